"""An agent that asks other nodes over real sockets on loopback: what counts as an answer, what is bounded."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from nodeagent.agent.questions import UdpPeers
from nodeagent.lease.lending import Ask, LoanAnswer
from nodeagent.lease.order import LeasePort
from nodeagent.lease.peers import DatagramSeal, Message, parse, split
from nodeagent.lease.whichstore import LeaseAnswer, LeaseAsk

SECRET = b"s3cret"
BOUND = 10.0
"""Seconds that anything may take where an answer is expected."""
SHORT = 0.05
"""Seconds waited for an answer that must not come."""
QUESTION = Ask("u", (4, "g4"), {"n1": "x"}, "n2", "y")
PORTS = (29400, 29899)
NO = LoanAnswer(False, "no reason", "n1", "x")


@asynccontextmanager
async def asker(ports: tuple[int, int] = PORTS) -> AsyncIterator[UdpPeers]:
    one = UdpPeers(LeasePort("127.0.0.1", ports, SECRET.hex()))
    await one.listen()
    try:
        yield one
    finally:
        one.close()
        await asyncio.sleep(0)  # the socket goes with the loop's next turn


async def test_it_asks_from_another_address_when_the_node_has_one() -> None:
    async with asker() as one:
        with Raw() as there:
            asking = asyncio.create_task(one.ask(there.address, QUESTION, BOUND))
            assert (await there.next())[2][0] == "127.0.0.1"
            await one.relocate("127.0.0.2")
            while (await there.next())[2][0] != "127.0.0.2":
                pass
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking


class Raw:
    """A plain socket in the place of a lease process."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def next(self) -> tuple[bytes, str, tuple[str, int]]:
        """A datagram, its nonce, and who sent it."""
        async with asyncio.timeout(BOUND):
            packet, sender = await asyncio.get_running_loop().sock_recvfrom(self.socket, 65536)
        nonce, message = parse(packet[32:])
        assert message in (QUESTION, LeaseAsk())
        return packet, nonce, sender

    def say(self, to: tuple[str, int], nonce: str, shown: Message, secret: bytes = SECRET) -> None:
        self.socket.sendto(DatagramSeal(secret).sealed(nonce, shown), to)


async def test_a_question_is_answered_and_a_lost_one_sent_again() -> None:
    async with asker() as one:
        with Raw() as end:
            asking = asyncio.ensure_future(one.ask(end.address, QUESTION, BOUND))
            first, _, _ = await end.next()  # as if lost
            second, nonce, sender = await end.next()
            assert second == first
            end.say(sender, nonce, NO)
            assert await asking == NO


async def test_where_a_lease_runs_is_another_question_with_another_kind_of_answer() -> None:
    answer = LeaseAnswer("n1", "c1", "e1", "10.0.0.1:6379", 0.25)
    async with asker() as one:
        with Raw() as end:
            for shown, taken in ((answer, answer), (NO, None)):
                asking = asyncio.ensure_future(one.ask_lease(end.address, BOUND))
                _, nonce, sender = await end.next()
                end.say(sender, nonce, shown)
                assert await asking == taken


async def test_many_questions_at_once_get_their_own_answers() -> None:
    async with asker() as one:
        with Raw() as end:
            asking = [asyncio.ensure_future(one.ask(end.address, QUESTION, BOUND)) for _ in range(20)]
            seen: dict[str, int] = {}
            while len(seen) < 20:
                _, nonce, sender = await end.next()
                seen.setdefault(nonce, len(seen))
                end.say(sender, nonce, NO._replace(why=nonce))
            found = await asyncio.gather(*asking)
    assert {answer.why for answer in found if answer is not None} == set(seen)


async def test_what_is_no_answer_to_it_is_none() -> None:
    async with asker() as one:
        with Raw() as end:
            asking = asyncio.ensure_future(one.ask(end.address, QUESTION, BOUND))
            _, nonce, sender = await end.next()
            for packet in (b"", b"x", b"x" * 100):
                end.socket.sendto(packet, sender)
            end.say(sender, nonce, QUESTION)
            end.say(sender, "another", NO._replace(why="of another question"))
            end.say(sender, nonce, NO._replace(why="of a stranger"), b"other")
            end.say(sender, nonce, NO)
            end.say(sender, nonce, NO._replace(why="twice"))
            assert await asking == NO


async def test_nobody_there_is_no_answer_within_the_bound() -> None:
    async with asker() as one:
        with Raw() as end:
            assert await one.ask(end.address, QUESTION, SHORT) is None
        assert await one.ask(end.address, QUESTION, SHORT) is None, "closed"
        assert await one.ask("[::1]:29400", QUESTION, SHORT) is None, "another family"
        assert await one.ask("a.name.invalid:29400", QUESTION, SHORT) is None
    assert await one.ask(end.address, QUESTION, SHORT) is None, "closed itself"


async def test_it_takes_a_port_from_the_end_of_the_range_or_any() -> None:
    def port(one: UdpPeers) -> int:
        assert one._transport is not None
        return int(one._transport.get_extra_info("sockname")[1])

    async with asker() as one, asker() as two:
        high, low = port(one), port(two)
        assert PORTS[0] <= low < high <= PORTS[1]
        assert high > PORTS[1] - 100
        async with asker((high, high)) as three:
            assert port(three) != high


async def test_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        assert host == "n1.example"
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with asker() as one:
        with Raw() as end:
            asking = asyncio.ensure_future(one.ask(f"n1.example:{split(end.address)[1]}", QUESTION, BOUND))
            _, nonce, sender = await end.next()
            end.say(sender, nonce, NO)
            assert await asking == NO


@pytest.mark.parametrize(
    "address", ["a..b:1", f"{'x' * 64}.example:1", "127.0.0.1:99999", f"127.0.0.1:{'9' * 5000}", "x"]
)
async def test_what_is_no_address_is_no_answer_and_ends_nothing(address: str) -> None:
    """Whoever writes to the store says where a node is."""
    async with asker() as one:
        assert await one.ask(address, QUESTION, SHORT) is None
        with Raw() as end:
            asking = asyncio.ensure_future(one.ask(end.address, QUESTION, BOUND))
            _, nonce, sender = await end.next()
            end.say(sender, nonce, NO)
            assert await asking == NO


async def test_a_name_that_takes_long_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, begun, over = list[str](), threading.Event(), threading.Event()

    def look_up(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        begun.set()
        over.wait(30)
        raise socket.gaierror("nobody knows it")

    async with asker() as one:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        found = await asyncio.gather(*(one.ask("n1.example:5", QUESTION, SHORT) for _ in range(20)))
        assert begun.wait(30), "its thread may begin late"
        assert (found, asked) == ([None] * 20, ["n1.example"])
        over.set()

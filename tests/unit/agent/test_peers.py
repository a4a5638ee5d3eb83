"""Agents that ask each other over real sockets on loopback: what is answered, what is dropped, what is bounded."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import structlog
from structlog.testing import capture_logs

from nodeagent.agent.peers import MOST_BYTES, WHY_MAX, UdpPeers
from nodeagent.model.world import Token
from nodeagent.plan.lending import Answer, Ask

SECRET = b"s3cret"
BOUND = 10.0
"""Seconds that anything may take where an answer is expected."""
SHORT = 0.05
"""Seconds waited for an answer that must not come."""
QUESTION = Ask(uid="u", token=Token(number=4, id="g4"), keepers={"n1": "x"}, node="n2", life="y")
PORTS = (29400, 29899)


@pytest.fixture(autouse=True)
def default_logs() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


async def closed(one: UdpPeers) -> None:
    one.close()
    await asyncio.sleep(0)  # the socket goes with the loop's next turn


@asynccontextmanager
async def peer(
    secret: bytes = SECRET, why: str = "asked", address: str = "127.0.0.1"
) -> AsyncIterator[tuple[UdpPeers, str, list[Ask]]]:
    """One that says yes, its address, and what it was asked."""
    asked: list[Ask] = []

    def handler(ask: Ask) -> Answer:
        asked.append(ask)
        return Answer(yes=True, why=why)

    one = UdpPeers(secret, handler)
    try:
        yield one, await one.listen(address, PORTS), asked
    finally:
        await closed(one)


@asynccontextmanager
async def raw() -> AsyncIterator[tuple[socket.socket, str, Callable[[], asyncio.Future[tuple[bytes, object]]]]]:
    """A plain socket, its address, and how to wait for the next datagram."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        one.setblocking(False)
        port = one.getsockname()[1]

        def next_one() -> asyncio.Future[tuple[bytes, object]]:
            return asyncio.ensure_future(asyncio.wait_for(loop.sock_recvfrom(one, 65536), BOUND))

        yield one, f"127.0.0.1:{port}", next_one


def sealed(message: object, secret: bytes = SECRET) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return hmac.digest(secret, body, hashlib.sha256) + body


def there(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def message(packet: bytes) -> dict[str, object]:
    found = json.loads(packet[hashlib.sha256().digest_size :])
    assert isinstance(found, dict)
    return found


# --- answers


async def test_a_question_is_answered() -> None:
    async with peer() as (one, address, asked), peer(why="no reason") as (_, other, asked_there):
        assert await one.ask(other, QUESTION, BOUND) == Answer(yes=True, why="no reason")
        assert asked_there == [QUESTION]
        assert asked == []
        assert await one.ask(address, QUESTION, BOUND) == Answer(yes=True, why="asked"), "itself"


async def test_many_questions_at_once_get_their_own_answers() -> None:
    async with peer() as (one, _, _), peer(why="two") as (_, two, _), peer(why="three") as (_, three, _):
        answers = await asyncio.gather(*(one.ask(a, QUESTION, BOUND) for a in (two, three) * 20))
    assert [a.why for a in answers if a is not None] == ["two", "three"] * 20


async def test_nobody_there_is_no_answer_within_the_bound() -> None:
    loop = asyncio.get_running_loop()
    async with peer() as (one, _, _):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
            gone.bind(("127.0.0.1", 0))
            port = gone.getsockname()[1]
        start = loop.time()
        assert await one.ask(f"127.0.0.1:{port}", QUESTION, 0.3) is None
        assert 0.25 < loop.time() - start < 5
        async with raw() as (_, silent, _next):
            assert await one.ask(silent, QUESTION, SHORT) is None
    assert await one.ask(silent, QUESTION, SHORT) is None, "closed"


async def test_an_address_of_another_family_is_no_answer() -> None:
    async with peer() as (one, _, _):
        assert await one.ask("[::1]:29400", QUESTION, SHORT) is None


async def test_a_lost_datagram_is_sent_again() -> None:
    async with peer() as (one, _, _), raw() as (end, address, next_one):
        asking = asyncio.ensure_future(one.ask(address, QUESTION, BOUND))
        first, _ = await next_one()  # as if lost
        second, sender = await next_one()
        assert second == first
        nonce = message(second)["nonce"]
        assert isinstance(sender, tuple)
        end.sendto(sealed({"nonce": nonce, "answer": {"yes": True, "why": "late"}}), sender)
        assert await asking == Answer(yes=True, why="late")


# --- what is dropped


async def test_a_wrong_secret_is_dropped_and_told() -> None:
    async with peer(secret=b"other") as (stranger, _, _), peer() as (_, address, asked):
        with capture_logs() as logs:
            assert await stranger.ask(address, QUESTION, SHORT) is None
        assert asked == []
    assert "a datagram without the cluster's signature was dropped" in [line["event"] for line in logs]
    assert logs[0]["log_level"] == "warning"
    assert logs[0]["sender"] == "127.0.0.1"


async def test_an_answer_to_an_earlier_question_is_ignored() -> None:
    async with peer() as (one, _, _), raw() as (end, address, next_one):
        first = asyncio.ensure_future(one.ask(address, QUESTION, SHORT))
        old, _ = await next_one()
        assert await first is None
        second = asyncio.ensure_future(one.ask(address, QUESTION, BOUND))
        while True:
            new, sender = await next_one()
            if new != old:  # the first one may have been sent again
                break
        assert isinstance(sender, tuple)
        assert message(new)["nonce"] != message(old)["nonce"]
        end.sendto(sealed({"nonce": message(old)["nonce"], "answer": {"yes": True, "why": "old"}}), sender)
        end.sendto(sealed({"nonce": message(new)["nonce"], "answer": {"yes": False, "why": "new"}}), sender)
        assert await second == Answer(yes=False, why="new")
        end.sendto(sealed({"nonce": message(new)["nonce"], "answer": {"yes": True, "why": "twice"}}), sender)


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"x",
        b"x" * 32,
        b"x" * 500,
        sealed(b""),
        sealed(b"not JSON"),
        sealed(b"\xff\xfe"),
        sealed(b"[1, 2]"),
        sealed({}),
        sealed({"nonce": "a"}),
        sealed({"nonce": "a", "ask": {"uid": "u"}}),
        sealed({"nonce": "a", "ask": QUESTION.model_dump() | {"more": 1}}),
        sealed({"nonce": "a", "ask": 7}),
        sealed({"nonce": "a", "ask": QUESTION.model_dump(), "padding": "x" * MOST_BYTES}),
    ],
    ids=[
        "empty", "a byte", "a signature's length", "unsigned", "nothing signed", "no JSON", "no text", "a list",
        "no nonce", "no question", "half a question", "a newer question", "a number", "too large",
    ],
)  # fmt: skip
async def test_garbage_is_dropped_and_the_next_question_answered(packet: bytes) -> None:
    """Nothing that comes from outside may reach the event loop as an error."""
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
    async with peer() as (one, _, _), peer() as (_, address, asked), raw() as (end, _, next_one):
        end.sendto(packet, there(address))
        end.sendto(sealed({"nonce": "after", "ask": QUESTION.model_dump()}), there(address))
        answer, _ = await next_one()
        assert message(answer)["nonce"] == "after", "the only one answered"
        assert asked == [QUESTION]
        assert await one.ask(address, QUESTION, BOUND) is not None
    assert errors == []


async def test_garbage_as_an_answer_is_no_answer() -> None:
    async with peer() as (one, _, _), raw() as (end, address, next_one):
        asking = asyncio.ensure_future(one.ask(address, QUESTION, BOUND))
        packet, sender = await next_one()
        assert isinstance(sender, tuple)
        nonce = message(packet)["nonce"]
        end.sendto(sealed({"nonce": nonce}), sender)
        end.sendto(sealed({"nonce": nonce, "answer": {"yes": "perhaps"}}), sender)
        end.sendto(sealed({"nonce": nonce, "answer": {"yes": True}}, secret=b"other"), sender)
        end.sendto(sealed({"nonce": nonce, "answer": {"yes": False, "why": "good"}}), sender)
        assert await asking == Answer(yes=False, why="good")


# --- ports


async def test_the_second_takes_the_next_port() -> None:
    async with peer() as (one, first, _), peer() as (_, second, _):
        low, high = there(first)[1], there(second)[1]
        assert PORTS[0] <= low < high <= PORTS[1]
        assert await one.ask(second, QUESTION, BOUND) is not None
        crowd = UdpPeers(SECRET)
        assert await crowd.listen("127.0.0.1", (low, low)) == "", "it goes on, but cannot be asked"
        await closed(crowd)


async def test_an_address_that_only_others_know_is_told_and_heard_on_all_of_this_machine() -> None:
    async with peer(address="192.0.2.7", why="here") as (_, told, _), peer() as (asks, _, _):
        assert told.startswith("192.0.2.7:")
        assert await asks.ask(f"127.0.0.1:{there(told)[1]}", QUESTION, BOUND) == Answer(yes=True, why="here")


async def test_ipv6() -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
    async with peer(address="::1") as (one, first, _), peer(address="::1", why="six") as (_, second, _):
        assert first.startswith("[::1]:")
        assert await one.ask(second, QUESTION, BOUND) == Answer(yes=True, why="six")


async def test_not_ready_yet() -> None:
    """Until the agent has set what answers."""
    new = UdpPeers(SECRET)
    try:
        assert await new.ask(await new.listen("127.0.0.1", PORTS), QUESTION, BOUND) == Answer(
            yes=False, why="not ready yet"
        )
    finally:
        await closed(new)


async def test_what_is_logged_of_an_unreadable_datagram_is_short() -> None:
    ask = json.dumps({"nonce": "n", "ask": {f"k{n}": n for n in range(500)}}).encode()
    packet = hmac.new(SECRET, ask, hashlib.sha256).digest() + ask
    with capture_logs() as logs:
        UdpPeers(SECRET).datagram_received(packet, ("127.0.0.1", 9))
    assert [len(entry["why"]) for entry in logs] == [WHY_MAX]

"""The lease process and a server that answers late, or on some links only."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nodeagent.lease.order import Server
from nodeagent.osutil.linux import boottime
from tests.integration.lease_support import BOUND, Node, order

HELD = 0.6
"""Seconds: longer than the order's ``timeout``, shorter than its ``fence``."""
INFO = b"role:master\r\nrun_id:r1\r\nmaster_replid:h1\r\n"
GREETING = b"$%d\r\n%b\r\n" % (len(INFO), INFO)
RENEWED = b"*3\r\n:1\r\n$3\r\n1 0\r\n$0\r\n\r\n"
SWALLOWED = -1.0

Held = Callable[[int, bool], float]
"""How many seconds the reply to a question on a link with this number is held back; the second: it is a renewal."""


class SlowStore:
    """Renews whatever is asked."""

    def __init__(self, path: Path, held: Held) -> None:
        self.place = Server(str(path), "", 0, (), None)
        self.links, self.replies = 0, 0
        self._held = held
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                self.links += 1
                self._threads.append(threading.Thread(target=self._serve, args=(link, self.links)))
                self._threads[-1].start()

    def _serve(self, link: socket.socket, number: int) -> None:
        link.settimeout(0.1)
        with link, suppress(OSError):
            while not self._over.is_set():
                try:
                    data = link.recv(1 << 16)
                except TimeoutError:
                    continue
                if not data:
                    return
                renewal = b"EVALSHA" in data
                held = self._held(number, renewal)
                if held != SWALLOWED and not self._over.wait(held):
                    self.replies += renewal
                    link.sendall(RENEWED if renewal else GREETING)

    def close(self) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    made.add()
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Callable[[Held], SlowStore]]:
    made: list[SlowStore] = []

    def make(held: Held) -> SlowStore:
        made.append(SlowStore(tmp_path / "store", held))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def test_late_answers_renew_the_lease_and_no_grant_ends(node: Node, store: Callable[[Held], SlowStore]) -> None:
    server = store(lambda _link, _renewal: HELD)
    node.give(order(server.place, fence=10.0, lease=12.0))
    node.start()
    await node.until(lambda: node.grant().until > boottime())
    renewals: set[float] = set()
    deadline = boottime() + BOUND
    while len(renewals) < 8:
        assert boottime() < deadline, node.log
        assert node.grant().until > boottime()
        renewals.add(node.pulse.renewed)
        await asyncio.sleep(0.002)
    assert "did not answer within 0.5 s" in node.log


async def test_a_link_that_swallows_what_is_asked_is_left_for_another(
    node: Node, store: Callable[[Held], SlowStore]
) -> None:
    server = store(lambda link, renewal: SWALLOWED if renewal and link == 1 else 0.0)
    node.give(order(server.place, fence=3600.0, lease=3700.0))
    node.start()
    for _ in range(3):
        await node.renewed_again()
    assert server.links == 2
    assert node.status.why == ""


async def test_a_link_that_is_swallowed_as_it_is_opened_is_left_for_another(
    node: Node, store: Callable[[Held], SlowStore]
) -> None:
    server = store(lambda link, _renewal: SWALLOWED if link == 1 else 0.0)
    node.give(order(server.place, fence=3600.0, lease=3700.0))
    node.start()
    await node.renewed_again()
    assert server.links == 2


async def test_an_answer_after_the_fence_grants_nothing(node: Node, store: Callable[[Held], SlowStore]) -> None:
    server = store(lambda _link, renewal: 1.0 if renewal else 0.0)
    node.give(order(server.place, fence=0.7))
    node.start()
    await node.until(lambda: server.replies >= 3)
    assert node.grant().until == 0.0
    assert node.pulse.renewed == 0.0
    assert node.status.state == "holding"


async def test_a_late_answer_to_what_another_life_asked_grants_nothing(
    node: Node, store: Callable[[Held], SlowStore]
) -> None:
    answer = threading.Event()

    def held(link: int, renewal: bool) -> float:
        if not renewal:
            return 0.0
        return 0.0 if link == 1 and answer.wait(BOUND) else SWALLOWED

    server = store(held)
    node.give(order(server.place, fence=3600.0, lease=3700.0))
    node.start()
    await node.until(lambda: "did not answer within 0.5 s" in node.status.why)
    node.give(order(server.place, life="n1-b", fence=3600.0, lease=3700.0))
    node.say({})
    await node.until(lambda: node.status.of[0] == "n1-b")
    answer.set()
    await node.until(lambda: server.links >= 4)  # it has asked in vain since
    assert node.grant().until == 0.0
    assert node.pulse.renewed == 0.0

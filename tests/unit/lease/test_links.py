"""The lease process's two links, with a server that answers when the test says so, at times that the test says."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nodeagent.lease.links import LeaseLinks, Outcome, StoreAnswer, StoreSilence
from nodeagent.lease.order import Server, StoreScript
from tests.unit.lease.test_resp import INFO, bulk

STEP = StoreScript("a" * 40, Path("nowhere"))
TIMEOUT, FENCE = 0.5, 2.2
BOUND = 10.0


class Served:
    """The server's end of one link."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.settimeout(BOUND)

    def takes(self, word: bytes) -> None:
        """Something with this word arrives."""
        assert word in self._end.recv(1 << 16)

    def answers(self, reply: bytes) -> None:
        self._end.sendall(reply)

    def is_closed(self) -> bool:
        """From the other end; else nothing has come from there."""
        if not select.select([self._end], [], [], 0)[0]:
            return False
        with suppress(ConnectionResetError):  # with an answer that was not read
            assert self._end.recv(1) == b""
        return True

    def close(self) -> None:
        self._end.close()


class Bench:
    """Links to a server, and their clock."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(BOUND)
        self.server = Server(str(path), "", 0, (), None)
        self.links, self.now = LeaseLinks(), 100.0
        self.served: list[Served] = []

    def open(self) -> Served:
        """A link that the server has not let in yet."""
        self.links.add(self.server, TIMEOUT, self.now, self.now + FENCE)
        self.served.append(Served(self._listener.accept()[0]))
        self.served[-1].takes(b"INFO")
        return self.served[-1]

    def opened(self) -> Served:
        made = self.open()
        made.answers(bulk(INFO))
        assert self.turn() == []
        return made

    def ask(self, on: Served) -> float:
        """A renewal; when it was sent."""
        self.links.ask("renew", self.now, self.now + FENCE, STEP, "p")
        on.takes(b"EVALSHA")
        return self.now

    def turn(self, seconds: float = 0.0) -> list[Outcome]:
        """What came of all that has happened, so many seconds later."""
        self.now += seconds
        poll = select.poll()
        for fd, events in self.links.files().items():
            poll.register(fd, events)
        self.links.turn({fd for fd, _ in poll.poll(0)}, self.now)
        return self.links.outcomes()

    def late(self) -> StoreSilence:
        """What is under way has become late."""
        assert self.turn(TIMEOUT - 0.01) == []
        assert not self.links.can_add()
        (found,) = self.turn(0.01)
        assert isinstance(found, StoreSilence)
        assert found.why.endswith("s did not answer within 0.5 s")
        return found

    def close(self) -> None:
        self.links.close()
        for one in self.served:
            one.close()
        self._listener.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "s")
    yield made
    made.close()


def test_a_late_answer_counts_from_when_it_was_asked_for(bench: Bench) -> None:
    first = bench.opened()
    sent = bench.ask(first)
    assert bench.late().sent == sent
    assert bench.links.can_add(), "the first link may lead nowhere"
    second = bench.open()
    first.answers(b":1\r\n")
    assert bench.turn(0.1) == [StoreAnswer("renew", sent, 1)]
    assert second.is_closed()
    assert bench.links.can_ask()
    bench.ask(first)


def test_a_link_that_leads_nowhere_costs_one_timeout(bench: Bench) -> None:
    first = bench.opened()
    bench.ask(first)
    bench.late()
    second = bench.opened()
    sent = bench.ask(second)
    assert not first.is_closed()
    second.answers(b":2\r\n")
    assert bench.turn(0.01) == [StoreAnswer("renew", sent, 2)]
    assert first.is_closed()


def test_an_answer_that_is_of_no_use_any_more_is_not_read(bench: Bench) -> None:
    first = bench.opened()
    bench.ask(first)
    bench.late()
    first.answers(b":1\r\n")
    assert bench.turn(FENCE - TIMEOUT) == []
    assert first.is_closed()
    assert bench.links.can_add()
    assert bench.links.files() == {}


def test_one_that_stood_still_reads_what_came_meanwhile(bench: Bench) -> None:
    first = bench.opened()
    sent = bench.ask(first)
    first.answers(b":1\r\n")
    assert bench.turn(FENCE - 0.1) == [StoreAnswer("renew", sent, 1)]


def test_a_late_answer_is_never_taken_for_one_to_another_question(bench: Bench) -> None:
    first = bench.opened()
    bench.ask(first)
    bench.late()
    second = bench.opened()
    bench.ask(second)
    second.answers(b":2\r\n")
    bench.turn(0.01)
    sent = bench.ask(second)
    with pytest.raises(OSError, match="Broken pipe"):
        first.answers(b":1\r\n")
    assert bench.turn(0.1) == []
    second.answers(b":3\r\n")
    assert bench.turn(0.1) == [StoreAnswer("renew", sent, 3)]


def test_nothing_is_asked_on_a_link_that_has_not_answered(bench: Bench) -> None:
    first = bench.opened()
    bench.ask(first)
    assert not bench.links.can_ask()
    bench.late()
    assert not bench.links.can_ask()
    bench.opened()
    assert bench.links.can_ask()


def test_of_two_answers_the_one_that_was_asked_for_later_counts(bench: Bench) -> None:
    first = bench.opened()
    bench.ask(first)
    bench.late()
    second = bench.opened()
    sent = bench.ask(second)
    first.answers(b":1\r\n")
    second.answers(b":2\r\n")
    assert bench.turn(0.1) == [StoreAnswer("renew", sent, 2)]
    assert first.is_closed()


def test_there_are_two_at_most_and_the_one_that_was_asked_stays(bench: Bench) -> None:
    first = bench.opened()
    bench.ask(first)
    bench.late()
    for _ in range(2):
        other = bench.open()
        bench.late()
        assert not other.is_closed()
        assert not first.is_closed()
    third = bench.open()
    assert other.is_closed()
    assert not first.is_closed()
    third.answers(bulk(INFO))
    assert bench.turn() == []
    bench.ask(third)
    bench.late()
    bench.open()
    assert first.is_closed(), "the other one was let in after it had been asked"
    assert not third.is_closed()


def test_of_two_that_are_being_opened_the_older_one_stays(bench: Bench) -> None:
    """Where each greeting takes longer than the timeout, one has to come to its end."""
    first = bench.open()
    bench.late()
    second = bench.open()
    bench.late()
    bench.open()
    assert second.is_closed()
    first.answers(bulk(INFO))
    assert bench.turn(0.1) == []
    bench.ask(first)


def test_what_was_asked_for_another_life_is_forgotten(bench: Bench) -> None:
    first = bench.opened()
    bench.ask(first)
    first.answers(b":1\r\n")
    bench.links.forget()
    assert bench.turn() == []
    assert first.is_closed()
    second = bench.opened()
    bench.links.forget()
    assert bench.links.can_ask()
    assert not second.is_closed()


def test_what_fails_is_reported_once(bench: Bench) -> None:
    first = bench.opened()
    sent = bench.ask(first)
    first.close()
    (found,) = bench.turn(0.1)
    assert isinstance(found, StoreSilence)
    assert (found.sent, found.why.rpartition(": ")[2]) == (sent, "it closed the connection")
    second = bench.opened()
    bench.ask(second)
    bench.late()
    second.close()
    assert bench.turn(0.1) == []
    assert bench.links.can_add()


def test_nobody_listens(bench: Bench, tmp_path: Path) -> None:
    bench.links.add(Server(str(tmp_path / "absent"), "", 0, (), None), TIMEOUT, bench.now, bench.now + FENCE)
    (found,) = bench.links.outcomes()
    assert isinstance(found, StoreSilence)
    assert found.why.endswith("No such file or directory")
    assert bench.links.can_add()
    assert bench.links.due() == float("inf")


def test_when_to_look_again(bench: Bench) -> None:
    first = bench.opened()
    began = bench.ask(first)
    assert bench.links.due() == began + TIMEOUT
    bench.late()
    assert bench.links.due() == began + FENCE
    bench.open()
    assert bench.links.due() == bench.now + TIMEOUT


def test_a_line_that_is_always_ready_and_never_whole_is_bounded(bench: Bench) -> None:
    first = bench.opened()
    bench.ask(first)
    first.answers(b"+" + b"x" * 1000)
    bench.late()
    first.answers(b"x" * 1000)
    assert bench.turn(FENCE - TIMEOUT) == []
    assert first.is_closed()

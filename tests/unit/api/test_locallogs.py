"""How many may read logs here at a time, and what they see if the disk hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from nodeagent.api import locallogs
from nodeagent.api.auth import Caller
from nodeagent.api.errors import ApiError
from nodeagent.api.locallogs import READERS_MAX, READERS_PER_USER, Line, Query, Readers, followed_lines, stored_lines
from nodeagent.osutil.threads import DaemonPool
from nodeagent.osutil.untrusted import NotSeenError
from nodeagent.pods import logs

Reading = Callable[[Path, Query], AsyncGenerator[Line, None]]


def caller(uid: int) -> Caller:
    return Caller(uid, uid, f"user{uid}", operator=False, trusted=False)


def test_a_user_reads_so_often_at_once_and_all_of_them_so_often() -> None:
    readers = Readers(per_user=2, most=3)
    with ExitStack() as stack:
        for uid in (1, 1, 2):
            stack.enter_context(readers.admit(caller(uid)))
        with pytest.raises(ApiError, match="user user1 reads logs 2 times") as refused, readers.admit(caller(1)):
            pass
        assert (refused.value.status, bool(refused.value.next_step)) == (429, True)
        with pytest.raises(ApiError, match="logs are read 3 times"), readers.admit(caller(2)):
            pass
    for _ in range(5):  # whoever ended counts no more
        with readers.admit(caller(1)), readers.admit(caller(1)), readers.admit(caller(3)):
            pass


def test_the_output_of_many_nodes_is_asked_for_few_readers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader of a job of 500 nodes had 500 connections of its own: of 16 readers they took gigabytes."""
    monkeypatch.setattr(locallogs, "PEERS_PER_USER", 1000)
    monkeypatch.setattr(locallogs, "PEERS_MAX", 4000)
    readers = Readers(READERS_PER_USER, READERS_MAX)
    with ExitStack() as held:
        for uid, count in ((1, 500), (1, 500), (2, 2500)):
            held.enter_context(readers.peers(caller(uid), count))
        with pytest.raises(ApiError, match="1000 other agents are asked for output for user user1"):
            held.enter_context(readers.peers(caller(1), 1))
        held.enter_context(readers.peers(caller(3), 500))
        with pytest.raises(ApiError, match="4000 other agents are asked for output already"):
            held.enter_context(readers.peers(caller(4), 1))
        held.enter_context(readers.peers(caller(4), 0))  # a job of this node alone
    with readers.peers(caller(1), 5000):
        """A job may have as many nodes."""


async def test_the_last_lines_are_held_for_few_readers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 readers who did not read held 200 MB."""
    monkeypatch.setattr(locallogs, "TAIL_WAIT", 0.01)
    readers = Readers(READERS_PER_USER, READERS_MAX)
    async with AsyncExitStack() as held:
        for uid in (1, 1, 2, 2, 3, 3, 4):
            await held.enter_async_context(readers.tail(caller(uid), alone=False))
        with pytest.raises(ApiError, match="by user user1 or all") as refused:
            async with readers.tail(caller(1), alone=False):
                """Not reached."""
        assert refused.value.status == 429
        await held.enter_async_context(readers.tail(caller(5), alone=False))
        with pytest.raises(ApiError, match="all users of this node together"):
            async with readers.tail(caller(6), alone=False):
                """Not reached."""
        async with readers.tail(caller(1), alone=True):
            """What another agent asks for waits for none of these."""
    async with readers.tail(caller(1), alone=False), readers.tail(caller(1), alone=False):
        """Whoever ended counts no more."""


class Disk:
    """Answers until it hangs; from then on no step is waited for for long."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._gate = patch, threading.Event()
        self.hung: set[int] = set()
        """Threads that it has caught."""

    def hang(self) -> None:
        self._patch.setattr(logs, "READ_LIMIT", 0.01)
        for module, name in ((logs, "generations"), (locallogs, "generations"), (locallogs, "read_logs")):
            self._patch.setattr(module, name, self._look)

    def answer(self) -> None:
        self._gate.set()

    def _look(self, *_: object, **__: object) -> list[int]:
        self.hung.add(threading.get_ident())
        self._gate.wait(30)
        return []


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(logs, "_threads", DaemonPool(2))
    disk = Disk(monkeypatch)
    yield disk
    disk.answer()


def stored(folder: Path, query: Query) -> AsyncGenerator[Line, None]:
    return stored_lines(folder, "n1", query)


def followed(folder: Path, query: Query) -> AsyncGenerator[Line, None]:
    return followed_lines(folder, "n1", query, lambda: True)


READINGS = pytest.mark.parametrize("reading", [stored, followed])
TAILS = pytest.mark.parametrize("query", [Query(), Query(tail=3)])


@READINGS
@TAILS
async def test_a_disk_that_hangs_takes_none_of_the_loops_threads_and_a_notice_says_so(
    tmp_path: Path, disk: Disk, reading: Reading, query: Query
) -> None:
    """The agent could not look up the name of its Redis any more."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(DaemonPool(1))
    disk.hang()
    for _ in range(4):
        (line,) = [line async for line in reading(tmp_path / "digits", query)]
        assert (line["stream"], line["node"]) == ("notice", "n1")
        assert f"{tmp_path / 'digits'} does not answer (it did not come back within 0.01 s)" in line["text"]
    assert await asyncio.to_thread(threading.get_ident) not in disk.hung
    assert await loop.getaddrinfo("127.0.0.1", 6379)


@READINGS
@TAILS
@pytest.mark.parametrize("error", [NotSeenError("g1: Too many open files"), OSError(5, "Input/output error")], ids=str)
async def test_a_notice_shows_that_what_cannot_be_read_now_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reading: Reading, query: Query, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(locallogs, "generations", fails)
    monkeypatch.setattr(logs, "generations", fails)
    (line,) = [line async for line in reading(tmp_path / "digits", query)]
    assert line["stream"] == "notice"
    assert line["text"].endswith(f"which is missing here: {error}; ask for the output again")


@READINGS
async def test_what_was_read_before_the_disk_hung_is_shown_before_the_notice(
    tmp_path: Path, disk: Disk, reading: Reading
) -> None:
    for number in (1, 2):
        (tmp_path / "digits" / f"g{number}").mkdir(parents=True)
    lines = [f"2026-01-01T00:00:01.{count:06d}Z stdout F {count}\n" for count in range(locallogs.BATCH)]
    (tmp_path / "digits" / "g1" / "rank0.log").write_text("".join(lines))
    found = []
    async for line in reading(tmp_path / "digits", Query()):
        found.append(line["text"] if line["stream"] != "notice" else "notice")
        if len(found) == 1:
            disk.hang()
    assert found == [*map(str, range(locallogs.BATCH)), "notice"]


async def test_the_readers_of_a_user_take_turns_and_leave_threads_for_others() -> None:
    readers = Readers(READERS_PER_USER, READERS_MAX)
    assert logs.THREADS_EACH * 4 <= logs.THREADS
    with readers.admit(caller(1)), readers.admit(caller(1)):
        first = logs.TURNS.get()
        with readers.admit(caller(1)):
            assert logs.TURNS.get() is first
        with readers.admit(caller(2)):
            assert logs.TURNS.get() is not first
    assert logs.TURNS.get() is None

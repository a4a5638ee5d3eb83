"""Reading what workers printed: merged by time, the last lines, and following across rotation and generations.

The files are written by ``shim_output`` (its docstring has the format) in folders that the job's user owns, who may put
anything there, and are read by an agent that may be root: through ``osutil.untrusted``, in steps that are small however
large the files, and with no file held open in between. All but ``follow`` blocks: run it ``beside`` the loop. What is
not there is no output; all but ``beside`` raise NotSeenError where it could not be looked at.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import re
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nodeagent.osutil.linux import passing
from nodeagent.osutil.threads import DaemonPool
from nodeagent.osutil.untrusted import NotSeenError, UntrustedError, UntrustedFolder

T = TypeVar("T")

POLL = 0.1
"""Seconds between two looks when following."""
LINE_MAX = 5 << 14
"""Bytes of the longest record: shims write pieces of 16 KiB, four times as much where none of it is text, each with its
stamp. What is longer is none."""
READ_MAX = 1 << 18
"""Bytes of one rank that are read in one go."""
READ_ALL = 1 << 23
"""The same, of all ranks together (but a record of each), with what each record takes in memory."""
TAIL_MAX = 1 << 23
"""Bytes that the last lines may take in memory, of all ranks and generations together; who asks for more gets the
newest of them."""
TAIL_LINES = 100_000
"""The most last lines."""
RECORD = 200
"""Bytes that a record takes in memory besides its text, which may be empty."""
GARBAGE, READ_COST = 50, 16
"""What a line that is no record counts for, and the bytes that count for one when they are searched: neither takes
memory, but both take time."""
GENERATIONS_MAX = 64
"""The newest generations that are looked at; shims keep fewer."""
RANKS_MAX = 1024
"""Ranks of one generation that are read."""
THREADS = 16
"""Threads that read logs. If the disk hangs, as many reads hang with it, and none of the loop's threads."""
READ_LIMIT = 20.0
"""Seconds until one step of reading is given up: far more than a disk takes that answers, and less than the 30 s of
silence after which the tool gives up the agent and cannot be shown why."""
THREADS_EACH = 4
"""How many of them the readers of one user may have at a time."""
_threads = DaemonPool(THREADS)
_NAME = re.compile(r"rank([0-9]{1,6})\.log(?:\.([0-9]{1,4}))?")
_GENERATION = re.compile(r"g([0-9]{1,9})")


class LogsHangError(NotSeenError):
    """A step of reading did not come back: the disk hangs, or all threads wait for one that does."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One record. ``partial``: the line goes on in the next record of the same rank and stream."""

    time: str
    """RFC 3339 UTC with microseconds; compares as text."""
    generation: int
    rank: int
    stream: str
    text: str
    partial: bool = False

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, about: a text with one wide letter takes four for each."""
        return RECORD + sys.getsizeof(self.text)


class LogTurns:
    """The steps of one user's readers in the threads that read logs: so many at a time. One that hangs counts until it
    comes back, whether anybody waits for it or not."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)

    async def take(self, work: Callable[[], T]) -> T:
        """The result of one step."""
        await self._free.acquire()
        loop, given_up = asyncio.get_running_loop(), threading.Event()

        def turn() -> T:
            _step.given_up = given_up
            return work()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._free.release)

        try:
            step = _threads.submit(turn)
        except RuntimeError:  # there is no thread to be had
            self._free.release()
            raise
        step.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(step)
        finally:
            given_up.set()


TURNS: ContextVar[LogTurns | None] = ContextVar("TURNS", default=None)
"""Those of whom the present task reads for; None: of nobody in particular, who has all threads."""


class _Step(threading.local):
    """The step of reading in the present thread."""

    given_up: threading.Event | None = None


_step = _Step()


def _go_on() -> None:
    """Called again and again by what reads: raises LogsHangError once nobody waits for the step any more."""
    if _step.given_up is not None and _step.given_up.is_set():
        raise LogsHangError("nobody waits for it any more")


def generations(folder: Path) -> list[int]:
    """Generations with output on this node, oldest first."""
    names: list[str] = []
    with _if_there(), UntrustedFolder(folder.parent, folder.name) as opened:
        names = opened.names()
    return sorted(int(match[1]) for name in names if (match := _GENERATION.fullmatch(name)))[-GENERATIONS_MAX:]


def read_logs(
    folder: Path, generation: int, ranks: Collection[int] | None = None, tail: int | None = None
) -> Iterator[LogLine]:
    """Records of one generation, by time; with ``tail`` the last so many. Nothing if there is none."""
    if tail is not None:
        return iter(newest(folder, [generation], ranks, tail))
    cursors = [_Cursor(folder, generation, rank) for rank in _ranks(folder, generation, ranks)]
    at_once = _share(READ_ALL, cursors, READ_MAX)
    return heapq.merge(*(cursor.rest(at_once) for cursor in cursors), key=lambda line: line.time)


def newest(folder: Path, numbers: Collection[int], ranks: Collection[int] | None, count: int) -> list[LogLine]:
    """The last so many records of these generations, as far as they fit into ``TAIL_MAX``, by generation and time."""
    parts, left, room = list[list[LogLine]](), min(count, TAIL_LINES), TAIL_MAX
    for number in sorted(numbers, reverse=True):
        if left <= 0 or room <= LINE_MAX:
            break
        part, room = _newest([_Cursor(folder, number, rank) for rank in _ranks(folder, number, ranks)], left, room)
        left -= len(part)
        parts.append(part)
    return [line for part in reversed(parts) for line in part]


async def beside(work: Callable[[], T]) -> T:
    """The result of ``work``, one step of reading logs, in one of the threads for that. Raises LogsHangError if it
    does not come back within ``READ_LIMIT``; its thread then waits for the disk alone, and stops when that answers."""
    turns = TURNS.get() or LogTurns(THREADS_EACH)
    try:
        async with asyncio.timeout(READ_LIMIT):
            return await turns.take(work)
    except TimeoutError:
        raise LogsHangError(f"it did not come back within {READ_LIMIT:g} s") from None


async def follow(
    folder: Path,
    ranks: Collection[int] | None = None,
    tail: int | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> AsyncIterator[LogLine]:
    """The newest generation's records (its last ``tail``), then new ones as they come, of newer generations too.

    Ends when ``ended()`` was true before a look that found nothing new; otherwise when the caller closes it. Raises
    LogsHangError too if the disk hangs.
    """
    view = _View(folder, ranks)
    for line in await beside(lambda: view.begin(tail)):
        yield line
    while True:
        last_look = ended()
        found = await beside(view.look)
        for line in found:
            yield line
        if not found:
            if last_look:
                return
            await asyncio.sleep(POLL)


class _View:
    """The generations from the one that was newest at first, and how far each rank was read."""

    def __init__(self, folder: Path, ranks: Collection[int] | None) -> None:
        self._folder, self._ranks = folder, ranks
        self._oldest = self._looked_at = 0
        self._cursors: dict[tuple[int, int], _Cursor] = {}

    def begin(self, tail: int | None) -> list[LogLine]:
        """The last so many records; without ``tail`` the first look finds the oldest."""
        self._oldest = max(generations(self._folder), default=0)
        return [] if tail is None else _newest(self._known(self._oldest), min(tail, TAIL_LINES), TAIL_MAX)[0]

    def look(self) -> list[LogLine]:
        """What is new since the last look, by time; a part of it, if it is much."""
        numbers = [number for number in generations(self._folder) if number >= self._oldest]
        cursors = [cursor for number in numbers for cursor in self._known(number)]
        self._cursors = {key: cursor for key, cursor in self._cursors.items() if key[0] in numbers}
        at_once, room, found = _share(READ_ALL, cursors, READ_MAX), READ_ALL, list[LogLine]()
        turn = self._looked_at % max(1, len(cursors))
        for cursor in (*cursors[turn:], *cursors[:turn]):
            if room <= 0:  # a record of each may be more than there is room for: the next look begins there
                break
            new = cursor.read(at_once)
            found += new
            room -= sum(line.size for line in new)
            self._looked_at += 1
        return sorted(found, key=lambda line: line.time)

    def _known(self, number: int) -> list[_Cursor]:
        return [
            self._cursors.setdefault((number, rank), _Cursor(self._folder, number, rank))
            for rank in _ranks(self._folder, number, self._ranks)
        ]


class _Cursor:
    """How far one rank's output has been read."""

    def __init__(self, folder: Path, generation: int, rank: int) -> None:
        self._folder, self._generation, self._rank = folder, generation, rank
        self._inode = 0
        self._at = 0
        self.more = False
        """The last read found something."""

    def read(self, most: int) -> list[LogLine]:
        """What is new, as records of at most about so many bytes (one, if there is one)."""
        self.more = False
        _go_on()
        with _if_there(), self._open() as opened:
            for name in self._names_left(opened):
                with _if_there():  # rotated away just now, or none of ours
                    if data := self._read(opened, name, max(LINE_MAX, most)):
                        self.more = True
                        found, taken = self._first_of(data, most)
                        self._at -= len(data) - taken
                        return found
        return []

    def _first_of(self, data: bytes, room: int) -> tuple[list[LogLine], int]:
        """(the records in the first of these whole lines, as many as there is room for; how many bytes they are)."""
        found, at = list[LogLine](), 0
        while at < len(data) and room > 0:
            end = data.index(b"\n", at)
            if (line := self._record(data[at:end])) is not None:
                found.append(line)
                room -= line.size
            at = end + 1
        return found, at

    def rest(self, at_once: int) -> Iterator[LogLine]:
        """All that is there, in steps."""
        self.more = True
        while self.more:
            yield from self.read(at_once)

    def last(self, count: int, most: int) -> tuple[list[LogLine], int]:
        """(the last so many records that take at most so many bytes (one, if there is one), found in as many from the
        end; what they and the search for them cost of the bytes that all ranks have). What comes after them is next."""
        found: list[LogLine] = []
        room, first, cost = most, most, 0
        _go_on()
        with _if_there(), self._open() as opened:
            for number, name in enumerate(reversed(_files(opened).get(self._rank, []))):
                with _if_there():
                    lines, read = self._last_of(opened, name, count - len(found), most, newest=number == 0)
                    most, cost = most - read, cost + read // READ_COST
                    while lines and room > 0:
                        line = self._record(lines.pop())
                        if line is not None and (line.size <= room or not found):
                            found.append(line)
                        room -= GARBAGE if line is None else line.size
                if len(found) >= count or most <= 0 or room <= 0:
                    break
        return found[::-1], cost + max(0, first - room)

    def _open(self) -> UntrustedFolder:
        return UntrustedFolder(self._folder.parent, self._folder.name, f"g{self._generation}")

    def _names_left(self, opened: UntrustedFolder) -> list[str]:
        """The files from the one that is being read, oldest first; from the oldest where that is gone."""
        names = _files(opened).get(self._rank, [])
        for number, name in enumerate(names) if self._inode else ():
            with _if_there():
                if opened.facts(name).st_ino == self._inode:
                    return names[number:]
        return names

    def _read(self, opened: UntrustedFolder, name: str, most: int) -> bytes:
        """The next whole lines of this file."""
        with opened.open(name) as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._at = inode, 0
            file.seek(self._at)
            data = file.read(most)
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= LINE_MAX:  # nothing of ours
            self._at += len(data)
            return b""
        self._at += end
        return data[:end]

    def _last_of(
        self, opened: UntrustedFolder, name: str, count: int, most: int, newest: bool
    ) -> tuple[list[bytes], int]:
        """(the last lines of this file, how many bytes were read for them)."""
        blocks: list[bytes] = []
        ends = read = barren = 0
        with opened.open(name) as file:
            facts = os.fstat(file.fileno())
            at = facts.st_size
            while at > 0 and ends <= count and barren < LINE_MAX and (ends <= 1 or read + ends * RECORD < most):
                _go_on()
                at = max(0, at - READ_MAX // 4)
                file.seek(at)
                block = file.read(facts.st_size - read - at)
                blocks.append(block)
                read += len(block)
                ends += block.count(b"\n")
                barren = 0 if b"\n" in block else barren + len(block)
                if not block:  # it was cut off meanwhile
                    break
        first, *lines = b"".join(reversed(blocks)).split(b"\n")
        unended = lines.pop() if lines else first
        if newest:
            self._inode, self._at = facts.st_ino, facts.st_size - len(unended)
        return ([first, *lines] if at == 0 and ends else lines)[-count:] if count else [], read

    def _record(self, raw: bytes) -> LogLine | None:
        return _parse(raw, self._generation, self._rank) if len(raw) <= LINE_MAX else None


@contextmanager
def _if_there() -> Iterator[None]:
    """What is not there, or none of ours, is passed over."""
    try:
        yield
    except NotSeenError:
        raise
    except UntrustedError as error:
        if isinstance(error.__cause__, OSError) and passing(error.__cause__):  # the disk fails, say
            raise NotSeenError(str(error)) from error


def _newest(cursors: list[_Cursor], count: int, room: int) -> tuple[list[LogLine], int]:
    """(the last so many records of all these ranks that take at most so many bytes, by time; the bytes that are
    left)."""
    parts = list[list[LogLine]]()
    for number, cursor in enumerate(cursors):
        part, cost = cursor.last(count if room > 0 else 0, max(0, room) // (len(cursors) - number))
        room -= cost
        parts.append(part)
    return list(deque(heapq.merge(*parts, key=lambda line: line.time), count)), room


def _share(whole: int, cursors: list[_Cursor], most: int) -> int:
    """Bytes for each of them."""
    return min(most, whole // max(1, len(cursors)))


def _ranks(folder: Path, generation: int, wanted: Collection[int] | None) -> list[int]:
    """Ranks with output."""
    found: list[int] = []
    with _if_there(), UntrustedFolder(folder.parent, folder.name, f"g{generation}") as opened:
        found = sorted(_files(opened))
    return [rank for rank in found if wanted is None or rank in wanted][:RANKS_MAX]


def _files(opened: UntrustedFolder) -> dict[int, list[str]]:
    """Rank to its file names, oldest first."""
    found: dict[int, list[tuple[int, str]]] = {}
    for name in opened.names():
        if match := _NAME.fullmatch(name):
            found.setdefault(int(match[1]), []).append((int(match[2] or 0), name))
    return {rank: [name for _, name in sorted(names, reverse=True)] for rank, names in found.items()}


def _parse(raw: bytes, generation: int, rank: int) -> LogLine | None:
    """None for what is no record (a torn line after a full disk). Shims write valid UTF-8; of what is none, as another
    may write, each byte would take a microsecond if it were shown."""
    parts = raw.decode("utf-8", "replace").split(" ", 3)
    if len(parts) != 4 or parts[1] not in ("stdout", "stderr") or parts[2] not in "FP":
        return None
    return LogLine(parts[0], generation, rank, parts[1], parts[3], parts[2] == "P")

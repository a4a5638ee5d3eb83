"""Reading what workers printed: merged by time, the last lines, and following across rotation and generations.

The files are written by ``shim_output`` (its docstring has the format) in folders that the job's user owns, and are
read by an agent that may be root: so no link is followed and only that user's plain files are opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import re
import stat
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

POLL = 0.1
"""Seconds between two looks when following."""
_NAME = re.compile(r"rank(\d+)\.log(?:\.(\d+))?")
_MAX_READ = 1 << 18


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


def generations(folder: Path) -> list[int]:
    """Generations with output on this node, oldest first."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(name[1:]) for name in names if re.fullmatch(r"g\d+", name))


def read_logs(
    folder: Path,
    ranks: Collection[int] | None = None,
    generation: int | None = None,
    previous: bool = False,
    tail: int | None = None,
) -> Iterator[LogLine]:
    """Records of one generation (None: the newest; ``previous``: the one before it), by time; with ``tail`` the last
    so many. Nothing if there is none."""
    number = generation
    if number is None:
        known = generations(folder)
        if len(known) < 1 + previous:
            return iter(())
        number = known[-2 if previous else -1]
    wanted = {r: names for r, names in sorted(_files(folder, number).items()) if ranks is None or r in ranks}
    if tail is None:
        sources = [_read_rank(folder, number, rank, names) for rank, names in wanted.items()]
    else:
        sources = [iter(_last(folder, number, rank, names, tail)) for rank, names in wanted.items()]
    merged = heapq.merge(*sources, key=lambda line: line.time)
    return iter(deque(merged, maxlen=tail)) if tail is not None else merged


async def follow(
    folder: Path,
    ranks: Collection[int] | None = None,
    tail: int | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> AsyncIterator[LogLine]:
    """The newest generation's records (its last ``tail``), then new ones as they come, of newer generations too.

    Ends when ``ended()`` was true before a look that found nothing new; otherwise when the caller closes it.
    """
    view = _View(folder, ranks)
    try:
        backlog: deque[LogLine] = deque(maxlen=tail)
        while found := view.look():
            backlog.extend(found)
            while tail is None and backlog:
                yield backlog.popleft()
        for line in backlog:
            yield line
        while True:
            last_look = ended()
            found = view.look()
            for line in found:
                yield line
            if not found:
                if last_look:
                    return
                await asyncio.sleep(POLL)
    finally:
        view.close()


class _View:
    """The generations from the one that was newest at first, and how far each rank was read."""

    def __init__(self, folder: Path, ranks: Collection[int] | None) -> None:
        self._folder, self._ranks = folder, ranks
        self._oldest = max(generations(folder), default=0)
        self._cursors: dict[tuple[int, int], _Cursor] = {}

    def look(self) -> list[LogLine]:
        """What is new since the last look, by time; at most about 256 KiB of each rank."""
        found: list[LogLine] = []
        for number in generations(self._folder):
            if number < self._oldest:
                continue
            for rank in _files(self._folder, number):
                if self._ranks is None or rank in self._ranks:
                    cursor = self._cursors.setdefault((number, rank), _Cursor(self._folder, number, rank))
                    found += cursor.read()
        return sorted(found, key=lambda line: line.time)

    def close(self) -> None:
        for cursor in self._cursors.values():
            cursor.close()


class _Cursor:
    """How far one rank's output has been read."""

    def __init__(self, folder: Path, generation: int, rank: int) -> None:
        self._folder, self._generation, self._rank = folder, generation, rank
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self) -> list[LogLine]:
        """What is new, at most about 1 MiB of it."""
        out: list[LogLine] = []
        if self._file is None:
            self._open_after(None)
        while self._file is not None:
            inode = os.fstat(self._file.fileno()).st_ino
            data = self._file.read(_MAX_READ)
            *lines, self._rest = (self._rest + data).split(b"\n")
            out += filter(None, (_parse(line, self._generation, self._rank) for line in lines))
            if data or not self._open_after(inode):
                break
        return out

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_after(self, inode: int | None) -> bool:
        """Open the file that was begun after the one with this inode (None: the oldest); False if there is none."""
        names = _files(self._folder, self._generation).get(self._rank, [])
        files = [file for name in names if (file := _open(self._folder, self._generation, name)) is not None]
        inodes = [os.fstat(file.fileno()).st_ino for file in files]
        following = inodes.index(inode) + 1 if inode in inodes else 0
        chosen = files[following] if following < len(files) else None
        for file in files:
            if file is not chosen:
                file.close()
        if chosen is None:
            return False
        self.close()
        self._file, self._rest = chosen, b""
        return True


def _files(folder: Path, generation: int) -> dict[int, list[str]]:
    """Rank to its file names, oldest first."""
    found: dict[int, list[tuple[int, str]]] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in (folder / f"g{generation}").iterdir():
            match = _NAME.fullmatch(entry.name)
            if match:
                found.setdefault(int(match[1]), []).append((int(match[2] or 0), entry.name))
    return {rank: [name for _, name in sorted(names, reverse=True)] for rank, names in found.items()}


def _read_rank(folder: Path, generation: int, rank: int, names: list[str]) -> Iterator[LogLine]:
    for name in names:
        file = _open(folder, generation, name)
        if file is None:
            continue
        with file:
            for raw in file:
                line = _parse(raw.rstrip(b"\n"), generation, rank)
                if line is not None:
                    yield line


def _last(folder: Path, generation: int, rank: int, names: list[str], count: int) -> list[LogLine]:
    """The last ``count`` records of one rank, without decoding what comes before them."""
    found: list[LogLine] = []
    for name in reversed(names):
        file = _open(folder, generation, name) if len(found) < count else None
        if file is None:
            continue
        with file:
            lines = file.read().split(b"\n")
        newest = [line for raw in lines[-(count - len(found)) - 1 :] if (line := _parse(raw, generation, rank))]
        found = newest[-(count - len(found)) :] + found
    return found


def _open(folder: Path, generation: int, name: str) -> BinaryIO | None:
    """The file, if it is a plain one of the folder's owner, reached through no link."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    opened: list[int] = []
    try:
        opened.append(os.open(folder, flags | os.O_DIRECTORY))
        owner = os.fstat(opened[0]).st_uid
        opened.append(os.open(f"g{generation}", flags | os.O_DIRECTORY, dir_fd=opened[0]))
        fd = os.open(name, flags, dir_fd=opened[1])
    except OSError:
        return None
    finally:
        for folder_fd in opened:
            os.close(folder_fd)
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != owner:
        os.close(fd)
        return None
    return os.fdopen(fd, "rb")


def _parse(raw: bytes, generation: int, rank: int) -> LogLine | None:
    """None for what is no record (a torn line after a full disk)."""
    parts = raw.decode("utf-8", "backslashreplace").split(" ", 3)
    if len(parts) != 4 or parts[1] not in ("stdout", "stderr") or parts[2] not in "FP":
        return None
    return LogLine(parts[0], generation, rank, parts[1], parts[3], parts[2] == "P")

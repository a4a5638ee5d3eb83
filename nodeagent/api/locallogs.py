"""The part of a job's output in this node's files, in the API's format, and a bound on concurrent readers. Files are
read in a thread: a slow disk must never block the agent's loop. If it hangs, a ``notice`` line says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from nodeagent.api.auth import Caller
from nodeagent.api.errors import ApiError
from nodeagent.osutil.untrusted import NotSeenError
from nodeagent.pods.logs import (
    THREADS_EACH,
    TURNS,
    LogLine,
    LogsHangError,
    LogTurns,
    beside,
    generations,
    newest,
    read_logs,
)
from nodeagent.pods.logs import follow as follow_files

Line = dict[str, Any]

BATCH = 100
"""Lines that are read in one call."""
READERS_PER_USER = 16
"""Readers of logs, followers or not, that a user may have on this node at a time."""
READERS_MAX = 128
"""Readers of all users together."""
TAILS_PER_USER, TAILS_MAX = 2, 8
"""Answers with the last lines at a time, of a user and of all: each is in memory whole until it is read. What other
agents ask for has as many, or two agents could wait for each other."""
PEERS_PER_USER, PEERS_MAX = 1024, 4096
"""Other agents that are asked at a time for the readers of one user, and for all: each is a connection. The first
reader of a user, or of all, may ask as many as its job has nodes."""
TAIL_WAIT = 10.0
"""Seconds that the next one waits for its turn."""


class Readers:
    """The present readers of logs; bounded, since each costs the agent time and memory."""

    def __init__(self, per_user: int, most: int) -> None:
        self._per_user, self._most = per_user, most
        self._now: Counter[tuple[int, str]] = Counter()
        self._turns: WeakValueDictionary[tuple[int, str], LogTurns] = WeakValueDictionary()
        """Kept by the readers, and by each step that has not come back."""
        self._tails: WeakValueDictionary[tuple[int, str, bool], asyncio.Semaphore] = WeakValueDictionary()
        self._peers: Counter[tuple[int, str]] = Counter()
        self._all_tails = {alone: asyncio.Semaphore(TAILS_MAX) for alone in (False, True)}

    @contextmanager
    def admit(self, caller: Caller, per_user: int | None = None) -> Iterator[None]:
        """Counts one more reader while the context is open, whose steps take their turns with those of the user's
        others. ``per_user``: the present value of the config. Raises ApiError if there are too many."""
        most = self._per_user if per_user is None else per_user
        who = (caller.uid, caller.name)
        text = ""
        if self._now[who] >= most:
            text = f"user {caller.name} reads logs {most} times at once on this node already (limits.followers)"
        elif self._now.total() >= self._most:
            text = f"logs are read {self._most} times at once on this node already"
        if text:
            raise ApiError("limit", text, "end one (for example a `nodeagentctl logs -f`), then try again")
        self._now[who] += 1
        turns = self._turns.setdefault(who, LogTurns(THREADS_EACH))
        before = TURNS.set(turns)
        try:
            yield
        finally:
            TURNS.reset(before)
            self._now[who] -= 1
            if not self._now[who]:
                del self._now[who]

    @contextmanager
    def peers(self, caller: Caller, count: int) -> Iterator[None]:
        """Counts a reader for whom so many other agents are asked. Raises ApiError if they are too many."""
        who, own, total = (caller.uid, caller.name), self._peers[caller.uid, caller.name], self._peers.total()
        text = ""
        if own and own + count > PEERS_PER_USER:
            text = f"{own} other agents are asked for output for user {caller.name} already, and this would ask {count}"
        elif total and total + count > PEERS_MAX:
            text = f"{total} other agents are asked for output already, and this would ask {count}"
        if text:
            raise ApiError("limit", text, "end the others (for example a `nodeagentctl logs -f`), then try again")
        self._peers[who] += count
        try:
            yield
        finally:
            self._peers[who] -= count
            if not self._peers[who]:
                del self._peers[who]

    @asynccontextmanager
    async def tail(self, caller: Caller, *, alone: bool) -> AsyncIterator[None]:
        """The turn of a reader that holds the last lines in memory, of this node's output ``alone`` or of all nodes'.
        Raises ApiError if it does not come in time."""
        who = (caller.uid, caller.name, alone)
        own = self._tails.setdefault(who, asyncio.Semaphore(TAILS_PER_USER))
        async with AsyncExitStack() as turns:
            try:
                async with asyncio.timeout(TAIL_WAIT):
                    await turns.enter_async_context(own)
                    await turns.enter_async_context(self._all_tails[alone])
            except TimeoutError:
                text = "the last lines of logs are asked for too often at once, by user "
                text += f"{caller.name} or all users of this node together; nothing was read"
                raise ApiError("limit", text, "read the other answers first, then try again") from None
            yield


@dataclass(frozen=True, slots=True)
class Query:
    """The requested part of the output."""

    first: int = 1
    """Oldest generation."""
    last: int | None = None
    """Newest generation; None: all later ones too."""
    rank: int | None = None
    tail: int | None = None
    """Only this many last lines, of all ranks together."""

    def params(self) -> dict[str, str]:
        """The query as the parameters of a request to another agent."""
        wanted = {"first": self.first, "last": self.last, "rank": self.rank, "tail": self.tail}
        return {k: str(v) for k, v in wanted.items() if v is not None}


def notice(node: str, text: str) -> Line:
    """A line about the log itself."""
    return {"rank": -1, "stream": "notice", "node": node, "generation": 0, "time": "", "text": text, "partial": False}


def _line(node: str, line: LogLine) -> Line:
    return {
        "rank": line.rank,
        "stream": line.stream,
        "node": node,
        "generation": line.generation,
        "time": line.time,
        "text": line.text,
        "partial": line.partial,
    }


def _stored(folder: Path, query: Query, below: int | None = None) -> Iterator[LogLine]:
    """Blocking. The stored lines, by generation and time; only of generations older than ``below``, if given."""
    ranks = None if query.rank is None else {query.rank}
    for number in generations(folder):
        wanted = query.first <= number and (query.last is None or number <= query.last)
        if wanted and (below is None or number < below):
            yield from read_logs(folder, number, ranks)


def _newest(folder: Path, query: Query, count: int) -> list[LogLine]:
    """Blocking. The last stored lines."""
    ranks = None if query.rank is None else {query.rank}
    found = generations(folder)
    wanted = [one for one in found if query.first <= one and (query.last is None or one <= query.last)]
    return newest(folder, wanted, ranks, count)


async def _batches(lines: Iterator[LogLine]) -> AsyncGenerator[LogLine, None]:
    while batch := await beside(lambda: list(islice(lines, BATCH))):
        for line in batch:
            yield line


async def _or_notice(folder: Path, node: str, lines: AsyncGenerator[Line, None]) -> AsyncGenerator[Line, None]:
    """The lines. If they cannot be read on, as on a disk that hangs: those until then, and a notice as the last."""
    try:
        async with contextlib.aclosing(lines):
            async for line in lines:
                yield line
    except LogsHangError as error:
        remedy = f"look at that disk on {node}, and ask for the output again when it answers"
        yield _missing(node, f"{folder} does not answer ({error}); {remedy}")
    except (NotSeenError, OSError) as error:
        yield _missing(node, f"{error}; ask for the output again")


def _missing(node: str, why: str) -> Line:
    return notice(node, f"node {node} cannot read the rest of its part of the output, which is missing here: {why}")


def stored_lines(folder: Path, node: str, query: Query) -> AsyncGenerator[Line, None]:
    """All stored lines."""
    return _or_notice(folder, node, _stored_lines(folder, node, query))


async def _stored_lines(folder: Path, node: str, query: Query) -> AsyncGenerator[Line, None]:
    """Raises NotSeenError, OSError."""
    lines, tail = _stored(folder, query), query.tail
    if tail is not None:
        lines = iter(await beside(lambda: _newest(folder, query, tail)))
    async with contextlib.aclosing(_batches(lines)) as batches:
        async for line in batches:
            yield _line(node, line)


def followed_lines(folder: Path, node: str, query: Query, ended: Callable[[], bool]) -> AsyncGenerator[Line, None]:
    """All stored lines and all new ones, until ``ended()`` and nothing is left."""
    return _or_notice(folder, node, _followed_lines(folder, node, query, ended))


async def _followed_lines(
    folder: Path, node: str, query: Query, ended: Callable[[], bool]
) -> AsyncGenerator[Line, None]:
    """Raises NotSeenError, OSError."""
    newest = max(await beside(lambda: generations(folder)), default=0)
    if query.tail is None:
        async with contextlib.aclosing(_batches(_stored(folder, query, below=newest))) as older:
            async for line in older:
                yield _line(node, line)
        between = Query(first=max(newest, query.first), last=query.last, rank=query.rank)
        if max(await beside(lambda: generations(folder)), default=0) > newest:  # formed while the older ones were read
            async with contextlib.aclosing(_followed_lines(folder, node, between, ended)) as rest:
                async for line_so_far in rest:
                    yield line_so_far
            return
    ranks = None if query.rank is None else {query.rank}
    following = follow_files(folder, ranks, query.tail, ended)
    try:
        async for line in following:
            if query.first <= line.generation and (query.last is None or line.generation <= query.last):
                yield _line(node, line)
    finally:
        close = getattr(following, "aclose", None)
        if close is not None:
            await close()

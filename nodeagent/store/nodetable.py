"""The table of all nodes, read apart from the beat: what agents read of each node's record is one text in it.

A text may be older than its record, or missing: such a node is read by itself. It is read in parts, between which the
agent's loop does its other work, and a reading that was not finished goes on where it was. Whoever can write to the
store can invent nodes, so there is a most of what is read. Must never use a script for it: Redis does nothing else
while one runs.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from nodeagent.model.node import NodeRecord
from nodeagent.store import codec
from nodeagent.store.base import StoreUnavailableError, TooMuchError
from nodeagent.store.calls import Calls
from nodeagent.store.decoder import Base
from nodeagent.store.recordroom import RecordRoom
from nodeagent.store.wire import ReplyError

FIELDS = ("id", "life", "start", "lost", "left", "joined", "rev", "facts", "readiness", "mute")
"""Fields of a record, in the order of its text's lines (``_records.lua``); an empty line is a field that it lacks."""
PLACE = "node:"
GONE = "gone:"
"""What `changes` has before a record that was removed."""
MOST_NODES = 16_384
"""Nodes that an agent reads: three times as many as a cluster was tried with (docs/scale.md). Each takes some 3 KB of
its memory."""
MOST_OF_NODES = 64 << 20
"""Characters of their records together. One of eight GPUs has some 2,000."""
AT_A_TIME = 512
"""Nodes that one command reads. Each command is a round trip, and costs Redis as much as the texts of ten nodes."""
LEAST_AT_A_TIME = 8
"""The same after commands that were not answered in time."""
DECODED_AT_A_TIME = 1 << 17
"""Characters decoded before the loop has its turn: some 10 ms."""
LEAST_DECODED = 1 << 10
"""Characters that a node counts as at least."""
FEW_CORDONS = 128
"""Cordons that are read at once: the names of all nodes would cost Redis more than the cordons themselves."""
LISTED_AT_A_TIME = 4096
"""Changes that one command lists."""
SECONDS = 1.0
"""That one call of ``read`` reads for; the next one goes on. A beat waits for it."""


@dataclass(frozen=True, slots=True)
class FoundNodes:
    """The nodes; each record is at least as new as ``rev`` of ``era``."""

    era: str
    rev: int
    nodes: tuple[NodeRecord, ...]
    unread: Mapping[str, ValueError]
    """Records (keys) that cannot be decoded."""


def _fields(text: str, newest: int) -> list[str] | None:
    """The fields of this text; None if it is older than ``newest``."""
    values = text.split("\n")
    if len(values) != len(FIELDS):
        return None
    fields = dict(zip(FIELDS, values, strict=True))
    if not codec.is_number(fields["rev"]) or int(fields["rev"]) < newest:
        return None
    return [word for field in fields.items() for word in field]


class _Begun(Exception):  # noqa: N818 (no error: the reading is begun anew)
    """What was read is of no use: the store is in another era, or has forgotten what was removed meanwhile."""


@dataclass(slots=True)
class _Reading:
    """A table that is being read, in passes: the first reads all nodes, each later one what has changed since the one
    before began. It is whole when a pass has ended that began after it was asked for, or since which nothing has
    changed."""

    era: str
    stage: Literal["begin", "list", "read", "check"] = "begin"
    asked: bool = False
    """The present pass began after ``NodeTable.read`` was called last."""
    first: int = 0
    """The store's revision when the first pass began."""
    rev: int = 0
    """The same of the present pass."""
    cursor: str = "-inf"
    """From this revision on changes are to be listed."""
    listed: dict[str, str] = field(default_factory=dict)
    """Nodes that this pass reads, with their newest revision."""
    todo: list[str] = field(default_factory=list)
    """Those of them that are still to be read, the next one last."""
    at_a_time: int = field(default_factory=lambda: AT_A_TIME)
    cordons: dict[str, str] | None = None
    """All that there are, read after the present pass began; None: they are many, and are read with their nodes."""
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    unread: dict[str, ValueError] = field(default_factory=dict)
    room: RecordRoom = field(default_factory=lambda: RecordRoom(MOST_NODES, MOST_OF_NODES))


class NodeTable:
    """The table of one store, as one client reads it. ``decode`` gets the fields and values of a node, and its
    cordon."""

    def __init__(self, calls: Calls, decode: Callable[[Sequence[str], str], NodeRecord]) -> None:
        self._calls, self._decode = calls, decode
        self._reading: _Reading | None = None
        self._reads = asyncio.Lock()
        """Who reads: one after the other."""
        self.room = RecordRoom(MOST_NODES, MOST_OF_NODES)
        """Of the nodes that were read, in this way or with beats."""
        self.upto = Base(0, "")
        """The revision up to which all nodes' records were read."""

    async def read(self, era: str) -> FoundNodes | None:
        """All nodes of this era that there is room for: first those that were read before, then by name. None if they
        cannot be read now, or not all within ``SECONDS``: the next call goes on."""
        async with self._reads:
            return await self._read(era)

    async def _read(self, era: str) -> FoundNodes | None:
        now = asyncio.get_running_loop().time
        until = now() + SECONDS
        reading = self._reading
        if reading is None or reading.era != era:
            reading = self._reading = _Reading(era)
        reading.asked = False
        try:
            while not await self._go_on(reading):
                if now() >= until:
                    return None
        except StoreUnavailableError:  # perhaps the link carries no more in time
            reading.at_a_time = max(LEAST_AT_A_TIME, reading.at_a_time // 2)
            return None
        except _Begun:
            self._reading = None
            return None
        self._reading, self.room, self.upto = None, reading.room, Base(reading.rev, era)
        return FoundNodes(era, reading.rev, tuple(reading.nodes.values()), reading.unread)

    async def _go_on(self, reading: _Reading) -> bool:
        """One part. Whether the table is whole."""
        if reading.stage == "begin":
            await self._begin(reading)
        elif reading.stage == "list":
            await self._list(reading)
        elif reading.stage == "read":
            await self._some(reading)
        else:
            async with self._calls.link() as link:
                era, rev = await link.ask("HMGET", f"{self._calls.prefix}meta", "era", "rev")
            if era != reading.era:
                raise _Begun
            if reading.asked or rev == str(reading.rev):
                return True
            reading.stage = "begin"  # what the beat has read since must not be newer than the nodes
        return False

    async def _begin(self, reading: _Reading) -> None:
        meta, cordons = f"{self._calls.prefix}meta", f"{self._calls.prefix}cordons"
        async with self._calls.link() as link:
            (era, rev, horizon), (count,) = await link.ask_beside(
                ("HMGET", meta, "era", "rev", "horizon"), ("HLEN", cordons)
            )
        if era != reading.era or not codec.is_number(rev):
            raise _Begun
        if not reading.first:
            reading.first = int(rev)
        elif codec.is_number(horizon) and reading.first < int(horizon) <= int(rev):
            raise _Begun
        reading.cursor = f"({reading.rev}" if reading.rev else "-inf"
        reading.rev, reading.asked, reading.stage = int(rev), True, "list"
        reading.cordons = await self._all_cordons(count)

    async def _all_cordons(self, count: int | None) -> dict[str, str] | None:
        """None if these are many, or much."""
        if not count:
            return {} if count == 0 else None
        if count > FEW_CORDONS:
            return None
        try:
            async with self._calls.link() as link:
                flat = await link.ask("HGETALL", f"{self._calls.prefix}cordons")
        except TooMuchError:
            return None
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def _list(self, reading: _Reading) -> None:
        """The next changes. The last one of a page is listed again by the next, with others of the same revision."""
        page = (f"{self._calls.prefix}changes", reading.cursor, "+inf", "WITHSCORES", "LIMIT", 0, LISTED_AT_A_TIME)
        async with self._calls.link() as link:
            found = await link.ask("ZRANGEBYSCORE", *page)
        for key, newest in zip(found[::2], found[1::2], strict=True):
            if key.startswith(PLACE):
                reading.listed[key.removeprefix(PLACE)] = newest
            elif key.startswith(GONE + PLACE):
                name = key.removeprefix(GONE + PLACE)
                reading.nodes.pop(name, None)
                reading.unread.pop(PLACE + name, None)
                reading.room.leave(name)
        if len(found) < 2 * LISTED_AT_A_TIME:
            self._choose(reading)
            reading.todo, reading.stage = sorted(reading.listed, key=self._turn(reading), reverse=True), "read"
            return
        if len(reading.listed) > 2 * MOST_NODES:
            self._choose(reading)
        if found[-1] == reading.cursor:  # no step writes so many of one revision
            reading.room.beyond, reading.cursor = True, f"({found[-1]}"
        else:
            reading.cursor = found[-1]

    def _turn(self, reading: _Reading) -> Callable[[str], tuple[bool, str]]:
        """In which order nodes are read, and have room: invented ones must not push out those that were there
        before. Beyond that all agents choose the same ones."""
        return lambda name: (name not in self.room and name not in reading.nodes, name)

    def _choose(self, reading: _Reading) -> None:
        if len(reading.listed) > MOST_NODES:
            reading.room.beyond = True
            chosen = heapq.nsmallest(MOST_NODES, reading.listed, key=self._turn(reading))
            reading.listed = {name: reading.listed[name] for name in chosen}

    async def _some(self, reading: _Reading) -> None:
        """The next nodes. They are decoded with no link in hand: that takes time which the store does not."""
        names = reading.todo[-reading.at_a_time :]
        if not names:
            reading.listed, reading.stage = {}, "check"
            return
        try:
            texts, cordons = await self._texts(reading, names)
        except TooMuchError:
            if len(names) > 1:
                reading.at_a_time = len(names) // 4 or 1
                return
            try:
                texts, cordons = await self._texts(reading, names, copies=False)
            except TooMuchError as error:  # its cordon alone
                reading.unread[PLACE + reading.todo.pop()] = ValueError(str(error))
                return
        decoded = 0
        for name, text, cordon in reversed(list(zip(names, texts, cordons, strict=True))):
            if decoded >= DECODED_AT_A_TIME:
                await asyncio.sleep(0)
                decoded = 0
            decoded += max(LEAST_DECODED, len(text or "") + len(cordon or ""))
            try:
                await self._one(reading, name, text or "", cordon or "")
                reading.unread.pop(PLACE + name, None)
            except ValueError as error:
                reading.unread[PLACE + name] = ValueError(str(error)[:1000])  # pydantic's would keep the whole text
        del reading.todo[-len(names) :]
        reading.at_a_time = min(AT_A_TIME, 2 * reading.at_a_time)

    async def _texts(
        self, reading: _Reading, names: Sequence[str], *, copies: bool = True
    ) -> tuple[list[str | None], list[str | None]]:
        """The texts of these nodes (not ``copies``: none, so that the records are read), and their cordons."""
        texts: list[str | None] = [None] * len(names)
        async with self._calls.link() as link:
            with suppress(ReplyError):  # a key of another type counts as empty
                texts = await link.ask("HMGET", f"{self._calls.prefix}nodes", *names) if copies else texts
            if reading.cordons is not None:
                return texts, [reading.cordons.get(name) for name in names]
            return texts, await link.ask("HMGET", f"{self._calls.prefix}cordons", *names)

    async def _one(self, reading: _Reading, name: str, text: str, cordon: str) -> None:
        """Raises ValueError for a record that is no node's."""
        key, newest = PLACE + name, reading.listed[name]
        if key != key.encode(errors="backslashreplace").decode():
            raise ValueError("its name is not UTF-8")
        fields = _fields(text, int(newest))
        if fields is None:
            try:
                async with self._calls.link() as link:
                    fields = await link.ask("HGETALL", self._calls.prefix + key)
            except TooMuchError as error:
                raise ValueError(str(error)) from None
        if not fields:  # a step removed the node; the next pass, or the next beat, reports it
            return
        if not reading.room.take(name, sum(map(len, fields)) + len(cordon)):
            return
        node = self._decode(codec.own_record(key, fields), cordon)
        if node.rev < int(newest):
            raise ValueError(f"it has revision {node.rev}, and a step has left revision {int(newest)}")
        reading.nodes[name] = node

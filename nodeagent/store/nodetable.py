"""The table of all nodes, read at once and not with a beat: what agents read of each node's record is one text in it.

A text may be older than its record, or missing: such a node is read by itself. Must never use a script for it: Redis
does nothing else while one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from nodeagent.model.node import NodeRecord
from nodeagent.store import codec
from nodeagent.store.base import StoreUnavailableError
from nodeagent.store.calls import Calls
from nodeagent.store.decoder import Base
from nodeagent.store.link import StoreLink
from nodeagent.store.wire import ReplyError

FIELDS = ("id", "life", "start", "lost", "left", "joined", "rev", "facts", "readiness")
"""Fields of a record, in the order of its text's lines (``_records.lua``)."""
PLACE = "node:"


@dataclass(frozen=True, slots=True)
class FoundNodes:
    """The nodes; each record is at least as new as ``rev`` of ``era``."""

    era: str
    rev: int
    nodes: tuple[NodeRecord, ...]
    unread: Mapping[str, ValueError]
    """Records (keys) that cannot be decoded."""


async def read_nodes(
    link: StoreLink, prefix: str, decode: Callable[[Sequence[str], str], NodeRecord], era: str
) -> FoundNodes | None:
    """All nodes; None if the store's era is another one before or after the reads. ``decode`` gets the fields and
    values, and the cordon. Raises ReplyError and ConnectionError."""
    before, rev = await link.ask("HMGET", f"{prefix}meta", "era", "rev")
    listed = await link.ask("ZRANGE", f"{prefix}changes", 0, -1, "WITHSCORES")
    texts: dict[str, str] = {}
    with suppress(ReplyError):  # a key of another type counts as empty
        flat = await link.ask("HGETALL", f"{prefix}nodes")
        texts = dict(zip(flat[::2], flat[1::2], strict=True))
    flat = await link.ask("HGETALL", f"{prefix}cordons")
    cordons = dict(zip(flat[::2], flat[1::2], strict=True))
    nodes, unread = [], {}
    for key, newest in zip(listed[::2], listed[1::2], strict=True):
        if not key.startswith(PLACE):
            continue
        name = key.removeprefix(PLACE)
        try:
            if key != key.encode(errors="backslashreplace").decode():
                raise ValueError("its name is not UTF-8")
            fields = _fields(texts.get(name, ""), int(newest)) or await link.ask("HGETALL", prefix + key)
            if fields:  # else a step removed the node; the next beat reports it
                node = decode(codec.own_record(key, fields), cordons.get(name, ""))
                if node.rev < int(newest):
                    raise ValueError(f"it has revision {node.rev}, and a step has left revision {int(newest)}")
                nodes.append(node)
        except ValueError as error:
            unread[key] = error
    if before != era or await link.ask("HGET", f"{prefix}meta", "era") != era:
        return None
    return FoundNodes(era, int(rev), tuple(nodes), unread)


def _fields(text: str, newest: int) -> list[str] | None:
    """The fields of this text; None if it is older than ``newest``."""
    values = text.split("\n")
    if len(values) != len(FIELDS):
        return None
    fields = dict(zip(FIELDS, values, strict=True))
    if not fields["rev"].isdecimal() or int(fields["rev"]) < newest:
        return None
    return [word for field in fields.items() for word in field]


class NodeTable:
    """The table of one store, as one client reads it. ``decode``: as of ``read_nodes``."""

    def __init__(self, calls: Calls, decode: Callable[[Sequence[str], str], NodeRecord]) -> None:
        self._calls, self._decode = calls, decode
        self.upto = Base(0, "")
        """The revision up to which all nodes' records were read."""

    async def read(self, era: str) -> FoundNodes | None:
        """All nodes of this era; None if they cannot be read now."""
        try:
            async with self._calls.link() as link:
                found = await read_nodes(link, self._calls.prefix, self._decode, era)
        except StoreUnavailableError:
            return None
        if found is not None:
            self.upto = Base(found.rev, era)
        return found

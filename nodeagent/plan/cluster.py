"""The snapshot that decisions are made on: every node and job as last read from the store; and what was worked out
from one view, kept for as long as that view stays the same.

With thousands of nodes, sorting and judging all of them anew for each job in each round of each agent would be most of
what an agent does. For the same reason it says what differs between a view and an earlier one: what was worked out from
that one need not be worked out anew. Decides nothing, and no result may depend on whether it was kept: only pure
functions of the view's nodes, jobs, queues, lapsed leases and refused jobs belong here. What depends on its time too
names that part of it among what it was worked out from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import is_
from typing import Literal, TypeVar, cast

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import NO_QUEUES, Queues
from nodeagent.model.timing import Timing, millis
from nodeagent.model.usage import UsageDay
from nodeagent.model.window import NO_WINDOWS, Windows

T = TypeVar("T")

ROOM = 50_000
"""Entries kept, all results together: of many jobs that wait, each has a result as long as the list of nodes."""
SMALL = 10
"""A result counts as so many entries at least."""
VIEWS_KEPT = 64
"""A result that nobody asks for in so many views is dropped: it keeps a view alive that is long past. Of each job that
comes and goes there are about ten."""


@dataclass(slots=True)
class _Note:
    """One result."""

    of: tuple[object, ...]
    result: object
    size: int
    view: int
    """The last one in which it was asked for."""


class Notes:
    """Results by what they are. Dropped are those that nobody asks for any more, and the oldest where there is no
    room."""

    def __init__(self) -> None:
        self._kept: dict[str, _Note] = {}
        self._size = 0
        self._view = 0

    def __len__(self) -> int:
        return len(self._kept)

    def turn(self) -> None:
        """The view has changed: nodes or jobs are others."""
        self._view += 1
        if self._view % VIEWS_KEPT == 0:
            for what, note in [*self._kept.items()]:
                if self._view - note.view > VIEWS_KEPT:
                    self._drop(what)

    def once(self, what: str, of: tuple[object, ...], work: Callable[[T | None], T], size: int = 1) -> T:
        """``work(before)``, done once for this ``what`` of these very objects (they are compared by identity).
        ``before`` is the result of other ones, if there is one: most of it may still be right. ``size``: how many
        entries the result has."""
        kept = self._kept.get(what)
        if kept is not None and all(map(is_, kept.of, of)):
            kept.view = self._view
            return cast("T", kept.result)
        before = None
        if kept is not None:
            before = cast("T", kept.result)
            self._drop(what)
        made = work(before)  # it may keep others meanwhile
        size = max(SMALL, size)
        while self._kept and self._size + size > ROOM:
            self._drop(next(iter(self._kept)))
        self._kept[what] = _Note(of, made, size, self._view)
        self._size += size
        return made

    def _drop(self, what: str) -> None:
        self._size -= self._kept.pop(what).size


RefusalKind = Literal[
    "unsigned", "changed", "ended", "early", "expired", "size", "gang", "control", "checkpoint", "unreadable"
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why this agent does not run a job's record as it is in the store (``agent/verifier.py``)."""

    kind: RefusalKind
    text: str
    controlled: bool
    """Its control is signed all the same, and the newest: an operator asked for what it says."""
    rev: int = 0
    """The newest revision of a good control of this job that was seen."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One consistent-enough view. Every write compares revisions, so a stale view costs a round trip, never
    safety."""

    served: int
    """Served time (ms) of the view; between beats the agent adds its own elapsed time, never more than ``credit``."""
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    jobs: Mapping[str, JobRecord] = field(default_factory=dict)
    rev: int = 0
    """The store's revision up to which the view has all changes; of some jobs it may have newer ones."""
    usage: Mapping[str, UsageDay] = field(default_factory=dict)
    """What jobs used that are here no more, by day."""
    lapsed: frozenset[str] = frozenset()
    queues: Queues = NO_QUEUES
    """The newest tree that the cluster's key signed."""
    queues_rev: int = 0
    """That of the tree in the store, signed or not: what a change of it has to name."""
    windows: Windows = NO_WINDOWS
    """The newest maintenance windows that the cluster's key signed: what they mean now is in ``nodes`` already."""
    windows_rev: int = 0
    """That of those in the store, signed or not: what a change of them has to name."""
    windows_until: int = 0
    """Served time at which they mean something else; 0: never."""
    left_out_until: int = 0
    """Served time at which a job tries a node again that it leaves out since it was no good to it; 0: never."""
    timing: Timing = field(default_factory=Timing)
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """Jobs that this agent starts nothing of, by uid."""
    unread: frozenset[str] = frozenset()
    """Jobs (uids) whose record cannot be read: ``jobs`` has them as they were before, if at all."""
    next_lapse: int | None = None
    """What was left (ms), when this was read, of the next lease to run out."""
    lapsed_at: Mapping[str, int] = field(default_factory=dict)
    """Served time at which this agent first read that a node of ``lapsed`` is in it."""
    returned: Mapping[str, int] = field(default_factory=dict)
    """Served time at which this agent read that a node is back from a silence, in the life that it had: the last one of
    each, until it lapses again. After a silence of this agent's own: of all nodes that are live."""
    partial: bool = False
    """Of what has changed a part is still to be read: a job that is not here may be there all the same."""
    set_aside: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Of a view that is one job's: by queue and resource, what the queue reserves of its capability for jobs before
    it."""
    notes: Notes = field(default_factory=Notes, compare=False, repr=False)
    """Shared by views in which ``nodes``, ``jobs``, ``lapsed``, ``queues`` and ``refused`` are the same objects: what
    was worked out from these is worked out once."""

    def once(self, what: str, work: Callable[[T | None], T], *of: object, size: int = 1) -> T:
        """What ``work`` makes of ``nodes``, ``jobs``, ``lapsed``, ``queues``, ``refused`` and ``of``, and of nothing
        else; it is given what it made of other ones (``Notes.once``). ``of``: whatever else it depends on, what others
        made of the view's time among it."""
        view = self.nodes, self.jobs, self.lapsed, self.queues, self.refused
        return self.notes.once(what, (*view, *of), work, size)

    def behind(self, job: JobRecord) -> bool:
        """The job's record is newer than all that the view has of the nodes (a wake brings jobs alone): whoever wrote
        it may have known more of its nodes' hardware and cordons."""
        return job.rev > self.rev

    def live(self, node: str, life: str | None = None) -> bool:
        """The node holds its lease (in this life, if given)."""
        record = self.nodes.get(node)
        if record is None or record.lost or record.left or node in self.lapsed:
            return False
        return life is None or record.incarnation.life == life

    def gone(self, node: str, life: str) -> bool:
        """This life can run nothing any more: lapsed, left, or replaced by another life (which may join only after a
        lapse)."""
        record = self.nodes.get(node)
        if record is None or record.incarnation.life != life:
            return True
        return record.lost or record.left or node in self.lapsed

    @property
    def more_to_lapse(self) -> bool:
        """Some node missed its last beats, so its lease may be about to run out like those that just did. A node
        whose beats arrive always has more left than this, by the inequalities of ``Timing``."""
        return self.next_lapse is not None and self.next_lapse <= millis(
            self.timing.heartbeat + self.timing.store_timeout
        )


@dataclass(frozen=True, slots=True)
class SeenNodes:
    """The nodes and leases of a view that something was worked out from."""

    nodes: Mapping[str, NodeRecord]
    lapsed: frozenset[str]


def seen(cluster: Cluster) -> SeenNodes:
    """This view's."""
    view = cluster.nodes, cluster.lapsed
    return cluster.notes.once("seen", view, lambda _before: SeenNodes(*view))


def changed(cluster: Cluster, before: SeenNodes) -> frozenset[str] | None:
    """Nodes that have another record or another standing of their lease than before; None if nodes came or went."""
    now = seen(cluster)
    if now is before:
        return _NONE
    return cluster.notes.once("changed", (now, before), lambda _before: _changed(now, before))


_NONE: frozenset[str] = frozenset()


def _changed(now: SeenNodes, before: SeenNodes) -> frozenset[str] | None:
    lapses = (now.lapsed ^ before.lapsed) & now.nodes.keys() if now.lapsed is not before.lapsed else _NONE
    if now.nodes is before.nodes:
        return lapses
    if len(now.nodes) != len(before.nodes) or list(now.nodes) != list(before.nodes):
        return None
    same = map(is_, now.nodes.values(), before.nodes.values())
    return lapses.union(name for name, is_same in zip(now.nodes, same, strict=True) if not is_same)


@lru_cache(maxsize=4096)
def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which n2 comes before n10. No two names are equal under it (n1, n01): all agents sort alike. No
    number is made of digits, of which somebody may have written more than Python takes for one."""
    parts = (p for p in re.split(r"([0-9]+)", name) if p)
    keys = ((0, len(digits := p.lstrip("0")), digits) if p.isdecimal() else (1, 0, p) for p in parts)
    return (*keys, (-1, 0, name))


SHOWN = 3
"""Names that a sentence gives before it only counts."""


def some(names: Sequence[str], most: int = SHOWN) -> str:
    """``n1, n2, n3 and 2 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def in_order(cluster: Cluster) -> Sequence[str]:
    """All known nodes in natural order."""
    return cluster.notes.once("order", (cluster.nodes,), lambda before: _in_order(cluster, before)).names


@dataclass(frozen=True, slots=True)
class _Order:
    nodes: Mapping[str, NodeRecord]
    names: Sequence[str]


def _in_order(cluster: Cluster, before: _Order | None) -> _Order:
    same = before is not None and before.nodes.keys() == cluster.nodes.keys()
    return _Order(cluster.nodes, before.names if before is not None and same else sorted(cluster.nodes, key=natural))

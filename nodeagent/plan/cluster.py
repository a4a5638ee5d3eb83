"""The snapshot that decisions are made on: every node and job as last read from the store. Holds no decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import Timing, millis
from nodeagent.plan.notes import Notes

T = TypeVar("T")
RefusalKind = Literal[
    "unsigned", "changed", "ended", "early", "expired", "size", "gang", "control", "checkpoint", "unreadable"
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why this agent does not run a job's record as it is in the store (``agent/guard.py``)."""

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
    lapsed: frozenset[str] = frozenset()
    timing: Timing = field(default_factory=Timing)
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """Jobs that this agent starts nothing of, by uid."""
    unread: frozenset[str] = frozenset()
    """Jobs (uids) whose record cannot be read: ``jobs`` has them as they were before, if at all."""
    next_lapse: int | None = None
    """What was left (ms), when this was read, of the next lease to run out."""
    more_to_return: bool = False
    """A node has just come back from a silence, in the life that it had: others that went silent with it may follow
    within a heartbeat and two calls."""
    notes: Notes = field(default_factory=Notes, compare=False, repr=False)
    """Shared by views in which ``nodes``, ``jobs`` and ``lapsed`` are the same objects: what was
    worked out from these is worked out once."""

    def once(self, what: str, work: Callable[[T | None], T], of: object = None, size: int = 1) -> T:
        """What ``work`` makes of ``nodes``, ``jobs``, ``lapsed`` and ``of``, and of nothing else; it is given what it
        made of other ones (``Notes.once``)."""
        return self.notes.once(what, (self.nodes, self.jobs, self.lapsed, of), work, size)

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

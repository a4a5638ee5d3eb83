"""What an agent knows of the store, from memory or from its disk: what it can give back. Holds no decision."""

from __future__ import annotations

from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord


@dataclass(frozen=True, slots=True)
class Known:
    """One view."""

    cluster_uid: str
    era: str
    rev: int
    """Everything up to this revision of the era is in it; some records may be newer."""
    served: int
    nodes: tuple[NodeRecord, ...]
    jobs: tuple[JobRecord, ...]
    lapsed: frozenset[str] = frozenset()
    whole: bool = True
    """A job that is not in it is not in the store; else some records could not be read."""

    @property
    def newest(self) -> int:
        """The highest revision in it."""
        return max((self.rev, *(n.rev for n in self.nodes), *(j.rev for j in self.jobs)))

    @property
    def live(self) -> tuple[str, ...]:
        """Nodes that held their lease."""
        return tuple(n.id for n in self.nodes if not n.lost and not n.left and n.id not in self.lapsed)

"""One pod of this node, as the rules of ``pod.py`` look at it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.model.world import Generation, Member
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.failure.blame import memory_share
from nodeagent.pods.base import PodStatus


@dataclass(frozen=True, slots=True)
class PodCase:
    """One pod of this node, or a job that may need one here, and all that a rule looks at."""

    cluster: Cluster
    node: str
    life: str
    job: JobRecord
    status: PodStatus | None
    """None: it has no pod here."""
    lends: bool
    """A promise of this node may still lend it time."""
    up: Collection[str]
    """Jobs (uids) that are next in line: only those of the ones that wait get pods."""

    @property
    def generation(self) -> Generation | None:
        return self.job.generation

    @property
    def member(self) -> Member | None:
        """Of the newest generation, in this life."""
        return self._mine(self.generation.members.get(self.node)) if self.generation is not None else None

    @property
    def holder(self) -> Member | None:
        """It may still run what is older than the newest generation, in this life."""
        return self._mine(self.generation.holders.get(self.node)) if self.generation is not None else None

    def _mine(self, one: Member | None) -> Member | None:
        return one if one is not None and one.life == self.life else None

    @property
    def forming(self) -> Generation | None:
        """The generation that is forming, if this node has a part in it."""
        found = self.generation
        has_part = found is not None and found.state == "forming" and (self.member or self.holder) is not None
        return found if has_part else None

    @property
    def active(self) -> Generation | None:
        """The generation that is active, if this node is a member of it."""
        found = self.generation
        return found if found is not None and found.state == "active" and self.member is not None else None

    @property
    def has_part(self) -> bool:
        """In a generation that is forming or active."""
        return self.forming is not None or self.active is not None

    @property
    def stuck(self) -> bool:
        """SIGKILL is pending: what is there runs no more of its own code, and cannot end."""
        return self.status is not None and self.status.phase == "stuck"

    @property
    def unknown(self) -> bool:
        """Workers may run: its shim has to say."""
        return self.status is not None and self.status.phase == "unknown"

    def memory_share(self, member: Member) -> float:
        """Of the node's memory, the part of this member's pod."""
        record = self.cluster.nodes.get(self.node)
        return memory_share(record.facts, member.devices) if record is not None else 0.0

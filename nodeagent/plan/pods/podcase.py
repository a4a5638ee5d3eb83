"""One pod of this node, as a rule of ``pod.py`` looks at it."""

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
    uid: str
    job: JobRecord | None
    """None: it is gone from the store."""
    status: PodStatus | None
    """None: it has no pod here."""
    lends: bool
    """A promise of this node may still lend it time."""
    up: Collection[str]
    """Jobs (uids) that are next in line: only those of the ones that wait get pods."""

    @property
    def generation(self) -> Generation | None:
        return self.job.generation if self.job is not None else None

    @property
    def is_member(self) -> bool:
        """Of the newest generation, in this life."""
        member = self.generation.members.get(self.node) if self.generation is not None else None
        return member is not None and member.life == self.life

    @property
    def is_holder(self) -> bool:
        """It may still run what is older than the newest generation, in this life."""
        holder = self.generation.holders.get(self.node) if self.generation is not None else None
        return holder is not None and holder.life == self.life

    @property
    def forms(self) -> bool:
        """A generation is forming that this node has a part in."""
        return self.generation is not None and self.generation.state == "forming" and (self.is_member or self.is_holder)

    @property
    def runs(self) -> bool:
        """A generation is active that this node is a member of."""
        return self.generation is not None and self.generation.state == "active" and self.is_member

    @property
    def stuck(self) -> bool:
        """SIGKILL is pending: what is there runs no more of its own code, and cannot end."""
        return self.status is not None and self.status.phase == "stuck"

    def memory_share(self, member: Member) -> float:
        """Of the node's memory, the part of this member's pod."""
        record = self.cluster.nodes.get(self.node)
        return memory_share(record.facts, member.devices) if record is not None else 0.0


def _unknown(case: PodCase) -> bool:
    """Workers may run: its shim has to say."""
    return case.status is not None and case.status.phase == "unknown"

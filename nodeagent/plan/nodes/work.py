"""The work on each node of a view: which job has booked which of its devices, and the pods that are placed there.

Gathers only; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nodeagent.model.job import JobRecord
from nodeagent.model.world import Generation, Member
from nodeagent.plan.cluster import Cluster


@dataclass(frozen=True, slots=True)
class PlacedPod:
    """A job's pod on a node that is a member of its newest generation, or may still run workers of an older one."""

    job: JobRecord
    generation: Generation
    member: Member | None
    """None: the node has no place in the newest generation."""
    holder: Member | None
    """Not None: workers of an older generation may still stop there."""


@dataclass(slots=True)
class NodeWork:
    """Of one node."""

    booked: dict[str, str] = field(default_factory=dict)
    """Device to the name of the job that has booked it."""
    pods: list[PlacedPod] = field(default_factory=list)
    """By the names of their jobs."""

    def jobs(self) -> Sequence[str]:
        """The names of the jobs with pods there, in order, each once."""
        return sorted({pod.job.name for pod in self.pods})


def work_on(cluster: Cluster) -> Mapping[str, NodeWork]:
    """Node to its work; nodes without work are left out."""
    found: dict[str, NodeWork] = {}
    for job in sorted(cluster.jobs.values(), key=lambda j: j.name):
        generation = job.generation
        if generation is None:
            continue
        members = generation.members if generation.state != "ended" else {}
        for node in generation.occupied:
            member, holder = members.get(node), generation.holders.get(node)
            work = found.setdefault(node, NodeWork())
            devices = (*(member.devices if member else ()), *(holder.devices if holder else ()))
            work.booked.update(dict.fromkeys(devices, job.name))
            work.pods.append(PlacedPod(job, generation, member, holder))
    return found

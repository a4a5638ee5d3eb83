"""When it is this agent's turn to take a decision that the others see as well: since when it has been seen, and how
many go before. Takes none itself."""

from __future__ import annotations

from nodeagent.model.job import JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.steps import Decision
from nodeagent.plan.turn import turn


class Turns:
    """Decisions seen in the last look at all jobs, and when each was seen first. ``patience``: seconds for each agent
    that goes before."""

    def __init__(self, node: str, patience: float) -> None:
        self._node, self._patience = node, patience
        self._before: dict[tuple[object, ...], float] = {}
        self._seen: dict[tuple[object, ...], float] = {}

    def looked(self) -> None:
        """A look at all jobs is over: what was not seen in it has passed."""
        self._before, self._seen = self._seen, {}

    def at(self, cluster: Cluster, job: JobRecord, decision: Decision, now: float) -> float:
        """When (our clock) to take it."""
        head = job.head
        key = (job.uid, head.id if head else "", head.state if head else "", job.control.rev, type(decision.step))
        self._seen[key] = first = self._before.get(key, now)
        return first + self._patience * turn(cluster, job, self._node)

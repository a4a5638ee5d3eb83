"""Counts re-formed gangs for the metrics: each once in the cluster. Decides nothing and writes no store."""

from __future__ import annotations

from collections.abc import Mapping

from nodeagent.agent.metrics import Metrics
from nodeagent.model.job import JobRecord


class RestartCounter:
    """The agent of a gang's group rank 0 counts it, when it first sees it active."""

    def __init__(self, node: str, metrics: Metrics) -> None:
        self._node, self._metrics = node, metrics
        self._counted: dict[str, int] = {}
        self._counting = False

    def look(self, jobs: Mapping[str, JobRecord]) -> None:
        """Count what is new in a whole view. What was there at the first look is not: it was counted before."""
        for job in jobs.values():
            if job.active is None or self._counted.get(job.uid) == job.active.number:
                continue
            first_look = not self._counting or job.restarts == 0
            self._counted[job.uid] = job.active.number
            head = job.head
            if first_look or head is None or head.token != job.active:
                continue
            if head.ordered()[0].node == self._node:
                self._metrics.restarts.labels(job=job.name, node=head.cause.node, cause=head.cause.kind).inc()
        self._counting = True

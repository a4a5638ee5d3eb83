"""Which jobs make room for a queue that has less than its part: who is entitled to how much, and whose nodes go first.

A queue is entitled to its guarantee, and to its part by weight among the siblings that have jobs, from the top of the
tree down. A job that waits takes back only up to that, and only from queues that have more than theirs and are
``reclaimable``; nobody falls below a guarantee. A job gives nodes above its ``min`` first; only where that is not
enough a whole job is stopped, saves, and waits in line again. Who gives what to whom in the end is ``elastic.py``'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import queue_of
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.demand import NOTHING, Resources, size
from nodeagent.plan.share import above, dominant, holdings, parts

MIN_RUNTIME = 60.0
"""Seconds that a gang runs at least before it is stopped for another queue."""
ROUNDING = 1e-9


def entitlements(cluster: Cluster) -> Mapping[str, float]:
    """Queue to its part of the cluster by weight, siblings without jobs left out."""

    def look(_before: object) -> dict[str, float]:
        tree = cluster.queues
        busy = {name for job in cluster.jobs.values() if _counts(job) for name in above(tree, queue_of(job.spec.queue))}
        return parts(tree, busy)

    return cluster.once("entitlements", look)


def _counts(job: JobRecord) -> bool:
    """It runs, or wants to."""
    return job.control.desired == "run" and job.phase in ("queued", "holding", "forming", "running")


class Reclaim:
    """What queues use, and what becomes of it as nodes are taken back."""

    def __init__(self, cluster: Cluster, before: Reclaim | None = None) -> None:
        """``before``: what was decided so far."""
        self._cluster = cluster
        self._use: dict[str, Resources] = dict(holdings(cluster).by_queue if before is None else before._use)
        self._guaranteed: dict[str, dict[str, int]] = {} if before is None else before._guaranteed
        self._total = size(cluster).total
        self._entitled = entitlements(cluster)

    def may_have(self, job: JobRecord, use: Resources) -> bool:
        """With this much more each of the job's queues has no more than it is entitled to."""
        return all(
            self._within(name, self._use.get(name, NOTHING).and_(use)) for name in above(self._cluster.queues, _of(job))
        )

    def owns(self, job: JobRecord, use: Resources) -> bool:
        """With this much more the job's queue still has no more than it is guaranteed."""
        name = _of(job)
        return self._within_guarantee(name, self._use.get(name, NOTHING).and_(use))

    def may_lose(self, donor: JobRecord, job: JobRecord, use: Resources, owns: bool) -> bool:
        """The donor's queue has more than it is entitled to, or the job's ``owns`` what it asks for; and with this much
        less the donor's queues still have what they are guaranteed."""
        tree = self._cluster.queues
        apart = [name for name in above(tree, _of(donor)) if name not in above(tree, _of(job))]
        if not apart or any(name not in tree.by_name for name in apart):
            return False
        if not owns and self._within(apart[-1], self._use.get(apart[-1], NOTHING)):
            return False
        return all(self._spares(name, use) for name in apart)

    def over(self, donor: JobRecord) -> float:
        """By how much the donor's queue has more than it is entitled to, as a part of the cluster."""
        name = _of(donor)
        return dominant(self._use.get(name, NOTHING), self._total) - self._entitled.get(name, 0.0)

    def release(self, donor: JobRecord, use: Resources) -> None:
        """The donor is to give that much."""
        for name in above(self._cluster.queues, _of(donor)):
            self._use[name] = self._use.get(name, NOTHING).less(use)

    def grant(self, job: JobRecord, use: Resources) -> None:
        """The job is to have that much."""
        for name in above(self._cluster.queues, _of(job)):
            self._use[name] = self._use.get(name, NOTHING).and_(use)

    def _within(self, name: str, use: Resources) -> bool:
        part = self._entitled.get(name, 0.0) + ROUNDING
        return dominant(use, self._total) <= part or self._within_guarantee(name, use)

    def _within_guarantee(self, name: str, use: Resources) -> bool:
        owned = self._owned(name)
        return bool(owned) and all(getattr(use, resource) <= amount for resource, amount in owned.items())

    def _spares(self, name: str, use: Resources) -> bool:
        left = self._use.get(name, NOTHING).less(use)
        queue = self._cluster.queues.by_name[name]
        return queue.reclaimable and all(
            getattr(left, resource) >= amount for resource, amount in self._owned(name).items()
        )

    def _owned(self, name: str) -> Mapping[str, int]:
        """Resource to what is guaranteed of it, where anything is."""
        if name not in self._guaranteed:
            tree = self._cluster.queues
            all_of = {one: tree.guaranteed(name, one) for one in Resources._fields} if name in tree.by_name else {}
            self._guaranteed[name] = {resource: amount for resource, amount in all_of.items() if amount}
        return self._guaranteed[name]


def _of(job: JobRecord) -> str:
    return queue_of(job.spec.queue)

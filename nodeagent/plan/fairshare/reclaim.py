"""Which jobs make room for a queue that has less than its part: who is entitled to how much, and whose nodes go first.

A queue is entitled to its guarantee, and to its part by weight among the siblings that have jobs, from the top of the
tree down. A job that waits, or that runs on fewer nodes than its target, takes back only up to that, to one node, and
only from queues that have more than theirs and are ``reclaimable``; nobody falls below a guarantee. A job gives nodes
above its ``min`` first; only if that is not enough for one that waits a whole job is stopped, saves, and waits in line
again. Who gives what to whom in the end is decided in ``queueing/makingroom.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import queue_of
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import NO_PART, ROUNDING, above, beyond, covers, entitlements, holdings, owned
from nodeagent.plan.fairshare.resources import NOTHING, Resources, of_devices, size, together
from nodeagent.plan.nodes.members import holding_nodes


def stops_at(cluster: Cluster, job: JobRecord) -> tuple[int, float]:
    """The served time (ms) from which a job that runs may be stopped for another queue, and the seconds for which it
    has its nodes then. That its gang was formed anew meanwhile does not count."""
    least = cluster.queues.min_runtime(_of(job))
    began = job.running_since or (job.generation.since if job.generation is not None else 0)
    return began + millis(least), least


_Apart = tuple[Sequence[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps jobs of one queue from making room for one of another."""

    why: Literal["over", "unreclaimable", "owned", "part", ""]
    """With that job its queue would have more than its part; or of the other one: it is not reclaimable, has no more
    than its guarantee, or no more than its part. Empty: nothing of these, so its jobs can give too little."""
    queue: str
    """Which queue that is."""


class Reclaim:
    """What queues use, and what becomes of it as nodes are taken back."""

    def __init__(self, cluster: Cluster, before: Reclaim | None = None) -> None:
        """``before``: what was decided so far. What a generation leaves is counted as given up already: it will be in a
        moment, and nothing more need be given for it."""
        self._cluster = cluster
        self._use: dict[str, Resources] = dict(holdings(cluster).by_queue if before is None else before._use)
        self._guaranteed: dict[str, Mapping[str, int]] = {} if before is None else before._guaranteed
        self._apart: dict[tuple[str, str], tuple[Sequence[str], Sequence[str]]] = (
            {} if before is None else before._apart
        )
        self._reserved: dict[str, Resources] = {} if before is None else dict(before._reserved)
        """What queues count as used, and only reserve of their capabilities for a job: they have nothing of it to
        give."""
        self._total = size(cluster).total
        self._entitled = entitlements(cluster)
        if before is None:
            for job in cluster.jobs.values():
                if job.generation is not None and job.generation.holders:
                    self.release(job, _leaving(cluster, job))

    def owns(self, job: JobRecord, use: Resources) -> bool:
        """With this much more the job's queue still has no more than it is guaranteed."""
        name = _of(job)
        return covers(self._owned(name), self._use.get(name, NOTHING).and_(use), use)

    def may_lose(
        self, donor: JobRecord, use: Resources, job: JobRecord, needs: Resources, owns: bool, *, rounded: bool
    ) -> bool:
        """The donor may give this much for a job that needs so much: with that much less its queues still have what
        they are guaranteed; and the job's queue ``owns`` what it asks for, or has no more than its part then and takes
        from one that has more. ``rounded``: of nodes that cannot be divided by weight it may have part of one more,
        where the other still has its part."""
        apart, siblings = self._paths(_of(donor), _of(job))
        known = self._cluster.queues.by_name
        if not apart or not all(name in known and self._spares(name, self._had(name).less(use), use) for name in apart):
            return False
        if owns:
            return True
        has = self._had(apart[-1])
        if self._within(apart[-1], has, use):
            return False
        if all(self._within(name, self._use.get(name, NOTHING).and_(needs), needs) for name in siblings):
            return True
        if not rounded:
            return False
        keeps = self._beyond(apart[-1], has.less(use)) >= -ROUNDING
        return keeps and all(self._below(n, needs) for n in siblings)

    def obstacle(self, giver: str, to: str, needs: Resources) -> Obstacle | None:
        """Why no job of the queue ``giver`` has to give anything for one of the queue ``to`` that needs so much: as of
        ``may_lose``, as far as that depends on queues alone. None: both are one, or one below the other."""
        tree = self._cluster.queues
        apart, asks = self._paths(giver, to)
        if not apart:
            return None
        owns = covers(self._owned(to), self.use(to).and_(needs), needs)
        over = (n for n in asks if not (self._within(n, self.use(n).and_(needs), needs) or self._below(n, needs)))
        if not owns and (name := next(over, "")):
            return Obstacle("over", name)
        for name in apart:
            if (queue := tree.by_name.get(name)) is not None and not queue.reclaimable:
                return Obstacle("unreclaimable", name)
            if any(0 < getattr(self._had(name), resource) <= amount for resource, amount in self._owned(name).items()):
                return Obstacle("owned", name)
        has = self._had(apart[-1])
        return Obstacle("part" if not owns and self._within(apart[-1], has, has) else "", apart[-1])

    def use(self, name: str) -> Resources:
        """What the queue has."""
        return self._use.get(name, NOTHING)

    def may_return(self, donor: JobRecord, use: Resources, to: str) -> bool:
        """The donor may give back this much of what it has borrowed, for a job of the queue ``to``: its own; or another
        if its queues are reclaimable and have with that much less what they are guaranteed. A queue that is gone keeps
        nothing."""
        return self._spared(donor, NOTHING.less(use), use, to)

    def would_return(self, donor: JobRecord, use: Resources, to: str) -> bool:
        """The same of what the donor does not have yet, once it has it."""
        return self._spared(donor, NOTHING, use, to)

    def evens_out(self, donor: JobRecord, use: Resources, job: JobRecord, needs: Resources) -> bool:
        """Also after the donor has given this much for what the job needs is its queue no less above its part than the
        job's."""
        gives, gets = _of(donor), _of(job)
        after = self._had(gives).less(use), self._use.get(gets, NOTHING).and_(needs)
        return self._beyond(gives, after[0]) >= self._beyond(gets, after[1]) - ROUNDING

    def barring(self, job: JobRecord, more: Resources) -> str:
        """The lowest of the job's queues that may not have so much more; empty if all may. Then only what jobs of that
        queue give up can help."""
        if _of(job) not in self._cluster.queues.by_name:
            return _of(job)
        for queue in self._cluster.queues.path(_of(job)):
            use = self._use.get(queue.name, NOTHING)
            for name, cap in queue.capability.stated.items():
                if (asked := getattr(more, name)) and getattr(use, name) + asked > cap:
                    return queue.name
        return ""

    def is_below(self, donor: JobRecord, name: str) -> bool:
        """What the donor gives up is this queue's."""
        return name in above(self._cluster.queues, _of(donor))

    def over(self, donor: JobRecord) -> float:
        """By how much the donor's queue has more than it is entitled to, as a part of the cluster."""
        return self._beyond(_of(donor), self._had(_of(donor)))

    def reserve(self, job: JobRecord, use: Resources) -> None:
        """The job's queues reserve that much of their capabilities for it."""
        self.grant(job, use)
        for name in above(self._cluster.queues, _of(job)):
            self._reserved[name] = self._reserved.get(name, NOTHING).and_(use)

    def unreserve(self, job: JobRecord, use: Resources) -> None:
        """It is reserved no more."""
        self.release(job, use)
        for name in above(self._cluster.queues, _of(job)):
            self._reserved[name] = self._reserved.get(name, NOTHING).less(use)

    def release(self, donor: JobRecord, use: Resources) -> None:
        """The donor is to give that much."""
        for name in above(self._cluster.queues, _of(donor)):
            self._use[name] = self._use.get(name, NOTHING).less(use)

    def grant(self, job: JobRecord, use: Resources) -> None:
        """The job is to have that much."""
        for name in above(self._cluster.queues, _of(job)):
            self._use[name] = self._use.get(name, NOTHING).and_(use)

    def _had(self, name: str) -> Resources:
        """What the queue's jobs have."""
        use = self._use.get(name, NOTHING)
        return use.less(self._reserved[name]) if name in self._reserved else use

    def _paths(self, giver: str, taker: str) -> _Apart:
        """Of each of two queues itself and those above it, without what they have in common."""
        if (giver, taker) not in self._apart:
            gives, gets = above(self._cluster.queues, giver), above(self._cluster.queues, taker)
            apart = [name for name in gives if name not in gets], [name for name in gets if name not in gives]
            self._apart[giver, taker] = apart
        return self._apart[giver, taker]

    def _beyond(self, name: str, use: Resources) -> float:
        return beyond(use, self._entitled.get(name, NO_PART), self._total)

    def _within(self, name: str, use: Resources, of: Resources) -> bool:
        """With that use the queue has no more than its part, or than it is guaranteed of what ``of`` takes."""
        return self._beyond(name, use) <= ROUNDING or covers(self._owned(name), use, of)

    def _below(self, name: str, needs: Resources) -> bool:
        """The queue would have less than its part if the job had one node less."""
        but_one = Resources(*(amount - amount // max(1, needs.nodes) for amount in needs))
        return self._beyond(name, self._use.get(name, NOTHING).and_(but_one)) < -ROUNDING

    def _spared(self, donor: JobRecord, change: Resources, use: Resources, to: str) -> bool:
        apart, _ = self._paths(_of(donor), to)
        known = self._cluster.queues.by_name
        return all(name not in known or self._spares(name, self._had(name).and_(change), use) for name in apart)

    def _spares(self, name: str, left: Resources, use: Resources) -> bool:
        """With that much left the queue still has what it is guaranteed of the resources that ``use`` takes."""
        if not self._cluster.queues.by_name[name].reclaimable:
            return False
        guarantee = self._owned(name).items()
        return all(getattr(left, resource) >= amount for resource, amount in guarantee if getattr(use, resource))

    def _owned(self, name: str) -> Mapping[str, int]:
        """Resource to what is guaranteed of it, where anything is."""
        if name not in self._guaranteed:
            self._guaranteed[name] = owned(self._cluster.queues, name)
        return self._guaranteed[name]


def _leaving(cluster: Cluster, job: JobRecord) -> Resources:
    """What it holds where its next generation, if it has one, is not."""
    assert job.generation is not None
    stays = job.generation.members if job.generation.state != "ended" else {}
    left = [job.generation.holders[node] for node in holding_nodes(cluster, job) if node not in stays]
    return together(of_devices(holder.devices) for holder in left)


def _of(job: JobRecord) -> str:
    return queue_of(job.spec.queue)

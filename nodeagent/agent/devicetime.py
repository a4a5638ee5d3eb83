"""Counts for how long jobs have this node's devices, and how much of that was lost to faults or overhead, for the
metrics: by queue, user and class of node. Each node counts its own devices only, so that the sum over all nodes counts
each once.

As the store counts (``store/scripts/_usage.lua``), but only while this agent looks: the truth is the store's.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Counter

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import queue_of
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.resources import used
from nodeagent.plan.fairshare.usage import add, since_written
from nodeagent.plan.nodes.devices import booked

EVERY = 1000
"""Milliseconds from one look to the next, while nothing changes."""
MAX_SERIES = 100
"""Queues and users that have series of their own, by kind of device; all others are ``others`` together."""

Whose = tuple[str, str, str]
"""Kind of device, queue and user."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What a job had on this node when it was last looked at."""

    whose: Whose
    devices: int
    part: float
    """Of all its devices of this kind."""
    wasted: tuple[int, int]
    """Milliseconds of all of these that faults had cost it, and that were overhead."""


class DeviceTime:
    """``seconds``, ``lost`` and ``overhead`` have the labels ``device``, ``queue``, ``user`` and ``class``. The class
    of a node is ``spot`` if it may be taken away, else ``regular``."""

    def __init__(self, seconds: Counter, lost: Counter, overhead: Counter) -> None:
        self._seconds, self._wasted = seconds, (lost, overhead)
        self._served: int | None = None
        self._seen: Cluster | None = None
        """The view of the last look that counted."""
        self._held: Mapping[tuple[str, str], _Share] = {}
        """By job (uid) and kind of device, as of then."""
        self._known: set[Whose] = set()

    def look(self, cluster: Cluster, node: str) -> None:
        """What was held at the last look was held until now. Of what a fault cost a job, and of its overhead, each of
        its nodes bears the part that it has of the job's devices."""
        last = self._seen
        same = last is not None and cluster.jobs is last.jobs and cluster.nodes is last.nodes
        if same and last is not None and cluster.served < last.served + EVERY:
            return  # what is held stays so: this time is counted with the next
        if self._served is not None and cluster.served > self._served:
            class_ = "spot" if node in cluster.nodes and cluster.nodes[node].facts.spot else "regular"
            for (uid, kind), share in self._held.items():
                labels = (*self._series(share.whose), class_)
                self._seconds.labels(*labels).inc(share.devices * (cluster.served - self._served) / 1000)
                job = cluster.jobs.get(uid)
                now = share.wasted if job is None else _wasted(job, kind, cluster.served)
                for counter, ms, before in zip(self._wasted, now, share.wasted, strict=True):
                    counter.labels(*labels).inc(max(0.0, (ms - before) * share.part / 1000))
        self._served = max(cluster.served, self._served or 0)
        self._held, self._seen = _held(cluster, node), cluster

    def _series(self, whose: Whose) -> Whose:
        if whose not in self._known and len(self._known) >= MAX_SERIES:
            return whose[0], "others", "others"
        self._known.add(whose)
        return whose


def _held(cluster: Cluster, node: str) -> dict[tuple[str, str], _Share]:
    counts: Tally[tuple[str, str]] = Tally()
    for uid, device in {(uid, device) for uid, devices in booked(cluster).get(node, ()) for device in devices}:
        counts[uid, "slot" if device.startswith("cpu") else "gpu"] += 1
    found: dict[tuple[str, str], _Share] = {}
    for (uid, kind), devices in counts.items():
        job, all_of = cluster.jobs[uid], used(cluster)[uid]
        whose = kind, queue_of(job.spec.queue), job.spec.submitter.user
        part = devices / (all_of.slots if kind == "slot" else all_of.gpus)
        found[uid, kind] = _Share(whose, devices, part, _wasted(job, kind, cluster.served))
    return found


def _wasted(job: JobRecord, kind: str, served: int) -> tuple[int, int]:
    """Milliseconds of its devices of this kind that faults cost the job up to then, and that were overhead."""
    use = add((*job.used.values(), *since_written(job, served, 0).values()))
    return (use.lost_slot_ms, use.overhead_slot_ms) if kind == "slot" else (use.lost_gpu_ms, use.overhead_gpu_ms)

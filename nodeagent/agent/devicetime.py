"""Counts for how long jobs have this node's devices, for the metrics: by queue and user, of its own devices only, so
that the sum over all nodes counts each once.

As the store counts (``store/scripts/_usage.lua``), but only while this agent looks: the truth is the store's.
"""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import Counter

from nodeagent.model.queue import queue_of
from nodeagent.plan.bookings import booked
from nodeagent.plan.cluster import Cluster

MAX_SERIES = 100
"""Queues and users that have series of their own, by kind of device; all others are ``others`` together."""

Whose = tuple[str, str, str]
"""Kind of device, queue and user."""


class DeviceTime:
    """``counter`` has the labels ``device``, ``queue`` and ``user``."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._served: int | None = None
        self._held: Tally[Whose] = Tally()
        """As of then."""
        self._known: set[Whose] = set()

    def look(self, cluster: Cluster, node: str) -> None:
        """What was held at the last look was held until now."""
        if self._served is not None and cluster.served > self._served:
            for whose, devices in self._held.items():
                self._series(whose).inc(devices * (cluster.served - self._served) / 1000)
        self._served = max(cluster.served, self._served or 0)
        self._held = Tally()
        held = {(uid, device) for uid, devices in booked(cluster).get(node, ()) for device in devices}
        for uid, device in held:
            job = cluster.jobs[uid]
            kind = "slot" if device.startswith("cpu") else "gpu"
            self._held[kind, queue_of(job.spec.queue), job.spec.submitter.user] += 1

    def _series(self, whose: Whose) -> Counter:
        device, queue, user = whose
        if whose not in self._known and len(self._known) >= MAX_SERIES:
            queue, user = "others", "others"
        else:
            self._known.add(whose)
        return self._counter.labels(device=device, queue=queue, user=user)

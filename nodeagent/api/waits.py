"""What a waiting job waits for now, in place of why it began to wait."""

from __future__ import annotations

from nodeagent.api.shapes import Json
from nodeagent.api.view import AgentView
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.plan.bookings import booked
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.keepers import silence
from nodeagent.plan.membership import in_order
from nodeagent.plan.queue import in_queue, places, room_for
from nodeagent.plan.waiting import SHOWN


def waits(view: AgentView, job: JobRecord, cluster: Cluster) -> Json:
    """A better ``reason``, or nothing; why a job is not run is better than any, and why none is decided on next."""
    if refusal := cluster.refused.get(job.uid):
        return {"reason": refusal.text}
    if job.phase not in TERMINAL and (text := view.health().store_waits):
        return {"reason": text}
    waiting = job.phase in ("queued", "holding") or (job.phase not in TERMINAL and silence(cluster, job))
    why = view.why(job.uid) if waiting else ()
    place = places(cluster).get(job.uid)
    line = (f"number {place} of {len(places(cluster))} in the queue",) if place is not None and why else ()
    return {"reason": "; ".join((*why, *line))} if why else {}


def way_out(job: JobRecord, cluster: Cluster) -> Json | None:
    """Of a job in the queue: what could be done about its waiting. ``backoff``: seconds until it may start again;
    ``needs``, ``fit``, ``pending``, ``live``: nodes that it needs at least, that could run it now, as soon as they are
    ready, and that there are; ``cordoned``: the first few nodes that take no work because somebody said so; ``held``:
    other jobs hold nodes that it could use. None of any other job."""
    if not in_queue(job):
        return None
    room = room_for(cluster, job)
    cordoned = [n for n in in_order(cluster) if cluster.nodes[n].cordon is not None and cluster.live(n)]
    return {
        "backoff": round(max(0, job.not_before - cluster.served) / 1000, 1),
        "needs": job.spec.nodes.min,
        "fit": room.fit,
        "pending": room.pending,
        "live": room.live,
        "cordoned": cordoned[:SHOWN],
        "held": any(uid != job.uid for jobs in booked(cluster).values() for uid, _ in jobs),
    }

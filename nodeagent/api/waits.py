"""What a waiting job waits for now, in place of why it began to wait."""

from __future__ import annotations

from nodeagent.api.shapes import Json
from nodeagent.api.view import AgentView
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.keepers import silence


def waits(view: AgentView, job: JobRecord, cluster: Cluster) -> Json:
    """A better ``reason``, or nothing; why a job is not run is better than any, and why none is decided on next."""
    if refusal := cluster.refused.get(job.uid):
        return {"reason": refusal.text}
    if job.phase not in TERMINAL and (text := view.health().store_waits):
        return {"reason": text}
    waiting = job.phase in ("queued", "holding") or (job.phase not in TERMINAL and silence(cluster, job))
    why = view.why(job.uid) if waiting else ()
    return {"reason": "; ".join(why)} if why else {}

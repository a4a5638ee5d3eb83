"""A scale that is pending: met, timed out, or still to wait for. Owns its end; how the gang changes is
``running.py``'s.

A scale-out is all or nothing: its newcomers join together when all are ready (``placement.py``), or at its deadline the
target goes back to what it was.
"""

from __future__ import annotations

from nodeagent.model.job import JobRecord, Scale, ScaleState
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.placement import choose
from nodeagent.plan.steps import Decision, Settle


def settle_scale(cluster: Cluster, job: JobRecord) -> Decision | None:
    """The step that ends the job's pending scale; None while there is none, or it goes on."""
    scale, head = job.control.scale, job.head
    if scale is None or scale.state != "pending":
        return None
    size = 0 if head is None or head.state == "ended" else len(head.members)
    if head is not None and head.state == "active" and _met(scale, frozenset(head.members)):
        return _settled(job, scale, "met", "JobScaleMet", f"runs on {size} nodes as asked", job.control.target)
    if not scale.deadline or cluster.served < scale.deadline or size >= scale.want:
        return None
    full = choose(cluster, job, scale.want)
    target = max(scale.before, size)
    if len(full.chosen) < scale.want:
        why = full.short
    elif head is not None and head.state == "active":
        why = "its nodes became ready too late"
    else:
        why = f"the job is {job.phase}: {job.reason}"
    text = f"scale to {scale.want} timed out after {scale.timeout:g}s: {why}; went back to {target}"
    return _settled(job, scale, "rolled_back", "JobScaleRolledBack", text, target)


def _met(scale: Scale, members: frozenset[str]) -> bool:
    if scale.deadline:
        return len(members) >= scale.want
    return len(members) <= scale.want and members.isdisjoint(scale.leaving)


def _settled(job: JobRecord, scale: Scale, state: ScaleState, event: str, text: str, target: int) -> Decision:
    over = scale.model_copy(update={"state": state, "reason": text})
    control = job.control.model_copy(update={"target": target, "scale": over})
    return Decision(Settle(control, event, text), (text,))

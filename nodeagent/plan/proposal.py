"""How the next generation of a job is put together, on the nodes that are chosen for it. Chooses no step: that is
``gang.py``'s and its helpers'."""

from __future__ import annotations

from collections.abc import Collection

from nodeagent.model.job import JobRecord, Spend
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.demand import of_devices, together
from nodeagent.plan.elastic import place
from nodeagent.plan.keepers import choose
from nodeagent.plan.placement import Placement, arranged, gang_of
from nodeagent.plan.share import claims
from nodeagent.plan.steps import Decision, End, Propose
from nodeagent.plan.world import make_world


def propose_or_hold(
    cluster: Cluster,
    job: JobRecord,
    cause: Cause,
    gone: tuple[str, ...],
    spend: Spend | None,
    planned: bool,
    without: Collection[str] = (),
    grace: float | None = None,
) -> Decision:
    placement = place(cluster, job, without)
    if placement.fits:
        return propose(cluster, job, cause, gone, spend, placement, planned, grace)
    text = f"{cause.text}; holds: {placement.missing}"
    return Decision(End("holding", text, gone, spend=spend, planned=planned), (text,))


def propose(
    cluster: Cluster,
    job: JobRecord,
    cause: Cause,
    gone: tuple[str, ...],
    spend: Spend | None,
    placement: Placement,
    planned: bool,
    grace: float | None = None,
) -> Decision:
    """``grace``: of a planned stop, None for the job's."""
    facts = {c.node: cluster.nodes[c.node].facts for c in placement.chosen}
    gang = gang_of(cluster, job.spec) if arranged(cluster, job.spec) else None
    paths, segment = (gang.paths, gang.segment) if gang is not None else (None, 0)
    members = make_world(job.head, placement.chosen, job.spec.role, facts, placement.places, paths, segment)
    stop = job.spec.grace if grace is None else grace
    form = cluster.timing.form_margin + (stop if planned else 0.0)
    keepers = choose(cluster, members.values())
    takes = together(of_devices(c.devices) for c in placement.chosen)
    taken = claims(cluster, job, takes)
    step = Propose(members, cause, gone, spend, planned, millis(form), placement.outside(), keepers, grace, taken)
    return Decision(step, (cause.text,))

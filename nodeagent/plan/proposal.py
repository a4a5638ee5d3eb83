"""How the next generation of a job is put together: on which nodes, and with which members. Chooses no step: that is
``gang.py``'s and its helpers'."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from nodeagent.model.job import JobRecord, Spend
from nodeagent.model.jobspec import MOST_NODES
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause
from nodeagent.plan import keepers
from nodeagent.plan.backfill import kept_for, kept_from, with_aside
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.demand import of_devices, together
from nodeagent.plan.elastic import eligible, nodes_wanted, sharing
from nodeagent.plan.membership import asked, candidates, choosy, in_order, ranked
from nodeagent.plan.moving import may_move
from nodeagent.plan.placement import Placement, arrange, arranged, choose, gang_of, soon
from nodeagent.plan.share import claims
from nodeagent.plan.steps import Decision, End, Propose
from nodeagent.plan.world import make_world


def place(cluster: Cluster, job: JobRecord, without: Collection[str] = ()) -> Placement:
    """Choose nodes for the next generation, never more than it is to have. ``without`` are nodes not to use this time.

    A scale-out is all or nothing: until all that it wants fit, the target from before it counts. Of nodes that are kept
    for others (``backfill.py``), and of what queues keep, a job that waits gets none, and one that runs only as many as
    it loses.
    """
    kept, view = kept_from(cluster, job), with_aside(cluster, job)
    if eligible(cluster, job) is not None:
        kept = frozenset()
    if not kept and view is cluster:
        return _place(cluster, cluster, job, without)
    head = job.head if job.head is not None and job.head.state != "ended" else None
    kept = kept.difference(head.members if head is not None else (), without)
    found = _place(cluster, view, job, kept.union(without))
    if head is not None and len(found.chosen) < len(head.members):
        return _place(cluster, cluster, job, without, len(head.members))
    return _with_kept(cluster, job, found, kept) if kept else found


def up_to(cluster: Cluster, job: JobRecord, target: int) -> Placement:
    """What a job that runs could have of so many nodes (``choose``)."""
    kept = kept_from(cluster, job).difference(job.head.members if job.head is not None else ())
    found = choose(with_aside(cluster, job), job, target, kept)
    return _with_kept(cluster, job, found, kept) if kept else found


def _with_kept(cluster: Cluster, job: JobRecord, found: Placement, kept: Collection[str]) -> Placement:
    """It says of nodes that are kept for others that they are."""
    left = (kept_for(cluster, job, one) for one in candidates(cluster, job) if one.node in kept)
    return replace(found, others=(*found.others, *left))


def _place(
    cluster: Cluster, view: Cluster, job: JobRecord, without: Collection[str], most: int = MOST_NODES
) -> Placement:
    """``view``: in which it is placed, with what its queues keep for others set aside, or without that."""
    if job.spec.several:
        full = choose(view, job, job.sized.nodes.target, without)
        before = job.sized_before.nodes.target
        return full if full.fits or job.control.growing is None else choose(view, job, before, without)
    if (may := eligible(cluster, job)) is not None:
        without = {n for n in cluster.nodes if n not in may}.union(without)
    elif back := sharing(cluster).gives.get(job.uid):
        without = {*without, *back}
    full = choose(view, job, min(most, nodes_wanted(cluster, job)), without)
    growing = job.control.growing
    if growing is None or len(full.chosen) >= growing.want:
        return full
    return choose(view, job, growing.before, without)


def awaited(cluster: Cluster, job: JobRecord, placement: Placement) -> tuple[str, ...]:
    """Nodes that are getting ready, and that the job would use if it waited for them: for its size; before its first
    start also for nodes that it prefers, or that are closer together."""
    if placement.fits and placement.capped:
        return ()
    if job.spec.several and placement.fits and may_move(cluster, job):
        return ()  # it moves where it can at once
    if job.spec.several:
        places = soon(cluster, job).places
        return tuple(c.node for c in placement.pending if c.node in places)
    wanted, lies = nodes_wanted(cluster, job), arranged(cluster, job.spec)
    if len(placement.chosen) >= wanted and (job.active is not None or not (lies or choosy(job))):
        return ()  # a gang that has run goes on at once, wherever that is
    if not lies and len(placement.chosen) < wanted:
        return tuple(c.node for c in placement.pending)
    names = {c.node for c in (*placement.chosen, *placement.others) if c.standing in ("fit", "pending")}
    if len(placement.chosen) >= wanted:  # nobody waits for a node that would do better and is not asked to get ready
        names &= asked(cluster).get(job.uid, {}).keys()
    able = [n for n in ranked(cluster, job, [n for n in in_order(cluster) if n in names]) if n in names]
    used = arrange(cluster, job, able, wanted, [c.node for c in placement.chosen]) if lies else able[:wanted]
    return tuple(c.node for c in placement.pending if c.node in used)


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
    return Decision(End("holding", text, gone, spend=spend, planned=planned, grace=grace), (text,))


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
    stop = job.spec.longest_grace if grace is None else grace
    form = cluster.timing.form_margin + (stop if planned else 0.0)
    kept = keepers.choose(cluster, members.values())
    takes = together(of_devices(c.devices) for c in placement.chosen)
    taken = claims(cluster, job, takes)
    step = Propose(members, cause, gone, spend, planned, millis(form), placement.outside(), kept, grace, taken)
    return Decision(step, (cause.text,))

"""How the next generation of a job is put together: on which nodes, in which order, with which ranks. Ranks are a pure
function of the last world and the chosen nodes. Chooses no step: that is ``gang.py``'s and its helpers'.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from nodeagent.model.job import BudgetEntry, JobRecord
from nodeagent.model.jobspec import MOST_NODES, Role
from nodeagent.model.node import NodeFacts
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause, Generation, Member, Place
from nodeagent.plan.cluster import Cluster, in_order
from nodeagent.plan.fairshare.queues import claims
from nodeagent.plan.fairshare.resources import of_devices, together
from nodeagent.plan.nodes import failsafe
from nodeagent.plan.nodes.candidates import Candidate, asked, candidates, choosy, gpus_per_worker, ranked
from nodeagent.plan.nodes.health import remarkable
from nodeagent.plan.nodes.labels import TopologyPath
from nodeagent.plan.nodes.setbacks import joined_at
from nodeagent.plan.placing.arranging import arrange, arranged, may_move
from nodeagent.plan.placing.placement import Placement, choose
from nodeagent.plan.placing.roles import soon
from nodeagent.plan.placing.topology import gang_of
from nodeagent.plan.queueing.elastic import eligible, nodes_wanted, transfers
from nodeagent.plan.queueing.heldback import with_aside
from nodeagent.plan.queueing.reservations import as_reserved, reserved_for_others
from nodeagent.plan.steps import Decision, End, Propose

MOST_LEFT_OUT = 32
"""Nodes that a generation's record names as left out: all agents read it, and each worker has it in its environment."""


def place(cluster: Cluster, job: JobRecord, without: Collection[str] = ()) -> Placement:
    """Choose nodes for the next generation, never more than it is to have. ``without`` are nodes not to use this time.

    A scale-out is all or nothing: until all that it wants fit, the target from before it counts. Of nodes that are
    reserved for others (``queueing/reservations.py``), and of what queues reserve, a job that waits gets none, and one
    that runs only as many as it loses. Where none of them has a port for the rendezvous, others are chosen.
    """
    found = _placed(cluster, job, without)
    names = {c.node for c in found.chosen if c.portless}
    if not names or len(names) < len(found.chosen):
        return found
    again = _placed(cluster, job, names.union(without))
    left = [
        replace(c, standing="unfit", passing=True, why=f"{c.node} cannot lead it: {why_portless(cluster, job, c.node)}")
        for c in found.chosen
    ]
    return replace(again, others=(*(c for c in again.others if c.node not in names), *left))


def why_portless(cluster: Cluster, job: JobRecord, node: str) -> str:
    """Why this node cannot lead the job; empty if it can, as far as is known."""
    record = cluster.nodes.get(node)
    ready = record.readiness.get(job.uid) if record is not None else None
    return ready.reason if ready is not None and ready.portless else ""


def _placed(cluster: Cluster, job: JobRecord, without: Collection[str]) -> Placement:
    theirs, view = reserved_for_others(cluster, job), with_aside(cluster, job)
    if eligible(cluster, job) is not None:
        theirs = frozenset()
    if not theirs and view is cluster:
        return _place(cluster, cluster, job, without)
    generation = job.generation if job.generation is not None and job.generation.state != "ended" else None
    theirs = theirs.difference(generation.members if generation is not None else (), without)
    found = _place(cluster, view, job, theirs.union(without))
    if generation is not None and len(found.chosen) < len(generation.members):
        return _place(cluster, cluster, job, without, len(generation.members))
    return _with_reserved(cluster, job, found, theirs) if theirs else found


def up_to(cluster: Cluster, job: JobRecord, target: int) -> Placement:
    """What a job that runs could have of so many nodes (``choose``)."""
    theirs = reserved_for_others(cluster, job).difference(job.generation.members if job.generation is not None else ())
    found = choose(with_aside(cluster, job), job, target, theirs)
    return _with_reserved(cluster, job, found, theirs) if theirs else found


def _with_reserved(cluster: Cluster, job: JobRecord, found: Placement, theirs: Collection[str]) -> Placement:
    """It says of nodes that are reserved for others that they are."""
    left = (as_reserved(cluster, job, one) for one in candidates(cluster, job) if one.node in theirs)
    return replace(found, others=(*found.others, *left))


def _place(
    cluster: Cluster, view: Cluster, job: JobRecord, without: Collection[str], most: int = MOST_NODES
) -> Placement:
    """``view``: in which it is placed, with what its queues reserve for others set aside, or without that."""
    if job.spec.several:
        full = choose(view, job, job.sized.nodes.target, without)
        before = job.sized_before.nodes.target
        return full if full.fits or job.control.growing is None else choose(view, job, before, without)
    if (may := eligible(cluster, job)) is not None:
        without = {n for n in cluster.nodes if n not in may}.union(without)
    elif back := transfers(cluster).gives.get(job.uid):
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
    spend: BudgetEntry | None,
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
    spend: BudgetEntry | None,
    placement: Placement,
    planned: bool,
    grace: float | None = None,
) -> Decision:
    """``grace``: of a planned stop, None for the job's."""
    facts = {c.node: cluster.nodes[c.node].facts for c in placement.chosen}
    gang = gang_of(cluster, job.spec) if arranged(cluster, job.spec) else None
    paths, segment = (gang.paths, gang.segment) if gang is not None else (None, 0)
    new = {c.node: joined_at(job, c.node, c.life, cluster.served) for c in placement.chosen}
    members = make_world(job.generation, placement.chosen, job.spec.role, facts, placement.places, paths, segment, new)
    stop = job.spec.longest_grace if grace is None else grace
    form = cluster.timing.form_margin + (stop if planned else 0.0)
    failsafe_members = failsafe.choose(cluster, job.uid, members.values())
    takes = together(of_devices(c.devices) for c in placement.chosen)
    taken = claims(cluster, job, takes)
    outside = left_out(cluster, job, placement)
    step = Propose(members, cause, gone, spend, planned, millis(form), outside, failsafe_members, grace, taken)
    return Decision(step, (cause.text,))


def left_out(cluster: Cluster, job: JobRecord, placement: Placement) -> dict[str, str]:
    """Nodes that the workers are to know of, with why they have none there: first those of the last generation, then
    those that have a fault. Of those that are only busy, or never checked the job, nobody has to know."""
    last, faulty = job.generation.members if job.generation is not None else {}, remarkable(cluster)
    why = {
        c.node: c.why
        for c in placement.others
        if c.why and not c.ruled_out
        if c.node in last or c.standing == "unfit" or (c.standing == "out" and c.node in faulty)
    }
    return dict(sorted(why.items(), key=lambda one: one[0] not in last)[:MOST_LEFT_OUT])


def order_nodes(
    last: Generation | None,
    chosen: Sequence[str],
    paths: Mapping[str, TopologyPath] | None = None,
    segment: int = 0,
    portless: Collection[str] = (),
) -> list[str]:
    """The chosen nodes by new group rank. Survivors keep their order, and their very rank where the size allows;
    newcomers fill the holes.

    ``chosen`` names survivors and newcomers; newcomers are taken in the order given, or with ``paths`` (where nodes are
    in the topology) each beside its neighbours. With ``segment``, ``chosen`` holds groups of so many one after another,
    which stay together. If the first is one of ``portless``, it changes places with the first that is not.
    """
    found = _ordered(last, chosen, paths, segment)
    at = next((i for i, node in enumerate(found) if node not in portless), 0)
    size = segment or 1
    groups = [found[i : i + size] for i in range(0, len(found), size)]
    if groups:
        groups[0], groups[at // size] = groups[at // size], groups[0]
        leads = groups[0]
        leads[0], leads[at % size] = leads[at % size], leads[0]
    return [node for group in groups for node in group]


def _ordered(
    last: Generation | None, chosen: Sequence[str], paths: Mapping[str, TopologyPath] | None, segment: int
) -> list[str]:
    old = {m.node: m.group_rank for m in last.ordered()} if last is not None else {}
    if not segment:
        return _fill(old, chosen, paths or {})
    groups = {chosen[i]: chosen[i : i + segment] for i in range(0, len(chosen), segment)}
    inside = {name: {n: old[n] % segment for n in group if n in old} for name, group in groups.items()}
    was = {name: min(old[n] for n in own) // segment for name, own in inside.items() if own}
    return [n for name in _fill(was, list(groups), {}) for n in _fill(inside[name], groups[name], {})]


def _fill(old: Mapping[str, int], chosen: Sequence[str], paths: Mapping[str, TopologyPath]) -> list[str]:
    stay = sorted((n for n in chosen if n in old), key=lambda n: old[n])
    new = [n for n in chosen if n not in old]
    out: list[str] = []
    size = len(chosen)
    for position in range(size):
        must = len(stay) == size - position  # no newcomer is left to fill a hole with
        if stay and (must or not new or old[stay[0]] <= position):
            out.append(stay.pop(0))
        else:
            out.append(new.pop(_neighbour(out[-1], new, paths) if out else 0))
    return out


def _neighbour(of: str, new: Sequence[str], paths: Mapping[str, TopologyPath]) -> int:
    """Which newcomer is nearest; of equals the first."""
    if len(new) == 1 or not (path := paths.get(of)):
        return 0
    for depth in range(len(path), 0, -1):
        if path[depth - 1]:
            for i, node in enumerate(new):
                if paths[node][:depth] == path[:depth]:
                    return i
    return 0


def make_world(
    last: Generation | None,
    chosen: Sequence[Candidate],
    role: Role,
    facts: Mapping[str, NodeFacts],
    places: Mapping[str, tuple[Place, ...]],
    paths: Mapping[str, TopologyPath] | None = None,
    segment: int = 0,
    joined: Mapping[str, int] | None = None,
) -> dict[str, Member]:
    """Members of the next generation by node. ``places``: of a job of several roles, by node. ``paths``, ``segment``:
    see ``order_nodes``. ``joined``: as of members, by node. Raises KeyError for a chosen node without facts."""
    by_node = {c.node: c for c in chosen}
    members: dict[str, Member] = {}
    first = 0
    portless = {c.node for c in chosen if c.portless}
    for rank, node in enumerate(order_nodes(last, [c.node for c in chosen], paths, segment, portless)):
        one = by_node[node]
        here = places.get(node, ())
        per = gpus_per_worker(role, len(facts[node].gpus))
        workers = len(one.devices) // per if per else len(one.devices)
        if here:
            workers = sum(place.workers for place in here)
        members[node] = Member(
            node=node, life=one.life, group_rank=rank, first_rank=first, workers=workers, devices=one.devices,
            places=here, joined=(joined or {}).get(node, 0),
        )  # fmt: skip
        first += workers
    return members

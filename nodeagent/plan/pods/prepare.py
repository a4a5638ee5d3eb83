"""Which nodes keep a pod of a job ready before it is needed. Never places a worker: a job may start without those, and
they book no device: nothing of them is used (``fairshare/usage.py``), so they are few."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.plan.cluster import Cluster, natural
from nodeagent.plan.nodes.availability import spot_nodes
from nodeagent.plan.nodes.candidates import (
    Candidate,
    asked,
    candidate,
    candidates,
    score,
    shape_of,
    some_candidates,
    staying,
)
from nodeagent.plan.nodes.health import takes_work, worn_nodes
from nodeagent.plan.nodes.labels import TopologyPath
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.nodes.setbacks import doubtful
from nodeagent.plan.placing.arranging import arrange, arranged, may_move
from nodeagent.plan.placing.roles import soon
from nodeagent.plan.placing.topology import closer, closest, gang_of
from nodeagent.plan.queueing.elastic import eligible, nodes_wanted, transfers
from nodeagent.plan.queueing.heldback import line
from nodeagent.plan.queueing.queue import in_queue, next_up
from nodeagent.plan.queueing.reservations import reserved_for_others
from nodeagent.plan.queueing.room import shut_for, with_room

Order = Callable[[str, bool], tuple[int, ...]]
"""The rank of a node, by whether it is fit: the lowest is the best."""
UNFIT_KEPT = 4
"""Pods of jobs that wait whose check failed here are kept on a node, to be looked at again now and then: those of the
first jobs in the queue. Of others the node only keeps the verdict."""


def should_prepare(cluster: Cluster, job: JobRecord, node: str, up: Collection[str] | None = None) -> bool:
    """Whether a node keeps a pod ready for a job: members, those who will be needed to reach the target, one spare,
    and those whose check failed: their verdict is kept and checked again, not forgotten and found anew. Of a paused
    job those who were members, so that it can go on without importing anew, and those on which it would be closer
    together. Of jobs that wait only those that are next (``up``, of which ``queue.next_up`` tells)."""
    if job.phase in TERMINAL or job.control.desired == "stop":
        return False
    member = job.generation.members.get(node) if job.generation is not None else None
    alive = member is not None and cluster.live(node, member.life)
    record = cluster.nodes.get(node)
    if job.control.desired == "pause":
        return takes_work(cluster, node) and (alive or node in _closer_nodes(cluster, job))
    if alive:
        return True
    if record is None:
        return False
    if in_queue(job) and job.uid not in (next_up(cluster, line(cluster)).up if up is None else up):
        return failed_here(cluster, job, node)
    if candidate(cluster, job, record).standing == "out":
        return False  # most nodes of a large cluster run other jobs: they need not look at all the others
    return node in _to_prepare(cluster, job)


def failed_here(cluster: Cluster, job: JobRecord, node: str) -> bool:
    """The job waits, and all that keeps it from this node is a check that failed: a pod could only look again."""
    record = cluster.nodes.get(node)
    ready = record.readiness.get(job.uid) if record is not None else None
    if record is None or ready is None or ready.state != "unfit" or not in_queue(job):
        return False
    member = job.generation.members.get(node) if job.generation is not None else None
    survives = member is not None and cluster.live(node, member.life)
    return not survives and candidate(cluster, job, record).standing == "unfit"


def _to_prepare(cluster: Cluster, job: JobRecord) -> frozenset[str]:
    """Of those that are no members."""
    theirs = reserved_for_others(cluster, job)
    of = job, theirs, transfers(cluster)
    return cluster.once(f"prepare:{job.uid}", lambda _before: _choose(cluster, job, theirs), *of)


def _closer_nodes(cluster: Cluster, job: JobRecord) -> frozenset[str]:
    """Where a gang that may move would be closer together than it was, as soon as those nodes are ready; none where it
    would not, or where they are reserved for others."""
    generation = job.generation
    if generation is None or not may_move(cluster, job) or not arranged(cluster, job.spec):
        return frozenset()
    gang, theirs = gang_of(cluster, job.spec), reserved_for_others(cluster, job)
    if closest([*generation.members], gang):
        return frozenset()

    def find(_before: object) -> frozenset[str]:
        begun = asked(cluster).get(job.uid, {})
        able = [c for c in candidates(cluster, job) if c.standing in ("fit", "pending") and c.node not in theirs]
        able.sort(key=lambda c: (c.node not in generation.members, c.standing != "fit", c.node not in begun))
        if job.spec.several:
            names = [*soon(cluster, job, theirs).places]
        else:
            names = arrange(cluster, job, [c.node for c in able], nodes_wanted(cluster, job), begun, soon=True)
        near = closer(names, [*generation.members], gang)
        return frozenset(names if near else ())

    return cluster.once(f"closer:{job.uid}", find, job, theirs, transfers(cluster))


def _choose(cluster: Cluster, job: JobRecord, theirs: Collection[str]) -> frozenset[str]:
    """Nodes that do not run it: those that it lacks, one spare (or two while one gets ready), and those whose check
    failed. ``theirs``: nodes that are reserved for others: a job that waits leaves them; one that runs takes them where
    it would lose its size without."""
    missing = max(0, nodes_wanted(cluster, job) - staying(cluster, job))
    begun = asked(cluster).get(job.uid, {})
    # Of a job that has all its nodes only the spare has to be found: nobody need look at all nodes for that.
    known = candidates(cluster, job) if missing else some_candidates(cluster, job, begun)
    members, leaving, old = {m.node for m in survivors(cluster, job)}, job.control.leaving, worn_nodes(cluster)
    spot, late, leaves = spot_nodes(cluster), doubtful(job), theirs if in_queue(job) else ()

    # Who is ready, or getting so, goes on: else a node that comes back or gets free would take the place of a warm
    # spare, and the job would have none until that one is warm.
    def order(node: str, fit: bool) -> tuple[int, ...]:
        last = node in theirs, node in leaving, node in late, node in old, node in spot
        return *last, not fit, node not in begun, -score(cluster, job, node)

    takes = transfers(cluster).takes.get(job.uid, ())
    waiting = [c for c in known if c.standing in ("fit", "pending") and c.node not in members and c.node not in leaves]
    waiting.sort(key=lambda c: (c.node not in takes, order(c.node, c.standing == "fit")))
    lacked = _lacked(cluster, job, waiting, missing, leaves) if missing else set()
    rest = [c for c in waiting if c.node not in lacked]
    if near := _closer_nodes(cluster, job):
        spares = set(near)  # its spare is looked for where it will be
    elif arranged(cluster, job.spec):
        spares = _near_spares(cluster, job, lacked, rest, order)
    else:
        every = bool(leaving or late or old or spot)
        others = [] if missing else _not_begun(cluster, job, {*members, *begun}, every)
        spares = _first_spare(cluster, rest, others, begun, order)
    return frozenset(lacked.union(spares, (c.node for c in known if c.standing == "unfit")))


def _lacked(
    cluster: Cluster, job: JobRecord, waiting: Sequence[Candidate], missing: int, leaves: Collection[str]
) -> set[str]:
    """Which of the nodes that wait, the best ones first, it should have: so many are ``missing``."""
    if job.spec.several:  # which nodes have room for all depends on what each of them has
        return {c.node for c in waiting}.intersection(soon(cluster, job, leaves).places)
    if arranged(cluster, job.spec):
        may = eligible(cluster, job)
        able = [*(m.node for m in survivors(cluster, job)), *(c.node for c in waiting if may is None or c.node in may)]
        begun = asked(cluster).get(job.uid, {})
        return {c.node for c in waiting}.intersection(arrange(cluster, job, able, nodes_wanted(cluster, job), begun))
    return {c.node for c in waiting[:missing]}


def _not_begun(cluster: Cluster, job: JobRecord, apart: Collection[str], every: bool) -> list[str]:
    """Nodes with room for it that have not begun to get ready: all of them, or the first."""
    others = (n for n in _able(cluster, job) if n not in apart)
    return list(others if every else islice(others, 1))


def _first_spare(
    cluster: Cluster, rest: Sequence[Candidate], others: Sequence[str], begun: Collection[str], order: Order
) -> set[str]:
    """The best of them, if there is any. A node keeps only so many standbys: of equally good ones that with the fewest,
    since were the first one the spare of all jobs, most would have none."""
    spares = [(order(c.node, c.standing == "fit"), c.node) for c in rest] + [(order(n, False), n) for n in others]
    by_load = ((rank, len(cluster.nodes[node].readiness) - (node in begun), node) for rank, node in spares)
    spare = min(by_load, key=lambda one: one[:2], default=None)
    return {spare[2]} if spare is not None else set()


def _near_spares(
    cluster: Cluster,
    job: JobRecord,
    wanted: Collection[str],
    rest: Sequence[Candidate],
    order: Order,
) -> set[str]:
    """The spare of a gang whose place in the topology matters: as near to it as may be. Another that is ready is kept
    until that one is. A gang that has not all its nodes yet gets none in another domain: it would start there."""
    gang = gang_of(cluster, job.spec)
    members = {m.node for m in survivors(cluster, job)}
    homes = {gang.paths[n] for n in members.union(wanted) if n in gang.paths}
    states = {c.node: c.standing == "fit" for c in rest}
    for depth in range(len(gang.levels), gang.within - 1, -1):
        domains = {home[:depth] for home in homes if depth == 0 or home[depth - 1]}
        near = [n for n in states if gang.paths[n][:depth] in domains]
        if not wanted:
            near += [n for d in domains for n in _first(cluster, job, d, {*members, *states})]
        if near:
            spare = min(near, key=lambda n: (order(n, states.get(n, False)), natural(n)))
            ready = [n for n, fit in states.items() if fit]
            keep = ready[:1] if not states.get(spare, False) else []
            return {spare, *keep}
        if wanted:
            break
    return set()


def _first(cluster: Cluster, job: JobRecord, domain: TopologyPath, taken: Collection[str]) -> list[str]:
    """Of a domain's nodes with room for one of the job's places, the one with the fewest pods."""
    gang = gang_of(cluster, job.spec)
    known = cluster.once("near", lambda _before: dict[object, dict[TopologyPath, list[str]]]())
    shape = gang.levels, shut_for(cluster, job.spec), *(shape_of(role) for role in job.spec.roles)
    if (by_domain := known.get(shape)) is None:
        by_domain = known[shape] = {}
        for node in _able(cluster, job):
            for depth in range(len(gang.levels) + 1):
                by_domain.setdefault(gang.paths[node][:depth], []).append(node)
    return [n for n in by_domain.get(domain, ()) if n not in taken][:1]


def _able(cluster: Cluster, job: JobRecord) -> Iterable[str]:
    """Nodes with room for one of its places, those of the first role first."""
    shut = shut_for(cluster, job.spec)
    return dict.fromkeys(node for role in job.spec.roles for node in with_room(cluster, role) if node not in shut)

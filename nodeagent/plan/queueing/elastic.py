"""How many nodes a job has: its target; and, with ``nodes: auto``, idle nodes on top of it. They are borrowed: a job
that is entitled to them and needs them gets them back. Worked out once for each view and for all jobs together
(``transfers.py``), so that all agents agree. In words, for ``describe``: which jobs make room for one that waits, or
why none does, by the rules of ``fairshare/reclaim.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import RESOURCES, queue_of
from nodeagent.plan.cluster import SHOWN, Cluster, natural, some
from nodeagent.plan.fairshare.queues import NO_PART, entitlements, owned, shared
from nodeagent.plan.fairshare.reclaim import Reclaim, stops_at
from nodeagent.plan.fairshare.resources import Resources, least, size
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.queueing.queue import is_given, line_key, queue, to_come
from nodeagent.plan.queueing.reservations import reserved
from nodeagent.plan.queueing.room import room_for
from nodeagent.plan.queueing.transferdraft import TransferDraft
from nodeagent.plan.queueing.transfers import NO_TRANSFERS, Transfers, borrows, lend_idle, level, provide

MOST_NEEDERS = 32
"""For so many jobs that wait, and for so many that run on too few nodes, nodes are looked for at a time: the first."""
MOST_OF_ROLES = 4
"""For so many jobs of several roles that wait nodes are looked for at a time: each of their places is laid out."""


def nodes_wanted(cluster: Cluster, job: JobRecord) -> int:
    """How many nodes the job would have. A gang of several roles that runs with all its places: as many as it has; else
    one for each place at most."""
    generation, target = job.generation, job.control.target
    if job.spec.several and job.phase == "running" and generation is not None and job.control.growing is None:
        has = generation.sizes
        return len(generation.members) if all(has[role.name] >= role.places for role in job.sized.roles) else target
    now = transfers(cluster)
    if not borrows(job):
        back = now.gives.get(job.uid)
        return min(target, len(survivors(cluster, job)) - len(back)) if back else target
    size = len(survivors(cluster, job)) - len(now.gives.get(job.uid, ())) + len(now.takes.get(job.uid, ()))
    return min(job.spec.nodes.max, max(target, size))


def borrowed(cluster: Cluster, job: JobRecord) -> int:
    """How many of its nodes the job has on top of its target."""
    return max(0, len(survivors(cluster, job)) - job.control.target) if borrows(job) else 0


def eligible(cluster: Cluster, job: JobRecord) -> frozenset[str] | None:
    """Nodes that its next generation may be on, of a job that borrows; None: on any."""
    if not borrows(job):
        return None
    now = transfers(cluster)
    mine = frozenset(m.node for m in survivors(cluster, job))
    return mine.union(now.takes.get(job.uid, ())).difference(now.gives.get(job.uid, ()))


def transfers(cluster: Cluster) -> Transfers:
    """What is to be taken and given back in this view."""
    of = queue(cluster), reserved(cluster), to_come(cluster)
    return cluster.once("transfers", lambda _before: _planned(cluster), *of)


def _planned(cluster: Cluster) -> Transfers:
    borrowers = [j for j in cluster.jobs.values() if j.uid not in cluster.refused and borrows(j)]
    if not borrowers and not shared(cluster):
        return NO_TRANSFERS
    draft = TransferDraft(cluster, sorted(borrowers, key=line_key))
    waiting, short = _waiting(cluster, draft.barring), _short(cluster, draft.barring)
    if draft.shared:  # who made room for one that waits has less than its target: those that wait go first
        late = [(job, lack) for job, lack in waiting if not provide(draft, job, lack, rounded=False)]
        for job, lack in chain(late, short):
            provide(draft, job, lack, rounded=True)
    else:
        for job, lack in chain(short, waiting):
            provide(draft, job, lack, rounded=True)
    lend_idle(draft)
    level(draft)
    return Transfers({uid: tuple(nodes) for uid, nodes in draft.takes.items() if nodes}, draft.gives, draft.stops)


Needers = Iterator[tuple[JobRecord, int]]
"""Jobs that are to have nodes, and how many."""


def _waiting(cluster: Cluster, barring: Callable[[JobRecord], str]) -> Needers:
    """Those that wait and could begin now, in line."""
    later = to_come(cluster)
    jobs = (w.job for w in queue(cluster) if w.job.control.desired == "run" and w.job.uid not in later)
    return ((job, job.spec.nodes.min) for job in _first(jobs, barring))


def _short(cluster: Cluster, barring: Callable[[JobRecord], str]) -> Needers:
    """Those that run on fewer nodes than their target. First those that others have just given nodes: else who gave
    them, and has less than its target since, would take them again, and be asked for them anew."""
    jobs = [j for j in cluster.jobs.values() if j.uid not in cluster.refused and j.control.desired == "run"]
    run = [j for j in jobs if j.phase in ("forming", "running") and not j.spec.several]
    lacks = {j.uid: j.control.target - len(survivors(cluster, j)) for j in run}
    few = sorted((j for j in run if lacks[j.uid] > 0), key=lambda job: (not is_given(cluster, job), line_key(job)))
    return ((job, lacks[job.uid]) for job in _first(few, barring))


def _first(jobs: Iterable[JobRecord], barring: Callable[[JobRecord], str]) -> Iterator[JobRecord]:
    """Only so many. The first job that a capability bars is the last of its queue that counts."""
    left, of_roles, looked = MOST_NEEDERS, MOST_OF_ROLES, set[str]()
    for job in jobs:
        if job.spec.queue in looked or (job.spec.several and not of_roles):
            continue
        of_roles -= job.spec.several
        barred = barring(job)
        if barred or not left:
            looked.add(job.spec.queue)
        if barred or left:
            left -= not barred
            yield job


_WHY = {
    "unreclaimable": ("is not reclaimable", "are not reclaimable"),
    "owned": ("has no more than its guarantee", "have no more than their guarantees"),
    "part": ("has no more than its part by weight", "have no more than their parts by weight"),
    "": ("can give too little", "can give too little"),
}


def making_room(cluster: Cluster, job: JobRecord) -> str:
    """Who gives nodes to a job that waits and lacks some, or why nobody does. Empty if it lacks none, if its queue may
    use no more, or if nothing else runs, and in a cluster of one queue: there no job makes room for another."""
    room = room_for(cluster, job)
    if not shared(cluster) or room.enough_soon or room.barred is not None:
        return ""
    now, found = transfers(cluster), list[str]()
    for uid, nodes in now.gives.items():
        if mine := sorted((node for node, to in nodes.items() if to == job.uid), key=natural):
            found.append(f"job {cluster.jobs[uid].name} gives {some(mine)} back for it")
    found += [_stops(cluster, cluster.jobs[uid]) for uid, to in now.stops.items() if to == job.uid]
    if found:
        return some(found)
    name, needs = queue_of(job.spec.queue), least(cluster, job.sized_before)
    return cluster.once(f"noroom:{name}:{needs}", lambda _before: _nobody(cluster, name, needs))


def stopped_with(cluster: Cluster, donor: JobRecord) -> tuple[int, str]:
    """The served time (ms) from which a job is stopped for the one that is entitled to its nodes, and what is waited
    for until then; empty if nothing is. All that are stopped for a job are stopped together: it starts with all of
    their nodes or not at all, and who was stopped before the others may be would only start again."""
    stops = transfers(cluster).stops
    others = [cluster.jobs[uid] for uid, to in stops.items() if to == stops[donor.uid]]
    last = max(others, key=lambda job: (stops_at(cluster, job)[0], job is donor))
    at, least = stops_at(cluster, last)
    name = "it" if last is donor else f"job {last.name}"
    return at, f"{name} has run for {least:g} s" if cluster.served < at else ""


def _stops(cluster: Cluster, donor: JobRecord) -> str:
    _, until = stopped_with(cluster, donor)
    return f"job {donor.name} makes room for it" + (f" when {until}" if until else "")


def _nobody(cluster: Cluster, name: str, needs: Resources) -> str:
    """Why no job makes room for one of this queue that needs so much; empty if no job runs that could."""
    plan, found = Reclaim(cluster), dict[str, dict[str, None]]()
    run = [job for job in cluster.jobs.values() if job.generation is not None and job.generation.state == "active"]
    if not run:
        return ""
    for giver in sorted({queue_of(job.spec.queue) for job in run}, key=natural):
        if (obstacle := plan.obstacle(giver, name, needs)) is not None:
            found.setdefault(obstacle.why, {})[obstacle.queue] = None
    texts = [_too_much(cluster, plan, over, needs) for over in [*found.pop("over", ())][:SHOWN]]
    for why, queues in found.items():
        one, more = _WHY[why]
        texts.append(f"queue {next(iter(queues))} {one}" if len(queues) == 1 else f"queues {some([*queues])} {more}")
    return f"nobody makes room for it: {'; '.join(texts) or f'what runs is of its own queue, {name}'}"


def _too_much(cluster: Cluster, plan: Reclaim, name: str, needs: Resources) -> str:
    """What the queue would have with the job, of the resource of which that is most, and what it is entitled to."""
    then, due, total = plan.use(name).and_(needs), entitlements(cluster).get(name, NO_PART), size(cluster).total
    over = [(mine - part) / all_ if all_ else -1.0 for mine, part, all_ in zip(then, due, total, strict=True)]
    at = over.index(max(over))
    own = owned(cluster.queues, name).get(RESOURCES[at])
    guarantee = f", its guarantee {own}" if own is not None else ""
    part = round(due[at], 1)
    return f"with it queue {name} would have {then[at]} {RESOURCES[at]}, its part by weight is {part:g}{guarantee}"

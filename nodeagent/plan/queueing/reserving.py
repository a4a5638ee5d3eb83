"""Who gets a reservation: which nodes are reserved for it, and until when.

The first gang that lacks nodes gets one. Its start is the earliest time at which enough nodes are free, computed from
the time limits of the jobs that hold them; it is unknown if one of these jobs has no limit. Of the nodes that are free
by then, those that become free last are reserved, so that few idle ones are. If what a gang lacks is not nodes but what
a queue's capability leaves, that queue reserves as much for it instead, in the same way. Who has to leave them is
``reservations.py``'s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import queue_of
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import NO_CEILING, above, barring, ceiling, holdings
from nodeagent.plan.fairshare.resources import NOTHING as NO_USE
from nodeagent.plan.fairshare.resources import Resources, least, together, used
from nodeagent.plan.nodes.candidates import asked, shape_of, strays
from nodeagent.plan.nodes.devices import booked
from nodeagent.plan.queueing.choices import of_one_role, of_places, would_do
from nodeagent.plan.queueing.departures import NO_NODES, UNKNOWN, departures, freed_at
from nodeagent.plan.queueing.queue import GIVE_WAY, NEXT, Waiting, is_favoured, patience, queue, to_come
from nodeagent.plan.queueing.room import shut_for

TRIED = 8
"""At most so many gangs are passed over that could not start even if all jobs had ended: they hold up nobody, and the
next gang in line gets the reservation. If there are more of them, there is no reservation."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that are reserved for one job."""

    uid: str
    name: str
    nodes: frozenset[str]
    """As many as it needs at least; some of them are in use still."""
    start: int | None
    """Served time (ms) at which all of them are free at the latest; 0: they are now; None: nobody can tell."""
    after: tuple[str, ...] = ()
    """Names of the jobs that leave last, the oldest first; of an unknown start those without a time limit."""
    lapses: int = 0
    """If the job lacks nothing, and nodes only get ready for it: the served time (ms) until which this holds. 0: as
    long as it lacks something."""
    first: bool = True
    """No job that may start at all is before it in line; of those of its queue, if that reserves something for it."""
    queue: str = ""
    """If a capability is in the job's way: that queue reserves what the job needs of it, and there are no ``nodes``."""
    needs: Resources = NO_USE
    """What the queue reserves."""


def of_nodes(cluster: Cluster) -> Iterable[Reservation]:
    """One reservation for the first job that lacks nodes. Before it, one for each of the first few jobs whose nodes are
    free by now and are still getting ready: without it other jobs would take these nodes first. None for one that is
    waited for (``earlier``), unless room was made for it: only jobs that wait would leave it its nodes, and not one
    that grows."""
    taken, before = NO_NODES, list[str]()
    ready = passed = 0
    first = True
    for waiting in queue(cluster):
        job = waiting.job
        early = cluster.served < job.not_before
        if early or _starts(cluster, waiting) or _barred(cluster, waiting):
            first = False
            continue
        found = _reservation(cluster, waiting, taken, before)
        if found is None:
            passed += 1
            if passed > TRIED:
                return
            continue
        if not found.lapses:
            yield replace(found, first=first)
            return
        first, ready = False, ready + 1
        if ready > NEXT:
            return
        if cluster.served < found.lapses:
            yield replace(found, first=False)
            taken |= found.nodes
            before.append(job.uid)


def _starts(cluster: Cluster, waiting: Waiting) -> bool:
    return not is_favoured(cluster, waiting.job) and waiting.starts(cluster.served, patience(waiting.job))


def _barred(cluster: Cluster, waiting: Waiting) -> bool:
    """Its queues may not use as much as it needs, whatever nodes there are."""
    if waiting.room.barred is not None:
        return True
    job = waiting.job
    found: dict[str, bool] = cluster.once("barred", lambda _before: {})
    if job.uid not in found:
        limit = ceiling(cluster, job)
        found[job.uid] = limit is not NO_CEILING and not limit.holds(least(cluster, job.sized_before))
    return found[job.uid]


def of_capabilities(cluster: Cluster) -> Iterable[Reservation]:
    """For each queue whose capability bars jobs a reservation for the first of them; before it those of jobs for which
    nodes get ready."""
    of = queue(cluster), to_come(cluster)
    for holds in cluster.once("holds", lambda _before: _possible_holds(cluster), *of).values():
        for one in holds:
            if cluster.jobs[one.uid].not_before <= cluster.served and (not one.lapses or cluster.served < one.lapses):
                yield one
                if not one.lapses:
                    break


def _possible_holds(cluster: Cluster) -> dict[str, list[Reservation]]:
    """Queue to the first job in line that it bars; before that those whose time has not come, and those for which nodes
    get ready: without it others, whose pods are ready, would take what has just become free for them."""
    found: dict[str, list[Reservation]] = {}
    full, ahead, tried, later = set[str](), set[str](), 0, to_come(cluster)
    paths = {name: above(cluster.queues, name) for name in cluster.queues.by_name}
    capped = {name: [q for q in path if cluster.queues.by_name[q].capability.stated] for name, path in paths.items()}
    if not any(capped.values()):
        return found
    alike: dict[tuple[object, ...], str] = {}
    for waiting in queue(cluster):
        job, name = waiting.job, queue_of(waiting.job.spec.queue)
        if tried == TRIED:
            break
        if not capped.get(name):
            continue
        if not waiting.has_room and not full.issuperset(capped[name]):
            own = job.spec.several or job.generation is not None
            shape = name, job.uid if own else (*shape_of(job.spec.role), job.spec.nodes.min)
            if shape not in alike:
                alike[shape] = barring(cluster, job, least(cluster, job.sized_before))
            by = alike[shape]
            if by and by not in full and len(of := found.setdefault(by, [])) < TRIED:
                if _reservation(cluster, waiting, NO_NODES, ()) is None:
                    tried += 1
                    continue
                of.append(replace(_hold(cluster, job, by), first=by not in ahead))
                if job.uid not in later:
                    full.add(by)
        elif waiting.has_room and not waiting.fits:
            for by in capped[name]:
                if by not in full and len(of := found.setdefault(by, [])) < TRIED:
                    lapses = _left(cluster, by) + millis(GIVE_WAY)
                    needs = least(cluster, job.sized_before)
                    of.append(Reservation(job.uid, job.name, NO_NODES, 0, lapses=lapses, queue=by, needs=needs))
        ahead.update(paths[name])
    return found


def _left(cluster: Cluster, name: str) -> int:
    """The latest served time at which a job of this queue, or below it, left some of its nodes; 0: none has."""

    def look(_before: object) -> dict[str, int]:
        found: dict[str, int] = {}
        for job in cluster.jobs.values():
            generation = job.generation
            if generation is not None and (generation.state == "ended" or generation.cause.kind in ("scale", "share")):
                for one in above(cluster.queues, queue_of(job.spec.queue)):
                    found[one] = max(found.get(one, 0), generation.since + millis(job.spec.longest_grace))
        return found

    return cluster.once("left", look).get(name, 0)


def _hold(cluster: Cluster, job: JobRecord, name: str) -> Reservation:
    """What a queue reserves of its capability for a job that its other jobs are in the way of."""
    needs = least(cluster, job.sized_before)
    cap, leave, by_job = cluster.queues.by_name[name].capability.stated, departures(cluster, job), used(cluster)
    holders = [uid for uid in holdings(cluster).jobs.get(name, ()) if uid != job.uid]
    at = {uid: leave[uid].at_last for uid in holders}
    left = together(by_job[uid] for uid in holders)
    start = 0
    for uid in sorted(holders, key=at.__getitem__):
        if all(getattr(left, resource) + getattr(needs, resource) <= most for resource, most in cap.items()):
            break
        start, left = at[uid], left.less(by_job[uid])
    after = _names(cluster, [uid for uid in holders if at[uid] == start])
    return Reservation(job.uid, job.name, NO_NODES, None if start == UNKNOWN else start, after, queue=name, needs=needs)


def _reservation(
    cluster: Cluster, waiting: Waiting, taken: frozenset[str], before: Sequence[str]
) -> Reservation | None:
    """``before``: jobs (uids) for which the nodes in ``taken`` are reserved."""
    what = f"reservation:{' '.join([*before, waiting.job.uid])}"
    return cluster.once(what, lambda _before: _reserve(cluster, waiting, taken), size=len(cluster.nodes) // 8)


def _reserve(cluster: Cluster, waiting: Waiting, taken: Collection[str]) -> Reservation | None:
    """None: the job could not start if all others had ended."""
    job = waiting.job
    astray = strays(cluster, job)
    ready = asked(cluster).get(job.uid, {})
    late = {one.node for one in job.setbacks}.intersection(cluster.nodes)
    late = {n for n in late if job.uid in cluster.nodes[n].left_out}
    bad = {*astray, *late, *(n for n, one in ready.items() if one.state == "unfit"), *shut_for(cluster, job.spec)}
    nodes = [n for n in would_do(cluster, job) if n not in bad]
    choices = of_places if job.spec.several else of_one_role
    free, enough, pick = choices(cluster, job, nodes, taken)
    times = sorted(set(free.values()))
    at = bisect_left(times, True, key=enough)
    if at == len(times):
        return None
    start = times[at]
    found = frozenset(pick(start))
    if not start and waiting.has_room:
        return Reservation(job.uid, job.name, found, 0, lapses=freed_at(cluster, found) + millis(GIVE_WAY))
    leave = departures(cluster, job)
    late = {
        uid
        for n in found
        for uid, _ in booked(cluster).get(n, ())
        if start and uid != job.uid and leave[uid].at(n) == start
    }
    return Reservation(job.uid, job.name, found, None if start == UNKNOWN else start, _names(cluster, late))


def _names(cluster: Cluster, uids: Iterable[str]) -> tuple[str, ...]:
    """The names of these jobs, the oldest first."""
    return tuple(job.name for job in sorted((cluster.jobs[uid] for uid in uids), key=lambda job: (job.order, job.uid)))

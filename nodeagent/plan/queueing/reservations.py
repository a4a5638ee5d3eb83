"""Reservations: which nodes are kept for the gangs that are first in line and cannot start yet, until when, and who may
use these nodes in the meantime. ``queue.py`` decides whose turn it is, ``placing/placement.py`` which nodes a job gets.

The first gang that lacks nodes gets a reservation. Its start is the earliest time at which enough nodes are free,
computed from the time limits of the jobs that hold them; it is unknown if one of these jobs has no limit. Of the nodes
that are free by then, those that become free last are reserved, so that few idle nodes are kept. A job later in line
may start on a reserved node only if it ends before that start. So no later job delays the gang, and idle nodes are
used. If what a gang lacks is not nodes but what a queue's capability leaves, that queue keeps as much for it instead,
in the same way.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from nodeagent.model.job import TERMINAL, USES_TIME, JobRecord
from nodeagent.model.node import Cordon, NodeRecord
from nodeagent.model.queue import amount_text, queue_of
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster, Notes, natural
from nodeagent.plan.fairshare.queues import NO_CEILING, above, barring, ceiling, holdings
from nodeagent.plan.fairshare.resources import NOTHING as NO_USE
from nodeagent.plan.fairshare.resources import Resources, least, together, used
from nodeagent.plan.nodes.candidates import Candidate, asked, shape_of, strays
from nodeagent.plan.nodes.devices import booked
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.queueing.choices import of_one_role, of_places, would_do
from nodeagent.plan.queueing.departures import (
    NO_NODES,
    UNKNOWN,
    departures,
    freed_at,
)
from nodeagent.plan.queueing.queue import (
    GIVE_WAY,
    NEXT,
    Waiting,
    is_favoured,
    is_given,
    line_key,
    made_room,
    patience,
    places,
    queue,
    to_come,
)
from nodeagent.plan.queueing.room import Room, room_for, shut_for, with_room

TRIED = 8
"""At most so many gangs are passed over that could not start even if all jobs had ended: they hold up nobody, and the
next gang in line gets the reservation. If there are more of them, there is no reservation."""
SHOWN = 3
"""Names that a sentence gives before it only counts."""
DAY = 86400


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that are kept for one job."""

    uid: str
    name: str
    nodes: frozenset[str]
    """As many as it needs at least; some of them are in use still."""
    start: int | None
    """Served time (ms) at which all of them are free at the latest; 0: they are now; None: nobody can tell."""
    after: tuple[str, ...] = ()
    """Names of the jobs that leave last, the oldest first; of an unknown start those without a time limit."""
    lapses: int = 0
    """If the job lacks nothing, and nodes only get ready for it: the served time (ms) until which this is kept. 0: as
    long as it lacks something."""
    first: bool = True
    """No job that may start at all is before it in line; of those of its queue, if that keeps something for it."""
    queue: str = ""
    """If a capability is in the job's way: that queue keeps what the job needs of it, and there are no ``nodes``."""
    needs: Resources = NO_USE
    """What the queue keeps."""


@dataclass(frozen=True, slots=True)
class KeptNodes:
    """Nodes that one job must leave to others, and what it must leave of its queues' capabilities."""

    nodes: frozenset[str]
    by: tuple[int, ...]
    """Which of the reservations keep them."""
    of: str = ""
    """The job (uid) that this set was made for; empty if several jobs share the set."""
    aside: tuple[tuple[str, Resources], ...] = ()
    """Queues, and what they keep of their capabilities."""


@dataclass(frozen=True, slots=True)
class Reservations:
    """All reservations of a view."""

    found: tuple[Reservation, ...] = ()
    """Of nodes, in the order of the line; then what queues keep of their capabilities."""
    kept: Mapping[str, KeptNodes] = field(default_factory=dict)
    """By job (uid); of those that have to leave some."""


NO_RESERVATIONS = Reservations()


@dataclass(frozen=True, slots=True)
class _Now:
    """What is kept, with what that was worked out from."""

    line: tuple[Waiting, ...]
    since: int
    until: int
    """From and up to which served time (ms) it is so, for as long as the reservations stay."""
    reserved: Reservations


def reserved(cluster: Cluster) -> Reservations:
    """What is kept at this time. The very same object for as long as that stays so."""
    line = queue(cluster)

    def look(before: _Now | None) -> _Now:
        found = (*_reservations(cluster), *_holds(cluster))
        if not found:
            return _Now(line, 0, 0, NO_RESERVATIONS)
        same = before is not None and before.line is line and before.reserved.found == found
        if before is not None and same and before.since <= cluster.served <= before.until:
            return before
        kept, until = _kept(cluster, found)
        now = Reservations(found, kept)
        if before is not None and before.reserved == now:
            now = before.reserved
        return _Now(line, cluster.served, until, now)

    return cluster.notes.once("reserved", (line, cluster.timing, cluster.served), look).reserved


def kept_from(cluster: Cluster, job: JobRecord) -> frozenset[str]:
    """Nodes that are kept for others who go before this job, and on which it would not have ended in time. A job that
    runs keeps what it has of them."""
    kept = reserved(cluster).kept.get(job.uid)
    return kept.nodes if kept is not None else NO_NODES


def kept_for(cluster: Cluster, job: JobRecord, node: Candidate) -> Candidate:
    """A kept node as a candidate for this job: ``out``, with the name of the job that it is kept for. Unchanged if the
    node could not run the job anyway."""
    if node.standing not in ("fit", "pending"):
        return node
    now = reserved(cluster)
    other = next(now.found[i] for i in now.kept[job.uid].by if node.node in now.found[i].nodes)
    return replace(node, standing="out", why=f"{node.node} is kept for job {other.name}", devices=())


def open_room(cluster: Cluster, job: JobRecord) -> Room:
    """How many nodes could run the job, without those that are kept for others."""
    room, now = room_for(cluster, job), reserved(cluster)
    kept = now.kept.get(job.uid)
    return room if kept is None or not room.enough_soon else _what_is_left(cluster, job, _line(cluster, now), kept)


def _what_is_left(cluster: Cluster, job: JobRecord, line: _Line, kept: KeptNodes) -> Room:
    waiting = line.less.get(job.uid)
    return waiting.room if waiting is not None and waiting.job is job else room_for(_without(cluster, kept), job)


def line(cluster: Cluster) -> tuple[Waiting, ...]:
    """The queue, each job with the room that it may use."""
    now = reserved(cluster)
    return _line(cluster, now).line if now.kept else queue(cluster)


@dataclass(frozen=True, slots=True)
class _Line:
    line: tuple[Waiting, ...]
    less: Mapping[str, Waiting]
    """By job (uid), of those that have to leave some."""
    held: dict[tuple[object, ...], HeldBack | None] = field(default_factory=dict)
    """As of ``held``: the same nodes are kept from all jobs of one shape."""


def _line(cluster: Cluster, now: Reservations) -> _Line:
    def look(_before: object) -> _Line:
        less: dict[str, Waiting] = {}
        for w in queue(cluster):
            if (kept := now.kept.get(w.job.uid)) is not None:
                less[w.job.uid] = Waiting(w.job, partial(_less_room, cluster, w, kept))
        return _Line(tuple(less.get(w.job.uid, w) for w in queue(cluster)), less)

    return cluster.once("line", look, queue(cluster), now, size=len(now.kept))


def _less_room(cluster: Cluster, waiting: Waiting, kept: KeptNodes) -> Room:
    return room_for(_without(cluster, kept), waiting.job) if waiting.has_room else waiting.room


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What keeps a job with room from starting."""

    nodes: tuple[str, ...]
    """Those that it could use, in natural order; none if its queue keeps something of its capability."""
    by: Reservation


def held(cluster: Cluster, job: JobRecord) -> HeldBack | None:
    """The first reservation that keeps what this job could use. None if the job has too little room even without
    reservations, or enough room in spite of them."""
    now = reserved(cluster)
    kept = now.kept.get(job.uid)
    if kept is None or not room_for(cluster, job).enough_soon:
        return None
    line = _line(cluster, now)
    if _what_is_left(cluster, job, line, kept).enough_soon:
        return None
    alike = line.held
    shape = kept.by, kept.of, shut_for(cluster, job.spec), *[shape_of(role) for role in job.spec.roles]
    if shape not in alike:
        found = (HeldBack(_with_room(cluster, job, one.nodes), one) for one in (now.found[i] for i in kept.by))
        alike[shape] = next((one for one in found if one.nodes or one.by.queue), None)
    return alike[shape]


def _with_room(cluster: Cluster, job: JobRecord, nodes: Collection[str]) -> tuple[str, ...]:
    """Those of the nodes with room for one of the job's pods, in natural order."""
    found = {node for role in job.spec.roles for node in with_room(cluster, role)}
    return tuple(sorted(found.intersection(nodes).difference(shut_for(cluster, job.spec)), key=natural))


def reservation_of(cluster: Cluster, job: JobRecord) -> Reservation | None:
    """The job's own, where it lacks nodes."""
    found = next((one for one in reserved(cluster).found if one.uid == job.uid), None)
    return found if found is not None and not found.lapses else None


def kept_free(cluster: Cluster, job: JobRecord) -> tuple[str, ...]:
    """Nodes that are idle, and kept for the job until it has all that it lacks; in natural order."""
    found = reservation_of(cluster, job)
    return _with_room(cluster, job, found.nodes) if found is not None else ()


def start_estimate(cluster: Cluster, job: JobRecord) -> Reservation | None:
    """The job's reservation, where its start is known: by then it has its nodes, if all jobs keep to their time limits,
    no node fails, and nobody comes who goes before it."""
    found = reservation_of(cluster, job)
    if found is None or not found.first or found.start is None or found.start <= cluster.served:
        return None
    return None if any(_may_grow_first(cluster, other, job) for other in cluster.jobs.values()) else found


def _may_grow_first(cluster: Cluster, other: JobRecord, job: JobRecord) -> bool:
    if other.phase not in ("forming", "running") or other.control.desired != "run" or other.spec.several:
        return False
    return line_key(other) < line_key(job) and len(survivors(cluster, other)) < other.control.target


# --- who gets which nodes, and when


def _reservations(cluster: Cluster) -> Iterable[Reservation]:
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


def _holds(cluster: Cluster) -> Iterable[Reservation]:
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
    """What a queue keeps of its capability for a job that its other jobs are in the way of."""
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
    """``before``: jobs (uids) for which the nodes in ``taken`` are kept."""
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


# --- who has to leave them


def _kept(cluster: Cluster, found: Sequence[Reservation]) -> tuple[dict[str, KeptNodes], int]:
    """Job (uid) to the nodes that it must leave to reservations before it; and the served time up to which this
    holds."""
    line, out, sets = places(cluster), dict[str, KeptNodes](), dict[tuple[int, ...], KeptNodes]()
    before = [(i, line[one.uid], line_key(cluster.jobs[one.uid]), one) for i, one in enumerate(found)]
    made_for = {one.uid for one in found if is_favoured(cluster, cluster.jobs[one.uid])}
    until, concerns = UNKNOWN, dict[str, list[tuple[int, int, tuple[int, int], Reservation]]]()
    for uid, job in cluster.jobs.items():
        if job.phase in TERMINAL or _is_owed(cluster, job):
            continue
        place, by, name = line.get(uid), list[int](), queue_of(job.spec.queue)
        if name not in concerns:
            path = above(cluster.queues, name)
            concerns[name] = [one for one in before if not one[3].queue or one[3].queue in path]
        ends: Callable[[int | None], int] | None = None
        for i, its_place, its_rank, one in concerns[name]:
            if line_key(job) > its_rank or one.uid in made_for if place is None else place > its_place:
                ends = ends or _last_start(cluster, job)
                last = ends(one.start)
                if cluster.served > last:
                    by.append(i)
                else:
                    until = min(until, last)
        if by:
            key = tuple(by)
            if key not in sets:
                aside = tuple((found[i].queue, found[i].needs) for i in by if found[i].queue)
                sets[key] = KeptNodes(frozenset().union(*(found[i].nodes for i in by)), key, aside=aside)
            out[uid] = sets[key]
            if cluster.served < (back := _comes_back(job)) and job.generation is not None:
                given = tuple(
                    (found[i].queue, found[i].needs) for i in by if found[i].queue and found[i].uid in made_for
                )
                out[uid] = KeptNodes(sets[key].nodes.difference(job.generation.members), key, uid, aside=given)
                until = min(until, back - 1)
    return out, until


def _is_owed(cluster: Cluster, job: JobRecord) -> bool:
    """It runs on too few nodes, and others have left some for it: kept for one that waits, these would be of use to
    nobody, and who left them would take them again."""
    return is_given(cluster, job) and len(survivors(cluster, job)) < job.control.target


def _comes_back(job: JobRecord) -> int:
    """The served time (ms) up to which a gang that has just failed may start again on the nodes that it had, though not
    within what others of a capability gave up for one that waits. 0 for any other job, and for a job that made room for
    another queue."""
    entry = job.budget.get(str(job.last_number))
    if job.phase != "holding" or entry is None or made_room(job):
        return 0
    return max(job.since, job.not_before) + millis(GIVE_WAY)


def _last_start(cluster: Cluster, job: JobRecord) -> Callable[[int | None], int]:
    """Of the start of a reservation: the served time up to which the job could start and still leave all its nodes in
    time for it; of one that runs 0 if it does not leave them in time."""
    if job.spec.time_limit is None:
        return lambda _start: 0
    if job.generation is not None and job.phase in USES_TIME:
        stays = departures(cluster, job)[job.uid].stays
        return lambda start: UNKNOWN if start and stays <= start else 0
    left = job.spec.time_limit - job.ran / 1000
    takes = millis(left + cluster.timing.form_margin + job.spec.longest_grace)
    return lambda start: start - takes if start else 0


@dataclass(frozen=True, slots=True)
class _View:
    """A view in which some nodes take no work."""

    cluster: Cluster
    copies: Mapping[str, tuple[NodeRecord, NodeRecord]]
    of: Mapping[str, NodeRecord]
    """The nodes of the view that it was made from."""


def _notes_after(before: _View | None) -> Notes:
    """The notes of the view before. Like the whole view's, they forget what is of views long past."""
    if before is None:
        return Notes()
    before.cluster.notes.turn()
    return before.cluster.notes


def _without(cluster: Cluster, kept: KeptNodes) -> Cluster:
    """The view for jobs that must not use these nodes: in it these nodes are cordoned."""

    def look(before: _View | None) -> _View:
        known, copies = before.copies if before is not None else {}, dict[str, tuple[NodeRecord, NodeRecord]]()
        if before is not None and before.of is cluster.nodes and known.keys() == kept.nodes:
            nodes = before.cluster.nodes  # the same, so that what follows from nodes alone stays
            now = replace(cluster, nodes=nodes, set_aside=_set_aside(kept), notes=_notes_after(before))
            return _View(now, known, cluster.nodes)
        for node in kept.nodes:
            own, last = cluster.nodes[node], known.get(node)
            copies[node] = last if last is not None and last[0] is own else (own, own.model_copy(update=_NO_WORK))
        nodes = {**cluster.nodes, **{node: copy for node, (_, copy) in copies.items()}}
        now = replace(cluster, nodes=nodes, set_aside=_set_aside(kept), notes=_notes_after(before))
        return _View(now, copies, cluster.nodes)

    what = f"without:{' '.join([*map(str, kept.by), kept.of])}:{kept.aside}"
    return cluster.once(what, look, kept, size=len(cluster.nodes)).cluster


def with_aside(cluster: Cluster, job: JobRecord) -> Cluster:
    """The view for a job whose queues keep something of their capabilities for others: it may have less then."""
    kept = reserved(cluster).kept.get(job.uid)
    if kept is None or not kept.aside:
        return cluster

    def look(before: _View | None) -> _View:
        now = replace(cluster, set_aside=_set_aside(kept), notes=_notes_after(before))
        return _View(now, {}, cluster.nodes)

    return cluster.once(f"aside:{kept.aside}", look, kept.aside, size=len(cluster.nodes)).cluster


def _set_aside(kept: KeptNodes) -> dict[str, dict[str, int]]:
    """Of several jobs of one queue together."""
    found: dict[str, dict[str, int]] = {}
    for name, needs in kept.aside:
        of = found.setdefault(name, {})
        for resource, amount in needs._asdict().items():
            of[resource] = of.get(resource, 0) + amount
    return found


_NO_WORK = {"cordon": Cordon(reason="kept for another job", by="", at=0.0)}


# --- in words


def why_held(cluster: Cluster, held: HeldBack, wall: float) -> str:
    """Which nodes are kept for whom, and until when. ``wall``: Unix time now."""
    more = f" and {len(held.nodes) - SHOWN} more" if len(held.nodes) > SHOWN else ""
    names = ", ".join(held.nodes[:SHOWN]) + more
    one, text = held.by, f"{names} {'is' if len(held.nodes) == 1 else 'are'} kept for job {held.by.name}"
    if not held.nodes:
        stated = cluster.queues.by_name[one.queue].capability.stated
        amounts = ", ".join(amount_text(getattr(one.needs, resource), resource) for resource in stated)
        text = f"queue {one.queue} keeps {amounts} for job {one.name}"
    if one.start is None:
        ends = f" when {_ends(one.after)} (no time limit says when)" if one.after else ", and no time limit says when"
        return f"{text}, which starts{ends}"
    if one.start > cluster.served:
        return f"{text}, which {starts_by(cluster, one, wall)}"
    if one.lapses:
        return f"{text}, for which they get ready" if held.nodes else f"{text}, which gets ready"
    return f"{text}, which is about to start"


def starts_by(cluster: Cluster, one: Reservation, wall: float) -> str:
    """``starts by about 18:40 UTC (when job a ends at its time limit)``, of a start that is known."""
    at = round(starts_at(cluster, one, wall))
    days = at // DAY - int(wall) // DAY
    when = f"{at % DAY // 3600:02}:{at % 3600 // 60:02} UTC{f' in {days} days' if days > 1 else ' tomorrow' * days}"
    limit = "its time limit" if len(one.after) == 1 else "their time limits"
    return f"starts by about {when}" + (f" (when {_ends(one.after)} at {limit})" if one.after else "")


def starts_at(cluster: Cluster, one: Reservation, wall: float) -> float:
    """Unix time of a start that is known, in whole minutes, rounded up."""
    return math.ceil((wall + ((one.start or 0) - cluster.served) / 1000) / 60) * 60.0


def _ends(jobs: Sequence[str]) -> str:
    """``job a ends``, ``jobs a, b end``."""
    more = f" and {len(jobs) - SHOWN} more" if len(jobs) > SHOWN else ""
    return f"job {jobs[0]} ends" if len(jobs) == 1 else f"jobs {', '.join(jobs[:SHOWN])}{more} end"

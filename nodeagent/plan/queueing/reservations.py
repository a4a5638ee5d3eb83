"""Reservations: what is reserved for the gangs that are first in line and cannot start yet (``reserving.py``), and who
has to leave it to them. ``queue.py`` decides whose turn it is, ``placing/placement.py`` which nodes a job gets.

A job later in line may start on a reserved node only if it ends before the reservation's start. So no later job delays
the gang, and idle nodes are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nodeagent.model.job import TERMINAL, USES_TIME, JobRecord
from nodeagent.model.queue import queue_of
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import above
from nodeagent.plan.fairshare.resources import Resources
from nodeagent.plan.nodes.candidates import Candidate
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.queueing.departures import NO_NODES, UNKNOWN, departures
from nodeagent.plan.queueing.queue import GIVE_WAY, Waiting, is_favoured, is_given, line_key, made_room, places, queue
from nodeagent.plan.queueing.reserving import Reservation, of_capabilities, of_nodes


@dataclass(frozen=True, slots=True)
class ReservedNodes:
    """Nodes that one job must leave to others, and what it must leave of its queues' capabilities."""

    nodes: frozenset[str]
    by: tuple[int, ...]
    """Which of the reservations they are in."""
    of: str = ""
    """The job (uid) that this set was made for; empty if several jobs share the set."""
    aside: tuple[tuple[str, Resources], ...] = ()
    """Queues, and what they reserve of their capabilities."""


@dataclass(frozen=True, slots=True)
class Reservations:
    """All reservations of a view."""

    found: tuple[Reservation, ...] = ()
    """Of nodes, in the order of the line; then what queues reserve of their capabilities."""
    for_others: Mapping[str, ReservedNodes] = field(default_factory=dict)
    """By job (uid); of those that have to leave some."""


NO_RESERVATIONS = Reservations()


@dataclass(frozen=True, slots=True)
class _Now:
    """What is reserved, with what that was worked out from."""

    line: tuple[Waiting, ...]
    since: int
    until: int
    """From and up to which served time (ms) it is so, for as long as the reservations stay."""
    reserved: Reservations


def reserved(cluster: Cluster) -> Reservations:
    """What is reserved at this time. The very same object for as long as that stays so."""
    line = queue(cluster)
    if not line:  # nobody waits
        return NO_RESERVATIONS

    def look(before: _Now | None) -> _Now:
        found = (*of_nodes(cluster), *of_capabilities(cluster))
        if not found:
            return _Now(line, 0, 0, NO_RESERVATIONS)
        same = before is not None and before.line is line and before.reserved.found == found
        if before is not None and same and before.since <= cluster.served <= before.until:
            return before
        for_others, until = _for_others(cluster, found)
        now = Reservations(found, for_others)
        if before is not None and before.reserved == now:
            now = before.reserved
        return _Now(line, cluster.served, until, now)

    return cluster.notes.once("reserved", (line, cluster.timing, cluster.served), look).reserved


def reserved_for_others(cluster: Cluster, job: JobRecord) -> frozenset[str]:
    """Nodes that are reserved for others who go before this job, and on which it would not have ended in time. A job
    that runs keeps what it has of them."""
    theirs = reserved(cluster).for_others.get(job.uid)
    return theirs.nodes if theirs is not None else NO_NODES


def as_reserved(cluster: Cluster, job: JobRecord, node: Candidate) -> Candidate:
    """A reserved node as a candidate for this job: ``out``, with the name of the job that it is reserved for. Unchanged
    if the node could not run the job anyway."""
    if node.standing not in ("fit", "pending"):
        return node
    now = reserved(cluster)
    other = next(now.found[i] for i in now.for_others[job.uid].by if node.node in now.found[i].nodes)
    return replace(node, standing="out", why=f"{node.node} is reserved for job {other.name}", devices=())


def reservation_of(cluster: Cluster, job: JobRecord) -> Reservation | None:
    """The job's own, where it lacks nodes."""
    found = next((one for one in reserved(cluster).found if one.uid == job.uid), None)
    return found if found is not None and not found.lapses else None


def _for_others(cluster: Cluster, found: Sequence[Reservation]) -> tuple[dict[str, ReservedNodes], int]:
    """Job (uid) to the nodes that it must leave to reservations before it; and the served time up to which this
    holds."""
    line, out, sets = places(cluster), dict[str, ReservedNodes](), dict[tuple[int, ...], ReservedNodes]()
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
                sets[key] = ReservedNodes(frozenset().union(*(found[i].nodes for i in by)), key, aside=aside)
            out[uid] = sets[key]
            if cluster.served < (back := _comes_back(job)) and job.generation is not None:
                given = tuple(
                    (found[i].queue, found[i].needs) for i in by if found[i].queue and found[i].uid in made_for
                )
                out[uid] = ReservedNodes(sets[key].nodes.difference(job.generation.members), key, uid, aside=given)
                until = min(until, back - 1)
    return out, until


def _is_owed(cluster: Cluster, job: JobRecord) -> bool:
    """It runs on too few nodes, and others have left some for it: reserved for one that waits, these would be of use to
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

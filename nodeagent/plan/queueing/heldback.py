"""What reservations leave to all other jobs: the room that each may use, the view in which its nodes are chosen, and in
words what it is held back by, and until when.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Cordon, NodeRecord
from nodeagent.model.queue import amount_text
from nodeagent.plan.cluster import Cluster, Notes, natural, some
from nodeagent.plan.nodes.candidates import shape_of
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.queueing.queue import Waiting, line_key, queue
from nodeagent.plan.queueing.reservations import Reservations, ReservedNodes, reservation_of, reserved
from nodeagent.plan.queueing.reserving import Reservation
from nodeagent.plan.queueing.room import Room, room_for, shut_for, with_room

DAY = 86400


def open_room(cluster: Cluster, job: JobRecord) -> Room:
    """How many nodes could run the job, without those that are reserved for others."""
    room, now = room_for(cluster, job), reserved(cluster)
    theirs = now.for_others.get(job.uid)
    return room if theirs is None or not room.enough_soon else _what_is_left(cluster, job, _line(cluster, now), theirs)


def _what_is_left(cluster: Cluster, job: JobRecord, line: _Line, theirs: ReservedNodes) -> Room:
    waiting = line.less.get(job.uid)
    return waiting.room if waiting is not None and waiting.job is job else room_for(_without(cluster, theirs), job)


def line(cluster: Cluster) -> tuple[Waiting, ...]:
    """The queue, each job with the room that it may use."""
    now = reserved(cluster)
    return _line(cluster, now).line if now.for_others else queue(cluster)


@dataclass(frozen=True, slots=True)
class _Line:
    line: tuple[Waiting, ...]
    less: Mapping[str, Waiting]
    """By job (uid), of those that have to leave some."""
    held: dict[tuple[object, ...], HeldBack | None] = field(default_factory=dict)
    """As of ``held_back``: the same nodes are reserved from all jobs of one shape."""


def _line(cluster: Cluster, now: Reservations) -> _Line:
    def look(_before: object) -> _Line:
        less: dict[str, Waiting] = {}
        for w in queue(cluster):
            if (theirs := now.for_others.get(w.job.uid)) is not None:
                less[w.job.uid] = Waiting(w.job, partial(_less_room, cluster, w, theirs))
        return _Line(tuple(less.get(w.job.uid, w) for w in queue(cluster)), less)

    return cluster.once("line", look, queue(cluster), now, size=len(now.for_others))


def _less_room(cluster: Cluster, waiting: Waiting, theirs: ReservedNodes) -> Room:
    return room_for(_without(cluster, theirs), waiting.job) if waiting.has_room else waiting.room


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What keeps a job with room from starting."""

    nodes: tuple[str, ...]
    """Those that it could use, in natural order; none if its queue reserves something of its capability."""
    by: Reservation


def held_back(cluster: Cluster, job: JobRecord) -> HeldBack | None:
    """The first reservation of what this job could use. None if the job has too little room even without
    reservations, or enough room in spite of them."""
    now = reserved(cluster)
    theirs = now.for_others.get(job.uid)
    if theirs is None or not room_for(cluster, job).enough_soon:
        return None
    line = _line(cluster, now)
    if _what_is_left(cluster, job, line, theirs).enough_soon:
        return None
    alike = line.held
    shape = theirs.by, theirs.of, shut_for(cluster, job.spec), *[shape_of(role) for role in job.spec.roles]
    if shape not in alike:
        found = (HeldBack(_with_room(cluster, job, one.nodes), one) for one in (now.found[i] for i in theirs.by))
        alike[shape] = next((one for one in found if one.nodes or one.by.queue), None)
    return alike[shape]


def _with_room(cluster: Cluster, job: JobRecord, nodes: Collection[str]) -> tuple[str, ...]:
    """Those of the nodes with room for one of the job's pods, in natural order."""
    found = {node for role in job.spec.roles for node in with_room(cluster, role)}
    return tuple(sorted(found.intersection(nodes).difference(shut_for(cluster, job.spec)), key=natural))


def idle_reserved(cluster: Cluster, job: JobRecord) -> tuple[str, ...]:
    """Nodes that are idle, and reserved for the job until it has all that it lacks; in natural order."""
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


def _without(cluster: Cluster, theirs: ReservedNodes) -> Cluster:
    """The view for jobs that must not use these nodes: in it these nodes are cordoned."""

    def look(before: _View | None) -> _View:
        known, copies = before.copies if before is not None else {}, dict[str, tuple[NodeRecord, NodeRecord]]()
        if before is not None and before.of is cluster.nodes and known.keys() == theirs.nodes:
            nodes = before.cluster.nodes  # the same, so that what follows from nodes alone stays
            now = replace(cluster, nodes=nodes, set_aside=_set_aside(theirs), notes=_notes_after(before))
            return _View(now, known, cluster.nodes)
        for node in theirs.nodes:
            own, last = cluster.nodes[node], known.get(node)
            copies[node] = last if last is not None and last[0] is own else (own, own.model_copy(update=_NO_WORK))
        nodes = {**cluster.nodes, **{node: copy for node, (_, copy) in copies.items()}}
        now = replace(cluster, nodes=nodes, set_aside=_set_aside(theirs), notes=_notes_after(before))
        return _View(now, copies, cluster.nodes)

    what = f"without:{' '.join([*map(str, theirs.by), theirs.of])}:{theirs.aside}"
    return cluster.once(what, look, theirs, size=len(cluster.nodes)).cluster


def with_aside(cluster: Cluster, job: JobRecord) -> Cluster:
    """The view for a job whose queues reserve something of their capabilities for others: it may have less then."""
    theirs = reserved(cluster).for_others.get(job.uid)
    if theirs is None or not theirs.aside:
        return cluster

    def look(before: _View | None) -> _View:
        now = replace(cluster, set_aside=_set_aside(theirs), notes=_notes_after(before))
        return _View(now, {}, cluster.nodes)

    return cluster.once(f"aside:{theirs.aside}", look, theirs.aside, size=len(cluster.nodes)).cluster


def _set_aside(theirs: ReservedNodes) -> dict[str, dict[str, int]]:
    """Of several jobs of one queue together."""
    found: dict[str, dict[str, int]] = {}
    for name, needs in theirs.aside:
        of = found.setdefault(name, {})
        for resource, amount in needs._asdict().items():
            of[resource] = of.get(resource, 0) + amount
    return found


_NO_WORK = {"cordon": Cordon(reason="reserved for another job", by="", at=0.0)}


def why_held(cluster: Cluster, held: HeldBack, wall: float) -> str:
    """Which nodes are reserved for whom, and until when. ``wall``: Unix time now."""
    one, text = held.by, f"{some(held.nodes)} {'is' if len(held.nodes) == 1 else 'are'} reserved for job {held.by.name}"
    if not held.nodes:
        stated = cluster.queues.by_name[one.queue].capability.stated
        amounts = ", ".join(amount_text(getattr(one.needs, resource), resource) for resource in stated)
        text = f"queue {one.queue} reserves {amounts} for job {one.name}"
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
    return f"job {jobs[0]} ends" if len(jobs) == 1 else f"jobs {some(jobs)} end"

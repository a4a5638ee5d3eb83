"""The jobs that wait for nodes, in their order: which of them go first, and for which of them nodes get ready. How many
nodes have room for each is ``room.py``'s, which of them it gets ``placing/placement.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from nodeagent.model.job import JobRecord
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import NO_PAST, in_line, shared
from nodeagent.plan.fairshare.usage import Decayed, decayed
from nodeagent.plan.nodes.candidates import asked
from nodeagent.plan.nodes.failsafe import silence
from nodeagent.plan.queueing.dependencies import blocked
from nodeagent.plan.queueing.room import Room, room_for, rooms_for

ASSEMBLE = 60.0
"""A queued job waits this many seconds for nodes that are still getting ready before it starts smaller than its
target."""
SETTLE = 5.0
"""A holding job waits this many seconds for the same."""

NEXT = 4
"""For so many of the jobs that wait and have room nodes get ready: the first in the queue. More pods than could start
soon would only cost memory."""
GIVE_WAY = 60.0
"""A job whose nodes have been getting ready for so many seconds and that has not started leaves its place to another.
Of such jobs, too, only the first NEXT keep their pods."""


def in_queue(job: JobRecord) -> bool:
    """It has no generation, and is to run as soon as it has nodes."""
    return job.phase in ("queued", "holding") and job.control.desired == "run"


def line_key(job: JobRecord) -> tuple[int, int]:
    """Sort key where there is one queue: higher priorities, then older jobs, first. Of several, ``fairshare/queues.py``
    says."""
    return -job.spec.priority, job.order


def patience(job: JobRecord) -> int:
    """Served time (ms) until which nodes that are getting ready for the job are waited for."""
    return job.since + millis(ASSEMBLE if job.active is None else SETTLE)


def patience_with(other: JobRecord, job: JobRecord) -> int:
    """Served time (ms) until which a job lets one that is before it in the queue get ready. One that has made room lets
    it for as long as a job that has not started yet: its own pods are ready there still, and it would take its nodes
    again."""
    return max(patience(other), job.since + millis(ASSEMBLE) if made_room(job) else 0)


def made_room(job: JobRecord) -> bool:
    """It was stopped for a job of another queue, and has not run since."""
    entry = job.budget.get(str(job.last_number))
    return job.phase == "holding" and entry is not None and entry.kind == "share"


class Waiting:
    """A job in the queue."""

    __slots__ = ("_look", "_room", "job")

    def __init__(self, job: JobRecord, look: Callable[[], Room]) -> None:
        self.job, self._look = job, look
        self._room: Room | None = None

    @property
    def room(self) -> Room:
        """Found out when somebody asks: in a long line, few ever do, and then one decision must not have to look for
        room for all of them."""
        if self._room is None:
            self._room = self._look()
        return self._room

    @property
    def fits(self) -> bool:
        """There are enough nodes now."""
        return self.room.enough

    @property
    def has_room(self) -> bool:
        """There would be enough nodes if all got ready that can."""
        return self.room.enough_soon

    @property
    def judged_by_some(self) -> bool:
        """It has no room since its check failed on some nodes, and others could say something too: if all say the same
        it fails. It must not wait for ever because some were faster."""
        room = self.room
        return self.job.active is None and not room.enough_soon and room.unfit > 0 and room.fit + room.pending > 0

    def starts(self, served: int, until: int) -> bool:
        """It could start now, or as soon as nodes are ready for it that are waited for until then (served time)."""
        if served < self.job.not_before:
            return False
        return self.room.enough_soon if served < until else self.room.enough


def queue(cluster: Cluster) -> tuple[Waiting, ...]:
    """The jobs that wait for nodes, and for no other job nor for word of silent nodes, and may run, the first one
    first."""

    def look(_before: object) -> tuple[Waiting, ...]:
        jobs = [j for j in cluster.jobs.values() if in_queue(j) and j.uid not in cluster.refused]
        jobs = [j for j in jobs if not blocked(cluster, j) and not silence(cluster, j)]
        line = _line_up(cluster, jobs)
        return tuple(Waiting(job, partial(room_for, cluster, job)) for job in line)

    return cluster.once("queue", look, _past_use(cluster))


def _past_use(cluster: Cluster) -> Decayed:
    """What the order of several queues depends on beside the view: it changes with each hour."""
    return decayed(cluster) if shared(cluster) else NO_PAST


class _ToCome(NamedTuple):
    jobs: Mapping[str, JobRecord]
    since: int
    until: float
    """Served time (ms) at which the first of their times comes."""
    uids: frozenset[str]


def to_come(cluster: Cluster) -> frozenset[str]:
    """Jobs whose time to begin has not come. The very same object for as long as that stays so."""

    def look(before: _ToCome | None) -> _ToCome:
        if before is not None and before.jobs is cluster.jobs and before.since <= cluster.served < before.until:
            return before
        times = {uid: job.not_before for uid, job in cluster.jobs.items() if cluster.served < job.not_before}
        uids = frozenset(times)
        if before is not None and before.uids == uids:
            uids = before.uids
        return _ToCome(cluster.jobs, cluster.served, min(times.values(), default=math.inf), uids)

    return cluster.notes.once("to come", (cluster.jobs, cluster.served), look).uids


def places(cluster: Cluster) -> Mapping[str, int]:
    """Each waiting job's (uid) place in the queue, from 1."""

    def count(_before: object) -> dict[str, int]:
        return {waiting.job.uid: i for i, waiting in enumerate(queue(cluster), 1)}

    return cluster.once("places", count, queue(cluster))


def earlier(cluster: Cluster, line: Sequence[Waiting], job: JobRecord) -> Waiting | None:
    """A job before this one in the line that could start now or soon; of those that cannot ``reservations.py`` says
    what is reserved for them."""
    for other in line:
        if other.job.uid == job.uid or not _before(cluster, other.job, job):
            return None
        if other.starts(cluster.served, patience_with(other.job, job)):
            return other
    return None


def _before(cluster: Cluster, other: JobRecord, job: JobRecord) -> bool:
    """Whether one that is in line goes before another, which may just be resumed and not be in it yet."""
    if not shared(cluster):
        return line_key(other) < line_key(job)
    if job.uid in (found := places(cluster)):
        return found[other.uid] < found[job.uid]
    of = job, queue(cluster)
    line = cluster.once(f"line:{job.uid}", lambda _before: _line_with(cluster, job), *of, size=len(found))
    return line[other.uid] < line[job.uid]


def _line_with(cluster: Cluster, job: JobRecord) -> dict[str, int]:
    line = _line_up(cluster, [*(waiting.job for waiting in queue(cluster)), job])
    return {one.uid: i for i, one in enumerate(line)}


def _line_up(cluster: Cluster, jobs: Collection[JobRecord]) -> list[JobRecord]:
    """Of several queues, first those that others made room for: else who gave nodes up, or another of its queue, could
    take them again, and would be asked for them anew."""
    if not shared(cluster):
        return sorted(jobs, key=line_key)
    rooms = zip(jobs, rooms_for(cluster, jobs), strict=True)
    without_room = {job.uid for job, room in rooms if not room.enough_soon}
    line = in_line(cluster, jobs, _past_use(cluster), without_room=without_room)
    if not (first := favoured(cluster)):
        return line
    return sorted(line, key=lambda job: first.get(job.uid, -1) < job.since)


def is_favoured(cluster: Cluster, job: JobRecord) -> bool:
    """Others have made room for it while it waited."""
    return favoured(cluster).get(job.uid, -1) >= job.since


def is_given(cluster: Cluster, job: JobRecord) -> bool:
    """It runs, and others have left nodes for it since its gang was formed: it has yet to take them."""
    generation = job.generation
    if generation is None or generation.state == "ended":
        return False
    return favoured(cluster).get(job.uid, -1) >= generation.since


def favoured(cluster: Cluster) -> Mapping[str, int]:
    """Job (uid) that others made room for, and when (served time) they did last."""

    def look(_before: object) -> dict[str, int]:
        found: dict[str, int] = {}
        for job in cluster.jobs.values():
            if last := job.budget.get(str(job.last_number)):
                found |= {uid: max(found.get(uid, 0), last.at) for uid in last.room_for}
        return found

    return cluster.once("favoured", look)


@dataclass(frozen=True, slots=True)
class NextUp:
    """The jobs (uids) among those that wait for which nodes get ready."""

    up: frozenset[str] = frozenset()
    since: Mapping[str, int] = field(default_factory=dict)
    """When (served time) each that was ever among them got its place, for as long as it has room."""
    judged_since: Mapping[str, int] = field(default_factory=dict)
    """The same of those without room that some nodes have judged, for as long as others could."""
    gave_way: Mapping[int, int] = field(default_factory=dict)
    """When (served time) a job of each user last gave way without having started, within the last GIVE_WAY."""


def next_up(cluster: Cluster, line: Sequence[Waiting], before: NextUp = NextUp()) -> NextUp:
    """Only some of the jobs that have room, or hundreds would have a pod on each free node. The first in the queue
    is always among them, since it could never start otherwise, and pods that never get ready keep no job from
    getting its turn. While those of one user do not, the turns that come next are others', whatever becomes of these
    jobs. Beside them, and once, those that all nodes are to judge. ``line``: the queue, each job with the
    room that it may use. ``before``: what this returned for an earlier view."""
    soon = cluster.served + millis(ASSEMBLE)
    begun = [w for w in line if w.job.not_before <= soon]
    gave_way = _gave_way(begun, before, cluster.served)

    def is_behind(one: Waiting) -> bool:
        return one is not begun[0] and one.job.uid not in before.since and one.job.owner in gave_way

    up, slow, since = _turns(sorted(begun, key=is_behind), attrgetter("has_room"), before.since, cluster.served)
    judging, _, judged_since = _turns(
        [w for w in begun if w.job.uid in asked(cluster)],
        attrgetter("judged_by_some"),
        before.judged_since,
        cluster.served,
    )
    return NextUp(frozenset((*up, *slow[:NEXT], *judging)), since, judged_since, gave_way)


def _gave_way(line: Iterable[Waiting], before: NextUp, now: int) -> dict[int, int]:
    found = dict(before.gave_way)
    for one in line:
        at = before.since.get(one.job.uid, now) + millis(GIVE_WAY)
        if at <= now:
            found[one.job.owner] = max(at, found.get(one.job.owner, at))
    return {owner: at for owner, at in found.items() if now < at + millis(GIVE_WAY)}


def _turns(
    line: Iterable[Waiting], able: Callable[[Waiting], bool], since: Mapping[str, int], now: int
) -> tuple[list[str], list[str], dict[str, int]]:
    """The first NEXT of the able jobs that have not had their turn for GIVE_WAY, those that have, and when (served
    time) each of both got it. ``since``: the last of these for an earlier view."""
    late = now - millis(GIVE_WAY)
    up, slow = list[str](), list[str]()
    for one in line:
        uid = one.job.uid
        of = slow if since.get(uid, now) <= late else up
        if (of is slow or len(up) < NEXT) and able(one):
            of.append(uid)
    return up, slow, {uid: since.get(uid, now) for uid in (*slow, *up)}

"""The jobs that wait for nodes, in their order: how many nodes each could use, which of them go first, and for which of
them nodes get ready.

What a decision on one of hundreds of jobs rests on is worked out once for each view, by kinds of node instead of by
node: it costs as much as there are nodes and jobs, not as much as both multiplied. Chooses no nodes: that is
``placement.py``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from nodeagent.model.constraints import value_of
from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec, Role
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import millis
from nodeagent.plan.batch import blocked
from nodeagent.plan.bookings import Booked, booked, changed_bookings
from nodeagent.plan.capped import cheapest
from nodeagent.plan.changes import Seen, changed, seen
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.demand import NOTHING, Use, of_devices, times, together
from nodeagent.plan.health import bar
from nodeagent.plan.membership import (
    Candidate,
    asked,
    candidates,
    fitting,
    gpus_per_worker,
    in_order,
    some_candidates,
    survivors,
)
from nodeagent.plan.placement import choose, gang_of, soon
from nodeagent.plan.share import NO_CEILING, Ceiling, ceiling, in_line, shared
from nodeagent.plan.topology import most, tree
from nodeagent.plan.windows import takes, too_long

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


def rank(job: JobRecord) -> tuple[int, int]:
    """Sort key where there is one queue: higher priorities, then older jobs, first. Of several, ``share.py`` says."""
    return -job.spec.priority, job.order


def patience(job: JobRecord) -> int:
    """Served time (ms) until which nodes that are getting ready for the job are waited for."""
    return job.since + millis(ASSEMBLE if job.active is None else SETTLE)


class _Kind(NamedTuple):
    """All of a node that decides whether it has room for a job that has nothing there."""

    gpus: int
    free_gpus: int
    free_slots: int


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of a view."""

    seen: Seen
    booked: Booked
    of: Mapping[str, _Kind]
    """Those that may take work."""
    kinds: Mapping[_Kind, int]
    """How many of these there are of each kind."""
    reserved: frozenset[str]
    """Those among them that a maintenance window is ahead of."""
    live: int
    """How many nodes are live, whether they may take work or not."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many nodes could run a job."""

    fit: int
    """Now."""
    pending: int
    """As soon as they have got ready."""
    unfit: int
    """They are live and could, but for a check that failed."""
    live: int
    """Nodes that are live, whether they could or not."""
    enough: bool
    """The job could start now."""
    enough_soon: bool
    """It could start as soon as all have got ready."""
    barred: Use | None = None
    """What it would have to have at least, where nodes have room and its queues may not use so much."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job in the queue."""

    job: JobRecord
    room: Room

    @property
    def fits(self) -> bool:
        """There are enough nodes now."""
        return self.room.enough

    @property
    def has_room(self) -> bool:
        """There would be enough nodes if all got ready that can."""
        return self.room.enough_soon

    def starts(self, served: int) -> bool:
        """It could start now, or as soon as nodes are ready for it that are still waited for."""
        if served < self.job.not_before:
            return False
        return self.room.enough_soon if served < patience(self.job) else self.room.enough


def room_for(cluster: Cluster, job: JobRecord) -> Room:
    """How many nodes could run the job: what ``candidates`` would count."""
    return cluster.once(f"room:{job.uid}", lambda _before: _room_for(cluster, job), job)


def queue(cluster: Cluster) -> tuple[Waiting, ...]:
    """The jobs that wait for nodes, and for no other job, and may run, the first one first."""

    def look(_before: object) -> tuple[Waiting, ...]:
        jobs = [j for j in cluster.jobs.values() if in_queue(j) and j.uid not in cluster.refused]
        jobs = [j for j in jobs if not blocked(cluster, j)]
        line = in_line(cluster, jobs) if shared(cluster) else sorted(jobs, key=rank)
        return tuple(Waiting(job, room_for(cluster, job)) for job in line)

    return cluster.once("queue", look, cluster.refused)


def places(cluster: Cluster) -> Mapping[str, int]:
    """Each waiting job's (uid) place in the queue, from 1."""

    def count(_before: object) -> dict[str, int]:
        return {waiting.job.uid: i for i, waiting in enumerate(queue(cluster), 1)}

    return cluster.once("places", count, cluster.refused)


def earlier(cluster: Cluster, job: JobRecord) -> Waiting | None:
    """A job before this one in the queue that could start now or soon; those that cannot hold nobody up."""
    for other in queue(cluster):
        if other.job.uid == job.uid or not _before(cluster, other.job, job):
            return None
        if other.starts(cluster.served):
            return other
    return None


def _before(cluster: Cluster, other: JobRecord, job: JobRecord) -> bool:
    """Whether one that is in line goes before another, which may just be resumed and not be in it yet."""
    if not shared(cluster):
        return rank(other) < rank(job)
    if job.uid in (found := places(cluster)):
        return found[other.uid] < found[job.uid]
    line = cluster.once(f"line:{job.uid}", lambda _before: _line_with(cluster, job), job, len(found))
    return line[other.uid] < line[job.uid]


def _line_with(cluster: Cluster, job: JobRecord) -> dict[str, int]:
    line = in_line(cluster, [*(waiting.job for waiting in queue(cluster)), job])
    return {one.uid: i for i, one in enumerate(line)}


@dataclass(frozen=True, slots=True)
class Line:
    """The jobs (uids) among those that wait for which nodes get ready."""

    up: frozenset[str] = frozenset()
    since: Mapping[str, int] = field(default_factory=dict)
    """When (served time) each that was ever among them got its place, for as long as it has room."""


def next_up(cluster: Cluster, before: Line = Line()) -> Line:
    """Only some of the jobs that have room, or hundreds would have a pod on each free node. The first in the queue is
    always among them, since it could never start otherwise, and pods that never get ready keep no job from getting its
    turn. ``before``: what this said of an earlier view."""
    soon = cluster.served + millis(ASSEMBLE)
    line = [w.job.uid for w in queue(cluster) if w.has_room and w.job.not_before <= soon]
    late = cluster.served - millis(GIVE_WAY)
    slow = [uid for uid in line if before.since.get(uid, cluster.served) <= late]
    up = [uid for uid in line if uid not in slow][:NEXT]
    since = {uid: before.since.get(uid, cluster.served) for uid in (*slow, *up)}
    return Line(frozenset((*up, *slow[:NEXT])), since)


def _room_for(cluster: Cluster, job: JobRecord) -> Room:
    if job.spec.several:
        return _room_for_places(cluster, job)
    head, role = job.head, job.spec.role
    known = dict.fromkeys(asked(cluster).get(job.uid, ()))
    if head is not None:
        known |= dict.fromkeys([*head.members, *head.holders])
    among = job.spec.placement is not None or (role.placement is not None and role.placement.hard)
    look = _room_among if among else _room_with
    if known:
        return look(cluster, job, known)
    # Of jobs that nobody has looked at yet, and that have nothing, those that are alike have the same.
    alike: dict[tuple[object, ...], Room] = cluster.once("alike", lambda _before: {})
    shape: tuple[object, ...] = (
        job.spec.queue, role.workers_per_node, role.gpus_per_worker, role.uneven, job.spec.nodes.min,
    )  # fmt: skip
    if among:
        shape = (*shape, role.placement, job.spec.within, job.spec.segments)
    if _look(cluster).reserved:
        shape = (*shape, takes(job.spec))
    if shape not in alike:
        alike[shape] = look(cluster, job, known)
    return alike[shape]


def _room_with(cluster: Cluster, job: JobRecord, known: Collection[str]) -> Room:
    """``known``: nodes that say something of the job, or where it has something."""
    nodes, role = _look(cluster), job.spec.role
    others = sum(count for kind, count in nodes.kinds.items() if _fits(role, kind))
    shut = shut_for(cluster, job.spec)
    others -= sum(_fits(role, nodes.of[node]) for node in shut.union(known) if node in nodes.of)
    members, found = {m.node for m in survivors(cluster, job)}, some_candidates(cluster, job, known)
    counts = _count(members, found)
    fit, pending, least = counts["fit"], counts["pending"] + others, job.spec.nodes.min
    room = Room(fit, pending, counts["unfit"], nodes.live, fit >= least, fit + pending >= least)
    limit = ceiling(cluster, job)
    if limit is NO_CEILING or not room.enough_soon:
        return room
    now = Counter(of_devices(c.devices) for c in found if _is_fit(members, c))
    soon = now + Counter(of_devices(c.devices) for c in found if c.standing == "pending" and not _is_fit(members, c))
    unasked = Counter(nodes.kinds) - Counter(nodes.of[node] for node in shut.union(known) if node in nodes.of)
    for kind, count in unasked.items():
        if _fits(role, kind):
            soon[_use_on(role, kind)] += count
    barred = _barred(limit, least, soon)
    enough = room.enough and _barred(limit, least, now) is None
    return replace(room, enough=enough, enough_soon=barred is None, barred=barred)


def _barred(limit: Ceiling, least: int, nodes: Mapping[Use, int]) -> Use | None:
    """What so many of these nodes take at least, if that is more than the job may have; as ``placement.py`` would
    choose them. None if it may, or if there are too few."""
    has, count = NOTHING, 0
    needs, left = NOTHING, least
    for use in sorted(nodes, key=lambda use: use.gpus + use.slots):
        taken = min(nodes[use], left)
        needs, left = needs.and_(times(use, taken)), left - taken
        for _ in range(min(nodes[use], least - count)):
            if not limit.holds(has.and_(use)):
                break
            has, count = has.and_(use), count + 1
    return None if count >= least or left else needs


@dataclass(frozen=True, slots=True)
class _Space:
    """Nodes with room for one kind of job that has nothing there."""

    nodes: frozenset[str]
    most: int
    """How many of them could be in one gang."""
    ever: int
    """How many of all known nodes could be, if they were free and sound."""


def _room_among(cluster: Cluster, job: JobRecord, known: Collection[str]) -> Room:
    """Of a job that not every node with room will do for."""
    space, nodes, least = _space(cluster, job.spec), _look(cluster), job.spec.nodes.min
    members, found = {m.node for m in survivors(cluster, job)}, some_candidates(cluster, job, known)
    fit = [c for c in found if _is_fit(members, c)]
    pending = [c for c in found if c.standing == "pending" and not _is_fit(members, c)]
    others, limit = space.nodes.difference(known), ceiling(cluster, job)
    capped = limit is not NO_CEILING
    if not known:
        now, later = 0, space.most
    elif job.spec.placement is None:
        now, later = len(fit), len(fit) + len(pending) + len(others)
    else:
        gang = gang_of(cluster, job.spec)
        now, later = most((c.node for c in fit), gang), most([*(c.node for c in (*fit, *pending)), *others], gang)
    enough = now >= least
    if enough and (capped or job.spec.placement is not None):
        enough = choose(cluster, job, job.control.target).fits
    room = Room(now, later - now, _count(members, found)["unfit"], nodes.live, enough, later >= least)
    if not capped or not room.enough_soon:
        return room
    uses = {c.node: of_devices(c.devices) for c in (*fit, *pending)}
    for node in in_order(cluster):
        if node in others:
            uses[node] = _use_on(job.spec.role, nodes.of[node])
    barred = cheapest(limit, gang_of(cluster, job.spec), uses, least, least).needs
    return replace(room, enough_soon=barred is None, barred=barred)


def _space(cluster: Cluster, spec: JobSpec) -> _Space:
    """Worked out once for all jobs that ask the same."""
    role = spec.role
    shut = shut_for(cluster, spec)
    shape = shape_of(role), spec.within, spec.segments, shut
    spaces = cluster.once("spaces", lambda _before: dict[object, _Space]())
    if (found := spaces.get(shape)) is not None:
        return found
    nodes, known = _look(cluster), tree(cluster)
    able = {kind for kind in nodes.kinds if _fits(role, kind)}
    among: Collection[str] = known.allowed(role.placement) if role.placement is not None else known.labels.keys()
    if spec.within:
        among = {n for n in among if value_of(spec.within, n, known.labels[n])}
    open_to = frozenset(n for n in among if nodes.of.get(n) in able and n not in shut)
    gang = gang_of(cluster, spec)
    count = partial(most, gang=gang) if spec.placement is not None else len
    spaces[shape] = _Space(open_to, count(open_to), count(among))
    return spaces[shape]


def never(cluster: Cluster, spec: JobSpec) -> str:
    """Why a job could not run if all known nodes were free and sound, as far as its placement goes; empty if it
    could."""
    known = len(cluster.nodes)
    for role in spec.roles:
        least = role.nodes.min if role.replicas is None else 1
        if role.placement is not None and role.placement.hard:
            such = len(tree(cluster).allowed(role.placement))
            if such < least:
                of = f"role {role.name} needs" if spec.several else "needs"
                return f"{of} {least} node{'s' * (least > 1)} {role.placement.words}: {_few(such, known)}"
    if spec.placement is None or spec.several:
        return ""
    ever = _space(cluster, spec).ever
    if ever >= spec.nodes.min:
        return ""
    if spec.segments and not gang_of(cluster, spec).levels:
        return "needs a topology in the agents' config to have segments"
    where = f" in one {spec.within}" * bool(spec.within) + f" in segments of {spec.segments}" * bool(spec.segments)
    return f"needs {spec.nodes.min} nodes{where}: of the {known} known nodes {ever} are"


def _few(such: int, known: int) -> str:
    if not such:
        return f"none of the {known} known nodes is such" if known != 1 else "the only known node is none"
    return f"only {such} of the {known} known nodes {'are' if such > 1 else 'is'}"


def _room_for_places(cluster: Cluster, job: JobRecord) -> Room:
    """Of a job of several roles the nodes that have room for one of its places; whether that is enough depends on what
    each of them has."""
    members, found = {m.node for m in survivors(cluster, job)}, candidates(cluster, job)
    counts = _count(members, found)
    enough = choose(cluster, job, job.spec.nodes.target).fits
    layout = None if enough else soon(cluster, job)
    room = Room(counts["fit"], counts["pending"], counts["unfit"], _look(cluster).live, enough, enough)
    if layout is None or layout.lack:
        return room
    uses = (of_devices([d for one in places for d in one.devices]) for places in layout.places.values())
    needs = together(uses)
    if ceiling(cluster, job).holds(needs):
        return replace(room, enough_soon=True)
    return replace(room, barred=needs)


def shape_of(role: Role) -> tuple[object, ...]:
    """All of a role that decides which nodes have room for it."""
    return role.workers_per_node, role.gpus_per_worker, role.uneven, role.placement


def shut_for(cluster: Cluster, spec: JobSpec) -> frozenset[str]:
    """Nodes that take work, but not this job's: a maintenance window is ahead."""
    return frozenset(n for n in _look(cluster).reserved if too_long(spec, cluster.nodes[n]))


def with_room(cluster: Cluster, role: Role) -> Sequence[str]:
    """Nodes with room for a job of this role that has nothing there, those with the fewest pods first."""
    shape = shape_of(role)

    def look(_before: object) -> tuple[str, ...]:
        nodes = _look(cluster)
        able = {kind for kind in nodes.kinds if _fits(role, kind)}
        fit = nodes.of.keys() if role.placement is None else tree(cluster).allowed(role.placement)
        found = [n for n in in_order(cluster) if n in fit and nodes.of.get(n) in able]
        return tuple(sorted(found, key=lambda n: len(cluster.nodes[n].readiness)))

    return cluster.once(f"able:{shape}", look)


def _count(members: Collection[str], found: Iterable[Candidate]) -> Counter[str]:
    return Counter("fit" if _is_fit(members, c) else c.standing for c in found)


def _is_fit(members: Collection[str], one: Candidate) -> bool:
    """A member that is live keeps its place while it gets ready again (see ``placement.choose``)."""
    return one.standing == "fit" or (one.standing == "pending" and one.node in members)


def _use_on(role: Role, kind: _Kind) -> Use:
    """What a pod of this role would use on a node of this kind."""
    workers, each = fitting(role, kind.gpus, kind.free_gpus, kind.free_slots), gpus_per_worker(role, kind.gpus)
    return Use(workers * each, 1, 0) if each else Use(0, 1, workers)


def _fits(role: Role, kind: _Kind) -> bool:
    return fitting(role, kind.gpus, kind.free_gpus, kind.free_slots) > 0


def _look(cluster: Cluster) -> _Nodes:
    return cluster.once("kinds", lambda before: _look_at_nodes(cluster, before))


def _look_at_nodes(cluster: Cluster, before: _Nodes | None) -> _Nodes:
    """Only those about which something changed."""
    held, news = booked(cluster), None
    if before is not None and (news := changed(cluster, before.seen)) is not None:
        news = news.union(changed_bookings(cluster, before.booked)).intersection(cluster.nodes)
    of = dict(before.of) if before is not None and news is not None else {}
    for name in cluster.nodes if news is None else news:
        node = cluster.nodes[name]
        of.pop(name, None)
        if cluster.live(name) and node.cordon is None and not bar(node.facts):
            of[name] = _kind(node, {d for _, devices in held.get(name, ()) for d in devices})
    live = sum(map(cluster.live, cluster.nodes))
    reserved = frozenset(n for n in of if cluster.nodes[n].reserved is not None)
    return _Nodes(seen(cluster), held, of, Counter(of.values()), reserved, live)


def _kind(node: NodeRecord, used: set[str]) -> _Kind:
    facts = node.facts
    slots = facts.cpu_slots
    if used:
        slots = sum(f"cpu{i}" not in used for i in range(slots))
    return _Kind(len(facts.gpus), sum(g.healthy and g.uuid not in used for g in facts.gpus), slots)

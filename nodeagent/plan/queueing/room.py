"""How many nodes have room for a job that waits: now, or as soon as they have got ready; and why none could ever.

Worked out once for each view, by kinds of node instead of by node: hundreds of jobs cost as much as there are nodes and
jobs, not as much as both multiplied. Chooses no nodes: that is ``placing/placement.py``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from nodeagent.model.constraints import value_of
from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec, Role
from nodeagent.model.node import Readiness
from nodeagent.plan.cluster import Cluster, SeenNodes, changed, in_order, seen
from nodeagent.plan.fairshare.queues import NO_CEILING, Ceiling, ceiling
from nodeagent.plan.fairshare.resources import NOTHING, Resources, of_devices, of_places, times
from nodeagent.plan.nodes.availability import shuns, takes, too_long
from nodeagent.plan.nodes.candidates import (
    Candidate,
    Kinds,
    NodeKind,
    asked,
    fits,
    fitting,
    free_gpus,
    gpus_per_worker,
    kind_of,
    shape_of,
    some_candidates,
)
from nodeagent.plan.nodes.devices import Booked, booked, changed_bookings
from nodeagent.plan.nodes.health import takes_work
from nodeagent.plan.nodes.labels import tree
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.placing.ceilings import cheapest
from nodeagent.plan.placing.counts import RoleRoom, count_places, room_of
from nodeagent.plan.placing.placement import choose
from nodeagent.plan.placing.roles import could_choose, could_soon, soon
from nodeagent.plan.placing.topology import gang_of, most


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of a view."""

    seen: SeenNodes
    booked: Booked
    of: Mapping[str, NodeKind]
    """Those that may take work."""
    kinds: Kinds
    """How many of these there are of each kind."""
    choosy: frozenset[str]
    """Those among them that are not for every job: a maintenance window is ahead, or they may be taken away."""
    alive: frozenset[str]
    """Nodes that are live, whether they may take work or not."""


def _look(cluster: Cluster) -> _Nodes:
    return cluster.once("kinds", lambda before: _look_at_nodes(cluster, before))


def _look_at_nodes(cluster: Cluster, before: _Nodes | None) -> _Nodes:
    """Only those about which something changed."""
    held, news, differ = booked(cluster), None, changed(cluster, before.seen) if before is not None else None
    if before is not None and differ is not None:
        news = differ.union(changed_bookings(cluster, before.booked)).intersection(cluster.nodes)
    of = dict(before.of) if before is not None and news is not None else {}
    for name in cluster.nodes if news is None else news:
        node = cluster.nodes[name]
        of.pop(name, None)
        if takes_work(cluster, name):
            of[name] = kind_of(node, {d for _, devices in held.get(name, ()) for d in devices})
    anew: Collection[str] = cluster.nodes if before is None or differ is None else differ
    choosy = frozenset(
        n for n in anew if n in of and ((node := cluster.nodes[n]).window is not None or node.facts.spot)
    )
    alive = frozenset(filter(cluster.live, anew))
    if before is not None and differ is not None:
        choosy, alive = before.choosy - differ | choosy, before.alive - differ | alive
    return _Nodes(seen(cluster), held, of, Counter(of.values()), choosy, alive)


def kinds(cluster: Cluster) -> Mapping[str, NodeKind]:
    """What each node is like that may take work."""
    return _look(cluster).of


def shut_for(cluster: Cluster, spec: JobSpec) -> frozenset[str]:
    """Nodes that take work, but not this job's, whatever its placement: a maintenance window is ahead, or they may be
    taken away."""
    if not (choosy := _look(cluster).choosy):
        return choosy
    known: dict[object, frozenset[str]] = cluster.once("shut", lambda _before: {})
    alike = takes(spec), spec.elastic or spec.spot
    if alike not in known:
        nodes = {n: cluster.nodes[n] for n in choosy}
        known[alike] = frozenset(n for n, node in nodes.items() if shuns(spec, node.facts) or too_long(spec, node))
    return known[alike]


def with_room(cluster: Cluster, role: Role) -> Sequence[str]:
    """Nodes with room for a job of this role that has nothing there, those with the fewest pods first."""
    shape = shape_of(role)

    def look(_before: object) -> tuple[str, ...]:
        nodes = _look(cluster)
        able = {kind for kind in nodes.kinds if fits(role, kind)}
        fit = nodes.of.keys() if role.placement is None else tree(cluster).allowed(role.placement)
        found = [n for n in in_order(cluster) if n in fit and nodes.of.get(n) in able]
        return tuple(sorted(found, key=lambda n: len(cluster.nodes[n].readiness)))

    return cluster.once(f"able:{shape}", look)


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
    barred: Callable[[], Resources] | None = None
    """What it would have to have at least, where nodes have room and its queues may not use so much: it is worked out
    when somebody asks."""


@dataclass(frozen=True, slots=True)
class _Rooms:
    """What is known of jobs in one view, and what that needs of the view."""

    asked: Mapping[str, Mapping[str, Readiness]]
    choosy: bool
    shapes: dict[str, tuple[JobRecord, tuple[object, ...]]]
    """By job (uid): what it asks for, as of the keys of ``alike``. From one view to the next."""
    of: dict[str, tuple[JobRecord, Room]] = field(default_factory=dict)
    """By job (uid)."""
    alike: dict[tuple[object, ...], Room] = field(default_factory=dict)
    """Of jobs that nobody has looked at yet, and that have nothing, those that are alike have the very same."""


def room_for(cluster: Cluster, job: JobRecord) -> Room:
    """How many nodes could run the job: what ``candidates`` would count."""
    return rooms_for(cluster, (job,))[0]


def rooms_for(cluster: Cluster, jobs: Iterable[JobRecord]) -> list[Room]:
    """The same of many jobs."""
    size = 3 * len(cluster.jobs)

    def look(before: _Rooms | None) -> _Rooms:
        shapes = before.shapes if before is not None and len(before.shapes) <= size else {}
        return _Rooms(asked(cluster), bool(_look(cluster).choosy), shapes)

    known, found = cluster.once("rooms", look, size=size), list[Room]()
    for job in jobs:
        of = known.of.get(job.uid)
        if of is None or of[0] is not job:
            of = known.of[job.uid] = job, _room_for(cluster, known, job)
        found.append(of[1])
    return found


def _room_for(cluster: Cluster, rooms: _Rooms, job: JobRecord) -> Room:
    last = rooms.shapes.get(job.uid) if not rooms.choosy and job.uid not in rooms.asked else None
    if last is not None and last[0] is job and (room := rooms.alike.get(last[1])) is not None:
        return room
    generation, spec = job.generation, job.spec
    known, role = dict.fromkeys(rooms.asked.get(job.uid, ())), spec.roles[0]
    if generation is not None:
        known |= dict.fromkeys([*generation.members, *generation.holders])
    known |= dict.fromkeys(one.node for one in job.setbacks)
    among = spec.placement is not None or (role.placement is not None and role.placement.hard)
    look = _room_for_places if spec.several else _room_among if among else _room_with
    if known or (spec.several and job.control.growing is not None):
        return look(cluster, job, known)
    shape: tuple[object, ...]
    if spec.several:
        shape = spec.queue, spec.within, job.control.leaving, *map(_size_and_shape, job.sized.roles)
    else:
        shape = spec.queue, role.workers_per_node, role.gpus_per_worker, role.uneven, role.nodes.min
        if among:
            shape = (*shape, role.placement, spec.within, spec.segments)
    if rooms.choosy:
        shape = (*shape, shut_for(cluster, spec))
    else:
        rooms.shapes[job.uid] = job, shape
    if shape not in rooms.alike:
        rooms.alike[shape] = look(cluster, job, known)
    return rooms.alike[shape]


def _size_and_shape(role: Role) -> tuple[object, ...]:
    return *shape_of(role), role.replicas is None, role.least, role.places


def _room_with(cluster: Cluster, job: JobRecord, known: Collection[str]) -> Room:
    """``known``: nodes that say something of the job, or where it has something."""
    nodes, role = _look(cluster), job.spec.role
    others = sum(count for kind, count in nodes.kinds.items() if fits(role, kind))
    shut = shut_for(cluster, job.spec)
    others -= sum(fits(role, nodes.of[node]) for node in shut.union(known) if node in nodes.of)
    members, found = {m.node for m in survivors(cluster, job)}, some_candidates(cluster, job, known)
    counts = _count(members, found)
    fit, pending, least = counts["fit"], counts["pending"] + others, job.spec.nodes.min
    room = Room(fit, pending, counts["unfit"], len(nodes.alive), fit >= least, fit + pending >= least)
    limit = ceiling(cluster, job)
    if limit is NO_CEILING or not room.enough_soon:
        return room
    now = Counter(of_devices(c.devices) for c in found if _is_fit(members, c))
    soon = now + Counter(of_devices(c.devices) for c in found if c.standing == "pending" and not _is_fit(members, c))
    unasked, apart = nodes.kinds, shut.union(known)
    if apart:
        unasked = Counter(unasked) - Counter(nodes.of[node] for node in apart if node in nodes.of)
    for kind, count in unasked.items():
        if fits(role, kind):
            soon[_use_on(role, kind)] += count
    barred = _barred(limit, least, soon)
    enough = room.enough and _barred(limit, least, now) is None
    return replace(room, enough=enough, enough_soon=barred is None, barred=_once_known(barred))


def _once_known(needs: Resources | None) -> Callable[[], Resources] | None:
    return None if needs is None else lambda: needs


def _barred(limit: Ceiling, least: int, nodes: Mapping[Resources, int]) -> Resources | None:
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
    room = Room(now, later - now, _count(members, found)["unfit"], len(nodes.alive), enough, later >= least)
    if not capped or not room.enough_soon:
        return room
    uses = {c.node: of_devices(c.devices) for c in (*fit, *pending)}
    for node in in_order(cluster):
        if node in others:
            uses[node] = _use_on(job.spec.role, nodes.of[node])
    barred = cheapest(limit, gang_of(cluster, job.spec), uses, least, least).needs
    return replace(room, enough_soon=barred is None, barred=_once_known(barred))


def _space(cluster: Cluster, spec: JobSpec) -> _Space:
    """Worked out once for all jobs that ask the same."""
    role = spec.role
    shut = shut_for(cluster, spec)
    shape = shape_of(role), spec.within, spec.segments, shut
    spaces = cluster.once("spaces", lambda _before: dict[object, _Space]())
    if (found := spaces.get(shape)) is not None:
        return found
    nodes, known = _look(cluster), tree(cluster)
    able = {kind for kind in nodes.kinds if fits(role, kind)}
    among: Collection[str] = known.allowed(role.placement) if role.placement is not None else known.labels.keys()
    if spec.within:
        among = {n for n in among if value_of(spec.within, n, known.labels[n])}
    open_to = frozenset(n for n in among if nodes.of.get(n) in able and n not in shut)
    gang = gang_of(cluster, spec)
    count = partial(most, gang=gang) if spec.placement is not None else len
    spaces[shape] = _Space(open_to, count(open_to), count(among))
    return spaces[shape]


def never(cluster: Cluster, spec: JobSpec) -> str:
    """Why a job could not run if all known nodes were free and sound: by what they have, and by its placement; empty if
    it could."""
    known = len(cluster.nodes)
    for role in spec.roles:
        least = role.nodes.min if role.replicas is None else 1
        of = f"role {role.name} needs" if spec.several else "needs"
        needed = f"{of} {least} node{'s' * (least > 1)}"
        if role.placement is not None and role.placement.hard:
            such = len(tree(cluster).allowed(role.placement))
            if such < least:
                return f"{needed} {role.placement.words}: {_few(such, known)}"
        able = sum(count for (gpus, slots), count in _installed(cluster).items() if fitting(role, gpus, gpus, slots))
        if able < least:
            if able == known:
                return f"{needed}, and only {known} {'is' if known == 1 else 'are'} known"
            return f"{needed} {_wide(role)}: {_few(able, known)}"
    if spec.placement is None or spec.several:
        return ""
    ever = _space(cluster, spec).ever
    if ever >= spec.nodes.min:
        return ""
    if spec.segments and not gang_of(cluster, spec).levels:
        return "needs a topology in the agents' config to have segments"
    where = f" in one {spec.within}" * bool(spec.within) + f" in segments of {spec.segments}" * bool(spec.segments)
    return f"needs {spec.nodes.min} nodes{where}: of the {known} known nodes {ever} are"


def _installed(cluster: Cluster) -> Mapping[tuple[int, int], int]:
    """How many GPUs and CPU slots known nodes have, whatever is free or sound, and how many nodes have so many."""

    def look(_before: object) -> Mapping[tuple[int, int], int]:
        return Counter((len(node.facts.gpus), node.facts.cpu_slots) for node in cluster.nodes.values())

    return cluster.notes.once("installed", (cluster.nodes,), look)


def _wide(role: Role) -> str:
    """What one node has to have for a pod of the role."""
    if role.workers_per_node == "gpu":
        each = role.gpus_per_worker or 1
        return f"with {each} GPU{'s' * (each > 1)}"
    workers = role.workers_per_node
    if role.gpus_per_worker:
        gpus = workers * role.gpus_per_worker
        return f"with {gpus} GPU{'s' * (gpus > 1)}"
    many = "s" * (workers > 1)
    return (
        f"with {workers} worker slot{many}"
        if role.gpus_per_worker == 0
        else f"with {workers} GPU{many} or worker slot{many}"
    )


def _few(such: int, known: int) -> str:
    if not such:
        return f"none of the {known} known nodes is such" if known != 1 else "the only known node is none"
    return f"only {such} of the {known} known nodes {'are' if such > 1 else 'is'}"


def _room_for_places(cluster: Cluster, job: JobRecord, known: Collection[str]) -> Room:
    """Of a job of several roles the nodes that have room for one of its places. Whether that is enough depends on what
    each of them has: mostly a count of that tells, and places are laid out only where it does not."""
    nodes, members, found = _look(cluster), survivors(cluster, job), some_candidates(cluster, job, known)
    counts, able = _count({m.node for m in members}, found), [c for c in found if c.standing in ("fit", "pending")]
    open_to = _open_to_places(cluster, job.spec, known, able)
    fit, pending = counts["fit"], counts["pending"] + len(open_to.others)
    room = Room(fit, pending, counts["unfit"], len(nodes.alive), False, False)
    least = count_places(job.sized_before.roles, open_to.rooms, open_to.kinds)
    if least.room is False:
        return room
    limit = ceiling(cluster, job)
    if members:
        if _chosen(cluster, job):
            return replace(room, enough=True, enough_soon=True)
        enough_soon = not soon(cluster, job).lack
    else:
        if fit and _could_start(cluster, job, limit, able):
            return replace(room, enough=True, enough_soon=True)
        enough_soon = bool(least.room and not job.spec.within)
        if not enough_soon:
            others = some_candidates(cluster, job, {*open_to.others, *(c.node for c in able)})
            enough_soon = could_soon(cluster, job, others)
    if not enough_soon or limit is NO_CEILING:
        return replace(room, enough_soon=enough_soon)
    return _within_limit(cluster, job, limit, open_to, room)


def _could_start(cluster: Cluster, job: JobRecord, limit: Ceiling, able: Iterable[Candidate]) -> bool:
    return could_choose(cluster, job, able) if limit is NO_CEILING else _chosen(cluster, job)


def _chosen(cluster: Cluster, job: JobRecord) -> bool:
    return choose(cluster, job, job.sized_before.nodes.target).fits


def _within_limit(cluster: Cluster, job: JobRecord, limit: Ceiling, open_to: _OpenToPlaces, room: Room) -> Room:
    """Nodes have room: what the job's queues say of that."""
    sized = count_places(job.sized.roles, open_to.rooms, open_to.kinds)

    def needs() -> Resources:
        return of_places(soon(cluster, job).places)

    barred = not limit.holds(sized.most) and (not limit.holds(sized.least) or not limit.holds(needs()))
    return replace(room, enough_soon=not barred, barred=needs if barred else None)


class _OpenToPlaces(NamedTuple):
    """Nodes with room for a place of a job."""

    others: Collection[str]
    """Those that say nothing of the job, and where it has nothing."""
    kinds: Kinds
    """A part of these, at least, has room for places."""
    rooms: Sequence[RoleRoom]
    """Each role's."""


def _open_to_places(
    cluster: Cluster, spec: JobSpec, known: Collection[str], able: Sequence[Candidate]
) -> _OpenToPlaces:
    """``able``: of the nodes that are ``known``, those that could take part."""
    every, shut = _look(cluster), shut_for(cluster, spec)
    open_to = [_open_to(cluster, role, spec.within, shut) for role in spec.roles]
    others = frozenset[str]().union(*{one.nodes for one in open_to})
    if not known:
        return _OpenToPlaces(others, every.kinds, [one.room for one in open_to])
    own = {c.node: _kind_for(cluster, c) for c in able}
    before = [node for node in known if node in every.of and node not in shut]

    def with_own(kinds: Kinds, among: Collection[str]) -> Counter[NodeKind]:
        """What the nodes that are known count for this job, in the place of what they count for others."""
        rest = Counter(kinds)
        rest.subtract(every.of[node] for node in before if node in among)
        rest.update(kind for node, kind in own.items() if node in among)
        return +rest

    rooms = [room_of(role, with_own(one.kinds, one.among)) for role, one in zip(spec.roles, open_to, strict=True)]
    return _OpenToPlaces(others.difference(known), with_own(every.kinds, cluster.nodes.keys()), rooms)


def _kind_for(cluster: Cluster, one: Candidate) -> NodeKind:
    """As what a node counts for a job that may have something there."""
    facts = cluster.nodes[one.node].facts
    gpus = free_gpus(facts, one.devices)
    return NodeKind(len(facts.gpus), gpus, len(one.devices) - gpus)


@dataclass(frozen=True, slots=True)
class _OpenTo:
    """What is open to one kind of role."""

    among: Collection[str]
    """Nodes that it may be on, whatever is free there, or whether they take work."""
    kinds: Kinds
    """Of those of them that take work."""
    nodes: frozenset[str]
    """Those that have room for a worker."""
    room: RoleRoom


def _open_to(cluster: Cluster, role: Role, within: str, shut: frozenset[str]) -> _OpenTo:
    """Worked out once for all roles that ask the same."""
    asks = role.placement if role.placement is not None and role.placement.hard else None
    what = role.workers_per_node, role.gpus_per_worker, role.uneven, role.replicas is None, asks, within, shut
    known = cluster.once("open to", lambda _before: dict[object, _OpenTo]())
    if (found := known.get(what)) is None:
        nodes, labels = _look(cluster), tree(cluster).labels
        among: Collection[str] = labels.keys() if asks is None else tree(cluster).allowed(asks)
        if within:
            among = frozenset(n for n in among if value_of(within, n, labels[n]))
        own: Mapping[str, NodeKind] = nodes.of
        kinds = nodes.kinds
        if asks is not None or within or shut:
            own = {n: kind for n, kind in nodes.of.items() if n in among and n not in shut}
            kinds = Counter(own.values())
        able = {kind for kind in kinds if fits(role, kind)}
        with_room = frozenset(n for n, kind in own.items() if kind in able) if able else frozenset[str]()
        found = known[what] = _OpenTo(among, kinds, with_room, room_of(role, kinds))
    return found


def _count(members: Collection[str], found: Iterable[Candidate]) -> Counter[str]:
    return Counter("fit" if _is_fit(members, c) else c.standing for c in found)


def _is_fit(members: Collection[str], one: Candidate) -> bool:
    """A member that is live keeps its place while it gets ready again (see ``placement.choose``)."""
    return one.standing == "fit" or (one.standing == "pending" and one.node in members)


def _use_on(role: Role, kind: NodeKind) -> Resources:
    """What a pod of this role would use on a node of this kind."""
    workers, each = fitting(role, kind.gpus, kind.free_gpus, kind.free_slots), gpus_per_worker(role, kind.gpus)
    return Resources(workers * each, 1, 0) if each else Resources(0, 1, workers)

"""Which nodes a job gets: the gang as a whole or nothing. Survivors first, then those ready, up to the target; no more
than the ceiling of its queues allows, and on other nodes than it was on only where nothing is lost by that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from nodeagent.model.constraints import value_of
from nodeagent.model.job import Checkpoint, JobRecord
from nodeagent.model.jobspec import JobSpec, Role
from nodeagent.model.world import Generation, Member, Place, PodReport
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import NO_CEILING, Ceiling, ceiling, full, holdings
from nodeagent.plan.fairshare.resources import NOTHING, Resources, devices_for, of_devices, times, together
from nodeagent.plan.nodes.availability import spot_nodes
from nodeagent.plan.nodes.candidates import Candidate, NodeKind, Standing, candidates, free_gpus, ranked, score
from nodeagent.plan.nodes.health import worn_nodes
from nodeagent.plan.nodes.labels import tree
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.nodes.setbacks import doubtful
from nodeagent.plan.placing.counts import PlacesCount, RoleRoom, count_places, room_of
from nodeagent.plan.placing.places import Ground, Layout, Site, had_places
from nodeagent.plan.placing.topology import (
    GangLayout,
    PastPlaces,
    closer,
    closest,
    gang_of,
    gather,
    most,
    nearest,
    parts,
    spread,
)


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice, and what was left out of it and why."""

    chosen: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    minimum: int
    target: int
    places: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    """Of a job of several roles: node to the places it gets."""
    lack: str = ""
    """Of a job of several roles: which place has no node. Then no node is chosen. Of nodes that have to be together:
    how many could be."""
    left: str = ""
    """Of a job of several roles: the first place of an elastic role that has no node, where others have."""
    capped: str = ""
    """Why nodes that fit are left out: its queue, or one above it, may not use more."""

    @property
    def fits(self) -> bool:
        return len(self.chosen) >= self.minimum

    @property
    def pending(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.others if c.standing == "pending")

    @property
    def missing(self) -> str:
        """One sentence: how many are needed, how many fit, what is wrong with the rest."""
        text = self.lack or needs(self.minimum, len(self.chosen))
        if not self.others and not self.chosen and not self.capped:
            return text + ": no node has joined"
        return text + self._reasons()

    def out_of_reach(self, lack: str = "") -> str:
        """Likewise where all that could get ready would be too few: none of them checks the job, and it does not wait
        for that. ``lack``: of a job of several roles, which place has no node even then."""
        if not lack and not self.pending:
            return self.missing
        text = lack or f"{self.lack or needs(self.minimum, len(self.chosen))}, {len(self.pending)} could get ready"
        return text + (f": {self.wrong}" if self.wrong else "")

    @property
    def wrong(self) -> str:
        """What is wrong with nodes that could not even get ready, and what caps the job; empty if nothing."""
        return self._named(c for c in self.others if c.standing != "pending")

    @property
    def short(self) -> str:
        """One phrase: how far it is from the target, and what is wrong with the nodes that are left out."""
        text = self.lack or self.left or f"{len(self.chosen)} of {self.target} nodes fit"
        return text + (self._reasons() or ("" if self.lack or self.left else ", and there are no others"))

    def _reasons(self) -> str:
        named = self._named(self.others)
        return f": {named}" if named else ""

    def _named(self, others: Iterable[Candidate]) -> str:
        ordered = sorted(others, key=lambda c: c.ruled_out)  # stable: what can be changed goes first
        reasons = [text for text in (self.capped, *(c.why for c in ordered)) if text]
        more = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
        return "; ".join(reasons[:8]) + more


def needs(minimum: int, fit: int) -> str:
    """How many nodes a job needs, and how many there are."""
    return f"needs {minimum} node{'s' if minimum > 1 else ''}, {fit} fit"


def choose(cluster: Cluster, job: JobRecord, target: int, without: Collection[str] = ()) -> Placement:
    """Choose up to ``target`` nodes, those scaled in by name last.

    A member that is live keeps its place even while its fork server is being rebuilt: its pod is checked when it
    acknowledges. Of a job of several roles ``target`` counts places: those that are wanted, or those before a
    scale-out.
    """
    if without:
        return _choose(cluster, job, target, without)
    of = _looked_at(cluster, job)
    if ceiling(cluster, job) is not NO_CEILING:
        of = (*of, cluster.queues, holdings(cluster))
    what = f"choose:{job.uid}:{target}"
    return cluster.notes.once(what, of, lambda _before: _choose(cluster, job, target, ()), len(cluster.nodes) // 8)


def _looked_at(cluster: Cluster, job: JobRecord) -> tuple[object, ...]:
    """All that a choice depends on, but for what queues may use."""
    members = job.generation.members if job.generation is not None else None
    return (
        candidates(cluster, job), survivors(cluster, job), members, worn_nodes(cluster), spot_nodes(cluster),
        job.control, job.spec, job.setbacks, tree(cluster), may_move(cluster, job),
    )  # fmt: skip


def arranged(cluster: Cluster, spec: JobSpec) -> bool:
    """It matters how the job's nodes lie to each other. Else the first that are able are taken."""
    role = None if spec.several else spec.role.placement  # where roles' own places go is for ``places.py``
    asked = spec.placement is not None or (role is not None and bool(role.spread or role.pack))
    return asked or bool(tree(cluster).levels)


def arrange(
    cluster: Cluster,
    job: JobRecord,
    able: Sequence[str],
    target: int,
    warm: Collection[str] = (),
    soon: bool = False,
) -> list[str]:
    """Up to so many of the nodes that are able, in the order of ``ranked``, as they should lie to each other. Survivors
    come first, by rank; but a gang that may move goes to a smaller domain that is ready. ``warm``: those that get
    ready for the job already. ``soon``: a gang may move to nodes that have yet to get ready."""
    stay = _beside_survivors(cluster, job, able, target, warm)
    role, gang = job.spec.role.placement, gang_of(cluster, job.spec)
    if not may_move(cluster, job) or (role is not None and role.spread) or closest(stay, gang):
        return stay
    ready = able if soon else [n for n in able if _warm(cluster, job, n)]
    groups = _by_welcome(cluster, job, sorted(ready, key=lambda n: _welcome(cluster, job, n)))
    moved = gather(groups, target, job.spec.nodes.min, gang, PastPlaces(warm=frozenset(warm)))
    return moved if len(moved) >= len(stay) and closer(moved, stay, gang) else stay


def _warm(cluster: Cluster, job: JobRecord, node: str) -> bool:
    ready = cluster.nodes[node].readiness.get(job.uid)
    return ready is not None and ready.state == "ready" and not ready.warming


def _welcome(cluster: Cluster, job: JobRecord, node: str) -> tuple[bool, bool, bool, bool, int]:
    """Sort key: how gladly the job takes a node that it is not on."""
    leaving, old, spot = node in job.control.leaving, node in worn_nodes(cluster), node in spot_nodes(cluster)
    return leaving, node in doubtful(job), old, spot, -score(cluster, job, node)


def _by_welcome(cluster: Cluster, job: JobRecord, nodes: Iterable[str]) -> list[list[str]]:
    """These nodes, which are in that order, in groups of equally welcome ones."""
    return [list(group) for _, group in groupby(nodes, key=lambda n: _welcome(cluster, job, n))]


def _beside_survivors(
    cluster: Cluster, job: JobRecord, able: Sequence[str], target: int, warm: Collection[str]
) -> list[str]:
    gang, known = gang_of(cluster, job.spec), tree(cluster)
    alive, generation = {m.node for m in survivors(cluster, job)}, job.generation
    leaving, old = job.control.leaving, worn_nodes(cluster)
    kept = [n for n in able if n in alive and n not in leaving and n not in old]
    stays = set(kept)
    groups = _by_welcome(cluster, job, (n for n in able if n not in stays))
    past = PastPlaces(
        tuple(m.node for m in generation.ordered()) if generation is not None else (), tuple(kept), frozenset(warm)
    )
    role = job.spec.role.placement
    if role is None or not role.spread:
        return gather(groups, target, job.spec.nodes.min, gang, past)
    values = {n: value_of(role.spread, n, known.labels[n]) for n in able}
    if gang.within:
        inside = gather(groups, target, job.spec.nodes.min, gang, past)
        domain = gang.paths[inside[0]][: gang.within] if inside else ()
        groups = [[n for n in group if gang.paths[n][: gang.within] == domain] for group in groups]
        kept = [n for n in kept if n in inside]
    return spread(groups, target, values, kept)


def _choose(cluster: Cluster, job: JobRecord, target: int, without: Collection[str]) -> Placement:
    members = {m.node for m in survivors(cluster, job)}
    everyone = {c.node: c for c in candidates(cluster, job)}
    limit = ceiling(cluster, job)
    limited = limit is not NO_CEILING
    chosen: list[Candidate] = []
    others: list[Candidate] = []
    every = job.spec.several or arranged(cluster, job.spec)
    for node in ranked(cluster, job, everyone):
        one = everyone[node]
        if node in members and one.standing == "pending":
            one = Candidate(one.node, one.life, "fit", "", one.devices, 0, one.joined)
        if one.standing == "fit" and node not in without and (every or limited or len(chosen) < target):
            chosen.append(one)
        elif node in members or node not in without:
            others.append(one)
    if job.spec.several:
        return _share_out(cluster, job, chosen, others, target)
    if every:
        return _together(cluster, job, limit, chosen, others, target)
    capped = ""
    if limited:
        chosen, left, capped = _within(cluster, job, limit, chosen, target)
        others = [*left, *others]
    return Placement(tuple(chosen), tuple(others), job.spec.nodes.min, target, capped=capped)


def _within(
    cluster: Cluster, job: JobRecord, limit: Ceiling, able: list[Candidate], target: int
) -> tuple[list[Candidate], list[Candidate], str]:
    """Of nodes that fit, the first preferred, those that the job's queues let it have; the others; and why some of them
    are left out. Where it comes to too few so, those that take least."""
    chosen = _greedy(limit, able, target)
    if len(chosen) < job.spec.nodes.min:
        chosen = _greedy(limit, sorted(able, key=lambda one: len(one.devices)), target)
    names = {one.node for one in chosen}
    left = [one for one in able if one.node not in names]
    if len(chosen) >= target or not left:
        return chosen, left, ""
    has = together(of_devices(one.devices) for one in chosen)
    least = min((of_devices(one.devices) for one in left), key=lambda use: (use.gpus + use.slots, use))
    short = max(1, job.spec.nodes.min - len(chosen))
    return chosen, left, full(cluster, job, has.and_(times(least, short)))


def _greedy(limit: Ceiling, able: Iterable[Candidate], target: int) -> list[Candidate]:
    chosen: list[Candidate] = []
    has = NOTHING
    for one in able:
        more = has.and_(of_devices(one.devices))
        if len(chosen) < target and limit.holds(more):
            chosen.append(one)
            has = more
    return chosen


def _together(
    cluster: Cluster, job: JobRecord, limit: Ceiling, able: list[Candidate], others: list[Candidate], target: int
) -> Placement:
    """As many of those that are able as may be, where it matters how they lie."""
    names = arrange(cluster, job, [one.node for one in able], target)
    by_node, least, capped = {one.node: one for one in able}, job.spec.nodes.min, ""
    if limit is not NO_CEILING:
        names, capped = _together_within(cluster, job, limit, by_node, names, target)
    taken = set(names)
    rest = [one for one in able if one.node not in taken]
    want = least if len(names) < least else target
    scattered = not capped and len(names) < min(want, len(able))
    lack = _scattered(cluster, job, [one.node for one in able], want) if scattered else ""
    chosen = tuple(by_node[node] for node in names)
    return Placement(chosen, (*rest, *others), least, target, lack=lack, capped=capped)


def _together_within(
    cluster: Cluster,
    job: JobRecord,
    limit: Ceiling,
    able: Mapping[str, Candidate],
    arranged_nodes: Sequence[str],
    target: int,
) -> tuple[list[str], str]:
    """Of a gang that is arranged those nodes that the job's queues let it have, and why some are left out. Fewer are
    arranged anew: a smaller gang may be closer together. Where it comes to too few so, those that take least."""
    gang, uses = gang_of(cluster, job.spec), {node: of_devices(one.devices) for node, one in able.items()}
    held = held_of(limit, gang.segment, arranged_nodes, uses)
    if len(held) == len(arranged_nodes) or len(arranged_nodes) < job.spec.nodes.min:
        return held, ""
    if len(held) >= job.spec.nodes.min:
        smaller = arrange(cluster, job, list(able), len(held))
        if len(smaller) == len(held) and limit.holds(together(uses[node] for node in smaller)):
            held = smaller
        return held, full(cluster, job, together(uses[node] for node in arranged_nodes))
    found = cheapest(limit, gang, uses, target, job.spec.nodes.min)
    if found.needs is not None:
        return held, full(cluster, job, found.needs)
    names = arrange(cluster, job, [node for node in able if node in found.nodes], len(found.nodes))
    more = "" if len(names) == target else full(cluster, job, together(uses[node] for node in arranged_nodes))
    return names, more


def _scattered(cluster: Cluster, job: JobRecord, able: Collection[str], want: int) -> str:
    """What a gang lacks that would have more nodes, were they together."""
    gang, spec = gang_of(cluster, job.spec), job.spec
    if spec.segments and not gang.levels:
        return "needs a topology in the agents' config to have segments"
    where = f" in one {spec.within}" if spec.within else ""
    where += f" in segments of {spec.segments}" if spec.segments else ""
    return f"needs {want} nodes{where}, {len(able)} fit, of which {most(able, gang)} are together"


def lay(cluster: Cluster, job: JobRecord, spec: JobSpec, able: Collection[Candidate], soon: bool = False) -> Layout:
    """The places of a job of several roles on these candidates, the first preferred; in the smallest domain that has
    room for all of them. Survivors keep theirs; but a gang that may move goes to a smaller domain that is ready
    (``soon``: or can get so). ``spec``: with the sizes that are to be laid out."""
    members = {m.node: m for m in survivors(cluster, job)}
    stay = _lay(cluster, job, spec, able, members)
    if not members or not may_move(cluster, job) or not arranged(cluster, job.spec):
        return stay
    moved = _lay(cluster, job, spec, able if soon else [c for c in able if not c.warming], {})
    better = not moved.lack and (stay.lack or closer([*moved.places], [*stay.places], gang_of(cluster, job.spec)))
    return moved if better else stay


def _lay(
    cluster: Cluster, job: JobRecord, spec: JobSpec, able: Collection[Candidate], members: Mapping[str, Member]
) -> Layout:
    """``members``: those that keep their places."""
    ground, domains = _ground(cluster, job, spec, able, members)
    return ground.lay_out_in(domains, job.spec.within)


def _ground(
    cluster: Cluster, job: JobRecord, spec: JobSpec, able: Collection[Candidate], members: Mapping[str, Member]
) -> tuple[Ground, Sequence[Sequence[int]]]:
    """The candidates, and which of them are in each domain that is tried before all of them."""
    sites = [Site(c.node, cluster.nodes[c.node].facts, c.devices, had_places(members.get(c.node))) for c in able]
    domains: Sequence[Sequence[int]] = ()
    if arranged(cluster, job.spec):
        gang = gang_of(cluster, job.spec)
        if members:
            sites = _near_first(sites, gang, [m for m in members if m in gang.paths])
        domains = _domains(gang, [site.node for site in sites], list(members))
    some = _with_room(spec.roles, sites)
    if len(some) < len(sites):
        numbers = {i: number for number, i in enumerate(some)}
        domains = [[numbers[i] for i in among if i in numbers] for among in domains]
        sites = [sites[i] for i in some]
    return Ground(spec.roles, sites, tree(cluster)), domains


def _with_room(roles: Sequence[Role], sites: Sequence[Site]) -> Sequence[int]:
    """The numbers of those that have room for a place; of all, where they are not alike, since roles go by what a place
    takes on the node with most GPUs."""
    installed = {len(site.facts.gpus) for site in sites}
    if len(installed) != 1:
        return range(len(sites))
    takes = {devices_for(role, *installed) for role in roles}
    least_gpus = min((gpus for gpus, _ in takes if gpus), default=math.inf)
    least_slots = min((slots for gpus, slots in takes if not gpus), default=math.inf)
    some = list[int]()
    for i, site in enumerate(sites):
        gpus = free_gpus(site.facts, site.devices)
        if gpus >= least_gpus or len(site.devices) - gpus >= least_slots or site.had:
            some.append(i)
    return some or range(len(sites))


def _near_first(sites: Sequence[Site], gang: GangLayout, members: Sequence[str]) -> list[Site]:
    """Survivors, then the others, the nearest to them first."""
    by_node = {site.node: site for site in sites}
    new = [n for n in by_node if n not in members]
    near = nearest(new, len(new), gang.paths, [gang.paths[n] for n in members])
    return [by_node[n] for n in (*(n for n in by_node if n in members), *near)]


def _domains(gang: GangLayout, nodes: Sequence[str], members: Sequence[str]) -> list[list[int]]:
    """Where to try, by the numbers of the nodes: the domains that survivors are in, then any, the smallest first.
    Survivors whose gang need not be in one domain stay, wherever they are."""
    if members and not gang.within:
        return []
    inside: dict[tuple[str, ...], list[int]] = {}
    for i, node in enumerate(nodes):
        path = gang.paths[node]
        for depth in range(max(gang.within, 1), len(path) + 1):
            if path[depth - 1]:
                inside.setdefault(path[:depth], []).append(i)
    home = {gang.paths[n][: gang.within] for n in members if n in gang.paths}
    return [inside[d] for d in sorted(inside, key=lambda d: (d[: gang.within] not in home, -len(d), len(inside[d]), d))]


def soon(cluster: Cluster, job: JobRecord, without: Collection[str] = ()) -> Layout:
    """Likewise on all that could take part as soon as they have got ready; without a scale-out that has no room."""
    if without:
        return _soon(cluster, job, without)
    of = _looked_at(cluster, job)
    return cluster.notes.once(f"soon:{job.uid}", of, lambda _before: _soon(cluster, job, ()), len(cluster.nodes) // 8)


def _soon(cluster: Cluster, job: JobRecord, without: Collection[str]) -> Layout:
    able = _able(cluster, job, ("fit", "pending"), without)
    found = lay(cluster, job, job.sized, able, soon=True)
    if found.lack and job.control.growing is not None:
        return lay(cluster, job, job.sized_before, able, soon=True)
    return found


def _able(
    cluster: Cluster, job: JobRecord, standings: tuple[Standing, ...], without: Collection[str] = ()
) -> list[Candidate]:
    able = (c for c in candidates(cluster, job) if c.standing in standings and c.node not in without)
    return _in_order(cluster, job, able)


def could_choose(cluster: Cluster, job: JobRecord, found: Iterable[Candidate]) -> bool:
    """Whether ``choose`` finds room on the fit ones of these for a job of several roles that has no nodes and that no
    queue limits. It finds out no more than that: of hundreds of jobs that wait, most are laid out only later, if ever.
    ``found``: in natural order, all that could take part."""
    able = _in_order(cluster, job, (c for c in found if c.standing == "fit"))
    return bool(able) and could_lay(cluster, job, _sizes(job, job.sized_before.nodes.target), able)


def could_soon(cluster: Cluster, job: JobRecord, found: Iterable[Candidate]) -> bool:
    """Likewise whether ``soon`` finds room, whatever queues allow."""
    able = _in_order(cluster, job, found)
    if could_lay(cluster, job, job.sized, able):
        return True
    return job.control.growing is not None and could_lay(cluster, job, job.sized_before, able)


def _in_order(cluster: Cluster, job: JobRecord, found: Iterable[Candidate]) -> list[Candidate]:
    everyone = {c.node: c for c in found}
    return [everyone[node] for node in ranked(cluster, job, everyone) if node in everyone]


def could_lay(cluster: Cluster, job: JobRecord, spec: JobSpec, able: Collection[Candidate]) -> bool:
    """Whether ``lay`` finds room on these for a job of several roles that has no nodes; at no more cost than that."""
    ground, domains = _ground(cluster, job, spec, able, {})
    return ground.holds(domains, spec.within)


def count_on(cluster: Cluster, spec: JobSpec, free: Sequence[tuple[str, NodeKind]]) -> PlacesCount:
    """What a count says of the places of a job of several roles on these nodes. ``free``: what each has for the job."""
    kinds, rooms = Counter(kind for _, kind in free), dict[object, RoleRoom]()
    by_role = list[RoleRoom]()
    for role in spec.roles:
        asks = role.placement if role.placement is not None and role.placement.hard else None
        what = role.workers_per_node, role.gpus_per_worker, role.replicas is None, asks
        if what not in rooms:
            able = tree(cluster).allowed(asks) if asks is not None else None
            rooms[what] = room_of(role, kinds if able is None else Counter(kind for n, kind in free if n in able))
        by_role.append(rooms[what])
    found = count_places(spec.roles, by_role, kinds)
    return found._replace(room=None) if found.room and spec.within else found


def _share_out(
    cluster: Cluster, job: JobRecord, able: list[Candidate], others: list[Candidate], target: int
) -> Placement:
    """Every place of every role on those that are able, or none; of elastic roles as many as fit, and as the job's
    queues let it have."""
    spec = _sizes(job, target)
    least, tried = spec.nodes.min, dict[int, tuple[Layout, str]]()

    def allowed(fewer: int) -> bool:
        found = lay(cluster, job, without_places(spec, fewer), able)
        use = together(of_devices([d for one in places for d in one.devices]) for places in found.places.values())
        tried[fewer] = found, full(cluster, job, use)
        return not tried[fewer][1]

    most = sum(role.places - role.least for role in spec.roles)
    fewer = 0 if allowed(0) or not most else bisect_left(range(most), True, key=allowed)
    if fewer not in tried:
        allowed(fewer)
    found, capped = tried[fewer]
    if capped:
        return Placement((), (*able, *others), least, target, capped=capped)
    chosen = [
        replace(one, devices=tuple(d for place in found.places[one.node] for d in place.devices))
        for one in able
        if one.node in found.places
    ]
    rest = [one for one in able if one.node not in found.places]
    left, limit = found.left, tried[0][1] if fewer else ""
    return Placement(tuple(chosen), (*rest, *others), least, target, found.places, found.lack, left, limit)


def _sizes(job: JobRecord, target: int) -> JobSpec:
    """``target``: as of ``choose``."""
    return job.sized if target == job.sized.nodes.target else job.sized_before


def without_places(spec: JobSpec, fewer: int) -> JobSpec:
    """It with so many places less of its elastic roles: each time of the role that has the largest part of what it
    wants above its fewest, of equals the last of the file."""
    wants = {role.name: role.places for role in spec.roles}
    able = [role for role in reversed(spec.roles) if role.least < role.places]
    for _ in range(fewer):
        role = max(able, key=lambda role: (wants[role.name] > role.least, wants[role.name] / role.places))
        wants[role.name] -= 1
    return spec.of_sizes(wants) if fewer else spec


def held_of(limit: Ceiling, segment: int, names: Sequence[str], uses: Mapping[str, Resources]) -> list[str]:
    """Those of an arranged gang that the ceiling allows, in its order; whole segments only."""
    size = max(segment, 1)
    return _in_groups(limit, (names[i : i + size] for i in range(0, len(names), size)), uses, len(names))


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The nodes on which a gang takes least."""

    nodes: frozenset[str]
    needs: Resources | None
    """What the smallest gang would take at least, where the ceiling allows none; None if it allows one, or there are
    too few nodes for one."""


def cheapest(limit: Ceiling, gang: GangLayout, uses: Mapping[str, Resources], want: int, least: int) -> Cheapest:
    """The largest gang of up to ``want`` of these nodes that the ceiling allows, those first that take least; in each
    domain that may hold it."""
    best: list[str] = []
    needs: Resources | None = None
    for groups in parts(sorted(uses, key=lambda n: _cost(uses[n])), gang):
        groups.sort(key=lambda group: _cost(_use_of(group, uses)))
        held = _in_groups(limit, groups, uses, want)
        if len(held) > len(best):
            best = held
        least_of = [node for group in groups for node in group][:least]
        if len(least_of) == least and (needs is None or _cost(_use_of(least_of, uses)) < _cost(needs)):
            needs = _use_of(least_of, uses)
    return Cheapest(frozenset(best), needs if len(best) < least else None)


def _in_groups(limit: Ceiling, groups: Iterable[Sequence[str]], uses: Mapping[str, Resources], want: int) -> list[str]:
    """All of a group, or nothing of it."""
    chosen: list[str] = []
    has = NOTHING
    for group in groups:
        more = has.and_(_use_of(group, uses))
        if len(chosen) + len(group) <= want and limit.holds(more):
            chosen += group
            has = more
    return chosen


def _use_of(nodes: Iterable[str], uses: Mapping[str, Resources]) -> Resources:
    return together(uses[node] for node in nodes)


def _cost(use: Resources) -> tuple[int, Resources]:
    return use.gpus + use.slots, use


def may_move(cluster: Cluster, job: JobRecord) -> bool:
    """The job's generation has ended on purpose, nothing of it runs any more, and what it had done by then is in a
    checkpoint that is committed. After a fault it never may: its snapshots are in memory alone."""
    generation = job.generation
    if generation is None or generation.state != "ended" or not generation.planned or generation.holders:
        return False
    return cluster.notes.once(f"moves:{job.uid}", (job,), lambda _before: _may_move(job, generation))


def _may_move(job: JobRecord, generation: Generation) -> bool:
    if job.active is None:
        return True  # its workers have never run
    saved = job.checkpoint
    if saved is None or not job.active.number == saved.number == generation.number == job.last_number:
        return False  # the nodes in the generation are not those that have the memory, or the checkpoint is older
    if saved.from_memory:
        return True
    return all(_saved(job.last_reports.get(node), saved) for node in generation.members)


def _saved(report: PodReport | None, saved: Checkpoint) -> bool:
    """All workers of a node have left after a step that the checkpoint has."""
    if report is None or report.state != "left" or not report.exits:
        return False
    return all(e.left_at is not None and e.saved_in is not None and e.left_at <= saved.step for e in report.exits)

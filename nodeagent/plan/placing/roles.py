"""On which nodes the places of a job of several roles go: in the smallest domain that has room for all of them.

The search within a domain is ``places.py``'s, who may take part ``nodes/candidates.py``'s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec, Role
from nodeagent.model.world import Member
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.resources import devices_for
from nodeagent.plan.nodes.candidates import Candidate, NodeKind, Standing, candidates, free_gpus, ranked
from nodeagent.plan.nodes.labels import tree
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.placing.arranging import arranged, looked_at, may_move
from nodeagent.plan.placing.counts import PlacesCount, RoleRoom, count_places, room_of
from nodeagent.plan.placing.places import Ground, Layout, Site, had_places
from nodeagent.plan.placing.topology import GangLayout, closer, gang_of, nearest


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
    of = looked_at(cluster, job)
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
    return bool(able) and could_lay(cluster, job, sizes_of(job, job.sized_before.nodes.target), able)


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


def sizes_of(job: JobRecord, target: int) -> JobSpec:
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

"""Who may take part in a job: for each node either what it would give, or why not. Never chooses among those who
may."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nodeagent.model.constraints import value_of
from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec, Role
from nodeagent.model.node import NodeFacts, NodeRecord, Readiness
from nodeagent.plan.cluster import Cluster, SeenNodes, changed, in_order, natural, seen
from nodeagent.plan.nodes.availability import shuns, spot_nodes, too_long
from nodeagent.plan.nodes.devices import Booked, booked, changed_bookings, pick, used_devices
from nodeagent.plan.nodes.health import bar, worn_nodes
from nodeagent.plan.nodes.labels import tree
from nodeagent.plan.nodes.members import own_devices, present_members, survivors
from nodeagent.plan.nodes.setbacks import doubtful

Standing = Literal["fit", "pending", "unfit", "out"]
"""``fit``: could start now. ``pending``: still getting ready. ``unfit``: a check failed there. ``out``: dead,
cordoned, sick or full."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One node, as seen by one job."""

    node: str
    life: str
    standing: Standing
    why: str = ""
    devices: tuple[str, ...] = ()
    code: int = 0
    joined: int = 0
    warming: bool = False
    """``fit``, and its first workers are still being warmed up."""
    ruled_out: bool = False
    """``out`` only because the job's placement excludes it: nothing is wrong with the node."""
    passing: bool = False
    """``unfit``, as in ``Readiness``."""
    error: str = ""
    """The same."""
    portless: bool = False
    """It cannot lead, as in ``Readiness``: ``fit`` if another node can, else ``unfit``."""


def gpus_per_worker(role: Role, installed: int) -> int:
    """GPUs for each worker on a node with ``installed`` GPUs: what the role asks for; else 1, or 0 without GPUs."""
    return role.gpus_per_worker if role.gpus_per_worker is not None else int(bool(installed))


def workers_wanted(role: Role, installed: int) -> int:
    """Workers a full pod of this role has on a node with so many GPUs."""
    if role.workers_per_node != "gpu":
        return role.workers_per_node
    per = gpus_per_worker(role, installed)
    return max(1, installed // per) if per else 1


def fitting(role: Role, installed: int, free_gpus: int, free_slots: int) -> int:
    """Workers of this role that a node has room for: 0 if it has too little for a pod."""
    want, per = workers_wanted(role, installed), gpus_per_worker(role, installed)
    if per == 0:
        return want if free_slots >= want else 0
    workers = min(want, free_gpus // per)
    return workers if workers == want or role.uneven else 0


class NodeKind(NamedTuple):
    """All of a node that decides whether it has room for a job that has nothing there. Most nodes of a cluster are
    alike: what is counted by kind costs as much for thousands of them as for ten."""

    gpus: int
    free_gpus: int
    free_slots: int


Kinds = Mapping[NodeKind, int]
"""How many nodes there are of each kind."""


def kind_of(node: NodeRecord, used: Collection[str]) -> NodeKind:
    """``used``: its devices that jobs have."""
    facts = node.facts
    slots, used = facts.cpu_slots, {*used, *facts.held} if facts.held else used
    if any(device.startswith("cpu") for device in used):
        slots = sum(f"cpu{i}" not in used for i in range(slots))
    return NodeKind(len(facts.gpus), sum(g.healthy and g.uuid not in used for g in facts.gpus), slots)


def fits(role: Role, kind: NodeKind) -> bool:
    """A node of this kind has room for a worker at least."""
    return fitting(role, kind.gpus, kind.free_gpus, kind.free_slots) > 0


def shape_of(role: Role) -> tuple[object, ...]:
    """All of a role that decides which nodes have room for it."""
    return role.workers_per_node, role.gpus_per_worker, role.uneven, role.placement


def offer(role: Role, facts: NodeFacts, used: Iterable[str], mine: Iterable[str]) -> tuple[str, ...] | str:
    """The devices a node would give this role, those it has now first; or a phrase saying what is missing."""
    taken = set(used)
    held = set(mine)
    keep = [d for d in facts.devices(held) if d not in taken]
    if held:
        keep.sort(key=lambda d: d not in held)  # stable: the same devices again where possible
    slots = [d for d in keep if d.startswith("cpu")]
    gpus = [g for g in facts.gpus if g.uuid in keep]
    installed = len(facts.gpus)
    want, per = workers_wanted(role, installed), gpus_per_worker(role, installed)
    workers = fitting(role, installed, len(gpus), len(slots))
    if per == 0:
        if not workers:
            return f"has {len(slots)} free worker slots, {want} needed"
        return tuple(sorted(slots[:want], key=natural))
    if not workers:
        sick = [f"GPU {g.index}: {g.why or 'unhealthy'}" for g in facts.gpus if not g.healthy]
        return f"has {len(gpus)} free GPUs, {want * per} needed" + (f" ({'; '.join(sick)})" if sick else "")
    return pick(gpus, workers * per, held)


def allowed(role: Role, node: str, facts: NodeFacts) -> str:
    """Why the role's constraints rule a node out, as what follows its name; empty if they do not."""
    return role.placement.unmet(node, facts.labels) if role.placement is not None else ""


def ruled_out(spec: JobSpec, node: NodeRecord) -> str:
    """Why the job's placement leaves no place for this node, free or not, as what follows its name; empty if it does
    leave one."""
    if spec.within and not value_of(spec.within, node.id, node.facts.labels):
        return f"has no label {spec.within}, of which the job's nodes have one value"
    if why_not := shuns(spec, node.facts):
        return why_not
    first = ""
    for role in spec.roles:
        if not (why := allowed(role, node.id, node.facts)):
            return ""
        first = first or why
    return first


def free_gpus(facts: NodeFacts, devices: Collection[str]) -> int:
    """How many of a node's devices that are free are GPUs; the others are worker slots."""
    return sum([gpu.uuid in devices for gpu in facts.gpus])


def share(
    roles: Sequence[Role], node: str, facts: NodeFacts, used: Iterable[str], mine: Iterable[str]
) -> tuple[str, ...] | str:
    """What a node has for the places of several roles: all its free devices, if one of the roles could have a place
    there; else a phrase saying what is missing for the first of them."""
    taken, held = frozenset(used), frozenset(mine)
    free = facts.devices(held)
    if taken:
        free = tuple(device for device in free if device not in taken)
    installed, gpus, first = len(facts.gpus), free_gpus(facts, free), ""
    slots = len(free) - gpus
    for role in roles:
        why = allowed(role, node, facts)
        if not why and fitting(role, installed, gpus, slots):
            return free
        if not first:
            lacks = why or offer(role, facts, taken, held)
            assert isinstance(lacks, str)  # it has no room for a worker
            first = lacks
    return first


@dataclass(frozen=True, slots=True)
class _Case:
    """All that a candidate's standing depends on, but for the job's role and uid."""

    node: NodeRecord
    live: bool
    used: frozenset[str]
    """Devices that other jobs hold."""
    own: tuple[str, ...]
    """Devices that this job has there."""
    runs: bool
    """It is a member of the job's newest generation, which has not ended."""


def candidate(cluster: Cluster, job: JobRecord, node: NodeRecord) -> Candidate:
    """How this node stands to this job, right now."""
    generation, live, name = job.generation, cluster.live(node.id), node.id
    member = generation.members.get(name) if generation is not None else None
    holder = generation.holders.get(name) if generation is not None else None
    all_booked = booked(cluster)

    def judge(_before: Candidate | None) -> Candidate:
        own = member.devices if member is not None else holder.devices if holder is not None else ()
        return _judge(job, _Case(node, live, used_devices(all_booked, name, job.uid), own, runs))

    runs = name in present_members(job)
    of = (node, live, all_booked.get(name), member, holder, job.spec, runs)
    return cluster.notes.once(f"candidate:{name}:{job.uid}", of, judge)


def _case(cluster: Cluster, all_booked: Booked, node: str, job: JobRecord, own: Mapping[str, tuple[str, ...]]) -> _Case:
    used = used_devices(all_booked, node, job.uid)
    return _Case(cluster.nodes[node], cluster.live(node), used, own.get(node, ()), node in present_members(job))


def _judge(job: JobRecord, case: _Case) -> Candidate:
    node, life = case.node, case.node.incarnation.life

    def no(standing: Standing, why: str, devices: tuple[str, ...] = ()) -> Candidate:
        return Candidate(node.id, life, standing, f"{node.id} {why}", devices, joined=node.joined)

    spec = job.spec
    if why := ruled_out(spec, node):
        return replace(no("out", why), ruled_out=True)
    if not case.live:
        return no("out", "has left" if node.left else "is not live (its lease has lapsed)")
    if node.window is not None and node.window.leaves:
        return no("out", f"is {node.window.text}")
    if node.cordon is not None:
        return no("out", f"is {'draining' if node.cordon.drain else 'cordoned'} ({node.cordon.reason})")
    if sick := bar(node):
        return no("out", sick)
    if not case.runs and (late := too_long(spec, node)):
        return no("out", late)
    got = (
        share(spec.roles, node.id, node.facts, case.used, case.own)
        if spec.several
        else offer(spec.role, node.facts, case.used, case.own)
    )
    if isinstance(got, str):
        return no("out", got)
    if job.uid in node.left_out:
        return replace(no("unfit", node.left_out[job.uid]), passing=True)
    ready = node.readiness.get(job.uid)
    if ready is None:
        return no("pending", "has not checked the job yet", devices=got)
    if ready.state == "preparing":
        why = "is getting ready" + (f" ({ready.reason})" if ready.reason else "")
        return no("pending", why, devices=got)
    if ready.state == "unfit":
        bad = no("unfit", f"cannot run it: {ready.reason}", devices=got if ready.portless else ())
        return replace(bad, code=ready.code, passing=ready.passing, portless=ready.portless, error=ready.error)
    return Candidate(node.id, life, "fit", "", got, 0, node.joined, ready.warming)


def candidates(cluster: Cluster, job: JobRecord) -> tuple[Candidate, ...]:
    """Every known node in natural order; those that see another checkpoint folder are unfit, and those without a free
    port fit if another leads. The very same object for as long as no candidate changes."""
    return _found(cluster, job).all


@dataclass(frozen=True, slots=True)
class _Found:
    by_node: Mapping[str, Candidate]
    all: tuple[Candidate, ...]


def _found(cluster: Cluster, job: JobRecord) -> _Found:
    return cluster.once(f"found:{job.uid}", lambda _before: _compared(cluster, job), job)


def _compared(cluster: Cluster, job: JobRecord) -> _Found:
    """With what depends on other nodes, too."""
    judged, astray, follow = _judged(cluster, job), strays(cluster, job), _followers(cluster, job)
    if not astray and not follow:
        return judged.found
    by_node = dict(judged.found.by_node)
    for node in {*astray, *follow}:
        if (one := by_node.get(node)) is not None:
            by_node[node] = _beside_others(one, astray, follow)
    return _Found(by_node, tuple(by_node.values()))


def _beside_others(one: Candidate, astray: Mapping[str, str], follow: Collection[str]) -> Candidate:
    if one.node in astray:
        return _astray(one, astray[one.node])
    return replace(one, standing="fit", why="") if one.node in follow and one.standing == "unfit" else one


def has_portless(cluster: Cluster, job: JobRecord) -> bool:
    """Some node says that it has too few free ports for the job."""
    return any(ready.portless for ready in asked(cluster).get(job.uid, {}).values())


def _followers(cluster: Cluster, job: JobRecord) -> frozenset[str]:
    """Nodes without a free port, of a job of one role that another node could lead. In a job of several roles each
    node has to keep ports."""
    if not has_portless(cluster, job) or job.spec.several:
        return frozenset()
    found, astray = _judged(cluster, job).found.all, strays(cluster, job)
    members = {m.node for m in survivors(cluster, job)}
    able = (c for c in found if c.standing == "fit" or (c.standing == "pending" and c.node in members))
    leads = any(c.node not in astray for c in able)
    return frozenset(c.node for c in found if c.portless) if leads else frozenset()


@dataclass(frozen=True, slots=True)
class _Judged:
    """The candidates of a job before their folders are compared, and what they were judged by: in the next view most
    of it is the same."""

    roles: tuple[Role, ...]
    seen: SeenNodes
    booked: Booked
    own: Mapping[str, tuple[str, ...]]
    members: frozenset[str]
    found: _Found


def _judged(cluster: Cluster, job: JobRecord) -> _Judged:
    return cluster.once(
        f"judged:{job.uid}", lambda before: _judge_all(cluster, job, before), job, size=len(cluster.nodes)
    )


def _judge_all(cluster: Cluster, job: JobRecord, before: _Judged | None) -> _Judged:
    """Only those about whom something changed are judged again."""
    roles, now, all_booked, own = job.spec.roles, seen(cluster), booked(cluster), own_devices(job)
    members = frozenset(present_members(job))
    news: set[str] | frozenset[str] | None = None
    if before is not None and (before.roles is roles or before.roles == roles):
        news = changed(cluster, before.seen)
    if before is None or news is None:
        by_node = {n: _judge(job, _case(cluster, all_booked, n, job, own)) for n in in_order(cluster)}
        return _Judged(roles, now, all_booked, own, members, _Found(by_node, tuple(by_node.values())))
    moved = {n for n in {**own, **before.own} if own.get(n) != before.own.get(n)} if own != before.own else set()
    moved |= members ^ before.members
    anew = {}
    for node in moved.union(news, changed_bookings(cluster, before.booked)):
        if node in cluster.nodes:
            one = _judge(job, _case(cluster, all_booked, node, job, own))
            if one != before.found.by_node[node]:
                anew[node] = one
    found = before.found
    if anew:
        by_node = {**found.by_node, **anew}
        found = _Found(by_node, tuple(by_node.values()))
    return _Judged(roles, now, all_booked, own, members, found)


def asked(cluster: Cluster) -> Mapping[str, Mapping[str, Readiness]]:
    """Job (uid) to the nodes that say how ready they are for it, in no order."""

    def look(_before: object) -> dict[str, dict[str, Readiness]]:
        found: dict[str, dict[str, Readiness]] = {}
        for name, node in cluster.nodes.items():
            for uid, ready in node.readiness.items():
                found.setdefault(uid, {})[name] = ready
        return found

    return cluster.notes.once("asked", (cluster.nodes,), look)


def _folders(cluster: Cluster, job: JobRecord) -> dict[str, str]:
    """Live node to the id of the checkpoint folder it sees, if any."""
    ready = asked(cluster).get(job.uid, {}).items()
    return {n: r.folder for n, r in ready if r.folder and r.state != "unfit" and cluster.live(n)}


def some_candidates(cluster: Cluster, job: JobRecord, nodes: Iterable[str]) -> list[Candidate]:
    """Those of ``candidates`` that are about these nodes, as far as they are known, in natural order."""
    all_booked, own, astray = booked(cluster), own_devices(job), strays(cluster, job)
    follow = _followers(cluster, job)
    found = []
    for node in sorted((n for n in nodes if n in cluster.nodes), key=natural):
        one = _judge(job, _case(cluster, all_booked, node, job, own))
        found.append(_beside_others(one, astray, follow))
    return found


def _astray(one: Candidate, why: str) -> Candidate:
    return replace(one, standing="unfit", why=why, devices=()) if one.standing in ("fit", "pending") else one


def strays(cluster: Cluster, job: JobRecord, newer: Mapping[str, str] | None = None) -> dict[str, str]:
    """Nodes whose checkpoint_dir is another folder than the job's, each with the sentence that says so.

    The job's is the one that most of its survivors see, then most nodes, then the first node. A job of one node may
    keep its checkpoints there. ``newer``: ids (by node) that the records do not hold yet.
    """
    if job.spec.nodes.max == 1:
        return {}
    folders = _folders(cluster, job)
    if len({*folders.values(), *(newer or {}).values()} - {""}) < 2:
        return {}
    reported = {**folders, **(newer or {})}
    by_folder: dict[str, list[str]] = {}
    for node in sorted((n for n, folder in reported.items() if folder), key=natural):
        by_folder.setdefault(reported[node], []).append(node)
    if len(by_folder) < 2:
        return {}
    members = {m.node for m in survivors(cluster, job)}
    groups = list(by_folder.values())  # of the greatest, max() takes the one with the first node
    right = max(groups, key=lambda nodes: (len(members.intersection(nodes)), len(nodes)))
    text = f"checkpoint_dir {job.spec.checkpoint_dir} there is not the folder that {right[0]} sees"
    return {
        n: f"{n} cannot run it: {text}; it must be one shared folder"
        for nodes in groups
        if nodes is not right
        for n in nodes
    }


def staying(cluster: Cluster, job: JobRecord) -> int:
    """How many survivors keep their place, those whose agents are silent among them. Not counted: nodes that are scaled
    in by name or drained, and nodes whose hardware is taken from the job."""
    alive = survivors(cluster, job)
    if strays(cluster, job) or has_portless(cluster, job):  # what is with other nodes counts as well
        return _staying(cluster, job)
    all_booked = booked(cluster)
    nodes = [one for m in alive for one in (cluster.nodes[m.node], all_booked.get(m.node))]
    of = (alive, job.generation, job.control, job.spec, *nodes)
    return cluster.notes.once(f"staying:{job.uid}", of, lambda _before: _staying(cluster, job), len(alive))


def _staying(cluster: Cluster, job: JobRecord) -> int:
    count, leaving = 0, job.control.leaving
    for one in some_candidates(cluster, job, [m.node for m in survivors(cluster, job)]):
        record = cluster.nodes[one.node]
        stays = one.standing in ("fit", "pending") or record.mute
        stays = stays or (record.cordon is not None and not record.cordon.drain)
        count += stays and one.node not in leaving
    return count


def ranked(cluster: Cluster, job: JobRecord, nodes: Iterable[str]) -> list[str]:
    """The order in which nodes are chosen: members by rank; then the others as given, preferred ones first. Behind all
    these, in this order: non-members that may be taken away (spot), worn nodes, nodes that were no good to it, nodes
    that were scaled in by name."""
    members = dict.fromkeys(m.node for m in survivors(cluster, job))
    rest = [n for n in nodes if n not in members]
    leaving, late, old, spot = job.control.leaving, doubtful(job), worn_nodes(cluster), spot_nodes(cluster)
    if choosy(job):
        scores = _scores(cluster, job)
        rest.sort(key=lambda n: -scores[n])
    names = [*members, *rest]
    return sorted(names, key=lambda n: (n in leaving, n in late, n in old, n in spot and n not in members))  # stable


def score(cluster: Cluster, job: JobRecord, node: str) -> int:
    """How much the job prefers a known node: that of the role that likes it most."""
    return _scores(cluster, job)[node]


def _scores(cluster: Cluster, job: JobRecord) -> Mapping[str, int]:
    """Of each node. Found once for as long as labels stay: it is asked for each node again and again."""
    known = tree(cluster)

    def look(_before: object) -> Mapping[str, int]:
        by_role = [known.scores(one) for one in {r.placement: None for r in job.spec.roles} if one is not None]
        if len(by_role) == 1:
            return by_role[0]
        return {node: max((of[node] for of in by_role), default=0) for node in known.labels}

    return cluster.notes.once(f"scores:{job.uid}", (job.spec, known), look, len(cluster.nodes) // 8)


def choosy(job: JobRecord) -> bool:
    return any(r.placement is not None and (r.placement.prefer or r.placement.avoid) for r in job.spec.roles)

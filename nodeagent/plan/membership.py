"""Who may take part in a job: for each node either what it would give, or why not. Never chooses among those who
may."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.jobspec import Role
from nodeagent.model.node import NodeFacts, NodeRecord
from nodeagent.model.world import Member
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.health import bar, worn

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


@lru_cache(maxsize=4096)
def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key under which n2 comes before n10. No two names are equal under it (n1, n01): all agents sort alike."""
    parts = (p for p in re.split(r"([0-9]+)", name) if p)
    return (*((0, int(p)) if p.isdecimal() else (1, p) for p in parts), (-1, name))


def in_order(cluster: Cluster) -> Sequence[str]:
    """All known nodes in natural order."""
    return cluster.once("order", lambda _before: sorted(cluster.nodes, key=natural))


def gpus_per_worker(role: Role, facts: NodeFacts) -> int:
    """GPUs for each worker on this node: as asked, else one where the node has any."""
    return role.gpus_per_worker if role.gpus_per_worker is not None else int(bool(facts.gpus))


def workers_wanted(role: Role, facts: NodeFacts) -> int:
    """Workers a full pod of this role has on this node."""
    if role.workers_per_node != "gpu":
        return role.workers_per_node
    per = gpus_per_worker(role, facts)
    return max(1, len(facts.gpus) // per) if per else 1


Booked = Mapping[str, Sequence[tuple[str, tuple[str, ...]]]]
"""Node to the jobs (uid) that hold devices there: as members of a generation not ended, or because they may still run
there."""


def booked(cluster: Cluster) -> Booked:
    return cluster.once("booked", lambda _before: _booked(cluster))


def _booked(cluster: Cluster) -> Booked:
    found: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for job in cluster.jobs.values():
        head = job.head
        if head is None:
            continue
        for node, member in head.members.items() if head.state != "ended" else ():
            if not cluster.gone(node, member.life):
                found.setdefault(node, []).append((job.uid, member.devices))
        for node, holder in head.holders.items():
            if not cluster.gone(node, holder.life):
                found.setdefault(node, []).append((job.uid, holder.devices))
    return found


def used_devices(all_booked: Booked, node: str, by_others_than: str) -> frozenset[str]:
    """Devices of a node that other jobs hold."""
    jobs = all_booked.get(node)
    return frozenset(d for uid, devices in jobs if uid != by_others_than for d in devices) if jobs else frozenset()


def offer(role: Role, facts: NodeFacts, used: Iterable[str], mine: Iterable[str]) -> tuple[str, ...] | str:
    """The devices a node would give this role, those it has now first; or a phrase saying what is missing."""
    taken = set(used)
    keep = [d for d in facts.devices() if d not in taken]
    held = set(mine)
    if held:
        keep.sort(key=lambda d: d not in held)  # stable: the same devices again where possible
    want = workers_wanted(role, facts)
    per = gpus_per_worker(role, facts)
    if per == 0:
        slots = [d for d in keep if d.startswith("cpu")]
        if len(slots) < want:
            return f"has {len(slots)} free worker slots, {want} needed"
        return tuple(sorted(slots[:want], key=natural))
    gpus = [g.uuid for g in facts.gpus if g.uuid in keep]
    gpus.sort(key=lambda u: (u not in held, [g.uuid for g in facts.gpus].index(u)))
    fits = min(want, len(gpus) // per)
    if fits < want and not (role.uneven and fits >= 1):
        sick = [f"GPU {g.index}: {g.why or 'unhealthy'}" for g in facts.gpus if not g.healthy]
        return f"has {len(gpus)} free GPUs, {want * per} needed" + (f" ({'; '.join(sick)})" if sick else "")
    order = {g.uuid: g.index for g in facts.gpus}
    return tuple(sorted(gpus[: fits * per], key=lambda u: order[u]))


@dataclass(frozen=True, slots=True)
class _Case:
    """All that a candidate's standing depends on, but for the job's role."""

    node: NodeRecord
    live: bool
    used: frozenset[str]
    """Devices that other jobs hold."""
    own: tuple[str, ...]
    """Devices that this job has there."""


def candidate(cluster: Cluster, job: JobRecord, node: NodeRecord) -> Candidate:
    """How this node stands to this job, right now."""
    return _judge(job, _case(cluster, booked(cluster), job, node))


def _case(cluster: Cluster, all_booked: Booked, job: JobRecord, node: NodeRecord) -> _Case:
    return _Case(node, cluster.live(node.id), used_devices(all_booked, node.id, job.uid), _own(job, node.id))


def _judge(job: JobRecord, case: _Case) -> Candidate:
    node, life = case.node, case.node.incarnation.life

    def no(standing: Standing, why: str, code: int = 0, devices: tuple[str, ...] = ()) -> Candidate:
        return Candidate(node.id, life, standing, f"{node.id} {why}", devices, code, node.joined)

    if not case.live:
        return no("out", "has left" if node.left else "is not live (its lease has lapsed)")
    if node.cordon is not None:
        return no("out", f"is {'draining' if node.cordon.drain else 'cordoned'} ({node.cordon.reason})")
    if sick := bar(node.facts):
        return no("out", sick)
    got = offer(job.spec.role, node.facts, case.used, case.own)
    if isinstance(got, str):
        return no("out", got)
    ready = node.readiness.get(job.uid)
    if ready is None:
        return no("pending", "has not checked the job yet", devices=got)
    if ready.state == "preparing":
        why = "is getting ready" + (f" ({ready.reason})" if ready.reason else "")
        return no("pending", why, devices=got)
    if ready.state == "unfit":
        return no("unfit", f"cannot run it: {ready.reason}", ready.code)
    return Candidate(node.id, life, "fit", "", got, 0, node.joined, ready.warming)


def candidates(cluster: Cluster, job: JobRecord) -> tuple[Candidate, ...]:
    """Every known node in natural order; those that see another checkpoint folder are unfit."""
    return cluster.once(f"candidates:{job.uid}", lambda before: _all(cluster, job, before), job).found


@dataclass(frozen=True, slots=True)
class _All:
    """The candidates of a job, and what each was judged by: most of it is the same in the next view."""

    role: Role
    judged: Mapping[str, tuple[_Case, Candidate]]
    found: tuple[Candidate, ...]


def _all(cluster: Cluster, job: JobRecord, before: _All | None) -> _All:
    known = before.judged if before is not None and before.role == job.spec.role else {}
    judged: dict[str, tuple[_Case, Candidate]] = {}
    all_booked = booked(cluster)
    for name in in_order(cluster):
        case, last = _case(cluster, all_booked, job, cluster.nodes[name]), known.get(name)
        same = last is not None and last[0].node is case.node and last[0] == case
        judged[name] = last if last is not None and same else (case, _judge(job, case))
    astray = strays(cluster, job)
    found = (candidate for _, candidate in judged.values())
    if astray:
        found = (
            replace(c, standing="unfit", why=astray[c.node], devices=())
            if c.node in astray and c.standing in ("fit", "pending")
            else c
            for c in found
        )
    return _All(job.spec.role, judged, tuple(found))


def strays(cluster: Cluster, job: JobRecord, newer: Mapping[str, str] | None = None) -> dict[str, str]:
    """Nodes whose checkpoint_dir is another folder than the job's, each with the sentence that says so.

    The job's is the one that most of its survivors see, then most nodes, then the first node. A job of one node may
    keep its checkpoints there. ``newer``: ids (by node) that the records do not hold yet.
    """
    if job.spec.role.nodes.max == 1:
        return {}
    ready = {n: r for n, record in cluster.nodes.items() if (r := record.readiness.get(job.uid)) and cluster.live(n)}
    seen = {n: r.folder for n, r in ready.items() if r.state != "unfit"} | dict(newer or {})
    if len({folder for folder in seen.values() if folder}) < 2:
        return {}
    by_folder: dict[str, list[str]] = {}
    for node in sorted((n for n, folder in seen.items() if folder), key=natural):
        by_folder.setdefault(seen[node], []).append(node)
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


def survivors(cluster: Cluster, job: JobRecord) -> tuple[Member, ...]:
    """Members of the newest generation that are still alive in the same life, by rank."""
    if job.head is None:
        return ()
    return tuple(m for m in job.head.ordered() if cluster.live(m.node, m.life))


def staying(cluster: Cluster, job: JobRecord) -> int:
    """Survivors whose place needs nobody else: not those that are scaled in by name or drained, nor those whose
    hardware is taken from the job."""
    found = {c.node: c.standing for c in candidates(cluster, job)}
    count = 0
    for member in survivors(cluster, job):
        cordon = cluster.nodes[member.node].cordon
        stays = found[member.node] in ("fit", "pending") or (cordon is not None and not cordon.drain)
        count += stays and member.node not in job.control.leaving
    return count


def ranked(cluster: Cluster, job: JobRecord, nodes: Iterable[str]) -> list[str]:
    """The order in which nodes are chosen: members by rank, then the others as given; then those that are worn; last
    those scaled in by name."""
    members = dict.fromkeys(m.node for m in survivors(cluster, job))
    rest = [n for n in nodes if n not in members]
    return sorted([*members, *rest], key=lambda n: (n in job.control.leaving, worn(cluster, n)))  # stable


def gone_nodes(cluster: Cluster, job: JobRecord) -> tuple[str, ...]:
    """Members and holders of the newest generation that can run nothing any more, in natural order."""
    if job.head is None:
        return ()
    gone = {m.node for m in job.head.members.values() if cluster.gone(m.node, m.life)}
    gone |= {n for n, h in job.head.holders.items() if cluster.gone(n, h.life)}
    return tuple(sorted(gone, key=natural))


def holding_nodes(cluster: Cluster, job: JobRecord) -> tuple[str, ...]:
    """Nodes that may still run an older generation of the job."""
    if job.head is None:
        return ()
    return tuple(sorted((n for n, h in job.head.holders.items() if not cluster.gone(n, h.life)), key=natural))


def should_prepare(cluster: Cluster, job: JobRecord, node: str) -> bool:
    """Whether a node keeps a pod ready for a job: members, those who will be needed to reach the target, one spare,
    and those whose check failed: their verdict is kept and checked again, not forgotten and found anew. Of a paused
    job those who were members, so that it can go on without importing anew."""
    if job.phase in TERMINAL or job.control.desired == "stop":
        return False
    member = job.head.members.get(node) if job.head is not None else None
    alive = member is not None and cluster.live(node, member.life)
    record = cluster.nodes.get(node)
    if job.control.desired == "pause":
        return alive and record is not None and record.cordon is None and not bar(record.facts)
    if alive:
        return True
    if record is None or candidate(cluster, job, record).standing == "out":
        return False  # most nodes of a large cluster run other jobs: they need not look at all the others
    return node in cluster.once(f"prepare:{job.uid}", lambda _before: _to_prepare(cluster, job), job)


def _to_prepare(cluster: Cluster, job: JobRecord) -> frozenset[str]:
    """Of those that are no members."""
    members = {m.node for m in survivors(cluster, job)}
    everyone = candidates(cluster, job)
    waiting = [c.node for c in everyone if c.standing in ("fit", "pending") and c.node not in members]
    waiting.sort(key=lambda n: (n in job.control.leaving, worn(cluster, n)))
    missing = max(0, job.control.target - staying(cluster, job))
    return frozenset(waiting[: missing + 1]).union(c.node for c in everyone if c.standing == "unfit")


def _own(job: JobRecord, node: str) -> tuple[str, ...]:
    if job.head is None:
        return ()
    member, holder = job.head.members.get(node), job.head.holders.get(node)
    return member.devices if member is not None else holder.devices if holder is not None else ()

"""The failsafe members of a generation: the nodes that, all together, may lend its members time while the store is
away.

Chooses them, says when they should be others, and when all that is left is to wait for one of them. Must never decide
what they answer: that is ``lending.py``'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from nodeagent.model.job import JobRecord
from nodeagent.model.world import Member
from nodeagent.plan.cluster import Cluster, in_order, natural
from nodeagent.plan.nodes.health import takes_work

MOST = 5
"""Members asked: one that does not answer costs the whole gang its time, so not more than needed."""
RACK = "rack"
"""Label of nodes that fail together."""
LEAST = 3
"""With fewer members, other nodes are asked as well: where one node is cut off alone, they know better."""


def choose(cluster: Cluster, uid: str, members: Iterable[Member]) -> dict[str, str]:
    """Node to life: members of the job (``uid``) that are unlikely to fail together, filled up with others that may be
    given work, other ones for each job: one that does not answer costs all its jobs their time. Nobody if one of those
    members cannot be asked."""
    ordered = _apart(cluster, sorted(members, key=lambda m: m.group_rank))
    if not all(_can_be_asked(cluster, m.node) for m in ordered):
        return {}
    chosen = {m.node: m.life for m in ordered}
    if len(chosen) >= LEAST:
        return chosen
    names = in_order(cluster)
    at = crc32(uid.encode()) % max(1, len(names))
    for node in (*names[at:], *names[:at]):
        if len(chosen) >= LEAST:
            break
        if node not in chosen and _may_join(cluster, node):
            chosen[node] = cluster.nodes[node].incarnation.life
    return chosen


def _apart(cluster: Cluster, ordered: list[Member]) -> list[Member]:
    """Few of them: one of each rack in turn where nodes say theirs; else spread over the ranks, which mostly follow the
    racks. The first five by rank were all in one rack, and that rack's power held the job until somebody spoke."""
    if len(ordered) <= MOST:
        return ordered
    racks: dict[str, list[Member]] = {}
    for member in ordered:
        record = cluster.nodes.get(member.node)
        racks.setdefault(record.facts.labels.get(RACK, "") if record is not None else "", []).append(member)
    if len(racks) == 1:
        return [ordered[i * (len(ordered) - 1) // (MOST - 1)] for i in range(MOST)]
    depth = max(len(rack) for rack in racks.values())
    in_turn = [rack[at] for at in range(depth) for rack in racks.values() if at < len(rack)]
    return sorted(in_turn[:MOST], key=lambda member: member.group_rank)


def better(cluster: Cluster, job: JobRecord) -> dict[str, str] | None:
    """The failsafe members that the active generation should have, if one of those it has is gone, one that is no
    member may be given no work any more, or there are too few; else None."""
    generation = job.generation
    if generation is None or generation.state != "active":
        return None
    whole = len(job.failsafe_members) >= LEAST and all(
        cluster.live(n, life) and (n in generation.members or takes_work(cluster, n))
        for n, life in job.failsafe_members.items()
    )
    if whole:
        return None
    found = choose(cluster, job.uid, [m for m in generation.ordered() if cluster.live(m.node, m.life)])
    return found if found and found != job.failsafe_members else None


def chooser(cluster: Cluster, job: JobRecord) -> str | None:
    """The node that may replace the failsafe members: the first of them that is live and whose agent speaks, a member
    rather than another; or the first such one of the members if there are none."""
    generation = job.generation
    if generation is None:
        return None
    if job.failsafe_members:
        live = [n for n in job.failsafe_members if cluster.live(n) and not cluster.nodes[n].mute]
        return min(live, key=lambda n: (n not in generation.members, natural(n)), default=None)
    able = (m.node for m in generation.ordered() if cluster.live(m.node, m.life))
    return next((n for n in able if not cluster.nodes[n].mute), None)


def must_let_go(cluster: Cluster, job: JobRecord, node: str) -> bool:
    """Something newer, or the job's end, waits for this failsafe member, and no other has let go or will by itself."""
    generation = job.generation
    if generation is None or node not in job.failsafe_members or generation.state == "active":
        return False
    if generation.state == "ended":
        stopping = [n for n, h in generation.holders.items() if n in job.failsafe_members and cluster.live(n, h.life)]
        return not stopping and chooser(cluster, job) == node
    if generation.released:
        return False
    reported_otherwise = node in generation.members and node not in generation.missing
    return reported_otherwise or not set(job.failsafe_members) & set(generation.members)


def silence(cluster: Cluster, job: JobRecord) -> str:
    """Not empty if no failsafe member is live: one of them must answer before anything newer may start, or be
    permanently down."""
    if not job.failsafe_members or job.active is None or any(cluster.live(n) for n in job.failsafe_members):
        return ""
    names = ", ".join(sorted(job.failsafe_members, key=natural))
    return (
        f"nothing has been received from {names}, which may keep generation {job.active.number} running without "
        f"the store: waits for one of them; if one is permanently down: nodeagentctl forget NODE"
    )


def _may_join(cluster: Cluster, node: str) -> bool:
    """As a failsafe member that is no member."""
    return takes_work(cluster, node) and _can_be_asked(cluster, node) and not cluster.nodes[node].facts.restarting


def _can_be_asked(cluster: Cluster, node: str) -> bool:
    """While its agent is silent or cut off a node knows of no new generation, and would say no."""
    return cluster.live(node) and bool(cluster.nodes[node].facts.peer) and not cluster.nodes[node].mute

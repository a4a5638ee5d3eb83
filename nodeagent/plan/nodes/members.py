"""A job's newest generation in the view: which members are alive, which are gone, and which may still run something;
whose turn it is to take a decision that all agents see alike; whether a node's agent may go at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.model.timing import millis
from nodeagent.model.world import Generation, Member
from nodeagent.plan.cluster import Cluster, SeenNodes, changed, in_order, natural, seen
from nodeagent.plan.nodes.health import drained


def present_members(job: JobRecord) -> Mapping[str, Member]:
    """Of its newest generation, if that has not ended."""
    return job.generation.members if job.generation is not None and job.generation.state != "ended" else {}


def survivors(cluster: Cluster, job: JobRecord) -> tuple[Member, ...]:
    """Members of the newest generation that are still alive in the same life, by rank."""
    return _gang(cluster, job).survivors


def gone_nodes(cluster: Cluster, job: JobRecord) -> tuple[str, ...]:
    """Members and holders of the newest generation that can run nothing any more, in natural order. Of one that has
    ended only holders could run something."""
    return _gang(cluster, job).gone


def holding_nodes(cluster: Cluster, job: JobRecord) -> tuple[str, ...]:
    """Nodes that may still run an older generation of the job."""
    return _gang(cluster, job).holding


@dataclass(frozen=True, slots=True)
class _Gang:
    """A job's newest generation, as far as it depends on who is alive."""

    generation: Generation | None
    seen: SeenNodes
    survivors: tuple[Member, ...] = ()
    gone: tuple[str, ...] = ()
    holding: tuple[str, ...] = ()


_NOBODY = _Gang(None, SeenNodes({}, frozenset()))


def _gang(cluster: Cluster, job: JobRecord) -> _Gang:
    if job.generation is None:
        return _NOBODY
    generation = job.generation
    return cluster.once(f"gang:{job.uid}", lambda before: _look(cluster, generation, before), job)


def _look(cluster: Cluster, generation: Generation, before: _Gang | None) -> _Gang:
    """Anew only if the generation or something about one of its nodes changed."""
    now = seen(cluster)
    members, holders, ended = generation.members, generation.holders, generation.state == "ended"
    if before is not None and before.generation is not None:
        same = before.generation.members is members and before.generation.holders is holders
        same = same and (before.generation.state == "ended") == ended
        news = changed(cluster, before.seen) if same else None
        if news is not None and not any(n in members or n in holders for n in news):
            return _Gang(generation, now, before.survivors, before.gone, before.holding)
    alive = tuple(m for m in generation.ordered() if cluster.live(m.node, m.life))
    gone = {m.node for m in members.values() if not ended and cluster.gone(m.node, m.life)}
    gone |= {n for n, h in holders.items() if cluster.gone(n, h.life)}
    holding = [n for n, h in holders.items() if not cluster.gone(n, h.life)]
    if before is not None and before.survivors == alive:
        alive = before.survivors
    return _Gang(generation, now, alive, tuple(sorted(gone, key=natural)), tuple(sorted(holding, key=natural)))


def more_expected(cluster: Cluster, job: JobRecord) -> tuple[str, int]:
    """Why the members of the active generation that are gone are not missed yet, and until when (served time) at the
    latest; no reason if they are.

    Nodes that are cut off together lapse one by one: each had more than a heartbeat and a call left of its lease. Those
    in touch with the store again all renew within a heartbeat and two calls, and may have run on meanwhile: but not if
    one that had to agree was never away. Nobody can put it off for good: who comes and goes again holds its lease for
    longer than it is waited for others.
    """
    timing = cluster.timing
    gone = min((_gone_at(cluster, job, node) for node in gone_nodes(cluster, job)), default=0)
    end = gone + millis(timing.lease - timing.heartbeat - timing.store_timeout)
    if cluster.more_to_lapse and cluster.served < end:
        return "the lease of another node is about to run out", end
    asked = [n for n in job.failsafe_members or present_members(job) if cluster.live(n)]
    back = [cluster.returned.get(n, -1) for n in asked]
    if not back or min(back) < gone:
        return "", 0
    settled = max(back) + millis(timing.heartbeat + 2 * timing.store_timeout)
    end = min(settled, min(back) + millis(timing.lease - timing.heartbeat))
    return ("another node has just come back, so it may as well" if cluster.served < end else ""), end


def _gone_at(cluster: Cluster, job: JobRecord, node: str) -> int:
    """When it was seen to be gone; 0 if it is not known, or it went by itself."""
    record, member = cluster.nodes.get(node), present_members(job).get(node)
    if record is not None and member is not None and record.incarnation.life != member.life:
        return record.joined
    return cluster.lapsed_at.get(node, 0)


def own_devices(job: JobRecord) -> dict[str, tuple[str, ...]]:
    """Node to the devices that this job has there."""
    generation = job.generation
    if generation is None:
        return {}
    return {n: h.devices for n, h in generation.holders.items()} | {n: m.devices for n, m in generation.members.items()}


def needed_by(cluster: Cluster, node: str, life: str) -> str:
    """Which job still needs this life of the node, in a few words; empty if none does."""
    record = cluster.nodes.get(node)
    leaves = record is not None and drained(record)
    for job in cluster.jobs.values():
        generation = job.generation
        if generation is None:
            continue
        named = [generation.holders.get(node), generation.members.get(node) if generation.state != "ended" else None]
        if any(one is not None and one.life == life for one in named):
            return f"job {job.name} runs here"
        if generation.state != "ended" and job.failsafe_members.get(node) == life and not leaves:
            return f"it is a failsafe member of job {job.name}"
    return ""


def order(cluster: Cluster, job: JobRecord) -> list[str]:
    """Proposers in order: live members by rank, then nodes that have the job ready, then all other live nodes. Those
    whose agents are silent or cut off come last."""
    members = dict.fromkeys(m.node for m in survivors(cluster, job))
    rest = [n for n in in_order(cluster) if n not in members and cluster.live(n)]
    names = [*members, *sorted(rest, key=lambda n: job.uid not in cluster.nodes[n].readiness)]  # stable
    return sorted(names, key=lambda n: cluster.nodes[n].mute)


def turn(cluster: Cluster, job: JobRecord, node: str) -> int:
    """How many others go before this node. The one that reported a fault of the active generation goes at once."""
    generation = job.generation
    if generation is not None and generation.state == "active":
        mine = generation.reports.get(node)
        if mine is not None and mine.seq:
            return 0
    proposers = order(cluster, job)
    return proposers.index(node) if node in proposers else len(proposers)

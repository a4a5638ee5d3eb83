"""How the workers of a pod are stopped: with which grace, what becomes of their snapshots, and in which order the roles
of a gang stop: the reverse of that in which they start.

A trainer may need its parameter servers to save, and MindSpore's workers their scheduler to leave. A shim keeps the
order among its own workers (``shim/grace.py``); this module keeps it between nodes. Each holder of a generation tells
the store which roles have ended there, where others wait for that.
"""

from __future__ import annotations

from collections.abc import Collection

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.roleorder import comes_after
from nodeagent.model.world import Ack, Generation, Member
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.failure.blame import leaves_broken
from nodeagent.plan.pods.actions import SendAck, Stop
from nodeagent.plan.pods.podcase import PodCase
from nodeagent.pods.base import GivenUp, PodStatus


def _before(spec: JobSpec) -> dict[str, frozenset[str]]:
    return comes_after({role.name: role.after for role in spec.roles})


def stops_later(cluster: Cluster, job: JobRecord, generation: Generation, node: str) -> tuple[str, ...]:
    """Roles that this node's workers of wait to be asked to stop, since workers on other nodes come after them."""
    if not job.spec.ordered or node not in generation.holders:
        return ()
    before = _before(job.spec)
    needed = frozenset[str]().union(*(before[role] for role in _running_elsewhere(cluster, generation, node)))
    return tuple(sorted(needed & _roles(generation.holders[node])))


def newly_down(job: JobRecord, generation: Generation, node: str, status: PodStatus) -> tuple[str, ...]:
    """Roles that have ended here, of a pod that is not over yet, if workers on other nodes wait for that and the store
    does not know it."""
    holder = generation.holders.get(node)
    if not job.spec.ordered or holder is None or status.phase != "stopping":
        return ()
    if status.generation is None or status.generation.number != job.last_number:
        return ()
    alive = {worker.rank for worker in status.workers if worker.state != "exited"}
    down = frozenset(role for role in _roles(holder) if not holder.ranks_of(role) & alive)
    before = _before(job.spec)
    waited_for = frozenset[str]().union(*(before[role] for role in down.difference(holder.down)))
    others = frozenset[str]().union(*(_roles(other) for name, other in generation.holders.items() if name != node))
    return tuple(sorted(down)) if waited_for & others else ()


def _running_elsewhere(cluster: Cluster, generation: Generation, node: str) -> Collection[str]:
    """Roles of which workers may run on other nodes. Those of a node that is silent were stopped by their fence."""
    others = [one for one in generation.holders.values() if one.node != node and cluster.live(one.node, one.life)]
    return frozenset[str]().union(*(_roles(one).difference(one.down) for one in others))


def _roles(member: Member) -> frozenset[str]:
    return frozenset(place.role for place in member.places)


def stop(case: PodCase, generation: Generation, status: PodStatus, why: str) -> Stop | SendAck:
    """Of a planned stop, too: what ended here that workers on other nodes wait for."""
    job, node = case.job, case.node
    if not generation.planned:
        return Stop(job.uid, None, why)
    broken = leaves_broken(job, generation)
    if not broken and (down := newly_down(job, generation, node, status)):
        ack = Ack(life=case.life, ended=generation.state == "ended", down=down)
        text = f"no worker of {', '.join(down)} runs on {node} any more; others stop after them"
        return SendAck(job.uid, generation.token, ack, None, text)
    held = generation.holders.get(node)
    roles = {place.role for place in held.places} if held is not None else ()
    grace, sooner = job.spec.graces(roles, generation.grace)
    later = () if broken else stops_later(case.cluster, job, generation, node)
    return Stop(job.uid, grace, why, _given_up(job, generation), broken, sooner, later)


def _given_up(job: JobRecord, generation: Generation) -> GivenUp | None:
    """What the snapshots of those that stop have to be written out for; None where all nodes go on, with their memory.
    The same on each of them, as long as none has acknowledged: and none does before its snapshots are written."""
    since = (job.checkpoint.number, job.checkpoint.step) if job.checkpoint is not None else (0, 0)
    if generation.state == "ended":
        return GivenUp(stays=False, world=0, since=since)
    lives = {node: member.life for node, member in generation.members.items()}
    stay = [node for node, holder in generation.holders.items() if lives.get(node) == holder.life]
    if len(stay) == len(generation.holders):
        return None
    return GivenUp(stays=bool(stay), world=generation.world_size, since=since)

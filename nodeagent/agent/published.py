"""What a node tells others: readiness for placement, states of its pods and of its agent for people. Pure
translation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nodeagent.agent.failsafe import Failsafe
from nodeagent.agent.lease import Lease
from nodeagent.agent.saver import Saver
from nodeagent.api.view import AgentHealth
from nodeagent.model.node import Readiness
from nodeagent.model.pod import PodState
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.prepare import failed_here
from nodeagent.pods.base import PodStatus


def readiness(statuses: Mapping[str, PodStatus]) -> dict[str, Readiness]:
    """Job uid to readiness. A stuck pod makes the node unfit for the job: its devices are not used again before a
    reboot."""
    out: dict[str, Readiness] = {}
    for uid, status in statuses.items():
        if status.phase in ("unknown", "preparing", "gone"):
            out[uid] = Readiness(state="preparing", reason=status.reason, folder=status.folder)
        elif status.phase in ("unfit", "stuck"):
            out[uid] = Readiness(state="unfit", reason=status.reason, code=status.code)
        else:
            out[uid] = Readiness(state="ready", folder=status.folder, warming=status.warming)
    return out


def kept_verdicts(cluster: Cluster, node: str, statuses: Mapping[str, PodStatus]) -> dict[str, Readiness]:
    """Job uid to the verdict of a check that failed here, of jobs that wait and have no pod here any more to look
    again (``plan/prepare.py``): forgotten, it would be found anew, again and again."""
    record = cluster.nodes.get(node)
    if record is None:
        return {}
    found = {uid: ready for uid, ready in record.readiness.items() if ready.state == "unfit" and uid not in statuses}
    jobs = cluster.jobs
    return {uid: ready for uid, ready in found.items() if uid in jobs and failed_here(cluster, jobs[uid], node)}


def pod_states(
    cluster: Cluster,
    node: str,
    statuses: Mapping[str, PodStatus],
    unreachable: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> tuple[PodState, ...]:
    """The node's pods as published under TTL keys, by job uid. ``unreachable``: as ``Reach`` has it."""
    out = []
    for uid, status in sorted(statuses.items()):
        job = cluster.jobs.get(uid)
        if job is None:
            continue
        out.append(
            PodState(
                uid=uid,
                job=job.name,
                role=job.spec.role_names,
                node=node,
                phase=status.phase,
                reason=status.reason or status.refused,
                generation=status.generation.number if status.generation is not None else 0,
                shim_pid=status.shim_pid,
                standby_pid=status.standby_pid,
                parked=len(status.parked),
                parked_memory=sum(status.parked.values()),
                workers=status.workers,
                snapshot_bytes=status.snapshot_bytes,
                unreachable=dict(unreachable.get(uid, {})),
            )
        )
    return tuple(out)


def agent_health(
    lease: Lease,
    failsafe: Failsafe,
    saver: Saver,
    lag: float,
    now: float,
    waits: str,
    unreachable: Mapping[str, Mapping[str, float]],
) -> AgentHealth:
    """How the node's agent is doing; ``lag``: how late its last heartbeat was; ``waits``: whom the store waits for;
    ``unreachable``: as ``Reach`` has it."""
    bridged = failsafe.bridged
    return AgentHealth(
        joined=lease.joined,
        reason=lease.reason,
        lease_left=lease.left(now),
        beat_age=max(0.0, now - lease.beat_sent),
        store_away_since=lease.away_since,
        unread=dict(lease.unread),
        store_unusable=lease.unusable,
        loop_lag=lag,
        lent={uid: end - now for uid, end in bridged.lent.items() if end > now},
        not_lent=bridged.refusals,
        unsaved=saver.trouble,
        store_waits=waits if lease.away_since is None else "",
        unreachable=unreachable,
    )

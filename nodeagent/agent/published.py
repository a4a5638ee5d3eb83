"""What a node tells others of its pods: readiness for placement, states for people. Pure translation of shim
states."""

from __future__ import annotations

from collections.abc import Mapping

from nodeagent.model.node import Readiness
from nodeagent.model.pod import PodState
from nodeagent.plan.cluster import Cluster
from nodeagent.workers.base import PodStatus


def readiness(statuses: Mapping[str, PodStatus]) -> dict[str, Readiness]:
    """Job uid to readiness. A stuck pod makes the node unfit for the job: its devices are not used again before a
    reboot."""
    out: dict[str, Readiness] = {}
    for uid, status in statuses.items():
        if status.phase in ("preparing", "gone"):
            out[uid] = Readiness(state="preparing", reason=status.reason, folder=status.folder)
        elif status.phase in ("unfit", "stuck"):
            out[uid] = Readiness(state="unfit", reason=status.reason, code=status.code)
        else:
            out[uid] = Readiness(state="ready", folder=status.folder)
    return out


def pod_states(cluster: Cluster, node: str, statuses: Mapping[str, PodStatus]) -> tuple[PodState, ...]:
    """The node's pods as published under TTL keys, by job uid."""
    out = []
    for uid, status in sorted(statuses.items()):
        job = cluster.jobs.get(uid)
        if job is None:
            continue
        out.append(
            PodState(
                uid=uid,
                job=job.name,
                role=job.spec.role.name,
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
            )
        )
    return tuple(out)

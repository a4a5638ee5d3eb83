"""Which records of ended jobs have been kept long enough. Removes nothing: that is the step ``Remove`` of each job."""

from __future__ import annotations

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import holding_nodes

AT_ONCE = 8
"""Records removed in one round at most."""


def outlived(cluster: Cluster, wall: float, keep_for: float, keep: int) -> list[JobRecord]:
    """The oldest few of the ended jobs that ended more than ``keep_for`` seconds before ``wall`` (Unix time), or are
    not among the ``keep`` that ended last. None on which a node may still run workers."""
    ended = [job for job in cluster.jobs.values() if job.phase in TERMINAL and job.ended is not None]
    ended.sort(key=lambda job: (job.ended or 0.0, job.order))
    surplus = max(0, len(ended) - keep)
    old = [job for i, job in enumerate(ended) if i < surplus or (job.ended or 0.0) < wall - keep_for]
    return [job for job in old[: 2 * AT_ONCE] if not holding_nodes(cluster, job)][:AT_ONCE]

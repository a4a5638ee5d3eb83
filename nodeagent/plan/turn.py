"""Whose turn it is to take a decision that all agents see alike: each next one waits a little longer, so one write
suffices."""

from __future__ import annotations

from nodeagent.model.job import JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import natural, survivors


def order(cluster: Cluster, job: JobRecord) -> list[str]:
    """Proposers in order: live members by rank, then nodes that have the job ready, then all other live nodes."""
    members = [m.node for m in survivors(cluster, job)]
    rest = [n for n in sorted(cluster.nodes, key=natural) if n not in members and cluster.live(n)]
    ready = [n for n in rest if job.uid in cluster.nodes[n].readiness]
    return members + ready + [n for n in rest if n not in ready]


def turn(cluster: Cluster, job: JobRecord, node: str) -> int:
    """How many others go before this node. The one that reported a fault of the active generation goes at once."""
    head = job.head
    if head is not None and head.state == "active":
        mine = head.reports.get(node)
        if mine is not None and mine.seq:
            return 0
    proposers = order(cluster, job)
    return proposers.index(node) if node in proposers else len(proposers)

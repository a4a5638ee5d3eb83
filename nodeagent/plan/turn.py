"""Whose turn it is to take a decision that all agents see alike: each next one waits a little longer, so one write
suffices."""

from __future__ import annotations

from nodeagent.model.job import JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import in_order, survivors


def order(cluster: Cluster, job: JobRecord) -> list[str]:
    """Proposers in order: live members by rank, then nodes that have the job ready, then all other live nodes."""
    members = dict.fromkeys(m.node for m in survivors(cluster, job))
    rest = [n for n in in_order(cluster) if n not in members and cluster.live(n)]
    return [*members, *sorted(rest, key=lambda n: job.uid not in cluster.nodes[n].readiness)]  # stable


def turn(cluster: Cluster, job: JobRecord, node: str) -> int:
    """How many others go before this node. The one that reported a fault of the active generation goes at once."""
    head = job.head
    if head is not None and head.state == "active":
        mine = head.reports.get(node)
        if mine is not None and mine.seq:
            return 0
    proposers = order(cluster, job)
    return proposers.index(node) if node in proposers else len(proposers)

"""Whether a node's agent may go at once, or somebody would miss it. Pure."""

from __future__ import annotations

from nodeagent.plan.cluster import Cluster


def missed(cluster: Cluster, node: str, life: str) -> str:
    """Who counts on this life of the node, in a few words; empty if nobody does."""
    record = cluster.nodes.get(node)
    leaves = record is not None and record.cordon is not None and record.cordon.drain
    for job in cluster.jobs.values():
        head = job.head
        if head is None:
            continue
        named = [head.holders.get(node), head.members.get(node) if head.state != "ended" else None]
        if any(one is not None and one.life == life for one in named):
            return f"job {job.name} runs here"
        if head.state != "ended" and job.keepers.get(node) == life and not leaves:
            return f"it is a keeper of job {job.name}"
    return ""

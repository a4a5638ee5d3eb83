"""What is wrong with the queues of a cluster, and with the jobs in them, each with the step that mends it."""

from __future__ import annotations

from collections.abc import Iterator

from nodeagent.model.facts import Finding
from nodeagent.model.job import TERMINAL
from nodeagent.model.queue import RESOURCES, queue_of
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.demand import size


def queue_findings(cluster: Cluster) -> Iterator[tuple[str, Finding]]:
    """(where, what), as ``clusterhealth.py`` has them."""
    tree = cluster.queues
    if not tree.queues and not cluster.queues_rev and not any(job.spec.queue for job in cluster.jobs.values()):
        return
    if cluster.queues_rev != tree.rev:
        what = "the queues in the store were changed past the agents, which act on those that were signed last"
        fix = "write them anew: nodeagentctl queue apply -f FILE; and see who can write to Redis"
        yield "cluster", Finding(severity="error", what=what, fix=fix)
    for job in sorted(cluster.jobs.values(), key=lambda job: job.order):
        name = queue_of(job.spec.queue)
        if job.phase not in TERMINAL and name not in tree.by_name:
            what = f"its queue {name} does not exist any more: it gets no nodes that it does not have"
            fix = f"nodeagentctl queue create {name}; or: nodeagentctl stop {job.name}"
            yield f"job/{job.name}", Finding(severity="error", what=what, fix=fix)
    total = size(cluster).total
    for resource in RESOURCES:
        promised = sum(tree.guaranteed(name, resource) for name in tree.children.get("", ()))
        has = getattr(total, resource)
        if promised > has:
            what = f"queues are guaranteed {promised} {resource}, and the live nodes have {has}"
            fix = "bring the nodes back, or lower guarantees: nodeagentctl queue set QUEUE guarantee.NAME=N"
            yield "cluster", Finding(severity="warning", what=what, fix=fix)

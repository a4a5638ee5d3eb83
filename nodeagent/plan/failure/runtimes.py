"""A podman that cannot start a container: the fault of its node, until it is shown to be the job's.

podman fails before a worker's command runs where its node is broken (no room in its store, a wrong configuration), and
where the job asks for what no node has (a bind that does not exist). The first costs the job nothing: it goes on
without the node (``nodes/setbacks.py``). The second would go on for ever. So a job that never ran ends, as one does
whose command no node has, once podman has failed on each member of a gang, and by then on each node that the job could
have, or on ``ENOUGH`` of them. A job that ran before waits: its nodes are at fault.
"""

from __future__ import annotations

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import millis
from nodeagent.model.world import Generation
from nodeagent.plan.cluster import Cluster, natural, some
from nodeagent.plan.failure.faults import final_report
from nodeagent.plan.failure.judgement import MOST_NAMED
from nodeagent.plan.nodes.candidates import ruled_out
from nodeagent.plan.nodes.setbacks import runtime_failed

ENOUGH = 8
"""Nodes that are tried at most before the job is said to be at fault."""
FAILS_WITHIN = 10.0
"""Seconds from the start of a gang within which podman fails on all nodes, if it is the job's fault."""


def others_answer_until(cluster: Cluster, job: JobRecord, generation: Generation) -> int:
    """Served time (ms) until which other members are waited for, which may report the same; 0: it makes no
    difference."""
    until = generation.since + millis(FAILS_WITHIN)
    answered = all(final_report(generation.reports.get(node)) for node in generation.members)
    return until if not answered and cluster.served < until and _never_ran(cluster, job, generation) else 0


def fails_everywhere(cluster: Cluster, job: JobRecord, generation: Generation) -> str:
    """Why the job ends; empty if it does not."""
    failed = runtime_failed(generation)
    if len(failed) < len(generation.members) or not _never_ran(cluster, job, generation):
        return ""
    tried = {one.node for one in job.setbacks if one.kind == "runtime" and _same_life(cluster, one.node, one.life)}
    tried.update(failed)
    others = [n for n, record in cluster.nodes.items() if n not in tried and not _cannot(job, record)]
    if others and len(tried) < ENOUGH:
        return ""
    what, _, why = generation.reports[failed[0]].reason.partition(": ")
    text = f"no node can run it: {what} on {some(sorted(tried, key=natural), MOST_NAMED)}: {why}"
    return f"{text}; look at the job's image and binds, or at podman there"


def _never_ran(cluster: Cluster, job: JobRecord, generation: Generation) -> bool:
    """Each of its generations was ended by this, and the present one has just begun."""
    before = sum(entry.kind == "runtime_failed" for entry in job.budget.values())
    return job.restarts == before and cluster.served - generation.since <= millis(cluster.timing.early)


def _same_life(cluster: Cluster, node: str, life: str) -> bool:
    record = cluster.nodes.get(node)
    return record is not None and record.incarnation.life == life


def _cannot(job: JobRecord, record: NodeRecord) -> bool:
    """It is not for this job, or says so for good."""
    ready = record.readiness.get(job.uid)
    return bool(ruled_out(job.spec, record)) or (ready is not None and ready.state == "unfit" and not ready.passing)

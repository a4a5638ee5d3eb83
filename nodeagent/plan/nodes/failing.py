"""Nodes on which job after job fails at its start, while nothing that ended well ran there since: such a node is always
the free one, so it takes the next job of the queue as well. It is taken last, and people are shown it.

Worked out from the ended jobs of the view alone, whatever the time. One command of one user is no evidence, unless it
has succeeded elsewhere: it may be wrong. Says nothing about a job's own nodes: that is ``setbacks.py``'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from nodeagent.model.job import JobRecord
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster

IN_A_ROW = 3
"""Jobs, one after the other, that failed on the node."""
_FAILED = frozenset({"worker_failed", "collective", "pod_failed"})

Failing = Mapping[str, tuple[JobRecord, ...]]


def failing_nodes(cluster: Cluster) -> Failing:
    """Each such node, with the last jobs that failed there. The very same object for as long as they are the same."""

    def look(before: Failing | None) -> Failing:
        found = _look(cluster)
        return before if before == found else found

    return cluster.notes.once("failing", (cluster.jobs,), look)


def _look(cluster: Cluster) -> Failing:
    failed, well, works = defaultdict[str, list[JobRecord]](list), defaultdict[str, int](int), dict[object, set[str]]()
    for job in cluster.jobs.values():
        if job.phase == "failed" and (node := _blamed(job, millis(cluster.timing.early))):
            failed[node].append(job)
        elif job.phase == "succeeded" and job.generation is not None:
            works.setdefault(_what(job), set()).update(job.generation.members)
            for node in job.generation.members:
                well[node] = max(well[node], job.since)
    found = dict[str, tuple[JobRecord, ...]]()
    for node, jobs in sorted(failed.items()):
        last = sorted((job for job in jobs if job.since > well[node]), key=lambda job: (job.since, job.uid))[-IN_A_ROW:]
        kinds = {_what(job) for job in last}
        if len(last) == IN_A_ROW and (len(kinds) > 1 or any(works.get(kind, set()) - {node} for kind in kinds)):
            found[node] = tuple(last)
    return found


def _what(job: JobRecord) -> object:
    """Whose it is, and what it runs."""
    return job.owner, tuple(role.command for role in job.spec.roles)


def _blamed(job: JobRecord, early: int) -> str:
    """The node whose worker or pod is blamed for an end soon after the first start; empty if it is another end."""
    entry = job.budget.get(str(job.last_number))
    if entry is None or entry.kind not in _FAILED or job.restarts or job.first_active is None:
        return ""
    return entry.node if entry.at - job.first_active <= early else ""

"""Whether a gang that was stopped on purpose may start on other nodes than it was on. It may where nothing is lost by
that: snapshots in the memory of its old nodes are on disk as well. Chooses no nodes: that is ``placement.py``'s.
"""

from __future__ import annotations

from nodeagent.model.job import Checkpoint, JobRecord
from nodeagent.model.world import Head, PodReport
from nodeagent.plan.cluster import Cluster


def may_move(cluster: Cluster, job: JobRecord) -> bool:
    """The job's generation has ended on purpose, nothing of it runs any more, and what it had done by then is in a
    checkpoint that is committed. After a fault it never may: its snapshots are in memory alone."""
    head = job.head
    if head is None or head.state != "ended" or not head.planned or head.holders:
        return False
    return cluster.notes.once(f"moves:{job.uid}", (job,), lambda _before: _may_move(job, head))


def _may_move(job: JobRecord, head: Head) -> bool:
    if job.active is None:
        return True  # its workers have never run
    saved = job.checkpoint
    if saved is None or not job.active.number == saved.number == head.number == job.last_number:
        return False  # the nodes in the head are not those that have the memory, or the checkpoint is older
    if saved.from_memory:
        return True
    return all(_saved(job.last_reports.get(node), saved) for node in head.members)


def _saved(report: PodReport | None, saved: Checkpoint) -> bool:
    """All workers of a node have left after a step that the checkpoint has."""
    if report is None or report.state != "left" or not report.exits:
        return False
    return all(e.left_at is not None and e.saved_in is not None and e.left_at <= saved.step for e in report.exits)

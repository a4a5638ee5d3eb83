"""Which nodes keep a pod of a job ready before it is needed. Never places a worker: a job may start without those."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.plan.changes import Seen, changed, seen
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.health import bar, worn_nodes
from nodeagent.plan.membership import Candidate, candidate, candidates, staying, survivors
from nodeagent.plan.queue import in_queue, next_up

UNFIT_KEPT = 4
"""Pods of jobs that wait whose check failed here are kept on a node, to be looked at again now and then: those of the
first jobs in the queue. Of others the node only keeps the verdict."""


def should_prepare(cluster: Cluster, job: JobRecord, node: str, up: Collection[str] | None = None) -> bool:
    """Whether a node keeps a pod ready for a job: members, those who will be needed to reach the target, one spare,
    and those whose check failed: their verdict is kept and checked again, not forgotten and found anew. Of a paused
    job those who were members, so that it can go on without importing anew. Of jobs that wait only those that are next
    (``up``, of which ``queue.next_up`` tells)."""
    if job.phase in TERMINAL or job.control.desired == "stop":
        return False
    member = job.head.members.get(node) if job.head is not None else None
    alive = member is not None and cluster.live(node, member.life)
    record = cluster.nodes.get(node)
    if job.control.desired == "pause":
        return alive and record is not None and record.cordon is None and not bar(record.facts)
    if alive:
        return True
    if record is None:
        return False
    if in_queue(job) and job.uid not in (next_up(cluster).up if up is None else up):
        return failed_here(cluster, job, node)
    if candidate(cluster, job, record).standing == "out":
        return False  # most nodes of a large cluster run other jobs: they need not look at all the others
    return node in _to_prepare(cluster, job)


def failed_here(cluster: Cluster, job: JobRecord, node: str) -> bool:
    """The job waits, and all that keeps it from this node is a check that failed: a pod could only look again."""
    record = cluster.nodes.get(node)
    ready = record.readiness.get(job.uid) if record is not None else None
    if record is None or ready is None or ready.state != "unfit" or not in_queue(job):
        return False
    member = job.head.members.get(node) if job.head is not None else None
    survives = member is not None and cluster.live(node, member.life)
    return not survives and candidate(cluster, job, record).standing == "unfit"


def _to_prepare(cluster: Cluster, job: JobRecord) -> frozenset[str]:
    """Of those that are no members."""
    everyone, alive, old = candidates(cluster, job), survivors(cluster, job), worn_nodes(cluster)
    kept = _pods_kept(cluster)

    def choose(_before: object) -> frozenset[str]:
        members, leaving = {m.node for m in alive}, job.control.leaving
        waiting = [c for c in everyone if c.standing in ("fit", "pending") and c.node not in members]
        # Who is ready, or getting so, goes on: else a node that comes back or gets free would take the place of a warm
        # spare, and the job would have none until that one is warm.
        begun = {c.node for c in waiting if job.uid in cluster.nodes[c.node].readiness}

        def order(one: Candidate) -> tuple[bool, ...]:
            return one.node in leaving, one.node in old, one.standing != "fit", one.node not in begun

        waiting.sort(key=order)
        missing = max(0, job.control.target - staying(cluster, job))
        # A node keeps only so many standbys: were the first one the spare of all jobs, most would have none.
        spare = min(waiting[missing:], key=lambda c: (order(c), kept[c.node] - (c.node in begun)), default=None)
        chosen = {c.node for c in waiting[:missing]} | ({spare.node} if spare is not None else set())
        return frozenset(chosen.union(c.node for c in everyone if c.standing == "unfit"))

    return cluster.notes.once(f"prepare:{job.uid}", (everyone, alive, old, kept, job.control), choose)


@dataclass(frozen=True, slots=True)
class _Kept:
    seen: Seen
    pods: Mapping[str, int]


def _pods_kept(cluster: Cluster) -> Mapping[str, int]:
    """How many jobs each node has a pod of, running or not. The very same object for as long as that stays so."""
    return cluster.notes.once("pods", (cluster.nodes,), lambda before: _count(cluster, before)).pods


def _count(cluster: Cluster, before: _Kept | None) -> _Kept:
    news = changed(cluster, before.seen) if before is not None else None
    if before is None or news is None:
        return _Kept(seen(cluster), {name: len(node.readiness) for name, node in cluster.nodes.items()})
    anew = {n: count for n in news if (count := len(cluster.nodes[n].readiness)) != before.pods[n]}
    return _Kept(seen(cluster), {**before.pods, **anew} if anew else before.pods)

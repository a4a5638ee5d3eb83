"""Which records of ended jobs leave the view: for the history, or, kept long enough, for good. Decides only."""

from __future__ import annotations

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.plan.batch import array_lives, is_awaited
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import holding_nodes, in_order

AT_ONCE = 8
"""Records removed in one round at most."""
IN_VIEW = 20
"""Ended jobs that every agent keeps in its view: the newest. Older ones are in the history."""
SHELVED_AT_ONCE = 64
"""Most records that go to the history with one step."""
AFTER = 60.0
"""Seconds from a job's end until its record may go there: who waits for the end looks at the view."""


def outlived(cluster: Cluster, wall: float, keep_for: float, keep: int) -> list[JobRecord]:
    """The oldest few of the ended jobs that ended more than ``keep_for`` seconds, or their own ``ttl``, before ``wall``
    (Unix time), or are not among the ``keep`` that ended last. None on which a node may still run workers."""
    ended = sorted(_ended(cluster), key=lambda job: (job.ended or 0.0, job.order))
    surplus = max(0, len(ended) - keep)
    old = [job for i, job in enumerate(ended) if i < surplus or (job.ended or 0.0) < wall - _kept(job, keep_for)]
    return [job for job in old[: 2 * AT_ONCE] if not holding_nodes(cluster, job)][:AT_ONCE]


def history_room(keep: int) -> int:
    """How many jobs the history may have, of ``keep`` ended ones altogether."""
    return max(0, keep - IN_VIEW)


def due_for_history(cluster: Cluster, wall: float) -> list[JobRecord]:
    """The oldest ended jobs but the newest ``IN_VIEW``, a step's worth. None on which a node may still run workers, nor
    one that somebody wants deleted, or that has a ``ttl``: of the history only age and number are known."""
    ended = sorted(_ended(cluster), key=lambda job: (job.ended or 0.0, job.order))
    surplus = ended[: max(0, len(ended) - IN_VIEW)]
    due = [job for job in surplus if (job.ended or 0.0) < wall - AFTER and not job.control.delete]
    due = [job for job in due if job.spec.ttl is None]
    return [job for job in due[: 2 * SHELVED_AT_ONCE] if not holding_nodes(cluster, job)][:SHELVED_AT_ONCE]


def keeps_history(cluster: Cluster, node: str) -> bool:
    """Whether this node is the one that moves records there: the first live one by name."""
    return next((name for name in in_order(cluster) if cluster.live(name)), "") == node


def _ended(cluster: Cluster) -> list[JobRecord]:
    """None that another job has yet to take note of, or of whose array others live."""
    ended = [job for job in cluster.jobs.values() if job.phase in TERMINAL and job.ended is not None]
    return [job for job in ended if not is_awaited(cluster, job) and not array_lives(cluster, job)]


def _kept(job: JobRecord, keep_for: float) -> float:
    """For how many seconds after its end."""
    return keep_for if job.spec.ttl is None else min(keep_for, job.spec.ttl)

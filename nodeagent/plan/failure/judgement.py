"""The verdict on the fault that ended the generation before.

A fault is *judged* when every other member has answered after it, or is known to be lost: the member that fell silent
first was the cause. Until then its budget entry is provisional and the gang is re-formed all the same; only what would
end the job waits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import get_args

from nodeagent.model.job import BudgetEntry, JobRecord, Outcome
from nodeagent.model.world import Cause, CauseKind
from nodeagent.plan.cluster import Cluster, natural, some
from nodeagent.plan.failure.budget import COUNTS
from nodeagent.plan.failure.faults import Fault, FaultCase, node_fault, reported_fault

MOST_NAMED = 5
"""Nodes that a sentence names one by one."""


def awaited(cluster: Cluster, job: JobRecord) -> tuple[str, ...]:
    """Who has to answer before the fault that ended the last generation is judged. Those who are lost need not; nor
    those who run nothing of it any more (a store that had lost the job forgets who did)."""
    generation = job.generation
    if generation is None or not job.silent:
        return ()
    held = {n for n, life in job.silent.items() if n in generation.holders and not cluster.gone(n, life)}
    return tuple(sorted(held, key=natural))


def judged_when(nodes: Collection[str]) -> str:
    """In words, what a fault that is not judged yet waits for."""
    names = sorted(nodes, key=natural)
    has = "have" if len(names) > 1 else "has"
    return f"judged when {some(names, MOST_NAMED)} {has} answered, or proved to be lost"


def late_fault(cluster: Cluster, job: JobRecord, wall: float) -> Fault | None:
    """What has become known of the fault that ended the generation before, where it is other than what was written
    down, or is a verdict that was waited for; None if there is nothing to do about it.

    A member that is gone and has not answered since was the cause, and costs nothing: the newcomer that failed (see
    ``newcomers.py``) did so for its loss. Else it may be another worker's
    fault than the one that was reported first. What would end the job does so once everybody has answered.
    """
    entry = job.budget.get(str(job.last_number)) if job.budget else None
    of_newcomer = entry is not None and entry.kind == "join_failed"
    if job.generation is None or entry is None or not (of_newcomer or (entry.counts and entry.kind in COUNTS)):
        return None
    lost = sorted((n for n, life in job.silent.items() if cluster.gone(n, life)), key=natural)
    if lost:
        found = node_fault(cluster, job, lost, wall)
        return replace(found, spend=found.spend.model_copy(update={"alone": entry.alone}))
    if of_newcomer:
        return None
    awaits = awaited(cluster, job)
    known = (job.budget, job.last_reports, job.restarts, job.generation.state, awaits)
    fault = cluster.notes.once(f"late:{job.uid}", known, lambda _before: _again(cluster, job, entry, awaits))
    fault = replace(fault, awaits=awaits)
    differs = (fault.cause.kind, fault.cause.node, fault.cause.rank) != (entry.kind, entry.node, entry.rank)
    if job.generation.state == "active":
        return fault if differs or fault.fail != entry.fails else None
    if fault.fail:
        return fault if differs or not entry.fails or not fault.awaits else None
    return fault if entry.fails else None


def judged_cause(job: JobRecord) -> Cause | None:
    """Why the newest generation was formed, as is known by now. Its own ``cause`` is what was known when it was
    proposed; a fault may be judged later (``late_fault``). None if there is no generation."""
    generation, entry = job.generation, job.budget.get(str(job.last_number))
    if (
        generation is None
        or entry is None
        or job.last_number >= generation.number
        or generation.cause.kind not in COUNTS
    ):
        return None if generation is None else generation.cause
    kind: CauseKind = next((kind for kind in get_args(CauseKind) if kind == entry.kind), generation.cause.kind)
    return Cause(kind=kind, text=entry.text, node=entry.node, rank=entry.rank)


def _again(cluster: Cluster, job: JobRecord, entry: BudgetEntry, awaits: tuple[str, ...]) -> Fault:
    """The fault as all later reports make it."""
    number = job.last_number
    case = FaultCase(cluster, job, number, entry.at, entry.wall, awaits)
    found = reported_fault(case, job.last_reports) if entry.kind != "hang" else None
    if found is not None:
        return found
    cause = Cause(kind=_kind(entry), text=entry.text, node=entry.node, rank=entry.rank)
    code = entry.exit if entry.exit is not None else 1
    return Fault(cause, entry, Outcome(code=code, text=entry.text, error=entry.error), entry.fails, entry.ends)


def _kind(entry: BudgetEntry) -> CauseKind:
    """Of an entry that counts, whose kind the model knows as text only."""
    return next(kind for kind in COUNTS if kind == entry.kind)

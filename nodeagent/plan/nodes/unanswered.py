"""Nodes that did not acknowledge a generation of a job in time, or had no memory left for its workers: for how long the
job goes on without each of them, and when it may grow again.

A node can renew its lease and acknowledge nothing: its shim hangs, or there is no agent, only a record that somebody
wrote. Each generation with such a node costs a gang ``form_margin`` without work. So the job remembers it
(``JobRecord.unanswered``), and leaves it out for a time that doubles each time, for as long as it is in the same life
and has acknowledged nothing since. A node whose agent is silent, and whose record says so, is neither waited for nor
remembered: it gets no work anyway, and is as good as before as soon as its agent speaks. A view has this in its nodes'
records, as it has maintenance windows: what is worked out from a view does not depend on its clock. Chooses no nodes.

So it is with a node whose memory others have filled (``failure/memory.py``). To lose workers there costs the job no
restart, and would go on for ever; that the node acknowledges proves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nodeagent.model.job import BudgetEntry, JobRecord, Phase, Unanswered
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.nodes.members import present_members

FIRST, LONGEST = 60.0, 3600.0
"""Seconds for which a node is left out after the first time, and at most; in between they double."""
KEPT = 64
"""Nodes that a job remembers: those of the last times."""
FEW = 2
"""So many times within ``LONGEST`` a job grows on as if nothing had happened: after more it waits, as for one node,
before it grows with any. Else a crowd of such nodes would stop its gang once each."""
WITHOUT: frozenset[Phase] = frozenset({"queued", "holding", "pausing", "paused"})
"""Phases in which a job has no gang that a node could hold up. There a node is tried again at once after the first
time: the job may not start without it, and most of those that are late once answer then."""


def _wait(times: int) -> int:
    """Milliseconds."""
    return millis(min(LONGEST, FIRST * 2 ** (min(times, 16) - 1))) if times > 0 else 0


def _until(job: JobRecord, one: Unanswered) -> int:
    """Served time (ms) at which the node is tried again."""
    return one.at + _wait(one.times - (job.phase in WITHOUT))


def _remembered(job: JobRecord) -> list[Unanswered]:
    """Those that have acknowledged nothing since."""
    generation = job.generation if job.generation is not None and job.generation.state == "active" else None
    return [one for one in job.unanswered if generation is None or one.node not in generation.members]


def doubtful(job: JobRecord) -> frozenset[str]:
    """Nodes that the job takes last, however long ago it was. Does not depend on time."""
    return frozenset(one.node for one in _remembered(job)) if job.unanswered else _NONE


_NONE: frozenset[str] = frozenset()


def left_out(job: JobRecord, nodes: Mapping[str, NodeRecord], served: int) -> dict[str, tuple[Unanswered, int]]:
    """Live or not: nodes that the job leaves out now, with the served time (ms) at which it tries them again. None is a
    member of its present generation."""
    members, found = present_members(job), dict[str, tuple[Unanswered, int]]()
    for one in job.unanswered:
        record = nodes.get(one.node)
        if record is None or record.incarnation.life != one.life or one.node in members:
            continue
        if served < (until := _until(job, one)) and one.at <= served + millis(FIRST):  # later ones no step wrote
            found[one.node] = one, until
    return found


def grows_at(job: JobRecord, served: int) -> int:
    """Served time (ms) before which the job does not grow, whoever could join; 0: it may."""
    since = served - millis(LONGEST)
    times = {one.at for one in job.unanswered if since < one.at <= served + millis(FIRST)}
    at = max(times) + _wait(len(times) - FEW) if len(times) > FEW else 0
    return at if served < at else 0


def in_words(one: Unanswered) -> str:
    """What the node did, as what follows its name."""
    often = {1: "", 2: " twice in a row"}.get(one.times, f" {one.times} times in a row")
    return f"{'had no memory left for its workers' if one.full else 'did not acknowledge a generation in time'}{often}"


def remembered(cluster: Cluster, job: JobRecord, spend: BudgetEntry | None) -> tuple[Unanswered, ...] | None:
    """What the job is to remember from its next generation, or its end, on; None: what it does already. ``spend``: for
    the fault that led to it."""
    generation = job.generation
    late: Mapping[str, str] = {}
    if generation is not None and generation.state == "forming" and cluster.served >= generation.deadline:
        late = {n: life for n, life in generation.missing.items() if n not in generation.holders}
        late = {n: life for n, life in late.items() if cluster.live(n, life) and not cluster.nodes[n].mute}
    full = dict[str, str]()
    if spend is not None and spend.kind == "crowded" and (record := cluster.nodes.get(spend.node)) is not None:
        full = {spend.node: record.incarnation.life}
    late = {**late, **full}
    if not late and not job.unanswered:
        return None
    answered = present_members(job).keys() - (generation.missing if generation is not None else {})
    kept = [one for one in job.unanswered if _counts(cluster, one, answered)]
    before = {(one.node, one.life): one.times for one in kept}
    kept = [one for one in kept if late.get(one.node) != one.life]
    news = [
        Unanswered(node=node, life=life, times=before.get((node, life), 0) + 1, at=cluster.served, full=node in full)
        for node, life in sorted(late.items())
    ]
    found = tuple(sorted((*kept, *news), key=lambda one: one.at)[-KEPT:])  # stable
    return None if found == job.unanswered else found


def _counts(cluster: Cluster, one: Unanswered, answered: Collection[str]) -> bool:
    if one.full:  # for longer than it is left out
        return cluster.served < one.at + 2 * millis(LONGEST)
    if one.node in answered:
        return False
    return cluster.live(one.node, one.life) or cluster.served < one.at + millis(LONGEST)


@dataclass(frozen=True, slots=True)
class Marked:
    """The nodes of a view, as decisions see them, and until when (served time, 0 for ever) that stays so while the
    view does."""

    nodes: Mapping[str, NodeRecord]
    until: int = 0


@dataclass(frozen=True, slots=True)
class _Marks:
    nodes: Mapping[str, NodeRecord]
    jobs: tuple[JobRecord, ...]
    since: int
    marks: Mapping[str, Mapping[str, str]]
    """Node to the jobs (uids) that leave it out, each with why."""
    marked: Marked


def marked(notes: Notes, nodes: Mapping[str, NodeRecord], jobs: Mapping[str, JobRecord], served: int) -> Marked:
    """With ``NodeRecord.unanswered``. The very same records for as long as nothing about them changes."""
    some = notes.once("unanswered jobs", (jobs,), lambda before: _with_some(jobs, before))
    if not some:
        return Marked(nodes)
    return notes.once("unanswered", (nodes, some, served), lambda before: _mark(nodes, some, served, before)).marked


def _with_some(jobs: Mapping[str, JobRecord], before: tuple[JobRecord, ...] | None) -> tuple[JobRecord, ...]:
    found = tuple(job for job in jobs.values() if job.unanswered)
    same = before is not None and len(before) == len(found) and all(a is b for a, b in zip(before, found, strict=True))
    return before if before is not None and same else found


def _mark(nodes: Mapping[str, NodeRecord], jobs: tuple[JobRecord, ...], served: int, before: _Marks | None) -> _Marks:
    same = before is not None and before.nodes is nodes and before.jobs is jobs and before.since <= served
    if before is not None and same and (not before.marked.until or served < before.marked.until):
        return before
    marks, ends = dict[str, dict[str, str]](), list[int]()
    for job in jobs:
        for node, (one, until) in left_out(job, nodes, served).items():
            marks.setdefault(node, {})[job.uid] = f"{in_words(one)}: it is tried again later"
            ends.append(until)
    if before is not None and before.nodes is nodes and before.marks == marks:
        return _Marks(nodes, jobs, served, marks, Marked(before.marked.nodes, min(ends, default=0)))
    if not marks:
        return _Marks(nodes, jobs, served, marks, Marked(nodes))
    found = dict(nodes)
    for node, why in marks.items():
        old = before.marked.nodes.get(node) if before is not None and before.nodes.get(node) is nodes[node] else None
        known = old is not None and old.unanswered == why
        found[node] = old if old is not None and known else nodes[node].model_copy(update={"unanswered": why})
    return _Marks(nodes, jobs, served, marks, Marked(found, min(ends)))

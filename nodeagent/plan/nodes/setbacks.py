"""What a job remembers of nodes that were no good to it: for how long it goes on without each of them, and when it may
grow again.

A node may hold a lease, say that it is ready, and still be no good: its agent acknowledges nothing (or there is none,
only a record that somebody wrote), what starts there dies at once, or it is lost again as soon as it is back. Each time
costs a gang a stop, and no budget ends that: membership costs nothing. So the job remembers it
(``JobRecord.setbacks``), and leaves the node out for a time that doubles each time. One rule for all kinds; ``KINDS``
has what differs. Whether a worker's failure was its node's is ``failure/newcomers.py``'s. A view has all this in its
nodes' records, as it has maintenance windows: what is worked out from a view does not depend on its clock. Chooses no
nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from nodeagent.model.job import BudgetEntry, JobRecord, Phase, Setback, SetbackKind
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause, CauseKind, Generation, Member
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.nodes.health import sick_members
from nodeagent.plan.nodes.members import present_members

FIRST, LONGEST = 60.0, 3600.0
"""Seconds for which a node is left out after the first time, and at most; in between they double."""
NEW = 600.0
"""Seconds for which a node that joined a gang that had run is a newcomer."""
KEPT = 64
"""Setbacks that a job remembers: the last ones."""
FEW = 2
"""So many times within ``LONGEST`` a job grows on as if nothing had happened: after more it waits, as for one node,
before it grows with any. Else a crowd of such nodes would stop its gang once each."""
FAILED: frozenset[CauseKind] = frozenset({"worker_failed", "collective", "pod_failed"})
"""Faults that may be those of the node of the worker that is blamed."""
WITHOUT: frozenset[Phase] = frozenset({"queued", "holding", "pausing", "paused"})
"""Phases in which a job has no gang that a node could stop."""


@dataclass(frozen=True, slots=True)
class _Kind:
    words: str
    """What the node did, as what follows its name."""
    of_life: bool = False
    """Another life of the node has no part in it: who starts an agent anew has mended it."""
    once: bool = False
    """The first time the node is not left out yet: it joins after the cool-down, as any other."""
    spared: float = 0.0
    """So many times count for nothing where the job has no gang: it may not start without the node."""


KINDS: Mapping[SetbackKind, _Kind] = {
    "unanswered": _Kind("did not acknowledge a generation in time", of_life=True, spared=1.0),
    "crowded": _Kind("had no memory left for its workers", of_life=True, spared=1.0),
    "runtime": _Kind("could not start a container", of_life=True, spared=1.0),
    "failed": _Kind(f"failed within {NEW / 60:g} min of joining, right after a start", spared=1.0),
    "lost": _Kind("was lost soon after it had joined", once=True, spared=math.inf),
    "unfit": _Kind("turned unfit soon after it had joined", once=True, spared=math.inf),
}
"""``unanswered``: most that are late once answer the second time, and each time costs ``form_margin``. ``crowded``: as
long as others fill the memory (``failure/blame.py``), which costs the job no restart, and would go on for ever.
``runtime``: what keeps podman from it may pass at once, or never. ``failed``: each time that the job cannot go on
without the node costs a restart. ``lost``, ``unfit``: a job that stands loses nothing by trying."""


def newcomer(member: Member, served: int) -> bool:
    """It joined a gang that had run before, not long ago."""
    return member.joined > 0 and served - member.joined <= millis(NEW)


def joined_at(job: JobRecord, node: str, life: str, served: int) -> int:
    """``Member.joined`` of a node that is to be a member of the job's next generation."""
    if job.active is None or job.generation is None:
        return 0
    before = job.generation.members.get(node)
    if before is None or before.life != life:
        return max(served, 1)
    return before.joined if newcomer(before, served) else 0


def _wait(times: float) -> int:
    """Milliseconds."""
    return millis(min(LONGEST, FIRST * 2 ** (min(times, 16) - 1))) if times > 0 else 0


def _until(job: JobRecord, one: Setback) -> int:
    """Served time (ms) at which the node is tried again."""
    kind = KINDS[one.kind]
    return one.at + _wait(one.times - kind.once - (kind.spared if job.phase in WITHOUT else 0))


def doubtful(job: JobRecord) -> frozenset[str]:
    """Nodes that the job takes last, however long ago it was. Does not depend on time."""
    if not job.setbacks:
        return _NONE
    generation = job.generation if job.generation is not None and job.generation.state == "active" else None
    return frozenset(one.node for one in job.setbacks if generation is None or one.node not in generation.members)


_NONE: frozenset[str] = frozenset()


def left_out(job: JobRecord, nodes: Mapping[str, NodeRecord], served: int) -> dict[str, tuple[Setback, int]]:
    """Live or not: nodes that the job leaves out now, with the served time (ms) at which it tries them again. None is a
    member of its present generation."""
    members, found = present_members(job), dict[str, tuple[Setback, int]]()
    for one in job.setbacks:
        record = nodes.get(one.node)
        if record is None or one.node in members or (one.life and record.incarnation.life != one.life):
            continue
        until = _until(job, one)
        if one.at > served + millis(FIRST) or served >= until:  # a time as far ahead no step wrote
            continue
        if one.node not in found or found[one.node][1] < until:
            found[one.node] = one, until
    return found


def grows_at(job: JobRecord, served: int) -> int:
    """Served time (ms) before which the job does not grow, whoever could join; 0: it may."""
    since = served - millis(LONGEST)
    some = (one for one in job.setbacks if one.times > KINDS[one.kind].once)
    times = {one.at for one in some if since < one.at <= served + millis(FIRST)}
    at = max(times) + _wait(len(times) - FEW) if len(times) > FEW else 0
    return at if served < at else 0


def in_words(job: JobRecord, one: Setback) -> str:
    """What the node did, as what follows its name."""
    often = {1: "", 2: " twice in a row"}.get(one.times, f" {one.times} times in a row")
    known = [e for e in job.budget.values() if e.kind == "runtime_failed" and e.node == one.node]
    last = max(known, key=lambda e: e.at, default=None) if one.kind == "runtime" else None
    return f"{KINDS[one.kind].words}{often}" + (f" ({last.text})" if last is not None else "")


def remembered(
    cluster: Cluster, job: JobRecord, stay: Collection[str], cause: Cause | None, spend: BudgetEntry | None
) -> tuple[Setback, ...] | None:
    """What the job is to remember from a step on that leaves its generation; None: what it does already. ``stay``: the
    members of the next one; ``cause``: why there is one; ``spend``: for the fault that led to it."""
    generation = job.generation
    if generation is None:
        return None
    news = {
        (one.node, one.kind, one.life): one
        for one in chain(
            _late(cluster, generation),
            _left(cluster, generation, stay, cause),
            _crowded(cluster, spend),
            _uncontained(cluster, generation),
        )
    }
    if not news and not job.setbacks:
        return None
    innocent = _acquitted(job, spend)
    found_before = (one for one in job.setbacks if (one.node, one.kind) != (innocent, "failed"))
    kept = [one for one in found_before if not _made_good(cluster, job, one)]
    for i, one in enumerate(kept):
        if (again := news.pop((one.node, one.kind, one.life), None)) is not None:
            kept[i] = again.model_copy(update={"times": one.times + 1})
    new = sorted(news.values(), key=lambda one: (one.node, one.kind))
    found = tuple(sorted((*kept, *new), key=lambda one: one.at)[-KEPT:])  # stable
    return None if found == job.setbacks else found


def _acquitted(job: JobRecord, spend: BudgetEntry | None) -> str:
    """The newcomer that was taken for the one at fault, where it is known by now that a lost node was; else empty."""
    before = job.budget.get(str(job.last_number))
    is_lost = spend is not None and spend.kind == "node_lost"
    return before.node if is_lost and before is not None and before.kind == "join_failed" else ""


def _late(cluster: Cluster, generation: Generation) -> Iterator[Setback]:
    """Of those that have not acknowledged in time. Who is still stopping older workers may take longer."""
    if generation.state != "forming" or cluster.served < generation.deadline:
        return
    for node, life in generation.missing.items():
        if node not in generation.holders and cluster.live(node, life) and not cluster.nodes[node].mute:
            yield Setback(node=node, kind="unanswered", life=life, times=1, at=cluster.served)


def _crowded(cluster: Cluster, spend: BudgetEntry | None) -> Iterator[Setback]:
    if spend is not None and spend.kind == "crowded" and (record := cluster.nodes.get(spend.node)) is not None:
        life = record.incarnation.life
        yield Setback(node=spend.node, kind="crowded", life=life, times=1, at=cluster.served)


def _uncontained(cluster: Cluster, generation: Generation) -> Iterator[Setback]:
    if generation.state == "active":
        for node in runtime_failed(generation):
            yield Setback(node=node, kind="runtime", life=generation.members[node].life, times=1, at=cluster.served)


def runtime_failed(generation: Generation) -> tuple[str, ...]:
    """Members on which podman could not start a container, by rank."""
    reports = generation.reports
    return tuple(m.node for m in generation.ordered() if m.node in reports and reports[m.node].runtime_failed)


def _left(cluster: Cluster, generation: Generation, stay: Collection[str], cause: Cause | None) -> Iterator[Setback]:
    """Of newcomers that the gang has lost, or goes on without."""
    if generation.state == "ended":
        return
    sick = {one.node for one in sick_members(cluster, generation)[0]}
    failed = cause.node if cause is not None and cause.kind in {*FAILED, "join_failed"} else ""
    early = generation.state == "active" and cluster.served - generation.since <= millis(cluster.timing.early)
    for node, member in generation.members.items():
        if not newcomer(member, cluster.served):
            continue
        if cluster.gone(node, member.life):
            yield Setback(node=node, kind="lost", times=1, at=cluster.served)
        elif node == failed and early and node not in stay:
            yield Setback(node=node, kind="failed", times=1, at=cluster.served)
        elif node in sick and node not in stay:
            yield Setback(node=node, kind="unfit", times=1, at=cluster.served)


def _made_good(cluster: Cluster, job: JobRecord, one: Setback) -> bool:
    """The node has done since what it had not, or it is long ago."""
    if one.kind == "crowded":  # that it acknowledges, or trains, proves nothing of its memory
        return cluster.served >= one.at + 2 * millis(LONGEST)
    member, generation = present_members(job).get(one.node), job.generation
    if member is not None and generation is not None and one.kind == "unanswered":
        return one.node not in generation.missing
    if member is not None and generation is not None and one.kind == "runtime":
        ran = generation.state == "active" and cluster.served - generation.since >= millis(cluster.timing.early)
        return ran and one.node not in runtime_failed(generation)
    if member is not None and not newcomer(member, cluster.served):
        return True
    lives = bool(one.life) and cluster.live(one.node, one.life)
    return not lives and cluster.served >= one.at + 2 * millis(LONGEST)


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
    """With ``NodeRecord.left_out``. The very same records for as long as nothing about them changes."""
    some = notes.once("setback jobs", (jobs,), lambda before: _with_some(jobs, before))
    if not some:
        return Marked(nodes)
    return notes.once("setbacks", (nodes, some, served), lambda before: _mark(nodes, some, served, before)).marked


def _with_some(jobs: Mapping[str, JobRecord], before: tuple[JobRecord, ...] | None) -> tuple[JobRecord, ...]:
    found = tuple(job for job in jobs.values() if job.setbacks)
    same = before is not None and len(before) == len(found) and all(a is b for a, b in zip(before, found, strict=True))
    return before if before is not None and same else found


def _mark(nodes: Mapping[str, NodeRecord], jobs: tuple[JobRecord, ...], served: int, before: _Marks | None) -> _Marks:
    same = before is not None and before.nodes is nodes and before.jobs is jobs and before.since <= served
    if before is not None and same and (not before.marked.until or served < before.marked.until):
        return before
    marks, ends = dict[str, dict[str, str]](), list[int]()
    for job in jobs:
        for node, (one, until) in left_out(job, nodes, served).items():
            marks.setdefault(node, {})[job.uid] = f"{in_words(job, one)}: it is tried again later"
            ends.append(until)
    if before is not None and before.nodes is nodes and before.marks == marks:
        return _Marks(nodes, jobs, served, marks, Marked(before.marked.nodes, min(ends, default=0)))
    if not marks:
        return _Marks(nodes, jobs, served, marks, Marked(nodes))
    found = dict(nodes)
    for node, why in marks.items():
        old = before.marked.nodes.get(node) if before is not None and before.nodes.get(node) is nodes[node] else None
        known = old is not None and old.left_out == why
        found[node] = old if old is not None and known else nodes[node].model_copy(update={"left_out": why})
    return _Marks(nodes, jobs, served, marks, Marked(found, min(ends)))

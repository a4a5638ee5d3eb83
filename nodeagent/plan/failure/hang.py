"""Does a gang hang, and who hangs: from what its pods tell of their workers, when some see no progress.

A worker's reported progress is believed; without that a gang counts as hanging only when nothing can be going on. The
worker to blame is the one that did not arrive where the others wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nodeagent.model.job import BudgetEntry, JobRecord
from nodeagent.model.pod import RankFacts
from nodeagent.model.timing import millis
from nodeagent.model.world import Generation
from nodeagent.plan.failure.blame import describe_pairs

MOST_IN_A_ROW = 3
"""Restarts for hangs without progress in between; one more hang fails the job."""
LONG_RUN = 10
"""Where no steps are reported: a generation that ran for so many limits has made progress."""
MOST_LINES = 15
"""Ranks that are described one by one."""

_STATES = {
    "stopped": "stopped (SIGSTOP)",
    "blocked": "blocked in the kernel (D state: mostly a disk, file server or driver)",
    "zombie": "its main thread has ended, other threads have not",
    "busy": "computing",
    "idle": "waiting",
}
_HELD = ("stopped", "blocked", "zombie")


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """One worker and its node."""

    node: str
    facts: RankFacts


@dataclass(frozen=True, slots=True)
class Hung:
    """A gang that hangs. ``rank`` None: who of them is not known, and no node is blamed."""

    node: str
    rank: int | None
    text: str
    table: str
    """What each worker does, those to blame first."""
    step: int | None
    """The newest that any worker reported."""
    limit: float
    stalled: float
    """Seconds without progress."""


def find_hang(generation: Generation) -> Hung | None:
    """None: some worker gets on, or may, or not every pod has reported yet."""
    seen = _all_seen(generation)
    if not seen or not _hangs([s.facts for s in seen]):
        return None
    guilty = culprits(seen)
    known = len(guilty) < len(seen) or len(seen) == 1
    limit = max(r.stall.limit for r in generation.reports.values() if r.stall is not None)
    return Hung(
        node=guilty[0].node if known else "",
        rank=guilty[0].facts.rank if known else None,
        text=_text(guilty, len(seen), known, limit) + _done(generation, seen) + describe_pairs(generation.reports),
        table=_table(guilty, seen, known),
        step=max((s.facts.step for s in seen if s.facts.step is not None), default=None),
        limit=limit,
        stalled=max(s.facts.age for s in guilty),
    )


def watching(generation: Generation) -> str:
    """While some pods see no progress and it is no hang yet: what is known; else empty."""
    stalls = {n: r.stall for n, r in sorted(generation.reports.items()) if r.stall is not None and r.state == "running"}
    suspects = [n for n, stall in stalls.items() if stall.suspects]
    if not suspects:
        return ""
    silent_nodes = [n for n in _living(generation) if n not in stalls]
    if silent_nodes:
        return f"no progress seen on {', '.join(suspects)}; waits for what {', '.join(silent_nodes)} sees"
    return f"no progress seen on {', '.join(suspects)}, but other workers of the gang get on, or may"


def _living(generation: Generation) -> list[str]:
    """Members whose workers have not all ended well."""
    done = {n for n, r in generation.reports.items() if r.state == "succeeded"}
    return [m.node for m in generation.ordered() if m.node not in done]


def _all_seen(generation: Generation) -> list[SeenWorker]:
    """Every living worker; none if a pod has not reported, or none of them suspects anything."""
    seen, suspects = [], False
    for node in _living(generation):
        report = generation.reports.get(node)
        if report is None or report.stall is None or report.state != "running":
            return []
        suspects |= report.stall.suspects
        seen += [SeenWorker(node, facts) for facts in report.stall.ranks]
    return sorted(seen, key=lambda s: s.facts.rank) if suspects else []


def _hangs(ranks: Sequence[RankFacts]) -> bool:
    idle = all(r.quiet for r in ranks) or any(r.frozen for r in ranks)
    reported = [r.overdue for r in ranks if r.overdue is not None]
    if reported:
        return all(o == "long" for o in reported) or (idle and "no" not in reported)
    return idle and all(r.silent for r in ranks)


def culprits(seen: Sequence[SeenWorker]) -> list[SeenWorker]:
    """Those who did not arrive; all of them when nothing tells them apart."""
    held = [s for s in seen if s.facts.state in _HELD]
    if 0 < len(held) < len(seen):
        return held
    left = _behind(list(seen))
    waiting = [s for s in seen if s.facts.waits]
    if waiting:
        left = [s for s in left if s.facts.waits is False] or [s for s in left if not s.facts.waits] or left
    left = _odd(left, lambda s: s.facts.state)
    return _odd(left, lambda s: s.facts.site)


def _behind(seen: list[SeenWorker]) -> list[SeenWorker]:
    """Those at the lowest step; or the few that reported none, while most did."""
    silent = [s for s in seen if s.facts.step is None]
    if 0 < len(silent) < len(seen) - len(silent):
        return silent
    steps = [s.facts.step for s in seen if s.facts.step is not None]
    if not steps or min(steps) == max(steps):
        return seen
    return [s for s in seen if s.facts.step == min(steps)]


def _odd(seen: list[SeenWorker], trait: Callable[[SeenWorker], str]) -> list[SeenWorker]:
    """The smallest group by this trait, if it is alone in being so small and the others are more."""
    groups = Counter(map(trait, seen)).most_common()
    if len(groups) < 2 or groups[-1][1] == groups[-2][1]:
        return seen
    return [s for s in seen if trait(s) == groups[-1][0]]


def _text(guilty: Sequence[SeenWorker], world: int, known: bool, limit: float) -> str:
    if not known:
        return f"no worker has made progress for {limit:g} s, and who hangs is not known: they all do alike"
    first = guilty[0]
    others = [s for s in guilty[1:] if s.facts.state == first.facts.state]
    where = f", in {first.facts.site}" if first.facts.site else ""
    at = f" at step {first.facts.step}" if first.facts.step is not None else ""
    text = f"rank {first.facts.rank} on {first.node} hangs{at}: {_STATES[first.facts.state]}{where}"
    if others:
        text += f" (so do ranks {', '.join(str(s.facts.rank) for s in others[:MOST_LINES])})"
    waits = world - len(guilty)
    if waits:
        text += f"; the other {waits} wait" if waits > 1 else "; the other one waits"
    return f"{text}; no progress for {limit:g} s"


def _done(generation: Generation, seen: Sequence[SeenWorker]) -> str:
    """How many have ended, and so well: a gang with one that did not has failed. In a job of several roles a pod that
    runs does not tell of those either that are yet to be started."""
    others = generation.world_size - len(seen)
    if others <= 0:
        return ""
    reports = generation.reports
    done = sum(m.workers for m in generation.ordered() if m.node in reports and reports[m.node].state == "succeeded")
    waits = done < others and any(m.places for m in generation.ordered())
    return f"; all others ({others}) have exited 0" + (", or wait for their start" if waits else "")


def _table(guilty: Sequence[SeenWorker], seen: Sequence[SeenWorker], known: bool) -> str:
    named = {
        (s.node, s.facts.rank) for s in guilty
    }  # of thousands of ranks, comparing each with each would take seconds
    order = [*guilty, *(s for s in seen if (s.node, s.facts.rank) not in named)]
    lines = [_line(s, known and (s.node, s.facts.rank) in named) for s in order[:MOST_LINES]]
    if len(order) > MOST_LINES:
        lines.append(f"and {len(order) - MOST_LINES} more")
    return "\n".join(lines)


def _line(seen: SeenWorker, guilty: bool) -> str:
    facts = seen.facts
    words: list[str] = [facts.state]
    if facts.step is not None:
        words.append(f"step {facts.step}")
    if facts.phase:
        words.append(f"phase {facts.phase}")
    words.append(f"{facts.age:g} s without progress")
    if facts.waits:
        words.append("waits for others")
    if facts.site:
        words.append(f"in {facts.site}")
    line = f"{'hangs: ' if guilty else ''}rank {facts.rank} on {seen.node}: {', '.join(words)}"
    return line + (f"; stacks: {facts.stacks}" if facts.stacks else "")


# --- one after the other --------------------------------------------------------------------------


def got_further(job: JobRecord, hung: Hung, served: int) -> bool:
    """Since the hang before, if there was one: a newer step, or where none is reported, a long run."""
    before = next(iter(_hangs_before(job)), None)
    if before is None or job.generation is None:
        return True
    if hung.step is not None and before.step is not None:
        return hung.step > before.step
    return served - job.generation.since >= millis(LONG_RUN * hung.limit)


def in_a_row(job: JobRecord) -> int:
    """Hangs of the generations before, back to the last one that came after progress."""
    count = 0
    for spend in _hangs_before(job):
        count += 1
        if spend.progressed:
            break
    return count


def _hangs_before(job: JobRecord) -> Iterable[BudgetEntry]:
    """Newest first, up to a fault of another kind; what cost nothing (joins, lost nodes) does not part them."""
    for _, spend in sorted(job.budget.items(), key=lambda item: -int(item[0])):
        if spend.kind == "hang":
            yield spend
        elif spend.counts:
            return

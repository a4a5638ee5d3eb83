"""The restart budget: how many faults a job may have in a window, and how long it waits before it starts again."""

from __future__ import annotations

from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.model.timing import millis


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one more fault is within the budget, and the wait before the next generation, in ms."""

    allowed: bool
    delay_ms: int
    spent: int
    """Spent in the window, this one included."""
    why: str


def spent(job: JobRecord, served: int) -> int:
    """Budget entries that count, no older than the window (served time)."""
    since = served - millis(job.spec.restarts.window)
    return sum(1 for entry in job.budget.values() if entry.counts and entry.at >= since)


def judge(job: JobRecord, served: int) -> Verdict:
    """Judge one more fault that counts."""
    limits = job.spec.restarts
    count = spent(job, served) + 1
    window = f"{limits.window:g} s"
    if count > limits.max:
        return Verdict(False, 0, count, f"restart budget spent: {limits.max} restarts within {window}")
    return Verdict(True, _delay(count, limits.backoff_min, limits.backoff_max), count,
                   f"restart {count} of {limits.max} within {window}")  # fmt: skip


def _delay(count: int, low: float, high: float) -> int:
    """The first two restarts wait the least; then the wait doubles up to the most."""
    if count <= 2:
        return millis(min(low, high))
    return millis(min(high, max(low, 0.5) * 2.0 ** min(count - 3, 32)))

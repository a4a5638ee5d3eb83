"""What the figures have to be: each goal is one number from the results and its bound. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.speed import ratios
from nodeagent.model.timing import Timing

Results = dict[str, Any]
LEASE = Timing().lease


@dataclass(frozen=True, slots=True)
class Goal:
    """One thing that must hold."""

    text: str
    phase: str
    value: Callable[[Results], float]
    bound: float
    at_least: bool = False
    unit: str = ""

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def wanted(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.bound:g}{self.unit}"


def medians(results: Results, phase: str) -> tuple[float, float]:
    """Of nodeagent and of torchrun."""
    ours: list[float] = results[phase]["nodeagent"]
    torchrun: list[float] = results[phase]["torchrun"]
    return statistics.median(ours), statistics.median(torchrun)


def times_faster(results: Results, phase: str) -> float:
    ours, torchrun = medians(results, phase)
    return torchrun / ours


def speed_ratio(results: Results) -> float:
    """The median over all turns."""
    rates = results["steps_per_second"]
    return statistics.median(ratios(rates["nodeagent"], rates["torchrun"]))


def _worst_agent(results: Results, what: str) -> float:
    return max(float(results["at_rest"][state]["agent"][what]) for state in ("no job", "8 workers"))


GOALS = (
    Goal(
        "worker killed: times faster than torchrun, tuned",
        "worker_killed",
        lambda r: times_faster(r, "worker_killed"),
        15,
        at_least=True,
        unit="x",
    ),
    Goal(
        f"node killed: median beyond the lease of {LEASE:g} s",
        "node_killed",
        lambda r: medians(r, "node_killed")[0] - LEASE,
        0.5,
        unit=" s",
    ),
    Goal("third node joins: median standstill", "node_joins", lambda r: medians(r, "node_joins")[0], 1, unit=" s"),
    Goal("steps per second against bare torchrun", "steps_per_second", speed_ratio, 0.99, at_least=True, unit="x"),
    Goal("memory of an agent (PSS)", "at_rest", lambda r: _worst_agent(r, "pss_mb"), 60, unit=" MB"),
    Goal("CPU of an agent", "at_rest", lambda r: _worst_agent(r, "cpu_percent"), 0.5, unit=" % of a core"),
)


def judged(results: Results) -> list[tuple[Goal, float, bool]]:
    """Each goal whose phase has run, its value, and whether it is met."""
    found = [(goal, goal.value(results)) for goal in GOALS if goal.phase in results]
    return [(goal, value, goal.met(value)) for goal, value in found]

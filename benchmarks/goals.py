"""What the figures have to be: each goal is one number from the results and its bound. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.phases import LEASE_PROCESS, NO_JOB, PROBES, WATCHED
from benchmarks.recovery import HANGING
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


def median(results: Results, phase: str) -> float:
    """Of nodeagent."""
    ours: list[float] = results[phase]["nodeagent"]
    return statistics.median(ours)


def p95(values: Sequence[float]) -> float:
    """The value that 95 % do not exceed; the largest of fewer than 20."""
    return sorted(values)[-(len(values) // 20) - 1]


def times_faster(results: Results, phase: str) -> float:
    torchrun: list[float] = results[phase]["torchrun"]
    return statistics.median(torchrun) / median(results, phase)


def most_lost(results: Results, phase: str) -> float:
    """Steps, in the worst trial."""
    lost: list[int] = results[phase]["nodeagent_lost"]
    return max(lost)


def speed_ratio(results: Results) -> float:
    """The median over all turns."""
    rates = results["steps_per_second"]
    return statistics.median(ratios(rates["nodeagent"], rates["torchrun"]))


def _worst_agent(results: Results, what: str) -> float:
    """Of a node's agent and its lease process together."""
    states = [results["at_rest"][state] for state in (NO_JOB, WATCHED, "8 workers")]
    return max(float(kinds["agent"][what]) + float(kinds[LEASE_PROCESS][what]) for kinds in states)


def _lease_memory(results: Results) -> float:
    return max(float(results["at_rest"][state][LEASE_PROCESS]["pss_mb"]) for state in (NO_JOB, WATCHED, "8 workers"))


def _probes_memory(results: Results) -> float:
    """Of both of a node."""
    return sum(float(results["at_rest"][WATCHED][probe]["pss_mb"]) for probe in PROBES)


def _watching(results: Results) -> float:
    """Of a node: both probes, and what its agent uses beyond one that has no GPU to watch."""
    with_gpus, without = results["watching"][WATCHED], results["watching"][NO_JOB]
    return sum(float(with_gpus[kind]) for kind in ("agent", *PROBES)) - float(without["agent"])


def _median(text: str, phase: str, bound: float, beyond: float = 0.0) -> Goal:
    return Goal(text, phase, lambda r: median(r, phase) - beyond, bound, unit=" s")


def _no_step(text: str, phase: str) -> Goal:
    return Goal(text, phase, lambda r: most_lost(r, phase), 0, unit=" steps")


HANG = HANGING.hang or 0.0
GOALS = (
    _median("worker killed: median", "worker_killed", 0.075),
    Goal("worker killed: p95", "worker_killed", lambda r: p95(r["worker_killed"]["nodeagent"]), 0.15, unit=" s"),
    Goal(
        "worker killed: times faster than torchrun, tuned",
        "worker_killed",
        lambda r: times_faster(r, "worker_killed"),
        45,
        at_least=True,
        unit="x",
    ),
    _median("worker killed, no pre-forked worker left: median", "empty_pool", 0.15),
    _median(f"worker hung: median beyond the limit of {HANG:g} s", "worker_hung", 0.5, beyond=HANG),
    _median(f"node killed: median beyond the lease of {LEASE:g} s", "node_killed", 0.2, beyond=LEASE),
    _median(f"rank 0's node killed: median beyond the lease of {LEASE:g} s", "first_node_killed", 0.2, beyond=LEASE),
    _median("agent killed and started again: median standstill", "agent_killed", 0.05),
    _median("third node joins: median standstill", "node_joins", 0.2),
    _no_step("third node joins: most steps lost", "node_joins"),
    _median("node drained: median standstill", "drain", 0.3),
    _no_step("node drained: most steps lost", "drain"),
    _median("scaled down: median standstill", "scale_down", 0.3),
    _no_step("scaled down: most steps lost", "scale_down"),
    _median("scaled up: median standstill", "scale_up", 0.2),
    _no_step("scaled up: most steps lost", "scale_up"),
    _median("borrowed node given back: median standstill", "give_back", 0.3),
    _no_step("borrowed node given back: most steps lost", "give_back"),
    _median("node given up to another queue: median standstill", "shrink", 0.3),
    _no_step("node given up to another queue: most steps lost", "shrink"),
    _no_step("training stopped for another queue: most steps lost", "preempt"),
    _median("sick GPU out of the running job: median", "gpu_evicted", 1.0),
    _no_step("paused and resumed: most steps lost", "resume"),
    Goal("steps per second against bare torchrun", "steps_per_second", speed_ratio, 0.99, at_least=True, unit="x"),
    Goal(
        "lease process: from its start to its first grant, median",
        "lease_start",
        lambda r: statistics.median(r["lease_start"]["seconds"]),
        0.05,
        unit=" s",
    ),
    Goal("memory of a lease process (PSS)", "at_rest", _lease_memory, 8, unit=" MB"),
    Goal(
        "memory of an agent and its lease process (PSS)", "at_rest", lambda r: _worst_agent(r, "pss_mb"), 80, unit=" MB"
    ),
    Goal(
        "CPU of an agent and its lease process",
        "at_rest",
        lambda r: _worst_agent(r, "cpu_percent"),
        0.5,
        unit=" % of a core",
    ),
    Goal("memory of a node's health probes (PSS)", "at_rest", _probes_memory, 15, unit=" MB"),
    Goal("CPU that watching 8 GPUs takes, the agent's part included", "watching", _watching, 0.2, unit=" % of a core"),
)


def judged(results: Results) -> list[tuple[Goal, float, bool]]:
    """Each goal whose phase has run, its value, and whether it is met."""
    run = [goal for goal in GOALS if goal.phase in results and results[goal.phase].get("nodeagent", True)]
    found = [(goal, _value(goal, results)) for goal in run]
    return [(goal, value, goal.met(value)) for goal, value in found if value is not None]


def _value(goal: Goal, results: Results) -> float | None:
    """None: results of an earlier run lack a kind of process that is measured now."""
    try:
        return goal.value(results)
    except KeyError:
        return None

"""The benchmarks' arithmetic: what counts as a re-formed gang, a standstill, a ratio, a goal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import leasecurve
from benchmarks.goals import judged, p95
from benchmarks.phases import LEASE_PROCESS, NO_JOB, WATCHED
from benchmarks.plot import svg
from benchmarks.report import commands, tables
from benchmarks.speed import ratios
from benchmarks.steplog import Gang, NotReachedError, StepLog, longest_pause, standstill, steps_lost, steps_per_second


def rows(ours: list[float], torchrun: list[float], instead: str = "", lost: int = 0) -> dict[str, Any]:
    found = {"nodeagent": ours, "nodeagent_lost": [lost for _ in ours]}
    return found | {"torchrun": torchrun, "torchrun_lost": [3 for _ in torchrun], "torchrun_instead": instead}


COST = {"processes": 2, "pss_mb": 50.0, "cpu_percent": 0.4}
LEASE = {"processes": 2, "pss_mb": 7.0, "cpu_percent": 0.05}
PROBE = {"processes": 2, "pss_mb": 7.0, "cpu_percent": 0.09}
RESULTS: dict[str, Any] = {
    "floor": {"seconds": [0.1, 0.1]},
    "worker_killed": rows([0.1, 0.2, 0.3], [8.0, 10.0]),
    "empty_pool": {"nodeagent": [], "nodeagent_lost": [], "nodeagent_instead": "the machine is too busy for it"},
    "node_killed": rows([3.1], [6.0]),
    "first_node_killed": rows([3.1], [], "its job is dead"),
    "node_joins": rows([0.5], [6.0]),
    "drain": rows([0.1], [5.0], lost=1),
    "shrink": rows([0.31], []),
    "preempt": rows([0.2], [], lost=1),
    "torchrun_default": {"default": [], "default_lost": [], "default_instead": "no step within 60 s"},
    "steps_per_second": {"nodeagent": [99.0, 99.0], "torchrun": [100.0, 100.0, 100.0]},
    "at_rest": {
        NO_JOB: {"agent": COST, LEASE_PROCESS: LEASE},
        WATCHED: {"agent": COST, LEASE_PROCESS: LEASE, "GPU probe": PROBE, "host probe": PROBE | {"pss_mb": 9.0}},
        "8 workers": {"agent": COST | {"pss_mb": 74.0}, LEASE_PROCESS: LEASE},
    },
    "watching": {
        NO_JOB: {"agent": 0.2, "redis (one per cluster)": 9.0},
        WATCHED: {"agent": 0.25, "GPU probe": 0.14, "host probe": 0.02, "redis (one per cluster)": 9.0},
    },
}


def write(log: Path, *steps: tuple[int, int, int, float]) -> None:
    with log.open("a") as file:
        for gang, rank, step, mono in steps:
            line = {"gang": gang, "rank": rank, "world": 2, "step": step, "pid": 100 * gang + rank, "mono": mono}
            file.write(json.dumps(line) + "\n")


def test_a_gang_steps_when_its_last_rank_does(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    write(log.path, (1, 0, 1, 1.0), (1, 1, 1, 1.5), (1, 0, 2, 2.0))
    assert log.wait(2, 0).first_step == 1.5

    write(log.path, (2, 1, 1, 9.0))
    with pytest.raises(NotReachedError, match="2 ranks, 1 stepped"):
        log.wait(2, 0, after=1)

    write(log.path, (2, 0, 1, 9.25))
    again = log.wait(2, 0, after=1)
    assert (again.number, again.first_step, again.pids) == (2, 9.25, {0: 200, 1: 201})


def test_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    write(log.path, (1, 0, 1, 1.0))
    text = log.path.read_text()
    log.path.write_text(text + text[:20])
    assert log.newest().steps == [1.0]
    log.path.write_text(text + text)
    assert log.newest().steps == [1.0, 1.0]


def test_a_standstill_is_the_longest_pause_over_all_gangs_in_between() -> None:
    old = Gang(1, 2, steps=[0.0, 1.0, 2.0, 3.0])
    between = Gang(2, 2, steps=[5.0, 6.0])
    new = Gang(3, 3, steps=[10.0, 11.0])
    assert standstill([old, between, new], old, new) == 3.0


def test_rates() -> None:
    gang = Gang(1, 2, steps=[number / 10 for number in range(100)])
    assert steps_per_second(gang, 2.05, 5.05) == pytest.approx(10)
    with pytest.raises(NotReachedError):
        steps_per_second(gang, 2.01, 2.15)
    assert ratios([50.0, 100.0], [100.0, 100.0, 300.0]) == [0.5, 0.5]


def test_p95() -> None:
    assert p95(range(1, 21)) == 19
    assert p95([3, 1, 2]) == 3


def test_goals_are_judged_and_shown() -> None:
    met = {goal.text: ok for goal, _, ok in judged(RESULTS)}
    assert {text for text, ok in met.items() if not ok} == {
        "worker killed: median",
        "worker killed: p95",
        "third node joins: median standstill",
        "node drained: most steps lost",
        "node given up to another queue: median standstill",
        "training stopped for another queue: most steps lost",
        "memory of an agent and its lease process (PSS)",
        "memory of a node's health probes (PSS)",
        "CPU that watching 8 GPUs takes, the agent's part included",
    }
    assert met["worker killed: times faster than torchrun, tuned"]
    text = tables(RESULTS)
    assert "**45.0x**" in text
    assert "81 MB | **no** |" in text
    assert "| 0.21 % of a core | **no** |" in text
    assert "| 2.0 | 9.00 |" in text, "times the floor, then torchrun's median"
    assert "its job is dead" in text
    assert "| the machine is too busy for it |" in text
    assert "once: no step within 60 s." in text


def test_a_phase_that_was_not_run_is_not_judged() -> None:
    assert {goal.phase for goal, _, _ in judged({"node_joins": RESULTS["node_joins"]})} == {"node_joins"}


def test_steps_that_are_done_again_are_lost() -> None:
    old, between = Gang(1, 2, lowest=1, highest=17), Gang(2, 2, lowest=11, highest=19)
    assert steps_lost([old, between, Gang(3, 2, lowest=11)], old, Gang(3, 2, lowest=11)) == 9
    assert steps_lost([old, between], between, Gang(3, 2, lowest=20)) == 0


def test_the_longest_pause_counts_where_it_began_before() -> None:
    gang = Gang(1, 2, steps=[0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 20.0])
    assert longest_pause(gang, 3.0, 8.5) == 11.0
    assert longest_pause(gang, 3.0, 7.5) == 3.0


def test_gaps_are_counted_by_how_late_they_are() -> None:
    gaps = leasecurve.Gaps(0.5)
    for gap in (*[0.503] * 98, 0.42, 1.4):
        gaps.add(gap)
    reported = gaps.as_json()
    assert (reported["count"], reported["longest"][-1]) == (100, 1.4)
    assert [leasecurve.over(reported, 0.5, bound) for bound in (0.5, 0.6, 1.39, 1.41)] == [99, 1, 1, 0]
    assert (leasecurve.quantile(reported, 0.5), leasecurve.quantile(reported, 0.999)) == (0.01, 0.9)
    clockwork = {"timing": {"heartbeat": 0.5, "lease": 3.0, "fence": 2.2}, "node_hours": 2.0, "lost": 0, "reformed": 0}
    text = leasecurve.tables(
        {
            "clockworks": [clockwork | {"gaps": reported}],
            "killed": clockwork | {"restarts": [0.7, 0.9, 1.6], "minutes": 2.0},
        }
    )
    assert "was 0.90 s (median of 3; p95 0.90, longest 1.60)" in text
    assert "| 1.5 s | 0.78 s | 0.50 | none seen (below 1.50) |" in text


def test_the_picture_is_xml_and_has_a_bar_for_each_figure() -> None:
    bars = [e for e in ElementTree.fromstring(svg(RESULTS)) if e.tag.endswith("rect")]
    assert len(bars) == 1 + 7 + 4, "the ground, then nodeagent's and torchrun's"


def test_the_commands_name_no_path_of_this_machine() -> None:
    assert str(Path(__file__).parents[3]) not in commands()

"""The benchmarks' arithmetic: what counts as a re-formed gang, a standstill, a ratio, a goal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.goals import judged
from benchmarks.report import commands, p95, tables
from benchmarks.speed import ratios
from benchmarks.steplog import Gang, NotReachedError, StepLog, standstill, steps_per_second

COST = {"processes": 2, "pss_mb": 50.0, "cpu_percent": 0.4}
RESULTS: dict[str, Any] = {
    "worker_killed": {"nodeagent": [0.1, 0.2, 0.3], "torchrun": [4.0, 5.0]},
    "node_killed": {"nodeagent": [3.2], "torchrun": [6.0]},
    "node_joins": {"nodeagent": [0.5], "torchrun": [6.0]},
    "steps_per_second": {"nodeagent": [99.0, 99.0], "torchrun": [100.0, 100.0, 100.0]},
    "at_rest": {"no job": {"agent": COST}, "8 workers": {"agent": COST | {"pss_mb": 61.0}}},
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
    met = {goal.phase + goal.unit: ok for goal, _, ok in judged(RESULTS)}
    assert met == {
        "worker_killedx": True,
        "node_killed s": True,
        "node_joins s": True,
        "steps_per_secondx": True,
        "at_rest MB": False,
        "at_rest % of a core": True,
    }
    text = tables(RESULTS)
    assert "**22.5x**" in text
    assert "61 MB | **no** |" in text


def test_a_phase_that_was_not_run_is_not_judged() -> None:
    assert [goal.phase for goal, _, _ in judged({"node_joins": RESULTS["node_joins"]})] == ["node_joins"]


def test_the_commands_name_no_path_of_this_machine() -> None:
    assert str(Path(__file__).parents[3]) not in commands()

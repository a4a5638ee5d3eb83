"""Hangs of a real job on two nodes: the right rank is named, its stacks are kept, the gang goes on; and a long
evaluation raises no alarm."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest

from tests.e2e.hanging import PLACES, WAYS, hanging_job, make_hang, trial, until_steps
from tests.e2e.support import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(360)]

NODES = 2
TRIALS = int(os.environ.get("NODEAGENT_HANG_TRIALS", "0"))
"""Random hangs of each kind, for a long run: 20 are what is promised."""


@pytest.fixture
def empty(calm: Cluster) -> Cluster:
    """Nothing of another test's training is left."""
    for file in calm.work.iterdir():
        file.unlink()
    return calm


@pytest.mark.parametrize("how", WAYS)
def test_the_rank_that_hangs_is_named_and_the_gang_goes_on(empty: Cluster, how: str) -> None:
    name, rank, place = f"hang-{how}", WAYS.index(how), PLACES[WAYS.index(how) % 3]
    # The limit: more than a busy machine may stand still, or take for a step.
    empty.submit(hanging_job(empty.work, name, hang="{progress: 8s}", steps=10**6))
    first = empty.until_running(name, 2)["generation"]
    until_steps(empty, 8)
    empty.until_workers(name, 4)
    node = make_hang(empty, name, how, rank, place)
    job = empty.until_running(name, 2, above=first)
    assert (job["cause"]["kind"], job["cause"]["rank"], job["cause"]["node"]) == ("hang", rank, node)
    assert f"rank {rank} on {node} hangs at step " in job["cause"]["text"]
    assert (job["restarts"], job["budget"]["used"]) == (1, 1)
    empty.until(lambda: empty.restarts_counted(name) == 1, 10, "a restart is counted")
    generations = {g["number"]: g for g in job["generations"]}
    end = generations[first]["ended_by"]
    rows = end["error"].splitlines()
    assert len(rows) == 4
    assert rows[0].startswith(f"hangs: rank {rank} on {node}: ")
    stacks = [Path(row.partition("; stacks: ")[2]).read_text() for row in rows]
    assert "hanging.py" in stacks[0], rows[0]
    assert all(stacks), "each rank has its file, if only with why there are none"
    assert generations[job["generation"]]["downtime"] > 8
    until_steps(empty, 8)
    output = empty.ctl("describe", name).stdout
    assert "what its workers did:" in output
    assert f"hangs: rank {rank} on {node}: " in output
    empty.ctl("stop", name)


def test_an_evaluation_that_is_reported_raises_no_alarm(empty: Cluster) -> None:
    (empty.work / "evaluate-1").touch()
    empty.submit(hanging_job(empty.work, "evaluates", hang="{progress: 3s}", steps=30))
    job = empty.until_phase("evaluates", "succeeded", 90)
    assert (empty.work / "evaluated").exists(), "8 s, for which the other ranks waited"
    assert (job["generation"], job["restarts"]) == (1, 0)


@pytest.mark.parametrize("how", ["stop", pytest.param("lock", marks=pytest.mark.endurance)])
def test_without_the_helper(empty: Cluster, how: str) -> None:
    """An evaluation in which nobody says a word raises no alarm; a gang in which nothing moves does."""
    (empty.work / "evaluate-1").touch()
    name = f"plain-{how}"
    empty.submit(hanging_job(empty.work, name, hang="{progress: 3s}", steps=200, helper=False))
    empty.until((empty.work / "evaluated").exists, 60, "the evaluation of 8 s is over")
    until_steps(empty, 5)
    job = empty.job(name)
    assert job["restarts"] == 0
    node = make_hang(empty, name, how, 3, "before")
    job = empty.until_running(name, 2, above=job["generation"])
    assert (job["cause"]["kind"], job["cause"]["rank"], job["cause"]["node"]) == ("hang", 3, node)
    empty.until_phase(name, "succeeded", 60)


def test_a_job_that_hangs_at_the_same_step_again_and_again_fails(empty: Cluster) -> None:
    name = "again"
    (empty.work / "hang-always").touch()
    empty.submit(hanging_job(empty.work, name, hang="{progress: 2s}", steps=60, more="restarts: {backoff: 0s}\n"))
    job = empty.until_phase(name, "failed", 120)
    assert job["reason"].startswith("hung 4 times in a row without progress, so it is not started again: rank 1 on n1")
    assert (job["generation"], job["budget"]["used"]) == (4, 4)
    assert [g["ended_by"]["kind"] for g in job["generations"]] == ["hang"] * 4


@pytest.mark.skipif(not TRIALS, reason="long: set NODEAGENT_HANG_TRIALS=20")
@pytest.mark.timeout(3600)
def test_random_trials(empty: Cluster) -> None:
    dice = random.Random(20)
    more = "restarts: {max: 60, window: 1s, backoff: 0s}\n"
    empty.submit(hanging_job(empty.work, "trials", hang="{progress: 2s}", steps=10**6, more=more))
    found = []
    for _ in range(TRIALS):
        for how in WAYS:
            found.append(trial(empty, "trials", how, dice))
            print(found[-1], flush=True)
    assert not [one for one in found if not one["named"]]


OUTLIVES = """
import os
if os.environ["RANK"] == "3" and os.environ["NODEAGENT_GENERATION"] == "1":
    def never_ends():
        os.read(os.pipe()[0], 1)
    never_ends()
"""


def test_a_rank_that_outlives_the_others_success_is_named_and_does_not_stay_for_ever(empty: Cluster) -> None:
    """Without ``hang``: it waits in its last line while all others have exited 0."""
    script = empty.work / "outlives.py"
    script.write_text(OUTLIVES)
    empty.submit(
        f"name: outlives\ncommand: [{json.dumps(sys.executable)}, {script}]\nnodes: 2\nworkers_per_node: 2\n"
        "gpus_per_worker: 0\nfinish: 8s\ngrace: 1s\n"
    )
    empty.until(lambda: list(empty.workers("outlives")) == [3], 60, "the others have ended")
    output = empty.ctl("describe", "outlives").stdout
    assert "nothing is wrong" not in output
    assert (
        "rank 3 on " in output
        and "still runs, others have exited 0; a worker that then does nothing for 8s hangs" in output
    )
    job = empty.until_phase("outlives", "succeeded", 90)
    end = job["generations"][0]["ended_by"]
    assert (end["kind"], end["rank"], job["generation"], job["budget"]["used"]) == ("hang", 3, 2, 1)
    assert "no progress for 8 s; all others (3) have exited 0" in end["text"]
    (row,) = end["error"].splitlines()
    assert "never_ends" in Path(row.partition("; stacks: ")[2]).read_text()

"""Paddle's parameter servers for real: a trainer and a server are killed, a node is evicted, one loses its power. All
four start again and go on from the last checkpoint, and the job is done when the trainers are."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.roles import pids
from tests.e2e.support import ROOT, Cluster
from tests.e2e.test_frameworks import metrics, python_of

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.frameworks, pytest.mark.timeout(600)]

NODES = 3
EXAMPLE = "paddle_ps"
JOB = "paddle-ps"
STEPS = 130
PLACES = ["pserver.0", "pserver.1", "trainer.0", "trainer.1"]
START = 60
"""Seconds: a cold start imports Paddle four times, on machines that are busy."""


def job_of(folder: Path, python: str) -> str:
    """The example's own job file, with this Python, and steps slow enough to be met."""
    job = yaml.safe_load((ROOT / "examples" / EXAMPLE / "job.yaml").read_text())
    script = [python, str(ROOT / "examples" / EXAMPLE / "train.py"), "--steps", str(STEPS), "--step-delay", "0.15"]
    for role in job["roles"].values():
        role["command"] = script
    return yaml.safe_dump(job | {"checkpoint_dir": str(folder)})


def until_it_steps(one: Cluster, folder: Path, nodes: int, above: int) -> dict[str, Any]:
    """Until all places of a newer generation train."""
    job = one.until_running(JOB, nodes, limit=START, above=above)
    one.until(lambda: sorted(pids(one, JOB)) == PLACES, 10, "all places are seen to run")
    before = len(metrics(folder))
    one.until(lambda: len(metrics(folder)) >= before + 12, START, "it makes twelve steps, and so a checkpoint")
    return job


def test_servers_and_trainers_are_killed_evicted_and_lose_a_node(calm: Cluster) -> None:
    python = python_of(EXAMPLE)
    folder = calm.work / "ps.ckpt"
    calm.submit(job_of(folder, python))
    job = until_it_steps(calm, folder, NODES, 0)
    for kills, place in enumerate(("trainer.1", "pserver.0"), start=1):
        before = pids(calm, JOB)
        os.kill(before[place], signal.SIGKILL)
        job = until_it_steps(calm, folder, NODES, job["generation"])
        assert not set(before.values()) & set(pids(calm, JOB).values()), "all of them start again"
        assert (job["restarts"], job["budget"]["used"], job["cause"]["kind"]) == (kills, kills, "worker_failed")

    evicted = next(p["node"] for p in job["pods"] if any(w["place"] == "pserver.1" for w in p["workers"]))
    before = pids(calm, JOB)
    calm.ctl("drain", evicted, "--reason", "test")
    job = until_it_steps(calm, folder, NODES - 1, job["generation"])
    assert not set(before.values()) & set(pids(calm, JOB).values()), "all of them start again"
    calm.ctl("uncordon", evicted)
    lost = next(p["node"] for p in job["pods"] if any(w["place"] == "pserver.0" for w in p["workers"]))
    calm.ctl("local", "kill", lost)
    job = until_it_steps(calm, folder, NODES - 1, job["generation"])
    assert (job["cause"]["kind"], job["cause"]["node"], job["budget"]["used"]) == ("node_lost", lost, 2)

    job = calm.until_phase(JOB, "succeeded", 120)
    assert job["reason"] == f"every worker of role trainer of generation {job['generation']} exited 0"
    calm.until(lambda: not pids(calm, JOB), 15, "the servers were stopped")

    rows = metrics(folder)
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1)) and rows[-1]["step"] == STEPS
    assert {row["world"] for row in rows} == {2}, "trainers alone count"
    begun = starts(calm)
    assert len(begun) == 4 and begun == sorted(begun) and begun[0] >= 10, f"each went on from a checkpoint: {begun}"
    assert mean(rows, STEPS - 20, STEPS) < 0.8 * mean(rows, 0, 20), "what the servers had learned is not lost"


def starts(one: Cluster) -> list[int]:
    """The steps after which the first trainer went on, by generation."""
    found = {}
    for file in one.home.glob(f"local/data/*/*/logs/{JOB}-*/g*/rank*.log"):
        if step := re.search(r"trainer 0 of 2 goes on after step (\d+)", file.read_text(errors="replace")):
            found[int(file.parent.name.removeprefix("g"))] = int(step[1])
    return [found[number] for number in sorted(found)]


def mean(rows: list[dict[str, Any]], above: int, most: int) -> float:
    """The loss of these steps."""
    mine = [float(row["loss"]) for row in rows if above < row["step"] <= most]
    return sum(mine) / len(mine)

"""Several jobs on the same nodes: none takes another's place, and who does not fit waits its turn."""

from __future__ import annotations

import json

import pytest

from tests.e2e.support import Cluster, check_complete, check_steps, check_undisturbed, digits_job, read_steps

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(480)]
NODES = 2
SLOTS = 64
LAST = 200
"""Steps of the first of two that train: some seconds longer than it takes to see what the third waits for."""
"""Workers that one local node takes."""


def submit(calm: Cluster, name: str, command: list[str], workers: int, **more: object) -> None:
    spec = {
        "name": name,
        "command": command,
        "nodes": 2,
        "workers_per_node": workers,
        "grace": "2s",
        "fork_server": "off",
    }
    calm.submit(json.dumps(spec | more))


def slots_used(calm: Cluster) -> dict[str, int]:
    return {n["name"]: n["cpu_slots_used"] for n in calm.ask("/v1/nodes")["items"]}


@pytest.mark.torch
def test_two_train_at_once_and_a_third_waits_for_a_place(calm: Cluster, reference: dict[int, float]) -> None:
    for name, steps in (("left", LAST), ("right", 600)):
        calm.submit(digits_job(calm.work, name, nodes="2", steps=steps, workers=1))
    for name in ("left", "right"):
        calm.until_running(name, 2)
    assert slots_used(calm) == {"n1": 2, "n2": 2}, "a slot that two jobs share would count once"
    submit(calm, "wide", ["true"], SLOTS - 1)
    missing = f"needs 2 nodes, 0 fit: n1 has {SLOTS - 2} free worker slots, {SLOTS - 1} needed"
    calm.until(lambda: any(why.startswith(missing) for why in calm.job("wide")["why"]), 20, "it says what is missing")
    assert (calm.job("wide")["phase"], calm.job("wide")["generation"]) == ("queued", 0)

    calm.until_phase("left", "succeeded", 120)
    calm.until_phase("wide", "succeeded")
    assert calm.job("right")["phase"] == "running", "it had a place only when left's was free"
    calm.ctl("stop", "right")
    assert calm.job("left")["generation"] == calm.job("right")["generation"] == 1
    for name in ("left", "right"):
        rows = read_steps(calm.work, name)
        check_steps(rows, reference)
        check_undisturbed(rows)
    check_complete(read_steps(calm.work, "left"), LAST)
    assert slots_used(calm) == {"n1": 0, "n2": 0}


def test_the_higher_priority_goes_first(calm: Cluster) -> None:
    submit(calm, "holder", ["sleep", "600"], 40)
    calm.until_running("holder", 2)
    submit(calm, "low", ["sleep", "600"], 40)
    submit(calm, "high", ["sleep", "600"], 40, priority=5)
    assert (calm.job("low")["phase"], calm.job("high")["phase"]) == ("queued", "queued")
    calm.ctl("stop", "holder")
    calm.until_running("high", 2)
    assert (calm.job("low")["phase"], calm.job("low")["generation"]) == ("queued", 0)
    calm.ctl("stop", "high")
    calm.until_running("low", 2)
    assert slots_used(calm) == {"n1": 40, "n2": 40}

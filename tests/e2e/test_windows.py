"""A maintenance window under a training: it goes on without the node, loses no step, and has it back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.store.server import PrivateRedis
from tests.e2e.bare import Bare, bare
from tests.e2e.conftest import FAILED
from tests.e2e.support import check_complete, check_steps, digits_job, read_steps
from tests.e2e.test_graceful import check_no_step_lost

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(300)]

STEPS = 200
OPEN = 15
"""Seconds that the window lasts."""


@pytest.fixture
def three(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bare]:
    """Nodes that run one worker each."""
    with PrivateRedis(tmp_path / "redis") as server, bare({"url": server.url}) as one:
        for i in range(1, 4):
            one.start_agent(f"n{i}", slots=1)
        one.until_ready()
        yield one
        if request.node.stash.get(FAILED, False):
            print(one.state())


def test_a_node_is_left_for_its_window_and_used_again(
    three: Bare, reference: dict[int, float], record_property: Any
) -> None:
    text = digits_job(three.work, "win", nodes="{min: 2, max: 3}", steps=STEPS, delay=0.2, workers=1)
    three.submit(text.replace('"--ckpt-every", "5"', '"--ckpt-every", "10000"'))
    three.until_running("win", 3, limit=90)
    three.ctl("reserve", "nodes", "n[3-4]", "from", "+1s", "for", f"{OPEN}s", "--why", "kernel update")
    three.until_running("win", 2)
    (window,) = three.json("reserve", "list")["items"]
    assert (window["name"], window["state"], window["known"]) == ("w1", "open", ["n3"])
    node = three.node("n3")
    assert (node["state"], node["pods"]) == ("reserved", [])
    assert node["reason"].startswith("reserved from ")
    assert "kernel update" in three.ctl("describe", "n3").stdout
    three.until_running("win", 3, limit=OPEN + 30)
    assert three.nodes()["n3"] == "ready"
    three.until_phase("win", "succeeded", 180)
    rows, job = read_steps(three.work, "win"), three.job("win")
    check_steps(rows, reference)
    check_complete(rows, STEPS)
    check_no_step_lost(rows, record_property, job)
    assert "node n3 is reserved from" in str(job["generations"])
    assert job["budget"]["used"] == 0

"""Nodes that are not there for a while, known ahead: a training goes on without them, loses no step, and has them back
afterwards. For a maintenance window, and by a notice of who lends the machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.local.privateredis import PrivateRedis
from tests.e2e.bare import Bare, bare
from tests.e2e.conftest import FAILED
from tests.e2e.support import check_complete, check_steps, digits_job, read_steps
from tests.e2e.test_graceful import check_no_step_lost

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

STEPS = 200
OPEN = 15
"""Seconds that the window lasts."""


@pytest.fixture
def three(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bare]:
    """Nodes that run one worker each; n3 may be taken away."""
    with PrivateRedis(tmp_path / "redis") as server, bare({"url": server.url}) as one:
        for i in (1, 2):
            one.start_agent(f"n{i}", slots=1)
        one.start_agent("n3", slots=1, notice=tmp_path / "notice")
        one.until_ready()
        yield one
        if request.node.stash.get(FAILED, False):
            print(one.state())


def train(three: Bare) -> None:
    """A training that saves when it is asked to leave, and else never, on all three."""
    text = digits_job(three.work, "win", nodes="{min: 2, max: 3}", steps=STEPS, delay=0.2, workers=1)
    three.submit(text.replace('"--ckpt-every", "5"', '"--ckpt-every", "10000"'))
    three.until_running("win", 3, limit=90)


def check_ended(three: Bare, reference: dict[int, float], record_property: Any) -> dict[str, Any]:
    """It ends well, as if nothing had been; returns the job."""
    three.until_phase("win", "succeeded", 180)
    rows, job = read_steps(three.work, "win"), three.job("win")
    check_steps(rows, reference)
    check_complete(rows, STEPS)
    check_no_step_lost(rows, record_property, job)
    assert job["budget"]["used"] == 0
    return job


def test_a_node_is_left_for_its_window_and_used_again(
    three: Bare, reference: dict[int, float], record_property: Any
) -> None:
    train(three)
    three.ctl("reserve", "nodes", "n[3-4]", "from", "+0s", "for", f"{OPEN}s", "--why", "kernel update")
    three.until_running("win", 2)
    (window,) = three.json("reserve", "list")["items"]
    assert (window["name"], window["state"], window["known"]) == ("w1", "open", ["n3"])
    node = three.node("n3")
    assert (node["state"], node["pods"]) == ("maintenance", [])
    assert node["reason"].startswith("in maintenance from ")
    assert "kernel update" in three.ctl("describe", "n3").stdout
    three.until_running("win", 3, limit=OPEN + 30)
    assert three.nodes()["n3"] == "ready"
    job = check_ended(three, reference, record_property)
    assert "node n3 is in maintenance from" in str(job["generations"])


def test_a_node_that_is_taken_away_with_a_notice_is_not_missed(
    three: Bare, tmp_path: Path, reference: dict[int, float], record_property: Any
) -> None:
    train(three)
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
    (tmp_path / "notice").write_text(f'{{"action": "terminate", "time": "{until}"}}')
    left = three.until_running("win", 2)["generation"]
    node = three.node("n3")
    assert (node["state"], node["pods"], node["spot"]) == ("leaving", [], True)
    assert node["reason"].startswith(f"to be taken away at {until[:10]} {until[11:19]} UTC (notice: ")
    three.cut("n3")
    job = check_ended(three, reference, record_property)
    assert job["generation"] == left, "and nobody had to form anew"

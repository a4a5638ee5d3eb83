"""Before a node takes part in a gang: what stands between it and the gang, and for how long a run counts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from nodeagent.agent.diagnosis import AGAIN, Diagnosis, Preflight, preflight
from nodeagent.diag import history
from nodeagent.model.node import Readiness
from nodeagent.osutil.clock import SystemClock
from nodeagent.spec.errors import CheckError
from nodeagent.spec.healthconfig import HealthConfig, PreflightConfig
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, spec
from tests.unit.api.test_nodehealth_diag import BOUND, HAND

READY = Readiness(state="ready", folder="f")


class Clock(SystemClock):
    """Ahead of the real one."""

    ahead = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead


class Node:
    """n1, whose hands do as planned."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        self.clock, self.view, self._file = Clock(), FakeView(folder), folder / "hand"
        self.plan(**plan)
        health = HealthConfig.model_validate({"diag": {"python": HAND, "bound": BOUND}})
        config = self.view.config.model_copy(update={"health": health})
        environ = {"HAND": str(self._file), "PATH": "/usr/bin:/bin"}
        self.changed = asyncio.Event()
        self.diagnosis = Diagnosis(config, environ, self.clock, self.changed.set)
        self.preflight = Preflight(PreflightConfig(reuse=3600.0, bound=20.0), "n1", self.diagnosis, self.clock)

    def plan(self, **plan: Any) -> None:
        self._file.write_text(json.dumps({"": plan}))

    def amend(self, ready: Readiness = READY) -> Readiness:
        return self.preflight.amend({"u1": ready}, self.view.cluster())["u1"]

    async def ended(self) -> None:
        async with asyncio.timeout(BOUND):
            while self.diagnosis.running:
                self.changed.clear()
                await self.changed.wait()


async def test_a_node_is_ready_once_it_passed_and_a_run_counts_for_a_while(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.view.join()
    first = node.amend()
    assert (first.state, first.folder) == ("preparing", "f")
    assert node.amend().reason.startswith("preflight: "), "the same run goes on"
    await node.ended()
    assert node.amend() == READY
    assert node.preflight.amend({"another": READY}, node.view.cluster()) == {"another": READY}
    node.clock.ahead = 3700.0
    assert node.amend().state == "preparing", "it has to be made anew"
    await node.ended()
    assert node.amend() == READY


async def test_earlier_results_on_a_disk_that_hangs_hold_up_nothing_else(tmp_path: Path) -> None:
    """The whole agent stood still with the disk at the end of a run."""
    node = Node(tmp_path)
    file = node.view.config.dirs.state / history.FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(file)  # who opens it waits for a writer

    def release() -> None:
        file.open("w").close()

    late = threading.Timer(BOUND, release)
    late.daemon = True
    late.start()
    task = node.diagnosis.start([], [], "check", [], whole=True, bound=0.1)
    await node.ended()
    assert not late.finished.is_set(), "the loop goes on while the disk hangs"
    late.cancel()
    await asyncio.to_thread(release)
    assert (await task)["passed"] is False


async def test_a_node_that_fails_says_why_and_is_checked_again(tmp_path: Path) -> None:
    node = Node(tmp_path, matmul="checksum 3, not 4")
    await node.view.join()
    node.amend()
    await node.ended()
    assert node.amend() == Readiness(state="unfit", reason="preflight failed: matmul: checksum 3, not 4", folder="f")
    node.plan()
    node.clock.ahead = AGAIN + 1
    assert node.amend().state == "preparing"
    await node.ended()
    assert node.amend() == READY


async def test_a_node_that_cannot_be_checked_did_not_pass(tmp_path: Path) -> None:
    node = Node(tmp_path, start="no torch")
    await node.view.join()
    node.amend()
    await node.ended()
    assert node.amend().state == "unfit"
    assert "no torch" in node.amend().reason


async def test_what_is_not_ready_anyway_and_who_is_inside_is_left_alone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.view.join()
    unfit = Readiness(state="unfit", reason="/shared is missing")
    assert node.amend(unfit) == unfit
    await submit_one(node.view.store, "u1", spec("digits"), 1000, node.clock.wall(), "alice", "r1")
    await node.view.refresh()
    await node.view.form(node.view.job("digits"), 2)
    await node.view.refresh()
    assert node.amend() == READY, "a gang that re-forms never waits for a check"
    assert not node.diagnosis.running


async def test_a_run_of_one_gpu_that_an_operator_asked_for_is_not_enough(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.view.join()
    await node.diagnosis.start((), (), "refuse", (), whole=False)
    assert node.amend().state == "preparing"
    await node.ended()
    assert node.amend() == READY


def test_a_preflight_that_cannot_be_done_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that cannot be checked must not count as one that passed."""
    node = Node(tmp_path)
    health = HealthConfig(preflight=PreflightConfig())
    config = node.view.config.model_copy(update={"health": health})
    assert preflight(config, "n1", node.diagnosis, node.clock) is not None
    monkeypatch.setitem(sys.modules, "nodeagent.hardware", None)
    assert preflight(node.view.config, "n1", node.diagnosis, node.clock) is None
    with pytest.raises(CheckError, match=r"health\.preflight cannot be done: nodeagent\.hardware is not installed"):
        preflight(config, "n1", node.diagnosis, node.clock)

"""Nothing is left: no process, port, socket or folder, however a cluster, a ``run`` or a job ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nodeagent.lease.grants import ANSWERS
from tests.e2e.support import Cluster, bounded, cluster, is_alive, leftovers, listening_ports, open_ports

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]

LOUD = """
import os, pathlib, subprocess, time
subprocess.Popen(["sleep", "600"])
print("up", flush=True)
time.sleep({seconds})
pathlib.Path("done-" + os.environ["RANK"]).touch()
"""
"""A worker that leaves a child of its own behind."""


@dataclass
class World:
    """A world in which everything that is made can be seen."""

    cluster: Cluster
    temporary: Path

    @property
    def processes(self) -> dict[int, str]:
        return leftovers(self.cluster.home)

    def run_local(self, seconds: float = 600) -> subprocess.Popen[str]:
        """``run --local`` with two workers; returns when both have printed."""
        run = self.cluster.start(
            "run", "--local", "2", "--nproc-per-node", "1", "--name", "loud", "--", sys.executable, "-c",
            LOUD.format(seconds=seconds),
        )  # fmt: skip
        assert run.stdout is not None
        assert sorted(run.stdout.readline() for _ in range(2)) == ["[0]<stdout>: up\n", "[1]<stdout>: up\n"]
        return run

    def check_nothing_left(self, before: dict[int, str], ports: set[int]) -> None:
        self.cluster.until(lambda: not any(map(is_alive, before)), 30, "every process has ended")
        assert not self.processes
        self.cluster.until(lambda: not list(self.temporary.iterdir()), 30, "the temporary folder is empty")
        left = [p for p in (self.cluster.home / "local").rglob("*") if not p.is_dir() and p.name != ".turn"]
        assert not left, "sockets or files are left"
        assert not open_ports() & ports


@pytest.fixture
def world() -> Iterator[World]:
    with cluster(0) as one:
        temporary = one.home / "tmp"
        temporary.mkdir()
        one.environ["TMPDIR"] = str(temporary)
        yield World(one, temporary)


def test_ctrl_c_of_run(world: World) -> None:
    with bounded(world.run_local()) as run:
        before = world.processes
        ports = listening_ports(before)
        assert len(before) >= 1 + 2 + 2 + 2 + 2 and ports, "the tool, agents, shims, workers, their children"
        run.send_signal(signal.SIGINT)
        _, output = run.communicate(timeout=60)
    assert run.returncode == 130, output
    assert "job loud stopped" in output
    world.check_nothing_left(before, ports)


def test_kill_9_of_run(world: World) -> None:
    with bounded(world.run_local()) as run:
        before = world.processes
        ports = listening_ports(before)
        run.kill()
    world.check_nothing_left(before, ports)


def test_a_lost_terminal_lets_run_go_on_to_the_jobs_end(world: World) -> None:
    with bounded(world.run_local(5)) as run:
        run.send_signal(signal.SIGHUP)
        before = world.processes
        ports = listening_ports(before)
        assert run.wait(60) == 0
    assert sorted(p.name for p in world.cluster.work.glob("done-*")) == ["done-0", "done-1"]
    world.check_nothing_left(before, ports)


def test_stop_delete_and_down(world: World) -> None:
    one = world.cluster
    one.up(2)
    agents = world.processes
    spec = {
        "name": "loud", "command": [sys.executable, "-c", LOUD.format(seconds=600)], "nodes": 2, "workers_per_node": 1,
        "grace": "2s",
    }  # fmt: skip
    for verb in ("stop", "delete"):
        one.submit(json.dumps(spec))
        one.until_running("loud", 2)
        pods = set(world.processes) - set(agents)
        assert len(pods) >= 2 + 2 + 2, "shims, workers, their children"
        one.ctl(verb, "loud")
        one.until(lambda: not set(world.processes) - set(agents), 20, f"after {verb} nothing of its pods runs")
        left = [file for file in one.home.glob("local/run/*/n*/pods/**/*") if file.name != ANSWERS]
        assert not left, "nor is a folder of theirs left"
    assert set(agents) <= set(world.processes)
    ports = listening_ports(agents)
    assert ports
    one.submit(json.dumps(spec))
    one.until_running("loud", 2)
    before = world.processes
    one.ctl("local", "down")
    world.check_nothing_left(before, ports)

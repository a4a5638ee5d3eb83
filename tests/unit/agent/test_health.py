"""What an agent's health monitor looks at: as much of the machine as its config says is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nodeagent.agent.health import PodWork, machine
from nodeagent.hardware.discovery import SIGNS
from nodeagent.model.pod import WorkerState
from nodeagent.pods.base import PodStatus
from nodeagent.spec.agentconfig import AgentConfig, NodeConfig
from nodeagent.spec.healthconfig import HealthConfig

DRIVER = any(sign.exists() for sign in SIGNS)


def config(**node: object) -> AgentConfig:
    return AgentConfig(node=NodeConfig.model_validate(node))


def test_the_driver_is_asked_where_there_is_one_or_gpus_are_named() -> None:
    health = HealthConfig(folders=("/shared",))
    none, every = machine(config(gpus="none"), health, "b"), machine(config(), health, "b")
    assert (none.gpus, none.configured) == (False, ())
    assert (every.gpus, every.configured) == (DRIVER, None)
    named = machine(config(gpus=["GPU-a"], data_interface="eth1"), health, "b")
    assert (named.gpus, named.configured, named.interfaces) == (True, ("GPU-a",), ("eth1",))
    assert (named.folders, named.boot) == (("/shared",), "b")
    assert Path(named.kmsg) == Path("/dev/kmsg")


def pod(uid: str, *pids: int) -> PodStatus:
    workers = tuple(WorkerState(rank=i, local_rank=i, pid=pid, state="running") for i, pid in enumerate(pids))
    return PodStatus(uid=uid, phase="running", workers=workers)


def test_a_shim_that_names_thousands_of_processes_takes_no_others_out_of_sight() -> None:
    """The victim's GPU was 'used by somebody else': there was a bound for all pods together."""
    code = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nprint(child.pid, flush=True)\nchild.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        try:
            invented = range(10_000_000, 10_004_096)
            work = PodWork(lambda: {"evil": pod("evil", *invented), "good": pod("good", worker.pid)})
            listed = {worker.pid, child, os.getpid(), os.getppid(), 10_000_000, 10_009_999}
            assert work.among(listed) == listed - {os.getppid(), 10_009_999}
        finally:
            os.kill(child, 9)

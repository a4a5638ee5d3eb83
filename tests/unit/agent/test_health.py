"""What an agent's health monitor looks at: as much of the machine as its config says is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.agent.health import NodeHealth, PodWork, machine
from nodeagent.hardware.discovery import SIGNS
from nodeagent.hardware.monitor import OwnWork, SavedHealth, save_memory
from nodeagent.model.jobspec import Nodes, Role
from nodeagent.model.node import Gpu, NodeFacts
from nodeagent.model.pod import WorkerState
from nodeagent.osutil.clock import SystemClock
from nodeagent.plan.nodes.candidates import offer
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


@pytest.mark.parametrize("there", [0, 1])
def test_a_boot_that_finds_fewer_gpus_is_given_no_job_that_takes_all_of_a_node(tmp_path: Path, there: int) -> None:
    """A machine whose driver did not come up was one without GPUs: each such job got a worker there, without any."""
    uuids = ("GPU-a", "GPU-b")
    save_memory(tmp_path / "health.json", SavedHealth(boot="before", gpus=uuids))
    facts = NodeFacts(
        address="h", hostname="h", boot_id="now", agent_pid=1, agent_version="", started=0.0, cpu_slots=8,
        gpus=tuple(Gpu(uuid=uuid, index=i) for i, uuid in enumerate(uuids[:there])),
    )  # fmt: skip
    dirs = dict.fromkeys(("run", "state", "logs"), tmp_path)
    node_health = NodeHealth(
        AgentConfig.model_validate({"dirs": dirs}), "n1", facts, {}, SystemClock(), OwnWork(), changed=lambda: None,
        counted=lambda _kind, _outcome: None,
    )  # fmt: skip
    found = facts.model_copy(update=node_health.facts())
    assert [gpu.healthy for gpu in found.gpus] == [True] * there + [False] * (2 - there)
    role = Role(command=("true",), nodes=Nodes(min=1, max=1, target=1), workers_per_node="gpu")
    why = offer(role, found, (), ())
    assert isinstance(why, str)
    assert why.startswith(f"has {there} free GPUs, 2 needed (GPU {there}: its driver has not listed it yet")
    assert offer(role.model_copy(update={"gpus_per_worker": 0}), found, (), ()) == ("cpu0",), "it needs none"

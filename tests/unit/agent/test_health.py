"""What an agent's health monitor looks at: as much of the machine as its config says is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.agent import health as agent_health
from nodeagent.agent.health import NodeHealth, PodWork, machine
from nodeagent.hardware.discovery import SIGNS, on_the_bus
from nodeagent.hardware.expected import Seen
from nodeagent.hardware.monitor import OwnWork
from nodeagent.hardware.readings import ProbeReading
from nodeagent.hardware.saved import SavedHealth, save_memory
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


def facts(boot: str, *gpus: str) -> NodeFacts:
    return NodeFacts(
        address="h", hostname="h", boot_id=boot, agent_pid=1, agent_version="", started=0.0, cpu_slots=8,
        gpus=tuple(Gpu(uuid=uuid, index=i) for i, uuid in enumerate(gpus)),
    )  # fmt: skip


def node_health(folder: Path, found: NodeFacts) -> NodeHealth:
    """Of an agent that starts."""
    dirs = dict.fromkeys(("run", "state", "logs"), folder)
    return NodeHealth(
        AgentConfig.model_validate({"dirs": dirs}), "n1", found, {}, SystemClock(), OwnWork(), changed=lambda: None,
        counted=lambda _kind, _outcome: None,
    )  # fmt: skip


ALL_GPUS = Role(command=("true",), nodes=Nodes(min=1, max=1, target=1), workers_per_node="gpu")
NO_GPU = ALL_GPUS.model_copy(update={"gpus_per_worker": 0})


def test_the_driver_is_asked_where_there_is_one_or_gpus_are_named() -> None:
    health = HealthConfig(folders=("/shared",))
    b = facts("b")
    none, every = machine(config(gpus="none"), health, b), machine(config(), health, b)
    assert (none.gpus, none.configured) == (False, ())
    assert (every.gpus, every.configured) == (DRIVER, None)
    named = machine(config(gpus=["GPU-a"], data_interface="eth1"), health, b)
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
    save_memory(tmp_path / "health.json", SavedHealth(boot="before", seen=Seen(uuids)))
    found = facts("now", *uuids[:there])
    found = found.model_copy(update=node_health(tmp_path, found).facts())
    assert [gpu.healthy for gpu in found.gpus] == [True] * there + [False] * (2 - there)
    why = offer(ALL_GPUS, found, (), ())
    assert isinstance(why, str)
    assert why.startswith(f"has {there} free GPUs, 2 needed (GPU {there}: its driver has not listed it yet")
    assert offer(NO_GPU, found, (), ()) == ("cpu0",), "it needs none"


def test_a_machine_that_was_never_seen_before_without_its_driver_is_none_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the PCI bus to what a job is offered. It got a worker on a CPU, as on a machine that has no GPU."""
    bus = tmp_path / "bus/pci/devices"

    def plug(address: str, driver: str = "", vendor: str = "0x10de") -> None:
        (bus / address).mkdir(parents=True)
        (bus / address / "vendor").write_text(f"{vendor}\n")
        (bus / address / "class").write_text("0x030200\n")
        (bus / address / "device").write_text("0x2335\n")
        if driver:
            (bus / address / "driver").symlink_to(tmp_path / driver)
            (tmp_path / driver).mkdir()

    monkeypatch.setattr(agent_health, "installed_slots", lambda: on_the_bus(tmp_path))
    now = facts("now")

    def offered(health: NodeHealth, role: Role = ALL_GPUS) -> str | tuple[str, ...]:
        return offer(role, now.model_copy(update=health.facts()), (), ())

    plug("0000:00:02.0", vendor="0x1a03")
    plug("0000:86:00.0", driver="vfio-pci")
    assert offered(node_health(tmp_path / "cpu", now)) == ("cpu0",), "it has no GPU of its own"
    plug("0000:3b:00.0")
    health = node_health(tmp_path / "gpu", now)
    why = "has 0 free GPUs, 1 needed (GPU 0: "
    assert offered(health) == f"{why}its driver has not listed it yet)"
    health.monitor.probe("nvml").reading = ProbeReading("nvml", problem="NVML: Driver Not Loaded")
    health.monitor.judge()
    assert offered(health) == f"{why}GPUs unknown: no driver reads them (probe.nvml.broken))"
    assert offered(health, NO_GPU) == ("cpu0",)
    health.monitor.acknowledge("", "probe.nvml.broken")
    assert offered(health) == ("cpu0",)
    with_driver = facts("now", "GPU-a")
    (gpu,) = node_health(tmp_path / "driven", with_driver).facts()["gpus"]
    assert (gpu.uuid, gpu.healthy) == ("GPU-a", True), "it is not counted twice"
    plug("0000:5e:00.0")
    one_of_two = node_health(tmp_path / "two", with_driver)
    assert offered(one_of_two) == ("GPU-a",), "the other one may be a card for a display"
    one_of_two.monitor.take_gpus({"gpus": [{"uuid": "GPU-a", "index": 0, "pci": "0000:3b:00"}]})
    assert offered(one_of_two) == "has 1 free GPUs, 2 needed (GPU 1: its driver has not listed it yet)"

"""Which cores a worker is bound to, on a machine made of files; torch's own answers, where it has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeagent.plan.job.gang import decide
from nodeagent.plan.steps import Propose
from nodeagent.pods.environment import worker_environments
from nodeagent.shim.forkserver.binding import bind, cards_near, cpus_near, gpu_of, numbers
from tests.unit.plan.build import WALL, make_cluster, make_generation, make_job, make_node, make_spec

CORES = 16
"""Two sockets of two NUMA nodes each, of two physical cores each, of two threads each: 0-7 and their siblings 8-15."""


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """GPUs a and b at node 0, c at node 3, d without a node."""
    for node in range(4):
        cpus = f"{2 * node}-{2 * node + 1},{2 * node + 8}-{2 * node + 9}"
        put(tmp_path / f"sys/devices/system/node/node{node}/cpulist", cpus)
    for cpu in range(CORES):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        core = cpu % 8
        put(folder / "topology/physical_package_id", core // 4)
        put(folder / "topology/thread_siblings_list", f"{core},{core + 8}")
        for index, (kind, level, shared) in enumerate(
            (("Data", 1, f"{core},{core + 8}"), ("Instruction", 9, "0-15"), ("Unified", 3, f"{core},{core + 8}"))
        ):
            put(folder / f"cache/index{index}/type", kind)
            put(folder / f"cache/index{index}/level", level)
            put(folder / f"cache/index{index}/shared_cpu_list", shared)
        put(folder / "cache/uevent", "")
    for number, (uuid, node) in enumerate((("GPU-a", 0), ("GPU-b", 0), ("GPU-c", 3), ("GPU-d", -1))):
        bus = f"0000:0{number}:00.0"
        put(tmp_path / f"proc/driver/nvidia/gpus/{bus}/information", f"Model: X\nGPU UUID: \t {uuid}\nBus Type: PCIe")
        put(tmp_path / f"sys/bus/pci/devices/{bus}/numa_node", node)
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "gpu", "cpus"),
    [
        ("node", "GPU-a", {0, 1, 8, 9}),
        ("node", "GPU-c", {6, 7, 14, 15}),
        ("node", "GPU-d", {0, 1, 8, 9}),
        ("socket", "GPU-a", {0, 1, 2, 3, 8, 9, 10, 11}),
        ("socket", "GPU-c", {4, 5, 6, 7, 12, 13, 14, 15}),
        ("exclusive", "GPU-c", {6, 7, 14, 15}),
        ("core-complex", "GPU-a", {0, 8}),
        ("core-complex", "GPU-b", {1, 9}),
        ("core-complex", "GPU-d", {0, 8}),
        ("core-complex", "GPU-c", {6, 14}),
    ],
)
def test_cores(machine: Path, mode: str, gpu: str, cpus: set[int]) -> None:
    assert cpus_near(mode, gpu, set(range(CORES)), str(machine)) == cpus


def test_cores_of_ones_own_are_whole_and_go_to_the_first_gpus(machine: Path) -> None:
    with pytest.raises(ValueError, match="2 cores and 3 GPUs"):
        cpus_near("exclusive", "GPU-b", set(range(CORES)), str(machine))
    put(machine / "sys/bus/pci/devices/0000:03:00.0/numa_node", 1)
    assert cpus_near("exclusive", "GPU-a", set(range(CORES)), str(machine)) == {0, 8}
    assert cpus_near("exclusive", "GPU-b", set(range(CORES)), str(machine)) == {1, 9}
    put(machine / "sys/devices/system/node/node0/cpulist", "0-2,8-10")
    assert cpus_near("exclusive", "GPU-a", set(range(CORES)), str(machine)) == {0, 8, 1, 9}
    assert cpus_near("exclusive", "GPU-b", set(range(CORES)), str(machine)) == {2, 10}


def test_only_cores_that_may_be_used(machine: Path) -> None:
    assert cpus_near("node", "GPU-a", {1, 2, 3}, str(machine)) == {1}
    assert cpus_near("socket", "GPU-a", {1, 2, 6}, str(machine)) == {1, 2}
    assert cpus_near("socket", "GPU-a", {6}, str(machine)) == set()


def test_a_workers_gpu() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "a,b,c,d", "LOCAL_WORLD_SIZE": "2"}
    assert [gpu_of(env | {"LOCAL_RANK": rank}) for rank in "01"] == ["a", "c"]
    assert gpu_of({"CUDA_VISIBLE_DEVICES": "b", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}) == "b"
    with pytest.raises(ValueError, match="no GPU"):
        gpu_of({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})


def test_ranges() -> None:
    assert numbers("0-2,4,7-7\n") == {0, 1, 2, 4, 7}
    assert numbers("\n") == set()


def test_a_process_is_bound_or_says_why_not(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(CORES)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cpus: done.append(cpus))
    env = {"CUDA_VISIBLE_DEVICES": "GPU-c", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    bind(env, str(machine))
    assert done == []
    bind(env | {"NODEAGENT_NUMA_BINDING": "node"}, str(machine))
    assert done == [{6, 7, 14, 15}]
    assert capsys.readouterr().err == ""
    for more, why in ((env | {"CUDA_VISIBLE_DEVICES": "MIG-1"}, "does not list MIG-1"), ({}, "no GPU")):
        bind(more | {"NODEAGENT_NUMA_BINDING": "node"}, str(machine))
        assert why in capsys.readouterr().err
    bind(env | {"NODEAGENT_NUMA_BINDING": "node"}, str(machine / "none"))
    assert "No such file" in capsys.readouterr().err
    assert len(done) == 1


def cards(machine: Path, **at: tuple[int, str]) -> None:
    """By name the NUMA node, and the state of the only port."""
    for name, (node, state) in at.items():
        put(machine / f"sys/class/infiniband/{name}/device/numa_node", node)
        put(machine / f"sys/class/infiniband/{name}/ports/1/state", state)


def test_network_cards_of_the_numa_nodes_that_are_up(machine: Path) -> None:
    assert cards_near("0", str(machine)) == [], "it has none"
    up, down = "4: ACTIVE", "1: DOWN"
    cards(machine, mlx5_0=(0, up), mlx5_1=(0, down), mlx5_10=(0, up), mlx5_2=(3, up), mlx5_3=(2, down))
    assert cards_near("0", str(machine)) == ["mlx5_0", "mlx5_10"]
    assert cards_near("3", str(machine)) == ["mlx5_2"]
    for numa, why in (("0,3", "all that are up"), ("1", "none"), ("2", "none is up"), ("", "nobody knows where")):
        assert cards_near(numa, str(machine)) == [], why


def test_a_worker_gets_the_cores_and_network_cards_near_the_gpus_that_the_plan_has_chosen(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two NUMA nodes with two GPUs each, another job has a GPU of the first: this one gets both of the second."""
    for number, numa in enumerate((0, 0, 3, 3)):
        put(machine / f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information", f"GPU UUID: GPU-n1-{number}")
        put(machine / f"sys/bus/pci/devices/0000:0{number}:00.0/numa_node", numa)
    cards(machine, mlx5_0=(0, "4: ACTIVE"), mlx5_1=(3, "4: ACTIVE"))
    node = make_node("n1", gpus=4)
    placed = tuple(gpu.model_copy(update={"numa": 3 * (gpu.index // 2)}) for gpu in node.facts.gpus)
    node = node.model_copy(update={"facts": node.facts.model_copy(update={"gpus": placed})})
    role = make_spec(workers=2, gpus=1, size=(1, 1)).role.model_copy(update={"numa_binding": "node"})
    job = make_job(spec=make_spec().model_copy(update={"roles": (role,)}))
    other = make_job("running", make_generation(["n1"]), uid="u-b", spec=make_spec(name="b"))
    assert other.generation is not None
    theirs = other.generation.members["n1"].model_copy(update={"devices": ("GPU-n1-0",)})
    other = other.model_copy(update={"generation": other.generation.model_copy(update={"members": {"n1": theirs}})})
    step = decide(make_cluster([node], job, other), job, WALL).step
    assert isinstance(step, Propose)
    generation = make_generation(["n1"]).model_copy(update={"members": step.members, "address": "10.0.0.1:29400"})
    generation = generation.model_copy(update={"ports": {"n1": (1, 2)}, "hosts": {"n1": "10.0.0.1"}})
    done: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(CORES)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cpus: done.append(cpus))
    for env in worker_environments(job, generation, node, {"n1": node}):
        assert env["CUDA_VISIBLE_DEVICES"] == "GPU-n1-2,GPU-n1-3"
        bind(env, str(machine))
        assert env["NCCL_IB_HCA"] == "=mlx5_1"
        own = env | {"NCCL_IB_HCA": "mlx5"}
        bind(own, str(machine))
        assert own["NCCL_IB_HCA"] == "mlx5", "the job knows better"
        unbound = {name: value for name, value in env.items() if name not in ("NODEAGENT_NUMA_BINDING", "NCCL_IB_HCA")}
        bind(unbound, str(machine))
        assert "NCCL_IB_HCA" not in unbound
    assert done == [{6, 7, 14, 15}] * 4

"""Which cores a worker is bound to, on a machine made of files; torch's own answers, where it has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeagent.shim.forkserver.binding import bind, cpus_near, gpu_of, numbers

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

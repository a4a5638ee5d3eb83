"""A worker that the kernel killed for want of memory: what it counts, and how the end is told."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from nodeagent.model.world import Starved, WorkerExit
from nodeagent.plan.failure.blame import describe
from nodeagent.shim.record import LOOKS, Farewell, MemoryKills, exit_record

GROUP = "nodeagent.slice/nodeagent-pod-x.service"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine whose kernel has killed before."""
    for folder in ("proc/self", f"sys/fs/cgroup/{GROUP}"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"4:memory:/old\n0::/{GROUP}\n")
    machine(tmp_path, 3)
    return tmp_path


def machine(root: Path, kills: int) -> None:
    (root / "proc/vmstat").write_text(f"nr_free_pages 7\noom_kill {kills}\nnuma_hit 1\n")


def group(root: Path, kills: int, limits: int = 1) -> None:
    (root / f"sys/fs/cgroup/{GROUP}/memory.events").write_text(f"oom {limits}\noom_kill {kills}\noom_group_kill 9\n")


def holds(root: Path, anon: int, shmem: int = 0, swapped: int | None = None) -> None:
    folder = root / f"sys/fs/cgroup/{GROUP}"
    (folder / "memory.stat").write_text(f"anon {anon}\nfile {10**15}\nkernel 5\nshmem {shmem}\n")
    if swapped is not None:
        (folder / "memory.swap.current").write_text(f"{swapped}\n")


def memory(root: Path, kib: int, swap: int = 0, pods: str = "max") -> None:
    """Of the machine, and for all pods together."""
    (root / "proc/meminfo").write_text(f"MemTotal: {kib} kB\nMemFree: 1 kB\nSwapTotal: {swap} kB\n")
    for folder in ("nodeagent.slice", GROUP):
        (root / "sys/fs/cgroup" / folder / "cgroup.procs").write_text("")
    (root / "sys/fs/cgroup/nodeagent.slice/memory.max").write_text(f"{pods}\n")


def reported(error_file: Path, why: str, status: int = 9, tail: str = "last words\n") -> WorkerExit:
    record = exit_record(0, 0, 9, status, False, 0, error_file / "none", tail, Farewell(), why)
    return WorkerExit.from_json(json.dumps(record))


def test_the_pods_own_count_is_certain(root: Path) -> None:
    group(root, 1)
    kills = MemoryKills(root)
    machine(root, 9)
    assert kills.explain(signal.SIGKILL).text == "", "others of this machine"
    group(root, 2)
    assert kills.explain(signal.SIGTERM).text == kills.explain(9 << 8).text == "", "it was not SIGKILL"
    exited = reported(root, kills.explain(signal.SIGKILL).text)
    assert exited.error == (
        "last words\nnodeagent: out of memory: the kernel killed 1 process(es) of this pod (nodeagent-pod-x.service)"
    )
    assert describe(exited) == "SIGKILL (9), out of memory"


def test_the_machines_count_is_a_hint(root: Path) -> None:
    kills = MemoryKills(root)
    assert kills.explain(signal.SIGKILL).text == ""
    machine(root, 4)
    exited = reported(root, kills.explain(signal.SIGKILL).text, tail="")
    assert exited.error == (
        "nodeagent: out of memory, it seems: since this start the kernel killed 1 process(es) on this machine"
    )
    assert describe(exited) == "SIGKILL (9), out of memory, it seems"


def test_a_kernel_that_does_not_count_is_no_hint(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path).explain(signal.SIGKILL).text == ""


def test_a_kill_that_nothing_explains(tmp_path: Path) -> None:
    assert describe(reported(tmp_path, "")) == "SIGKILL (9)"
    assert describe(reported(tmp_path, "", tail="we are out of memory")) == "SIGKILL (9)"


def starved(kills: MemoryKills) -> Starved | None:
    found = kills.explain(signal.SIGKILL).starved
    return Starved.from_json(json.dumps(found)) if found is not None else None


def test_what_the_pod_held_is_known_where_no_limit_of_its_own_was_reached(root: Path) -> None:
    """What a worker held is gone when its end is seen."""
    group(root, 1)
    memory(root, kib=4000, swap=1000)
    holds(root, 10**6)
    kills = MemoryKills(root)
    holds(root, 2 * 10**6, shmem=1000, swapped=500)
    kills.look()
    holds(root, 10)
    group(root, 2)
    assert starved(kills) == Starved(held=2_001_500, total=5000 * 1024)
    assert kills.explain(signal.SIGKILL).text.endswith(", which held 0.0 GB of 0.0 GB for all")
    memory(root, kib=4000, swap=1000, pods=str(3000 * 1024))
    found = starved(kills)
    assert found is not None and found.total == 4000 * 1024, "a limit of all pods together"


def test_nothing_is_known_after_a_limit_of_its_own_or_an_older_kill(root: Path) -> None:
    group(root, 1)
    memory(root, kib=4000)
    holds(root, 10**6)
    kills = MemoryKills(root)
    group(root, 2, limits=2)
    assert kills.explain(signal.SIGKILL).text and starved(kills) is None
    for _ in range(LOOKS):
        kills.look()
    assert kills.explain(signal.SIGKILL).text and starved(kills) is None, "somebody else has killed it since"


@pytest.mark.parametrize("lacks", ["proc/meminfo", f"sys/fs/cgroup/{GROUP}/memory.stat"])
def test_nothing_is_known_where_the_kernel_does_not_tell(root: Path, lacks: str) -> None:
    group(root, 1)
    memory(root, kib=4000)
    holds(root, 10**6)
    (root / lacks).unlink()
    kills = MemoryKills(root)
    group(root, 2)
    assert kills.explain(signal.SIGKILL).text and starved(kills) is None

"""A worker that the kernel killed for want of memory: what it counts, and how the end is told."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from nodeagent.model.world import WorkerExit
from nodeagent.plan.failure.blame import describe
from nodeagent.shim.record import Farewell, MemoryKills, exit_record

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


def group(root: Path, kills: int) -> None:
    (root / f"sys/fs/cgroup/{GROUP}/memory.events").write_text(f"oom 1\noom_kill {kills}\noom_group_kill 9\n")


def reported(error_file: Path, why: str, status: int = 9, tail: str = "last words\n") -> WorkerExit:
    record = exit_record(0, 0, 9, status, False, 0, error_file / "none", tail, Farewell(), why)
    return WorkerExit.from_json(json.dumps(record))


def test_the_pods_own_count_is_certain(root: Path) -> None:
    group(root, 1)
    kills = MemoryKills(root)
    machine(root, 9)
    assert kills.explain(signal.SIGKILL) == "", "others of this machine"
    group(root, 2)
    assert kills.explain(signal.SIGTERM) == kills.explain(9 << 8) == "", "it was not SIGKILL"
    exited = reported(root, kills.explain(signal.SIGKILL))
    assert exited.error == (
        "last words\nnodeagent: out of memory: the kernel killed 1 process(es) of this pod (nodeagent-pod-x.service)"
    )
    assert describe(exited) == "SIGKILL (9), out of memory"


def test_the_machines_count_is_a_hint(root: Path) -> None:
    kills = MemoryKills(root)
    assert kills.explain(signal.SIGKILL) == ""
    machine(root, 4)
    exited = reported(root, kills.explain(signal.SIGKILL), tail="")
    assert exited.error == (
        "nodeagent: out of memory, it seems: since this start the kernel killed 1 process(es) on this machine"
    )
    assert describe(exited) == "SIGKILL (9), out of memory, it seems"


def test_a_kernel_that_does_not_count_is_no_hint(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path).explain(signal.SIGKILL) == ""


def test_a_kill_that_nothing_explains(tmp_path: Path) -> None:
    assert describe(reported(tmp_path, "")) == "SIGKILL (9)"
    assert describe(reported(tmp_path, "", tail="we are out of memory")) == "SIGKILL (9)"

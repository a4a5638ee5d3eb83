"""``nodeagent diag`` as people and repairs run it: a fake driver below it, and hands that do as the test says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakenvml.build import build, write_state

ROOT = Path(__file__).parents[2]
HAND = ROOT / "tests" / "unit" / "diag" / "hand.py"
UUIDS = [f"GPU-fa4e0000-0000-0000-0000-{n:012d}" for n in range(2)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


class Node:
    """A machine with two GPUs."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._folder = folder
        self.bound(20)
        self._env = {
            **os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(library),
            "FAKE_NVML": str(folder / "driver"), "HAND": str(folder / "hand"),
        }  # fmt: skip
        self.driver()
        self.hands({})

    def bound(self, seconds: int) -> None:
        """Of each check."""
        folder = self._folder
        dirs = "".join(f", {name}: {folder / name}" for name in ("state", "logs"))
        (folder / "config.yaml").write_text(
            f"dirs: {{run: {folder / 'run'}{dirs}}}\nnode: {{gpus: [{', '.join(UUIDS)}]}}\n"
            f"health: {{diag: {{python: {HAND}, bound: {seconds}s}}}}\n"
        )

    def driver(self, *lines: str) -> None:
        write_state(self._folder / "driver", "gpus 2", *lines)

    def hands(self, plan: dict[str, dict[str, Any]]) -> None:
        (self._folder / "hand").write_text(json.dumps(plan))

    def diag(self, *args: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "nodeagent.agent.main", "diag", "--json", "--config"]
        done = subprocess.run(
            [*command, str(self._folder / "config.yaml"), *args], env=self._env, capture_output=True, text=True
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


def failed(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    assert found["passed"] is (not [c for c in found["checks"] if not c["passed"]])
    return [(c["name"], c["gpu"], c["why"]) for c in found["checks"] if not c["passed"]]


@pytest.fixture
def node(tmp_path: Path, library: Path) -> Node:
    return Node(tmp_path, library)


def test_a_history_grows_and_a_gpu_that_has_become_slow_fails(node: Node) -> None:
    for _ in range(3):
        code, found = node.diag("--verify", "--gpu=")
        assert (code, found["problem"], failed(found)) == (0, "", [])
        assert len(found["checks"]) == 2 * 4 + 1
    node.hands({UUIDS[1]: {"matmul": 60.0}})
    code, found = node.diag("--verify")
    (one,) = failed(found)
    assert (code, one[:2]) == (1, ("matmul", UUIDS[1]))
    assert one[2].startswith("60 TFLOP/s is 60% of 100, the median of this node's earlier results")
    assert set(found["checks"][0]) == {"name", "gpu", "passed", "value", "unit", "why"}


def test_gpus_in_use_are_left_alone_unless_asked_for(node: Node) -> None:
    node.driver(f"1.processes {os.getpid()}:1048576")
    code, found = node.diag()
    assert code == 2
    assert f"{UUIDS[1]}) is used by pid {os.getpid()} (" in found["problem"]
    code, found = node.diag("--verify")
    assert (code, {c["gpu"] for c in found["checks"]}) == (0, {UUIDS[0], ""})
    assert "is used by" in found["notes"][0]
    code, found = node.diag("--gpu", UUIDS[1], "--busy")
    assert (code, {c["gpu"] for c in found["checks"]}) == (0, {UUIDS[1], ""})
    assert "not judged" in found["notes"][-1]
    node.driver("0.memory_used 1073741824")
    code, found = node.diag("--gpu", UUIDS[0])
    assert (code, "1024 MiB of its memory are held" in found["problem"]) == (2, True)


def test_a_driver_that_hangs_and_one_that_lost_a_gpu(node: Node) -> None:
    node.driver("hang nvmlDeviceGetMemoryInfo_v2")
    node.bound(4)
    code, found = node.diag("--verify")
    assert (code, failed(found)) == (1, [("driver", "", "hung: the driver did not answer within 4 s")])
    node.bound(20)
    node.driver("0.lost 1")
    code, found = node.diag("--verify")
    assert code == 1
    assert ("driver", UUIDS[0]) in [one[:2] for one in failed(found)]
    assert [c["passed"] for c in found["checks"] if c["gpu"] == UUIDS[1]] == [True] * 4


def test_what_cannot_be_run_says_what_to_do(node: Node) -> None:
    node.hands({UUIDS[0]: {"start": "/usr/bin/python3 has no torch"}})
    code, found = node.diag("--verify")
    assert (code, found["passed"], found["checks"]) == (2, False, [])
    assert "has no torch" in found["problem"]

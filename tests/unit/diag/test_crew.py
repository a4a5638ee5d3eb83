"""The processes at work, as real processes: what hangs, dies or lies is a failure with a name, and nothing waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nodeagent.diag.crew import WORKER, CannotRunError, CheckOutcome, work

HAND = Path(__file__).with_name("hand.py")
GPUS = (("GPU-a", "GPU 0"), ("GPU-b", "GPU 1"))
BOUND = 30.0
"""Seconds for one check that is to end."""
HANG = 3.0
"""For one that hangs: all of it is waited for, and four times as long for a start."""


async def checked(
    folder: Path, bound: float = BOUND, **plan: dict[str, Any]
) -> tuple[dict[tuple[str, str], CheckOutcome], list[str], list[str]]:
    """Outcomes by check and GPU, notes, and what was said on the way. ``GPU_a`` stands for GPU-a."""
    file, calls = folder / "plan", list[str]()
    file.write_text(json.dumps({name.replace("_", "-"): one for name, one in plan.items()}))
    found, notes = await work(str(HAND), GPUS, {**os.environ, "HAND": str(file)}, bound, calls.append)
    return {(o.name, o.gpu): o for o in found}, notes, calls


async def test_all_is_well(tmp_path: Path) -> None:
    found, notes, calls = await checked(tmp_path, GPU_a={"collective": 90.0}, GPU_b={"matmul": 7.5})
    assert len(found) == 9
    assert not [o for o in found.values() if o.why]
    assert (found["matmul", "GPU-b"].value, found["matmul", "GPU-b"].kind) == (7.5, "NVIDIA H200")
    together = found["collective", ""]
    assert (together.kind, together.value) == ("2 x NVIDIA H200", 90.0), "as fast as the slowest"
    assert notes == []
    assert "matmul on GPU 0, GPU 1" in calls


async def test_a_check_that_hangs_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    found, notes, _ = await checked(tmp_path, HANG, GPU_b={"host_to_device": None})
    assert found["host_to_device", "GPU-b"].why == f"hung: no result within {HANG:g} s"
    assert ("device_to_host", "GPU-b") not in found
    assert found["device_to_host", "GPU-a"].value == 100.0
    assert notes == ["no collective: GPU 1 takes no part in it"]


async def test_a_start_that_hangs(tmp_path: Path) -> None:
    found, _, _ = await checked(tmp_path, HANG, GPU_a={"start": None})
    assert found["start", "GPU-a"].why == f"hung: no result within {4 * HANG:g} s"
    assert found["matmul", "GPU-b"].value == 100.0


async def test_a_start_that_ends_by_itself_says_nothing_of_the_gpu(tmp_path: Path) -> None:
    """A torch whose libraries are not there was taken for a broken GPU, and the machine rebooted for it."""
    with pytest.raises(CannotRunError, match=r"hand.py ended with exit code 1: OSError: libcudart.*health.diag.python"):
        await checked(tmp_path, GPU_b={"start": 1})


async def test_a_start_that_is_killed_or_that_the_gpu_refuses_is_a_failure(tmp_path: Path) -> None:
    wrong = "CUDA error: uncorrectable ECC error encountered"
    found, _, _ = await checked(tmp_path, GPU_a={"start": -signal.SIGSEGV}, GPU_b={"wrong": wrong})
    assert found["start", "GPU-a"].why.startswith("its process died: OSError")
    assert found["start", "GPU-b"].why == wrong
    assert len(found) == 2


TORCH = """
class Cuda:
    def is_available(self): return True
    def set_device(self, index): {}
cuda, __version__ = Cuda(), "2.9"
{}
"""
"""A module named torch: what it does for a GPU, and what at its import."""


@pytest.mark.parametrize(
    ("device", "imported", "first"),
    [
        ("raise RuntimeError('CUDA error: out\\nof luck')", "", {"wrong": "CUDA error: out of luck"}),
        (
            "",
            "raise OSError('libcudart.so.12: no such file')",
            {"problem": "PYTHON has no torch (libcudart.so.12: no such file)"},
        ),
    ],
    ids=["GPU", "torch"],
)
def test_what_the_gpu_refuses_is_no_broken_torch(
    tmp_path: Path, device: str, imported: str, first: dict[str, str]
) -> None:
    (tmp_path / "torch.py").write_text(TORCH.format(device or "pass", imported))
    given = json.dumps({"index": 0, "count": 1, "gpu": "GPU-a", "group": ""})
    ended = subprocess.run(
        [sys.executable, str(WORKER), given], env={"PYTHONPATH": str(tmp_path)}, stdin=subprocess.DEVNULL,
        capture_output=True, check=False, text=True, timeout=60,
    )  # fmt: skip
    answer = {name: text.replace(sys.executable, "PYTHON") for name, text in json.loads(ended.stdout).items()}
    assert (answer, ended.returncode) == (first, 0)


async def test_one_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    found, _, _ = await checked(tmp_path, GPU_a={"die": "matmul"})
    assert found["matmul", "GPU-a"].why == "its process died: CUDA error: an illegal memory access was encountered"


async def test_a_wrong_result_and_one_hand_that_hangs_in_the_collective(tmp_path: Path) -> None:
    found, _, _ = await checked(tmp_path, HANG, GPU_a={"matmul": "checksum 3, not 4"}, GPU_b={"collective": None})
    assert (found["matmul", "GPU-a"].value, found["matmul", "GPU-a"].why) == (None, "checksum 3, not 4")
    assert found["memory_bandwidth", "GPU-a"].value == 100.0, "it goes on"
    assert found["collective", ""].why == f"GPU 1: hung: no result within {2 * HANG:g} s"


async def test_a_python_without_torch_cannot_check_gpus(tmp_path: Path) -> None:
    with pytest.raises(CannotRunError, match="has no torch"):
        await checked(tmp_path, GPU_b={"start": "python3 has no torch"})
    with pytest.raises(CannotRunError, match="cannot be started: No such file"):
        await work(str(tmp_path / "none"), GPUS, os.environ, BOUND, lambda _: None)


async def test_the_real_checks_on_the_cpu_without_torch(tmp_path: Path) -> None:
    """This Python in a shape that finds no packages: the plain checks."""
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    found, notes = await work(str(bare), (), os.environ, 60.0, lambda _: None)
    assert [(o.name, o.gpu, o.why) for o in found] == [("matmul", "", ""), ("memory_bandwidth", "", "")]
    assert all(o.value is not None and o.value > 0 for o in found)
    assert notes == ["no collective: it needs torch (health.diag.python)"]


@pytest.mark.torch
async def test_the_real_checks_on_the_cpu_with_torch() -> None:
    found, notes = await work(sys.executable, (), os.environ, 60.0, lambda _: None)
    assert [(o.name, o.why) for o in found] == [("matmul", ""), ("memory_bandwidth", ""), ("collective", "")]
    assert all(o.value is not None and o.value > 0 for o in found)
    assert notes == []

"""A snapshot that the shim does not take, or that cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402

from nodeagent.train.context import Context  # noqa: E402
from nodeagent.train.link import Link, LinkError, ShimAnswer  # noqa: E402
from nodeagent.train.snapshots import WorkerSnapshots  # noqa: E402


class Refusing:
    """A shim that lets a memory be made, and does not take it."""

    def ask(self, name: str, timeout: float = 0.0, *, fds: tuple[int, ...] = (), **fields: Any) -> ShimAnswer:
        if fds:
            raise LinkError(f"{name}: a snapshot of 40 MiB is more than this node has memory for (30 MiB)")
        return ShimAnswer({})


def memories() -> int:
    """Those that this process has."""
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(200) if Path(f"/proc/self/fd/{fd}").is_symlink()]  # noqa: PTH115
    return sum("nodeagent-snapshot" in name for name in names)


def test_its_memory_is_given_back() -> None:
    before = memories()
    own = WorkerSnapshots(cast("Link", Refusing()), Context())
    assert not own.take({"x": torch.zeros(1000)}, 1)
    assert memories() == before


class Unready:
    """A part of a state that has none at this moment."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("CUDA error: out of memory")


def test_what_fails_never_fails_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    own = WorkerSnapshots(cast("Link", Refusing()), Context())
    assert not own.take({"x": torch.zeros(1000), "scaler": Unready()}, 7)
    assert "no snapshot of step 7 (RuntimeError: CUDA error: out of memory)" in capsys.readouterr().err


def test_a_state_that_can_never_be_kept_is_an_error_of_the_script() -> None:
    own = WorkerSnapshots(cast("Link", Refusing()), Context())
    with pytest.raises(TypeError, match="plain tensors"):
        own.take({"x": torch.eye(3).to_sparse()}, 1)


def test_a_state_is_handed_out_on_a_device_of_the_group() -> None:
    """gloo's, gloo's where there is another one, and hccl's."""
    code = (
        "import torch, types\n"
        "torch.utils.rename_privateuse1_backend('npu')\n"
        "torch._register_device_module('npu', types.SimpleNamespace(current_device=lambda: 3))\n"
        "from nodeagent.train.snapshots import device_among\n"
        "print(*(device_among(types) for types in (['cpu'], ['npu', 'cpu'], ['npu'])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "cpu cpu npu:3\n", done.stderr

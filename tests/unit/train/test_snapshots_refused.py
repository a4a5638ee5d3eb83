"""A snapshot that the shim does not take."""

from __future__ import annotations

import os
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

"""What a pod's cgroup says of who lives in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nodeagent.pods import cgroup
from nodeagent.pods.cgroup import PodCgroup
from tests.descriptors import seen_with


def test_without_a_descriptor_nobody_counts_as_dead(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:

        def look() -> None:
            assert PodCgroup(tmp_path).kill() == [process.pid]

        try:
            (tmp_path / "cgroup.procs").write_text(f"{process.pid}\n")
            seen = seen_with(look, 6)
            assert seen[0] is False and seen[-1] is True
        finally:
            process.kill()


@pytest.mark.skipif("0::" not in Path("/proc/self/cgroup").read_text(), reason="needs cgroup v2")
def test_without_a_descriptor_nobody_counts_as_one_of_no_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "PREFIX", "")
    monkeypatch.setattr(cgroup, "MOUNTS", (tmp_path,))
    (tmp_path / "cgroup.procs").touch()

    def look() -> None:
        assert PodCgroup.of(os.getpid()) is not None

    seen = seen_with(look, 4)
    assert seen[0] is False and seen[-1] is True
    assert PodCgroup.of(1 << 30) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes one")
def test_one_that_cannot_be_made_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cgroup, "MOUNTS", (tmp_path,))
    for name in ("cgroup.procs", "nodeagent-pods"):
        (tmp_path / name).touch()
    assert PodCgroup.make(tmp_path / "run", os.getpid()) is None
    assert f"no cgroup for {tmp_path / 'run'}, whose processes are found by their mark alone" in caplog.text

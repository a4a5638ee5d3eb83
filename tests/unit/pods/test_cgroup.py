"""What a pod's cgroup says of who lives in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nodeagent.pods import cgroup
from nodeagent.pods.cgroup import PodCgroup
from tests.descriptors import few_files


def test_without_a_descriptor_nobody_counts_as_dead(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            (tmp_path / "cgroup.procs").write_text(f"{process.pid}\n")
            seen = list[bool]()
            for count in range(6):
                with few_files(count):
                    try:
                        assert PodCgroup(tmp_path).kill() == [process.pid]
                        seen.append(True)
                    except OSError:
                        seen.append(False)
            assert seen[0] is False and seen[-1] is True
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes one")
def test_one_that_cannot_be_made_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cgroup, "MOUNTS", (tmp_path,))
    for name in ("cgroup.procs", "nodeagent-pods"):
        (tmp_path / name).touch()
    assert PodCgroup.make(tmp_path / "run", os.getpid()) is None
    assert f"no cgroup for {tmp_path / 'run'}, whose processes are found by their mark alone" in caplog.text

"""What a pod's cgroup says of who lives in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nodeagent.pods import cgroup
from nodeagent.pods.cgroup import PodCgroup, cgroup_of_pod, cgroup_of_unit, cgroups_left
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
    path = cgroup_of_pod(tmp_path, "key")
    assert path is not None
    assert PodCgroup.make(path, os.getpid()) is None
    assert "no cgroup nodeagent-pod-key: its pod's processes are found by their mark alone" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes one")
def test_only_those_of_this_run_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even after another one has had its path."""
    monkeypatch.setattr(cgroup, "MOUNTS", (tmp_path,))
    (tmp_path / "cgroup.procs").touch()
    runs = [tmp_path / "run", tmp_path / "other"]
    made = list[PodCgroup]()
    for run in runs:
        run.mkdir()
        assert cgroups_left(run) == {}
        path = cgroup_of_pod(run, "key")
        assert path is not None
        path.mkdir(parents=True)
        made.append(PodCgroup(path))
    assert [{key: one.path for key, one in cgroups_left(run).items()} for run in runs] == [
        {"key": one.path} for one in made
    ]
    runs[0].rename(tmp_path / "before")
    runs[1].rename(runs[0])
    assert cgroups_left(runs[0]) == {}
    for one in made:
        assert one.exists
        one.remove()
        assert not one.path.parent.exists()


@pytest.mark.parametrize(
    ("first", "slices"), [("/init.scope", "."), ("/", "."), ("/machine.slice/c1/init.scope", "machine.slice/c1")]
)
def test_where_systemd_starts_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, slices: str) -> None:
    monkeypatch.setattr(cgroup, "MOUNTS", (tmp_path,))
    monkeypatch.setattr(cgroup, "FIRST", tmp_path / "first")
    (tmp_path / "cgroup.procs").touch()
    (tmp_path / "first").write_text(f"12:pids:/elsewhere\n0::{first}\n")
    assert cgroup_of_unit("u.service") == tmp_path / slices / "nodeagent.slice" / "u.service"
    (tmp_path / "first").write_text("12:pids:/elsewhere\n")
    assert cgroup_of_unit("u.service") is None, "there is no cgroup v2"

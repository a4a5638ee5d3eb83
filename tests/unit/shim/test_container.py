"""The command lines of podman and Apptainer, what a node says that cannot run them, and which process is whose."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nodeagent.shim.container import ASK_BOUND, MOST_REMOVED, Containers, RuntimeMissingError, find_runtime, remove_left
from tests.descriptors import seen_with

BASE = {"PATH": "/usr/bin", "HOME": "/home/u", "LANG": "C.UTF-8", "USER": "u"}
LOGIN = {"APPTAINERENV_LANG": "C.UTF-8", "APPTAINERENV_USER": "u"}


def pod(runtime: str = "podman", image: str = "torch:2", **more: Any) -> dict[str, Any]:
    container = {"runtime": runtime, "image": image, "binds": ("/data:/data:ro",)}
    return {
        "container": container, "working_dir": "/w", "state": "/s", "checkpoint_dir": "ck", "limits": {"nofile": 1024},
        "env": {},
    } | more  # fmt: skip


def words(
    given: dict[str, Any], env: dict[str, str], folder: Path, from_file: dict[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    made = Containers(given, folder, {"program": "/usr/bin/x", "init": "/usr/bin/catatonit"}, BASE, from_file or {})
    return made.start(["python", "t.py"], BASE | env, 1)


def test_podman(tmp_path: Path) -> None:
    argv, env = words(pod(), {"RANK": "1", "SECRET": "s3"}, tmp_path)
    assert argv[-4:] == ["--entrypoint=", "torch:2", "python", "t.py"]
    for option in (
        "--pull=never",
        "--network=host",
        "--cgroups=disabled",
        "--init",
        "--workdir=/w",
        "--ulimit=nofile=1024:1024",
        "--volume=/w:/w",
        f"--volume={tmp_path}:{tmp_path}",
        "--volume=/s:/s",
        "--volume=/w/ck:/w/ck",
        "--volume=/data:/data:ro",
        "--env=RANK",
        "--env=SECRET",
        "--env=LANG",
    ):
        assert option in argv  # fmt: skip
    assert not [word for word in argv if "s3" in word or word in ("--env=PATH", "--env=HOME", "--privileged")]
    assert env == BASE | {"RANK": "1", "SECRET": "s3"}
    assert ("--userns=keep-id" in argv) == (os.getuid() != 0)


def test_a_folder_is_podmans_root(tmp_path: Path) -> None:
    argv, _ = words(pod(image="/images/root"), {}, tmp_path)
    assert argv[-4:] == ["--rootfs", "/images/root", "python", "t.py"]


def test_a_jobs_own_bind_goes_before_ours(tmp_path: Path) -> None:
    given = pod()
    given["container"]["binds"] = ("/elsewhere:/w",)
    argv, _ = words(given, {}, tmp_path)
    assert "--volume=/elsewhere:/w" in argv
    assert "--volume=/w:/w" not in argv


def test_what_is_meant_for_the_inside_does_not_rule_the_runtime(tmp_path: Path) -> None:
    """podman would look for images below that HOME, and load that library."""
    own = {"HOME": "/workspace", "LD_PRELOAD": "/x.so", "PATH": "/opt/bin", "CONTAINER_HOST": "tcp://x", "TEXT": "1\n2"}
    argv, env = words(pod(env=own), own | {"TOKEN": " a 'b' # "} | {"RANK": "1"}, tmp_path, {"TOKEN": " a 'b' # "})
    assert env == BASE | {"RANK": "1", "TEXT": "1\n2"}
    file = tmp_path / "environment-1"
    assert f"--env-file={file}" in argv and file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().splitlines() == [
        "CONTAINER_HOST=tcp://x", "HOME=/workspace", "LD_PRELOAD=/x.so", "PATH=/opt/bin", "TOKEN= a 'b' # ",
    ]  # fmt: skip
    names = {word.removeprefix("--env=") for word in argv if word.startswith("--env=")}
    assert names == {"RANK", "TEXT", "LANG", "USER"}, "of several lines: podman takes it from its own environment"
    argv, env = words(pod("apptainer", "/t.sif", env=own), own, tmp_path)
    assert env == BASE | {f"APPTAINERENV_{key}": value for key, value in own.items()} | LOGIN


def test_a_value_that_podman_could_only_take_in_the_place_of_its_own_is_refused(tmp_path: Path) -> None:
    own = {"HOME": "/a\n/b"}
    with pytest.raises(OSError, match="HOME"):
        words(pod(env=own), own, tmp_path)


def test_the_recorded_shells_word_for_a_remote_podman_does_not_count(tmp_path: Path) -> None:
    env = fake(tmp_path, 'test -z "$CONTAINER_HOST"') | {"CONTAINER_HOST": "ssh://x"}
    assert find_runtime({"runtime": "podman", "image": "t"}, env, str(tmp_path), ASK_BOUND)


@pytest.mark.parametrize(
    ("env", "podman", "apptainer"),
    [
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, ["--device=nvidia.com/gpu=all"], ["--nv"]),
        ({"HIP_VISIBLE_DEVICES": "0"}, ["--device=/dev/kfd", "--device=/dev/dri"], ["--rocm"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [], []),
        ({}, [], []),
    ],
)
def test_gpus(env: dict[str, str], podman: list[str], apptainer: list[str], tmp_path: Path) -> None:
    assert [w for w in words(pod(), env, tmp_path)[0] if w.startswith("--device")] == podman
    argv, _ = words(pod("apptainer", "/t.sif"), env, tmp_path)
    assert [w for w in argv if w in ("--nv", "--rocm")] == apptainer


def test_apptainer(tmp_path: Path) -> None:
    argv, env = words(pod("apptainer", "/t.sif"), {"RANK": "1"}, tmp_path)
    assert argv[:4] == ["/usr/bin/x", "exec", "--cleanenv", "--pwd=/w"]
    assert argv[-3:] == ["/t.sif", "python", "t.py"]
    assert argv[argv.index("/data:/data:ro") - 1 :][:2] == ["--bind", "/data:/data:ro"]
    assert env["APPTAINERENV_RANK"] == "1"
    assert "APPTAINERENV_PATH" not in env


@pytest.mark.parametrize(("status", "seen"), [(0, 0), (7 << 8, 7 << 8), (137 << 8, signal.SIGKILL), (9, 9),
                                              (200 << 8, 200 << 8)])  # fmt: skip
def test_a_signal_is_no_exit_code(status: int, seen: int) -> None:
    assert Containers.status(status) == seen


def test_what_a_node_says(tmp_path: Path) -> None:
    def reason(runtime: str, image: str, *programs: str) -> str:
        for name in programs:
            (tmp_path / name).write_text("#!/bin/sh\n[ $1 = ps ] || { echo broken store >&2; exit 125; }\n")
            (tmp_path / name).chmod(0o755)
        with pytest.raises(RuntimeMissingError) as caught:
            find_runtime({"runtime": runtime, "image": image}, {"PATH": str(tmp_path)}, str(tmp_path), ASK_BOUND)
        return str(caught.value)

    assert reason("apptainer", "/t.sif").startswith("apptainer was not found in PATH")
    assert reason("podman", "t").startswith("podman was not found in PATH")
    assert reason("podman", "/nowhere", "podman", "catatonit").startswith("image /nowhere is not a folder on this node")
    assert reason("podman", "t") == "podman failed with exit code 125: broken store"
    assert reason("apptainer", "/t.sif", "singularity") == "image /t.sif is not on this node"


def fake(folder: Path, script: str) -> dict[str, str]:
    """An environment with a podman that does this."""
    for name, text in (("podman", script), ("catatonit", "")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("script", "reason", "passes"),
    [
        ("exec sleep 600", "podman image did not answer within 0.5 s", True),
        ("echo Error: database is locked >&2; exit 125", "podman failed with exit code 125: Error: database is", True),
        ("exit 1", "podman has no image t for user", False),
        ("echo 'time=\"1\" level=warning msg=x' >&2; exit 1", "podman has no image t for user", False),
        ("echo cannot resolve /workspace >&2; exit 1", "podman failed with exit code 1: cannot resolve /work", True),
    ],
)
def test_only_a_plain_answer_of_podmans_is_final(tmp_path: Path, script: str, reason: str, passes: bool) -> None:
    env = fake(tmp_path, script)
    with pytest.raises(RuntimeMissingError) as caught:
        find_runtime({"runtime": "podman", "image": "t"}, env, str(tmp_path), 0.5)
    assert reason in str(caught.value) and caught.value.passing is passes


def test_what_earlier_pods_left_is_no_part_of_the_check(tmp_path: Path) -> None:
    env = fake(tmp_path, '[ "$1" = image ] || { touch asked; exit 125; }')
    assert (
        find_runtime({"runtime": "podman", "image": "t"}, env, str(tmp_path), ASK_BOUND)["program"]
        == f"{tmp_path}/podman"
    )
    assert not (tmp_path / "asked").exists()


def test_what_earlier_pods_left_is_removed_a_few_at_a_time(tmp_path: Path) -> None:
    here = os.uname().nodename
    (tmp_path / "alive").mkdir()
    rows = [f"id{i} {here}:/nowhere/{i}" for i in range(MOST_REMOVED + 1)]
    listed = "\n".join([f"mine {here}:{tmp_path}/alive", "far elsewhere:/nowhere/1", *rows])
    env = fake(tmp_path, f"[ $1 = ps ] && echo '{listed}' || echo \"$@\" >>removed")
    assert remove_left(f"{tmp_path}/podman", env, str(tmp_path))
    ids = " ".join(f"id{i}" for i in range(MOST_REMOVED))
    assert (tmp_path / "removed").read_text() == f"rm --force --ignore --time=0 {ids}\n"


@contextmanager
def tree() -> Iterator[tuple[int, int]]:
    """A child of this process, as podman's monitor is one of the shim's, and its own child, the container's first."""
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as monitor:
        assert monitor.stdout is not None
        first = int(monitor.stdout.readline())
        try:
            yield monitor.pid, first
        finally:
            os.kill(first, signal.SIGKILL)


def test_which_process_is_the_workers_is_read_from_its_pidfile(tmp_path: Path) -> None:
    made = Containers(pod(), tmp_path, {"program": "/usr/bin/x"}, BASE, {})
    with tree() as (monitor, first):
        assert made.process(7, 0) == 7, "there is none yet"
        (tmp_path / "container-0").write_text(f"{first}\n")
        assert made.process(7, 0) == first
        (tmp_path / "container-0").write_text(str(monitor))
        assert made.process(7, 0) == first, "what it runs, if it is an init"
        assert made.process(7, 1) == 7, "that is another worker's"


def test_without_a_descriptor_no_runtime_is_taken_for_its_container(tmp_path: Path) -> None:
    """A SIGTERM would end it at once, and its container with it."""
    made = Containers(pod(), tmp_path, {"program": "/usr/bin/x"}, BASE, {})
    with tree() as (_, first):
        (tmp_path / "container-0").write_text(f"{first}\n")

        def look() -> None:
            assert made.process(7, 0) == first

        seen = seen_with(look, 6)
        assert seen[0] is False and seen[-1] is True


def test_no_pidfile_names_a_process_that_is_not_the_pods(tmp_path: Path) -> None:
    """A container may write into the folder: what the shim signals, and looks at, is its own all the same."""
    made = Containers(pod(), tmp_path, {"program": "/usr/bin/x"}, BASE, {})
    file = tmp_path / "container-0"
    forged = (os.getpid(), os.getppid(), 1, 0, -1, 1 << 40)
    for text in (*map(str, forged), "", "x", f"{os.getpid()} 1", "1" * 40, "\xb2"):
        file.write_text(text)
        assert made.process(7, 0) == 7, text
    file.unlink()
    with tree() as (_, first):
        (tmp_path / "elsewhere").write_text(str(first))
        file.symlink_to(tmp_path / "elsewhere")
        assert made.process(7, 0) == 7, "no link is followed"
        file.unlink()
        os.mkfifo(file)
        assert made.process(7, 0) == 7, "nor a writer waited for"

"""What makes a node unfit for a pod, which folder its checkpoint_dir is, which commands a fork server can stand in
for."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from nodeagent.shim.checks import (
    MARKER,
    UnfitError,
    check,
    folder_id,
    python_program,
    resolve,
    see_folder,
    verdict,
)
from nodeagent.shim.loop import Loop
from nodeagent.shim.prepare import Preparation
from nodeagent.shim.processes import ShimChildren


def a_pod(folder: Path, **changes: Any) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "working_dir": str(folder),
        "address": "127.0.0.1",
        "command": [sys.executable, "train.py"],
        "roles": {},
        "environ": {"PATH": "/usr/bin:/bin"},
        "own_user": True,
        "env": {},
        "env_file": None,
        "container": None,
        "modules": (),
        "checkpoint_dir": None,
        "limits": {},
        "fork_server": True,
        "state": str(folder),
    }
    return pod | changes


def test_fit(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("TOKEN=x\n")
    found = check(a_pod(tmp_path, checkpoint_dir="new/ckpt", env_file="secrets", limits={"core": 0}))
    marker = tmp_path / "new/ckpt" / MARKER
    here = str(tmp_path.resolve())
    assert found.pop("base")["PATH"] == "/usr/bin:/bin"
    assert found.pop("local_address") == "127.0.0.1"
    rest = {"fork_server": True, "path0": here, "folder": marker.read_text(), "container": None}
    assert found == rest | {"env_file": {"TOKEN": "x"}, "programs": [a_pod(tmp_path)["command"]]}
    assert check(a_pod(tmp_path))["folder"] == ""


def test_a_fork_server_stands_in_for_the_roles_that_run_its_own_interpreter(tmp_path: Path) -> None:
    mine, other = a_pod(tmp_path)["command"][0], tmp_path / "python"
    other.symlink_to(mine)
    commands = [
        [mine, "a.py"], [mine, "-m", "b"], [mine, "-c", "1"], [str(other), "a.py"], ["python3", "a.py"], ["sh", "a.sh"],
    ]  # fmt: skip
    roles = {str(i): {"command": command} for i, command in enumerate(commands)}
    found = check(a_pod(tmp_path, roles=roles))
    assert found["programs"] == [a_pod(tmp_path)["command"], *commands[:2]]
    assert check(a_pod(tmp_path, roles=roles, fork_server=False))["programs"] == []


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"working_dir": "/no/such"}, 0, "working_dir /no/such is missing"),
        ({"working_dir": "/etc/passwd"}, 0, "/etc/passwd is not a folder"),
        ({"state": "/no/such"}, 0, "/no/such cannot be written to: No such file or directory"),
        ({"command": ["pythn", "x"]}, 127, "command 'pythn' was not found in PATH (/usr/bin:/bin)"),
        ({"command": ["./nothing"]}, 127, "command './nothing' does not exist"),
        ({"command": ["/etc/passwd"]}, 126, "command '/etc/passwd' is not executable"),
        ({"command": ["/usr"]}, 126, "command '/usr' is not executable"),
        ({"command": ["./" + "x" * 300]}, 126, "is not to be reached as user"),
        ({"checkpoint_dir": "/proc/ckpt"}, 0, "checkpoint_dir /proc/ckpt cannot be created"),
        ({"env_file": "/no/file"}, 0, "env_file /no/file: No such file"),
        ({"limits": {"nofiles": 1}}, 0, "limit 'nofiles' is not known"),
    ],
)
def test_unfit(tmp_path: Path, changes: dict[str, Any], code: int, text: str) -> None:
    with pytest.raises(UnfitError) as caught:
        check(a_pod(tmp_path, **changes))
    assert text in str(caught.value)
    assert caught.value.code == code
    shown = json.loads(verdict(check, a_pod(tmp_path, **changes)))
    assert (shown["reason"], shown["code"]) == (str(caught.value), code)


def test_a_look_that_the_system_refuses_says_what_it_refused(tmp_path: Path) -> None:
    def refused(_pod: Mapping[str, Any]) -> dict[str, Any]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/closed/python")

    shown = json.loads(verdict(refused, a_pod(tmp_path)))
    assert re.fullmatch(r"the job's folders .* as user .*: Permission denied \(/closed/python\)", shown["reason"])
    assert (shown["code"], shown["passing"]) == (0, False)


class Waited(ShimChildren):
    """A child has ended when it is expected."""

    def expect(self, pid: int, ended: Callable[[], None]) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        ended()


def test_a_look_that_ends_without_an_answer_is_none_that_took_too_long(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pod = a_pod(tmp_path, preforked=0)
    del pod["command"]
    preparation = Preparation(Loop(), Waited(), pod, tmp_path / "s", lambda: None, lambda _: None)
    preparation.check()
    assert preparation.reason == "the job's folders could not be looked at: exit code 126; more in shim.log"
    assert "cannot run the checks: KeyError: 'command'" in capfd.readouterr().err


def test_the_jobs_own_environment_is_for_the_inside_of_its_container(tmp_path: Path) -> None:
    image, programs = tmp_path / "image", tmp_path / "bin"
    for folder in (image, programs):
        folder.mkdir()
    for name in ("podman", "catatonit"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    container = {"runtime": "podman", "image": str(image), "binds": ()}
    (tmp_path / "more").write_text("HOME=/workspace\n")
    pod = a_pod(tmp_path, container=container, env={"PATH": "/opt/bin"}, env_file="more", fork_server=False)
    assert check(pod | {"environ": {"PATH": str(programs)}})["container"]["program"] == str(programs / "podman")


def test_the_jobs_own_path_counts(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    check(a_pod(tmp_path, command=["tool"], env={"PATH": str(tool.parent)}))
    assert resolve("tool", str(tmp_path), "bin") == str(tool)
    assert resolve("bin/tool", str(tmp_path), "") == str(tool)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python train.py -x", "train.py"),
        ("/opt/v/bin/python3.12 -u train.py", "train.py"),
        ("python3 -m pkg.train -x", "-m"),
        ("python -m", None),
        ("python", None),
        ("python -c 1", None),
        ("python -O train.py", None),
        ("python a.pyc", None),
        ("python folder", None),
        ("torchrun train.py", None),
        ("bash python", None),
        ("pythonx a.py", None),
    ],
)
def test_commands_a_fork_server_can_run(tmp_path: Path, command: str, program: str | None) -> None:
    (tmp_path / "folder").mkdir()
    assert python_program(command.split(), str(tmp_path)) == program


def test_path0_is_the_real_folder_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "t.py").touch()
    (tmp_path / "t.py").symlink_to("real/t.py")
    assert check(a_pod(tmp_path, command=[sys.executable, "t.py"]))["path0"] == str((tmp_path / "real").resolve())
    assert check(a_pod(tmp_path, command=[sys.executable, "-m", "t"]))["path0"] == str(tmp_path)


def test_a_folder_keeps_its_id_and_no_two_have_the_same(tmp_path: Path) -> None:
    first = see_folder(a_pod(tmp_path, checkpoint_dir="a"))
    assert re.fullmatch("[0-9a-f]{32}", first["folder"])
    assert (tmp_path / "a" / MARKER).stat().st_mode & 0o777 == 0o644
    assert see_folder(a_pod(tmp_path, checkpoint_dir="a")) == first
    assert see_folder(a_pod(tmp_path, checkpoint_dir="b")) != first


ROUNDS = 40


def look_together(folder: str, together: Barrier) -> list[str]:
    found = []
    for i in range(ROUNDS):
        together.wait(60)
        found.append(folder_id(Path(folder, str(i))))
    return found


def test_nodes_that_come_at_the_same_time_see_one_id(tmp_path: Path) -> None:
    for i in range(ROUNDS):
        (tmp_path / str(i)).mkdir()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, spawn.Pool(3) as pool:
        together = manager.Barrier(3)
        first, second, third = pool.starmap(look_together, [(str(tmp_path), together)] * 3, chunksize=1)
    assert first == second == third
    assert len(set(first)) == ROUNDS


@pytest.mark.parametrize("content", ["", "0123", "x" * 5000])
def test_a_marker_without_an_id_is_to_be_removed(tmp_path: Path, content: str) -> None:
    (tmp_path / MARKER).write_text(content)
    with pytest.raises(UnfitError) as caught:
        folder_id(tmp_path, patience=0.1)
    assert str(caught.value) == f"checkpoint_dir {tmp_path}: {MARKER} in it holds no id; remove that file"


def test_a_marker_that_is_just_being_written_is_waited_for(tmp_path: Path) -> None:
    marker = tmp_path / MARKER
    marker.touch()
    writer = threading.Timer(0.2, lambda: marker.write_text("0" * 32))
    writer.start()
    assert folder_id(tmp_path, patience=60) == "0" * 32
    writer.join()


def reported_by_a_child(look: Callable[[], str], prepare: Callable[[], None]) -> str:
    """What a process says that has given up some of its rights first."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            os.write(write, look().encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as shown:
        return shown.read()


def test_a_folder_that_takes_no_marker(tmp_path: Path) -> None:
    pod = a_pod(tmp_path, checkpoint_dir="ckpt")
    full = reported_by_a_child(
        lambda: verdict(see_folder, pod), lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    )
    begin = f"checkpoint_dir {tmp_path}/ckpt: {MARKER} in it cannot be written or read: "
    assert json.loads(full)["reason"].startswith(begin + "File too large (as user ")
    assert list((tmp_path / "ckpt").iterdir()) == [], "no empty marker is left to keep all others out"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_marker_that_the_user_may_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    folder_id(folder)
    (folder / MARKER).chmod(0o600)
    folder.chmod(0o777)
    inside = os.open(folder, os.O_RDONLY)  # pytest's own folders can be passed through by nobody else

    def become_nobody() -> None:
        os.fchdir(inside)
        os.setuid(65534)

    shown = reported_by_a_child(lambda: verdict(lambda _: {"folder": folder_id(Path())}, {}), become_nobody)
    os.close(inside)
    reason = f"checkpoint_dir .: {MARKER} in it cannot be written or read: Permission denied (as user nobody)"
    assert json.loads(shown)["reason"] == reason


def test_the_nodes_address_is_looked_up(tmp_path: Path) -> None:
    assert check(a_pod(tmp_path))["local_address"] == "127.0.0.1"
    assert check(a_pod(tmp_path, address="localhost"))["local_address"] in ("127.0.0.1", "::1")
    for nowhere in ("a.name.invalid", "a..b"):
        with pytest.raises(UnfitError, match=f"the node's address {nowhere} cannot be looked up") as unfit:
            check(a_pod(tmp_path, address=nowhere))
        assert unfit.value.passing

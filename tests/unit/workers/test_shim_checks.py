"""What makes a node unfit for a pod, and which commands a standby can stand in for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nodeagent.workers.shim_checks import UnfitError, check, python_program, resolve, verdict


def a_pod(folder: Path, **changes: Any) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "working_dir": str(folder),
        "command": [sys.executable, "train.py"],
        "environ": {"PATH": "/usr/bin:/bin"},
        "own_user": True,
        "env": {},
        "env_file": None,
        "checkpoint_dir": None,
        "limits": {},
        "standby": True,
    }
    return pod | changes


def test_fit(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("TOKEN=x\n")
    found = check(a_pod(tmp_path, checkpoint_dir="new/ckpt", env_file="secrets", limits={"core": 0}))
    assert found == {"env_file": {"TOKEN": "x"}, "standby": True, "path0": str(tmp_path.resolve())}
    assert (tmp_path / "new/ckpt").is_dir()


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"working_dir": "/no/such"}, 0, "/no/such is missing"),
        ({"working_dir": "/etc/passwd"}, 0, "/etc/passwd is not a folder"),
        ({"command": ["pythn", "x"]}, 127, "command 'pythn' was not found in PATH (/usr/bin:/bin)"),
        ({"command": ["./nothing"]}, 127, "command './nothing' does not exist"),
        ({"command": ["/etc/passwd"]}, 126, "command '/etc/passwd' is not executable"),
        ({"command": ["/usr"]}, 126, "command '/usr' is not executable"),
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
    said = json.loads(verdict(a_pod(tmp_path, **changes)))
    assert (said["reason"], said["code"]) == (str(caught.value), code)


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
def test_commands_a_standby_can_run(tmp_path: Path, command: str, program: str | None) -> None:
    (tmp_path / "folder").mkdir()
    assert python_program(command.split(), str(tmp_path)) == program


def test_path0_is_the_real_folder_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "t.py").touch()
    (tmp_path / "t.py").symlink_to("real/t.py")
    assert check(a_pod(tmp_path, command=[sys.executable, "t.py"]))["path0"] == str((tmp_path / "real").resolve())
    assert check(a_pod(tmp_path, command=[sys.executable, "-m", "t"]))["path0"] == str(tmp_path)

"""What plug-ins are given: who a process belongs to, in words, and a vendor's tool that may hang."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import time
from pathlib import Path

import pytest

from nodeagent.hardware.accelerator import (
    AbsentError,
    Command,
    DeviceRule,
    Persistence,
    ProblemError,
    job_of,
    user_of,
    who,
)
from nodeagent.hardware.judging.rules import Rule
from nodeagent.osutil.linux import is_running


def test_user_and_program() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()  # it has been exec'd
        answer = who(process.pid)
        process.stdin.close()
    me = pwd.getpwuid(os.getuid()).pw_name
    assert re.fullmatch(rf"pid {process.pid} \({me}: cat(, of .*)?\)", answer)
    assert who(process.pid) == "", "it has gone"


@pytest.mark.parametrize(("cgroups", "reported"), [
    ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
    ("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n", "of job 4711 of Slurm"),
    ("4:memory:/slurm/uid_1000/job_4711/step_batch\n1:name=systemd:/system.slice\n", "of job 4711 of Slurm"),
    ("0::/system.slice/job_4711\n", ""),
    ("0::/nodeagent.slice/nodeagent-pod-0123456789-ab.service\n", "of nodeagent-pod-0123456789-ab.service"),
    ("0::/nodeagent-pods/nodeagent-pod-0123456789abcdef/deeper\n", "of nodeagent-pod-0123456789abcdef"),
    ("", ""),
])  # fmt: skip
def test_the_job_of_a_process_is_what_its_cgroup_says(cgroups: str, reported: str) -> None:
    assert job_of(cgroups) == reported


def test_a_user_without_a_name() -> None:
    assert user_of(3_999_999_999) == "3999999999"


def tool(folder: Path, script: str) -> str:
    """A vendor's command line tool that does this."""
    file = folder / "smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def test_a_tools_output_is_returned(tmp_path: Path) -> None:
    assert Command(tool(tmp_path, 'echo "$@"'), "info", bound=20.0).output("--json") == "info --json\n"


@pytest.mark.parametrize(("script", "bound", "why"), [
    ("echo broken; exit 3", 20.0, "exit code 3.*broken"), ("sleep 60", 0.2, "did not answer within 0.2 s"),
    ("exec >&-; exec sleep 60", 20.0, "did not answer"), ("yes", 20.0, "without an end"),
])  # fmt: skip
def test_a_tool_that_fails_hangs_or_floods_is_a_problem_that_passes(
    tmp_path: Path, script: str, bound: float, why: str
) -> None:
    command = Command(tool(tmp_path, script), bound=bound)
    for _ in range(2):
        with pytest.raises(ProblemError, match=why) as caught:
            command.output()
        assert caught.value.again
        assert not isinstance(caught.value, AbsentError)


def test_what_a_tool_has_started_ends_with_it(tmp_path: Path) -> None:
    """Of a script around a program that hangs only the script was killed, at each look again."""
    script = f"(sleep 600 & echo $! > {tmp_path}/inner; wait) & echo $! > {tmp_path}/outer; wait"
    command = Command(tool(tmp_path, script), bound=5.0)
    with pytest.raises(ProblemError, match="did not answer"):
        command.output()
    for name in ("inner", "outer"):
        pid = int((tmp_path / name).read_text())
        end = time.monotonic() + 10
        while is_running(pid):
            assert time.monotonic() < end, f"{name} lives"
            time.sleep(0.01)


def test_a_tool_that_is_not_installed_is_an_absent_driver(tmp_path: Path) -> None:
    with pytest.raises(AbsentError):
        Command(str(tmp_path / "none"), bound=1.0).output()


def test_a_rule_is_reported_with_how_long_it_must_hold() -> None:
    rule = DeviceRule(
        "acme.hot", "degraded", "diagnose", "reading", "it is hot", "acme-smi",
        persistence=Persistence(after=60.0, window=600.0, times=2),
    )  # fmt: skip
    assert Rule(**rule.row) == Rule(
        "acme.hot", "degraded", "diagnose", "reading", "it is hot", "acme-smi", after=60.0, window=600.0, times=2
    )

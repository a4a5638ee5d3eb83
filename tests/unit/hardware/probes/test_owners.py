"""Who a process belongs to, in words."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys

import pytest

from nodeagent.hardware.probes.owners import user_of, who


@pytest.mark.parametrize(("environ", "told"), [
    ({}, ""),
    ({"NODEAGENT_JOB": "resnet50"}, ", of job resnet50"),
    ({"SLURM_JOB_ID": "4711"}, ", of job 4711 of Slurm"),
])  # fmt: skip
def test_user_command_and_job(environ: dict[str, str], told: str) -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # it has been exec'd
        said = who(process.pid)
        process.stdin.close()
    me = pwd.getpwuid(os.getuid()).pw_name
    assert said.startswith(f"pid {process.pid} ({me}: {sys.executable} -S -c")
    assert said.endswith(f"{told})")
    assert who(process.pid) == "", "it has gone"


def test_a_user_without_a_name() -> None:
    assert user_of(3_999_999_999) == "3999999999"

"""What systemd says about the agent: which unit it is, and why it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeagent.agent.systemd import comes_back, job_of, own_unit

NOTIFIED = {"NOTIFY_SOCKET": "/run/systemd/notify"}
UNIFIED = "0::/system.slice/nodeagent.service\n"
JOBS = """\
  41 network-online.target start waiting
 123 nodeagent.service     {} running
 124 nodeagent.service.bak stop waiting
"""


@pytest.mark.parametrize(
    ("groups", "unit"),
    [
        (UNIFIED, "nodeagent.service"),
        ("12:pids:/system.slice/x.service\n1:name=systemd:/system.slice/nodeagent.service\n", "nodeagent.service"),
        ("4:memory:/other\n" + UNIFIED, "nodeagent.service"),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", ""),
        ("0::/\n", ""),
    ],
)
def test_own_unit_is_the_service_that_its_control_group_names(groups: str, unit: str) -> None:
    assert own_unit(NOTIFIED | {"SYSTEMD_EXEC_PID": "94"}, groups, 0, 94, True) == unit


@pytest.mark.parametrize(
    ("environ", "uid", "booted"),
    [
        ({}, 0, True),
        (NOTIFIED, 1000, True),
        (NOTIFIED, 0, False),
        (NOTIFIED | {"SYSTEMD_EXEC_PID": "93"}, 0, True),  # a child of somebody else's service
    ],
)
def test_who_was_not_started_by_the_systems_systemd_has_no_unit(
    environ: dict[str, str], uid: int, booted: bool
) -> None:
    assert own_unit(environ, UNIFIED, uid, 94, booted) == ""


def test_an_older_systemd_does_not_say_whom_it_started() -> None:
    assert own_unit(NOTIFIED, UNIFIED, 0, 94, True) == "nodeagent.service"


@pytest.mark.parametrize("kind", ["restart", "stop", "try-restart"])
def test_the_job_is_found_by_the_units_whole_name(kind: str) -> None:
    assert job_of("nodeagent.service", JOBS.format(kind)) == kind


def test_no_job_no_answer() -> None:
    assert job_of("nodeagent.service", "") == ""
    assert job_of("other.service", JOBS.format("stop")) == ""


async def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> bool:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\n{script}\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return await comes_back("nodeagent.service")


@pytest.mark.parametrize(
    ("script", "back"),
    [
        ("echo '9 nodeagent.service stop running'", False),
        ("echo '9 nodeagent.service restart running'", True),
        ("echo '9 other.service stop running'", True),
        ("exit 1", True),
        ("sleep 60", True),
    ],
)
async def test_only_a_stop_is_a_goodbye(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, back: bool
) -> None:
    assert await reported(tmp_path, monkeypatch, f"exec {script}" if script.startswith("sleep") else script) is back


async def test_where_there_is_no_systemctl_it_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await comes_back("nodeagent.service") is True
    assert await comes_back("") is True

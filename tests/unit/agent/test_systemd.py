"""What systemd says about the agent: which unit it is, and why it ends; and what a stop leaves behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from nodeagent.agent.systemd import come_back, comes_back, drain, job_of, own_unit
from nodeagent.model.node import Cordon, NodeRecord
from tests.unit.plan.build import make_node

if TYPE_CHECKING:
    from nodeagent.agent.loop import Agent
    from nodeagent.osutil.clock import Clock

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


class Stopped:
    """As much of an agent as a stop and the next start need: a node with work, until it is drained."""

    def __init__(self, cordon: Cordon | None) -> None:
        self.node, self.record = "n1", make_node("n1").model_copy(update={"cordon": cordon})
        self.config = SimpleNamespace(drain=60.0, timing=SimpleNamespace(heartbeat=0.0))
        self.store, self.joined = self, asyncio.Event()
        self.joined.set()

    def needed_by(self) -> str:
        return "" if self.record.cordon is not None and self.record.cordon.drain else "job a"

    def me(self) -> NodeRecord:
        return self.record

    async def refresh(self) -> None: ...

    async def cordon(self, _node: str, cordon: Cordon | None, _request: str) -> None:
        self.record = self.record.model_copy(update={"cordon": cordon})


@pytest.mark.parametrize(
    "cordon",
    [None, Cordon(reason="fan", by="ann", at=1.0), Cordon(reason="fan", by="ann", at=1.0, drain=True)],
    ids=["free", "cordoned", "drained"],
)
async def test_after_a_stop_and_a_start_the_node_is_as_it_was(cordon: Cordon | None) -> None:
    stopped = Stopped(cordon)
    agent = cast("Agent", stopped)
    await drain(agent, cast("Clock", SimpleNamespace(now=lambda: 0.0, wall=lambda: 9.0)))
    marked = stopped.record.cordon
    assert marked is not None and marked.drain
    assert (marked.by, marked.reason) == (
        ("ann", "fan") if cordon is not None else ("systemctl stop", "its agent was asked to stop")
    )
    await come_back(agent)
    assert stopped.record.cordon == cordon

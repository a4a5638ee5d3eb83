"""What ``local`` says."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from nodeagent.ctl import local
from nodeagent.ctl.main import cli
from nodeagent.local import session
from nodeagent.local.layout import LocalError


def node(**more: Any) -> dict[str, Any]:
    """A node as the supervisor shows it."""
    return {
        "name": "n1", "power": "on", "state": "ready", "agent_pid": 12, "starts": 1, "unstarted": 0, "last_end": "",
        "failed": False, "gpus": [], "socket": "/nowhere/api.sock", "log": "/nowhere/agent.log",
    } | more  # fmt: skip


@pytest.mark.parametrize(
    ("unstarted", "shown"),
    [(0, "n1     on      starting   12      3        -"), (2, "n1     on      starting   12      3 (2 failed)   -")],
)
def test_starts_that_failed_are_counted_apart(unstarted: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = {
        "ok": True, "name": "dev", "pid": 7, "redis": {"url": "unix:///r", "pid": 8}, "data": "/d",
        "nodes": [node(starts=3, unstarted=unstarted)],
    }  # fmt: skip
    monkeypatch.setattr(local, "_ask", lambda *_: reply)
    result = CliRunner().invoke(cli, ["local", "status"])
    assert result.stdout.splitlines()[1] == shown


@pytest.mark.parametrize("verb", ["local up --nodes 1", "local add", "local start n1", "run --local 1 true"])
def test_an_agent_that_does_not_start_is_shown_with_its_last_words(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing in them moves the cursor."""

    def fail(*_: object, **__: object) -> None:
        raise LocalError("n1's agent does not stay up", ["\x1b[2Jthe reactor is on fire"], "put it out")

    monkeypatch.setattr(local, "_ask", lambda *_, **__: {"node": "n1", "changed": True})
    monkeypatch.setattr(local, "_cluster", lambda _: None)
    for name in ("up", "wait_joined", "local_session"):
        monkeypatch.setattr(session, name, fail)
    result = CliRunner().invoke(cli, verb.split())
    assert result.exit_code != 0
    first, *more = result.stderr.splitlines()
    assert first.startswith("nodeagentctl: ") and first.endswith("n1's agent does not stay up")
    assert more == ["  \\u001b[2Jthe reactor is on fire", "  next: put it out"]


def test_a_name_that_cannot_be_is_an_error_of_usage() -> None:
    result = CliRunner().invoke(cli, ["local", "up", "--nodes", "1", "--name", "Bad Name"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'Bad Name' cannot be a local cluster's name" in result.stderr

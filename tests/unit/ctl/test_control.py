"""What ends the wait of ``pause``, ``resume`` and ``restart``."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from nodeagent.ctl import control, waiting
from nodeagent.ctl.main import cli

Json = dict[str, Any]


def row(rev: int, desired: str, phase: str = "running", restarts: tuple[int, int] = (0, 0)) -> Json:
    """A job as an agent shows it whose view has this revision of the control."""
    return {
        "name": "a", "uid": "u1", "phase": phase, "reason": "", "desired": desired, "control_rev": rev, "pods": [],
        "generation_state": "active" if phase == "running" else "ended", "changed": True,
        "restart": {"asked": restarts[0], "done": restarts[1]},
    }  # fmt: skip


class Agents:
    """Answers the change with the first row, and each look with the next; the last one stays."""

    def __init__(self, *rows: Json) -> None:
        self.after, *self.rows = rows

    def change(self, *_: object) -> Json:
        return self.after

    def endure(self, _patience: float) -> None:
        pass

    def get(self, _path: str) -> Json:
        return self.rows.pop(0) if len(self.rows) > 1 else self.rows[0]


def invoke(monkeypatch: pytest.MonkeyPatch, verb: str, *rows: Json) -> tuple[int, str, str]:
    """The exit code, stdout and stderr."""
    agents = Agents(*rows)
    monkeypatch.setattr(control, "connect", lambda _ctx: agents)
    monkeypatch.setattr(waiting, "POLL", 0.001)
    result = CliRunner().invoke(cli, [verb, "a", "--timeout", "200ms"])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("verb", "own", "later", "says"),
    [
        ("pause", row(2, "pause"), row(3, "run"), "job a was resumed before it was paused: running"),
        ("resume", row(3, "run"), row(4, "pause", "pausing"), "job a was paused before it was resumed: pausing"),
        ("restart", row(2, "run"), row(3, "pause", "paused"), "job a was paused before it was restarted: paused"),
    ],
)
def test_what_was_taken_back_is_not_waited_for(
    verb: str, own: Json, later: Json, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, text = invoke(
        monkeypatch, verb, own, own | {"phase": "forming", "restart": {"asked": 1, "done": 0}}, later
    )
    assert (code, says in text) == (1, True), text
    assert "nodeagentctl events --job a" in text


def test_an_older_view_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent that is asked next may not have read the pause yet: it still shows the job as it was before."""
    older, own = row(1, "run"), row(2, "pause")
    assert invoke(monkeypatch, "pause", own, older, own, row(2, "pause", "paused"))[:2] == (0, "job/a paused\n")
    code, _, text = invoke(monkeypatch, "pause", own, older)
    assert (code, "nothing was taken back" in text) == (4, True)


def test_a_pause_that_was_reached_is_done_though_it_was_resumed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(monkeypatch, "pause", row(2, "pause"), row(3, "run", "paused"))[:2] == (0, "job/a paused\n")

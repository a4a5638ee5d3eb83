"""What a change of queues prints."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from nodeagent.ctl import queue
from nodeagent.ctl.main import cli


@pytest.mark.parametrize("warning", ["", "queues are guaranteed 99 nodes, and the live nodes have 3"])
def test_a_warning_is_one_line_and_no_refusal(warning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Agent:
        def change(self, *_: object, **_more: object) -> dict[str, Any]:
            return {"changes": [{"name": "a", "change": "changed", "keys": ["guarantee"]}], "warning": warning}

    monkeypatch.setattr(queue, "connect", lambda _ctx: Agent())
    result = CliRunner().invoke(cli, ["queue", "set", "a", "guarantee.nodes=99"])
    assert (result.exit_code, result.stdout) == (0, "queue/a changed: guarantee\n")
    assert result.stderr == (f"nodeagentctl: warning: {warning}\n" if warning else "")

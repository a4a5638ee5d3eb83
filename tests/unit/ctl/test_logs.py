"""Following a job's output through an agent that goes away."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from nodeagent.ctl.client import Client
from nodeagent.ctl.logs import MOST_HELD, Printer, print_logs
from nodeagent.ctl.terminal import BrokeOffError, NoAgentError


class Gone:
    """An agent that breaks off once, and then does not come back."""

    patience = 0.2

    def __init__(self) -> None:
        self.calls = 0

    def stream(self, _path: str, **_query: object) -> Iterator[dict[str, object]]:
        yield from ()
        self.calls += 1
        if self.calls == 1:
            raise BrokeOffError("the agent hung up", "ask again")
        raise NoAgentError("nobody answers", "start one")


def test_what_follows_ends_when_its_agent_does_not_come_back(tmp_path: Path) -> None:
    gone = Gone()
    with (tmp_path / "out").open("w") as file, pytest.raises(NoAgentError, match="nobody answers"):
        print_logs(cast(Client, gone), "digits", Printer(file, file), follow=True)
    assert gone.calls == 2, "one that broke off is asked for again"


def test_a_line_of_megabytes_is_shown_as_it_comes() -> None:
    """All of it was held until its end, and copied with each of its pieces: of a line of 1 GB nothing was seen."""
    out = io.StringIO()
    printer, piece, count = Printer(out, out), "x" * 16384, 3 * MOST_HELD // 16384
    line = {"stream": "stdout", "generation": 1, "rank": 0, "node": "n1", "time": "1"}
    held = []
    for number in range(1, count + 1):
        printer.put(line | {"text": piece, "partial": True})
        held.append(number * len(piece) - out.tell())
    printer.put(line | {"text": "end", "partial": False})
    assert max(held) <= MOST_HELD
    assert out.getvalue() == f"[0]<stdout>: {piece * count}end\n"

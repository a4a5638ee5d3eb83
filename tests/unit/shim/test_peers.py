"""What a shim pushes: in one line that its agent takes, however many workers have failed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodeagent.pods.base import PodStatus
from nodeagent.pods.pod import ShimReport
from nodeagent.shim.gang import FIRST, LATER_CHARS, RESTARTED_KEPT
from nodeagent.shim.peers import LINE_MAX, status_line


def status(workers: int, letter: str) -> dict[str, Any]:
    """Of a pod whose workers have all failed."""
    states = [
        {"rank": n, "local_rank": n, "pid": 4_000_000 + n, "state": "exited", "exit": 1, "step": 10**6, "doing": ""}
        for n in range(workers)
    ]
    ends = [
        {
            "rank": n, "local_rank": n, "pid": 4_000_000 + n, "code": 1, "signal": None, "stopped": False, "order": n,
            "at": 1764450000.123456, "error": letter * (4000 if n < FIRST else LATER_CHARS), "left_at": None,
            "saved_in": None, "overdue": None, "missed": False,
        }
        for n in range(workers)
    ]  # fmt: skip
    restarted = [end | {"error": letter * 4000} for end in ends[:RESTARTED_KEPT]]
    return {"uid": "u", "phase": "exited", "workers": states, "exits": ends, "restarted": restarted}


def received(line: str) -> PodStatus:
    found = ShimReport.read(line.encode()).status
    assert found is not None
    return found


def test_what_a_thousand_workers_that_all_failed_say_is_sent_whole() -> None:
    plain = status(1024, "x")
    line = status_line(plain)
    assert len(line.encode()) < LINE_MAX
    assert json.loads(line)["status"] == plain


@pytest.mark.parametrize(("workers", "letter"), [(1024, "\x1b"), (1024, "\U0001f600"), (2048, "x"), (2048, "\x1b")])
def test_what_is_longer_is_sent_with_fewer_of_their_words(workers: int, letter: str) -> None:
    line = status_line(status(workers, letter))
    assert len(line.encode()) < LINE_MAX
    ends = received(line).exits
    assert len(ends) == workers
    assert {end.error for end in ends} in ({letter * 50}, {""})


def test_half_of_a_surrogate_pair_costs_one_letter() -> None:
    assert received(status_line(status(1, "\ud800"))).exits[0].error == "?" * 4000

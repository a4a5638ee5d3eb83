"""What a shim pushes: in one line that its agent takes, however many workers have failed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodeagent.pods.base import PodStatus
from nodeagent.pods.bounds import ShimReport
from nodeagent.shim.exits import LATER_CHARS
from nodeagent.shim.peers import LINE_MAX, status_line
from nodeagent.shim.record import WHOLE_ERRORS
from nodeagent.shim.restarts import RESTARTED_KEPT
from nodeagent.spec.jobvalues import MAX_WORKERS


def status(workers: int, letter: str) -> dict[str, Any]:
    """Of a pod whose workers have all failed."""
    states = [
        {"rank": n, "local_rank": n, "pid": 4_000_000 + n, "state": "exited", "exit": 1, "step": 10**6, "doing": ""}
        for n in range(workers)
    ]
    ends = [
        {
            "rank": n, "local_rank": n, "pid": 4_000_000 + n, "code": 1, "signal": None, "stopped": False, "order": n,
            "at": 1764450000.123456, "error": letter * (4000 if n < WHOLE_ERRORS else LATER_CHARS), "left_at": None,
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
    plain = status(MAX_WORKERS, "x")
    line = status_line(plain)
    assert len(line.encode()) < LINE_MAX
    assert json.loads(line)["status"] == plain


@pytest.mark.parametrize("letter", ["\x1b", "\U0001f600", "中"])
def test_of_workers_that_all_failed_the_first_keep_their_words(letter: str) -> None:
    line = status_line(status(MAX_WORKERS, letter))
    assert len(line.encode()) < LINE_MAX
    ends = received(line).exits
    assert {end.error for end in ends[:WHOLE_ERRORS]} == {letter * 4000}, "they are the cause"
    assert {end.error for end in ends[WHOLE_ERRORS:]} in ({letter * 50}, {""})


@pytest.mark.parametrize("letter", ["x", "\x1b"])
def test_what_more_workers_say_is_sent_with_fewer_of_their_words(letter: str) -> None:
    line = status_line(status(2 * MAX_WORKERS, letter))
    assert len(line.encode()) < LINE_MAX
    ends = received(line).exits
    assert len(ends) == 2 * MAX_WORKERS
    assert all(end.error in (letter * 4000, letter * 50, "") for end in ends)


def test_half_of_a_surrogate_pair_costs_one_letter() -> None:
    assert received(status_line(status(1, "\ud800"))).exits[0].error == "?" * 4000

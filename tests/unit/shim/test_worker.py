"""What is known of one worker, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeagent.model.pod import WorkerState
from nodeagent.shim.output import Capture, RotatingFile
from nodeagent.shim.worker import Parts, Worker


class Closes:
    """In the place of a log, or of a capture."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def worker(place: str = "", **known: Any) -> Worker:
    log, captures = cast(RotatingFile, Closes()), (cast(Capture, Closes()), cast(Capture, Closes()))
    made = Worker(3, 1, Path("/e.json"), log, captures, place)
    for name, value in known.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("known", "lives", "reaped", "state", "code"),
    [
        ({}, False, False, "starting", None),
        ({"pid": 7}, True, False, "running", None),
        ({"pid": 7, "ended": True}, False, False, "running", None),
        ({"pid": 7, "ended": True, "failed": {"code": 1, "signal": None}}, False, True, "running", None),
        ({"pid": 7, "ended": True, "record": {"code": 0, "signal": None}}, False, True, "exited", 0),
        ({"pid": 7, "ended": True, "record": {"code": 5, "signal": None}}, False, True, "exited", 5),
        ({"pid": 7, "ended": True, "record": {"code": None, "signal": 9}}, False, True, "exited", 137),
    ],
)
def test_what_it_is_at_by_what_is_known(
    known: dict[str, Any], lives: bool, reaped: bool, state: str, code: int | None
) -> None:
    """One that failed and is to be started again has not exited for the agent."""
    one = worker(**known)
    shown = WorkerState.model_validate(one.state())
    assert (one.lives, one.reaped, shown.state, shown.exit) == (lives, reaped, state, code)
    assert (shown.rank, shown.local_rank, shown.pid) == (3, 1, known.get("pid"))


def test_its_progress_is_as_it_reported_last() -> None:
    shown = WorkerState.model_validate(worker(pid=7, step=12, doing="saves").state())
    assert (shown.step, shown.doing) == (12, "saves")


@pytest.mark.parametrize(("place", "role"), [("", ""), ("trainer.0", "trainer"), ("a.b.12", "a.b")])
def test_its_role_is_that_of_its_place(place: str, role: str) -> None:
    assert worker(place).role == role


def test_nothing_of_it_is_written_once_it_is_closed() -> None:
    one = worker()
    one.close()
    assert [cast(Any, part).closed for part in (one.log, *one.captures)] == [1, 1, 1]


def test_in_a_container_the_process_is_the_one_inside() -> None:
    one = worker(pid=7)
    inside = SimpleNamespace(process=lambda pid, local_rank: 100 * pid + local_rank)
    assert Parts.process(cast(Parts, SimpleNamespace(containers=None)), one) == 7
    assert Parts.process(cast(Parts, SimpleNamespace(containers=inside)), one) == 701

"""Following a job: what ends it."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from nodeagent.ctl import session as module
from nodeagent.ctl.client import Client
from nodeagent.ctl.logs import Printer
from nodeagent.ctl.session import Session
from nodeagent.ctl.terminal import CtlError, Exit, OutputError

JOB: dict[str, Any] = {"uid": "u", "name": "digits", "phase": "running", "reason": "", "lent": None, "outcome": None,
                       "world_nodes": 1, "world_size": 1, "cause": None, "generation": 1}  # fmt: skip


class Flood:
    """An agent of a job that writes without an end, and ends when it is asked to."""

    patience = 0.0

    def __init__(self, *refusals: CtlError) -> None:
        self.job = dict(JOB)
        self.sent = 0
        self.refusals = list(refusals)
        """What it answers to a stop at first."""

    def endure(self, _patience: float) -> None:
        pass

    def twin(self) -> Flood:
        return self

    def get(self, _path: str) -> dict[str, Any]:
        return self.job

    def change(self, _method: str, path: str) -> None:
        assert path.endswith("/stop")
        if self.refusals:
            raise self.refusals.pop(0)
        self.job["phase"] = "stopped"

    def stream(self, _path: str, **_query: object) -> Iterator[dict[str, Any]]:
        while True:
            self.sent += 1
            if self.sent == 100:
                os.kill(os.getpid(), signal.SIGTERM)
            yield {"node": "n1", "generation": 1, "rank": 0, "stream": "stdout", "time": f"{self.sent:09}",
                   "text": "x", "partial": False}  # fmt: skip


@pytest.mark.timeout(30)
def test_a_flood_ends_soon_after_the_job_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL", 0.01)
    monkeypatch.setattr(module, "LINGER", 0.05)
    flood, out, err = Flood(), io.StringIO(), io.StringIO()
    session = Session(cast(Client, flood), stays=True)
    session.begin(flood.job, Printer(out, err))
    assert session.follow() == 128 + signal.SIGTERM
    assert err.getvalue().count("the rest of the output is not printed: nodeagentctl logs digits") == 1
    assert out.getvalue().count("\n") > 100, "what comes until then is printed"


@pytest.mark.timeout(30)
def test_a_stop_that_is_refused_for_a_while_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many requests at once is no word about the job, and another change at the same moment is not its end."""
    monkeypatch.setattr(module, "POLL", 0.01)
    monkeypatch.setattr(module, "LINGER", 0.05)
    busy = [CtlError("too many requests at once", Exit.REFUSED) for _ in range(3)]
    for one, kind in zip(busy, ("limit", "limit", "state"), strict=True):
        one.kind = kind
    flood, err = Flood(*busy), io.StringIO()
    session = Session(cast(Client, flood), stays=True)
    session.begin(flood.job, Printer(io.StringIO(), err))
    assert session.follow() == 128 + signal.SIGTERM
    assert (flood.job["phase"], flood.refusals) == ("stopped", [])
    assert err.getvalue().count("stopping the job gracefully") == 1
    assert err.getvalue().count("too many requests at once") == 1


@pytest.mark.timeout(30)
def test_a_job_that_has_ended_need_not_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL", 0.01)
    monkeypatch.setattr(module, "LINGER", 0.05)
    ended = CtlError("job 'digits' has ended (succeeded)", Exit.REFUSED)
    ended.kind = "state"
    flood, err = Flood(ended), io.StringIO()
    flood.job["phase"] = "succeeded"
    session = Session(cast(Client, flood), stays=True)
    session.begin(flood.job, Printer(io.StringIO(), err))
    assert session.follow() == 0
    assert "has ended" not in err.getvalue()


def test_a_command_that_ignores_a_lost_terminal_goes_on_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    """As ``nohup`` has it: what is printed goes to a file."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Session(cast("Client", Flood()), stays=False)._signals():
            os.kill(os.getpid(), signal.SIGHUP)
            os.write(1, b"still here")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr().out == "still here"


def test_at_a_lost_terminal_what_goes_to_a_file_still_does(capfd: pytest.CaptureFixture[str]) -> None:
    """A run on nodes of its own goes on, and so does the log that the shell made of its output."""
    with Session(cast("Client", Flood()), stays=False)._signals():
        os.kill(os.getpid(), signal.SIGHUP)
        os.write(1, b"still here")
    assert capfd.readouterr().out == "still here"


def test_at_a_lost_terminal_what_goes_to_it_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, ours = pty.openpty()
    with os.fdopen(ours, "w") as out, os.fdopen(os.dup(ours), "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with Session(cast("Client", Flood()), stays=False)._signals():
            os.close(terminal)
            os.kill(os.getpid(), signal.SIGHUP)
            print("lost", flush=True)
            print("lost", file=sys.stderr, flush=True)


class Gone(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError


@pytest.mark.timeout(30)
def test_the_stop_is_sent_though_nobody_reads_what_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL", 0.01)
    monkeypatch.setattr(module, "LINGER", 0.05)
    flood = Flood()
    session = Session(cast(Client, flood), stays=True)
    session.begin(flood.job, Printer(io.StringIO(), Gone()))
    with pytest.raises(OutputError):
        session.follow()
    assert flood.job["phase"] == "stopped"


class Impatient(Flood):
    """Is interrupted twice at once."""

    def stream(self, _path: str, **_query: object) -> Iterator[dict[str, Any]]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        yield {}


def test_the_stop_is_sent_before_a_second_interrupt_leaves() -> None:
    flood, err = Impatient(), io.StringIO()
    session = Session(cast(Client, flood), stays=True)
    session.begin(flood.job, Printer(io.StringIO(), err))
    assert session.follow() == 130
    assert flood.job["phase"] == "stopped"
    assert "job digits is being stopped" in err.getvalue()

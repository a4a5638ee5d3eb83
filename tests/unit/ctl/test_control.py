"""What ends the wait of ``pause``, ``resume`` and ``restart``, and what becomes of a change whose answer was lost."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from nodeagent.ctl import client, control, waiting
from nodeagent.ctl.main import cli
from nodeagent.ctl.terminal import CtlError, Exit

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

    def get(self, path: str) -> Json:
        if path == "/v1/jobs/a":  # only to learn its uid
            return self.after
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


class Deleted(Agents):
    """One whose job is not there any more when it is looked at."""

    def get(self, path: str) -> Json:
        if path == "/v1/jobs/a":
            return self.after
        raise CtlError("no job 'u1'", Exit.NOT_FOUND)


@pytest.mark.parametrize(("verb", "code"), [("stop", 0), ("pause", 1), ("resume", 1), ("restart", 1)])
def test_a_job_that_is_deleted_meanwhile_is_named(verb: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, not as "no job UID"; and one that was to be stopped has been."""
    monkeypatch.setattr(control, "connect", lambda _ctx: Deleted(row(2, "stop", "forming")))
    result = CliRunner().invoke(cli, [verb, "a", "--timeout", "200ms"])
    says = "job/a stopped, and deleted since" if verb == "stop" else "job a was deleted meanwhile"
    assert (result.exit_code, says in result.output) == (code, True), result.output


class Losing(BaseHTTPRequestHandler):
    """An agent whose answers to changes are ``answers``, one by one: a status, or 0: it ends in the middle of it."""

    there: ClassVar[str] = ""
    """The path of all that there is."""
    answers: ClassVar[list[int]] = []
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"GET {self.path}")
        self._answer(200 if self.path in (self.there, "/v1/nodes") else 404)

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(f"{self.command} {self.path}")
        if status := self.answers.pop(0):
            self._answer(status)

    def do_POST(self) -> None:
        self.do_DELETE()

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()
        error = {"code": "not_found", "message": "no such thing"}
        self.wfile.write(
            json.dumps(
                {"error": error, "items": [], "next": "", "name": "digits", "uid": "u1", "id": "array-u1"}
            ).encode()
        )

    def address_string(self) -> str:
        return "local"

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.mark.parametrize(
    ("there", "answers", "changes", "code", "out"),
    [
        ("/v1/jobs/digits", [0, 404], "/v1/jobs/u1", 0, "job/digits is gone\n"),
        ("/v1/jobs/digits", [0, 0, 404], "/v1/jobs/u1", 0, "job/digits is gone\n"),
        ("/v1/jobs/digits", [404], "/v1/jobs/u1", 3, ""),
        ("/v1/arrays/digits", [0, 404], "/v1/arrays/array-u1", 0, "array/digits is gone\n"),
        ("/v1/arrays/digits", [404], "/v1/arrays/array-u1", 3, ""),
        ("", [], "", 3, ""),
    ],
    ids=["lost", "lost twice", "somebody else's", "an array's lost", "an array of somebody else's", "never there"],
)
def test_a_job_that_is_gone_when_its_deletion_is_asked_for_again_was_deleted(
    there: str, answers: list[int], changes: str, code: int, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first request, perhaps, whose answer was lost. It is asked for by its uid, or the array's id: the name
    may be another's by then."""
    monkeypatch.setattr(Losing, "there", there)
    monkeypatch.setattr(Losing, "answers", list(answers))
    done = asked_of_losing("delete", tmp_path, monkeypatch)
    assert (done.exit_code, done.stdout) == (code, out), done.stderr
    assert [one for one in Losing.asked if not one.startswith("GET")] == [f"DELETE {changes}"] * len(answers)


@pytest.mark.parametrize(
    ("verb", "there", "changes"),
    [
        ("stop", "/v1/jobs/digits", "/v1/jobs/u1/stop"),
        ("stop", "/v1/arrays/digits", "/v1/arrays/array-u1/stop"),
        ("pause", "/v1/jobs/digits", "/v1/jobs/u1/pause"),
        ("scale 2", "/v1/jobs/digits", "/v1/jobs/u1/scale"),
        ("scaleout --count 1", "/v1/jobs/digits", "/v1/jobs/u1/scaleout"),
        ("scalein --count 1", "/v1/jobs/digits", "/v1/jobs/u1/scalein"),
    ],
)
def test_a_job_that_took_the_name_meanwhile_is_left_alone(
    verb: str, there: str, changes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Losing, "there", there)
    monkeypatch.setattr(Losing, "answers", [0, 404])
    asked_of_losing(verb, tmp_path, monkeypatch)
    assert [one for one in Losing.asked if not one.startswith("GET")] == [f"POST {changes}"] * 2


def test_what_is_followed_is_the_job_that_had_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the agent breaks off, another job may have the name when it is back: their output would be mixed."""
    monkeypatch.setattr(Losing, "there", "/v1/jobs/digits")
    asked_of_losing("logs -f", tmp_path, monkeypatch)
    jobs = [one.partition("?")[0] for one in Losing.asked if one.startswith("GET /v1/jobs/")]
    assert jobs == ["GET /v1/jobs/digits", "GET /v1/jobs/u1/logs"]


def asked_of_losing(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """What the command does with the job or array ``digits``. ``words``: its verb, and what comes after the name."""
    verb, *more = words.split()
    monkeypatch.setattr(client, "ASK_AGAIN_EVERY", 0.0)
    monkeypatch.setattr(Losing, "asked", [])
    path = str(folder / "api.sock")
    with UnixStreamServer(path, Losing) as server:
        agent = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        agent.start()
        try:
            return CliRunner().invoke(cli, [verb, "digits", *more, "--agent", path])
        finally:
            server.shutdown()
            agent.join()

"""Events in lines, and following them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import ClassVar

import pytest
import yaml
from click.testing import CliRunner, Result

from nodeagent.ctl import events
from nodeagent.ctl.events import _text, event_line
from nodeagent.ctl.main import cli
from nodeagent.ctl.terminal import Exit, printable

EVENT = {
    "id": "1700000000000-0", "kind": "GenerationForming", "job": "digits", "node": "", "generation": 3,
    "text": "n2 is lost (its lease has lapsed); the gang is formed anew on n1, n3",
}  # fmt: skip


def test_an_event_is_one_line_where_no_width_is_to_be_kept() -> None:
    line = event_line(EVENT)
    assert line.endswith(f"  GenerationForming   job/digits generation 3  {EVENT['text']}")
    assert "\n" not in line and event_line(EVENT, wide=True) == f"{EVENT['id']}  {line}"


@pytest.mark.parametrize(("width", "indent"), [(80, 41), (69, 41), (60, 4)])
def test_on_a_terminal_it_is_folded_below_its_sentence(width: int, indent: int) -> None:
    first, *more = event_line(EVENT, width=width).split("\n")
    assert more and all(len(line) <= width for line in (first, *more))
    assert {len(line) - len(line.lstrip()) for line in more} == {indent}
    assert " ".join([first, *(line.strip() for line in more)]) == event_line(EVENT)


def test_no_text_looks_like_another_event() -> None:
    forged = EVENT | {"text": "why\n2026-11-25 12:00:00  JobDeleted          job/digits"}
    line = event_line(forged)
    assert "\n" not in line and line.endswith("why\\n2026-11-25 12:00:00  JobDeleted          job/digits")


def test_as_yaml_it_reads_back_as_it_was() -> None:
    odd = EVENT | {"text": "a\u200eb"}
    assert yaml.safe_load(printable(_text(odd, "yaml"))) == odd


def test_the_help_speaks_of_no_argument_that_is_not_there() -> None:
    assert "argument" not in CliRunner().invoke(cli, ["events", "--help"]).output


class Leaving(BaseHTTPRequestHandler):
    """An agent that sends the next event, and ends in the middle of what follows."""

    answers: ClassVar[list[dict[str, object]]] = []
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        answer = self.answers.pop(0)
        self.send_response(404 if "error" in answer else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode() + b"\n")

    def address_string(self) -> str:
        return "local"

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def test_following_goes_on_where_it_was_and_ends_when_no_agent_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = EVENT | {"id": "1700000001000-0", "kind": "GenerationActive"}
    monkeypatch.setattr(events, "AGENT_AWAY_LIMIT", 0.5)
    monkeypatch.setattr(Leaving, "answers", [{"items": [], "next": ""}, {}, EVENT, later])
    monkeypatch.setattr(Leaving, "asked", [])
    path = str(tmp_path / "api.sock")

    def follow() -> Result:
        return CliRunner().invoke(cli, ["events", "--follow", "--agent", path])

    with UnixStreamServer(path, Leaving) as server:
        server.timeout = 20.0

        def serve() -> None:
            for _ in range(5):  # the look whether it listens, the nodes, and three times the events
                server.handle_request()
            server.server_close()

        agent = threading.Thread(target=serve)
        agent.start()
        done = follow()
        agent.join()
    asked = "/v1/events?follow=1"
    assert Leaving.asked[1:] == [asked, asked, f"{asked}&after={EVENT['id']}"]
    assert done.stdout.splitlines() == [events.HEADING, event_line(EVENT), event_line(later)]
    first, then = done.stderr.splitlines()
    assert first.startswith(f"nodeagentctl: no answer from the agent at {path}: ") and "refused" in first
    assert then.startswith("  next: start one: ")
    assert done.exit_code == Exit.UNREACHABLE
    nobody = follow()
    assert (nobody.exit_code, nobody.stdout) == (Exit.UNREACHABLE, "")
    assert nobody.stderr.startswith(f"nodeagentctl: no agent listens on {path}\n  next: start one: ")


def test_following_ends_where_connections_break_off_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MOST_BREAKS", 2)
    monkeypatch.setattr(events, "POLL", 0.01)
    answers: list[dict[str, object]] = [{"items": [], "next": ""}, {}, EVENT, {}, {}]
    monkeypatch.setattr(Leaving, "answers", answers)
    monkeypatch.setattr(Leaving, "asked", [])
    path = str(tmp_path / "api.sock")
    with UnixStreamServer(path, Leaving) as server:
        agent = threading.Thread(target=server.serve_forever)
        agent.start()
        done = CliRunner().invoke(cli, ["events", "--follow", "--agent", path])
        server.shutdown()
        agent.join()
    assert (done.exit_code, answers) == (Exit.UNREACHABLE, [])
    assert done.stdout.splitlines() == [events.HEADING, event_line(EVENT)]


NO_SUCH_JOB = {"error": {"code": "not_found", "message": "there is no job 'digits'", "next": ""}}


@pytest.mark.parametrize(
    ("answer", "named"), [({"uid": "u1"}, ["u1", "u1"]), (NO_SUCH_JOB, ["digits", "u1"])], ids=["kept", "deleted"]
)
@pytest.mark.parametrize("seen", [True, False], ids=["", "nothing-seen"])
def test_a_job_is_followed_by_its_uid_since_its_name_may_become_another_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object], named: list[str], seen: bool
) -> None:
    """One whose record was deleted: from its first event on."""
    event = EVENT | {"uid": "u1"} if seen else {}
    monkeypatch.setattr(Leaving, "answers", [answer, {"items": [], "next": ""}, event, {"end": True}])
    monkeypatch.setattr(Leaving, "asked", [])
    monkeypatch.setattr(events, "POLL", 0.01)
    path = str(tmp_path / "api.sock")
    with UnixStreamServer(path, Leaving) as server:
        agent = threading.Thread(target=server.serve_forever)
        agent.start()
        done = CliRunner().invoke(cli, ["events", "--follow", "--job", "digits", "--agent", path])
        server.shutdown()
        agent.join()
    assert done.exit_code == 0, done.output
    first, then = named if seen else named[:1] * 2
    after = f"&after={EVENT['id']}" if seen else ""
    assert Leaving.asked[0] == "/v1/jobs/digits"
    assert Leaving.asked[2:] == [f"/v1/events?follow=1&job={first}", f"/v1/events?follow=1{after}&job={then}"]

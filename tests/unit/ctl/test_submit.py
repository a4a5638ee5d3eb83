"""Submit waits while the workers of an ended job of the same name still stop, and for nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import Any, ClassVar

import pytest
import yaml
from click.testing import CliRunner

from nodeagent.ctl.client import Client
from nodeagent.ctl.main import cli
from nodeagent.ctl.submit import _print, send
from nodeagent.ctl.terminal import RUN_CODES, CtlError, Exit
from nodeagent.model.jobspec import Submission
from nodeagent.spec.jobargs import capture_submitter
from nodeagent.spec.jobfile import parse_jobs

Answer = tuple[int, dict[str, Any]]
HELD = "the job named train (uid u1, stopped) still stops its workers on node n2"


def refusal(code: str, message: str) -> Answer:
    return 409, {"error": {"code": code, "message": message, "next": "ask again in a moment"}}


class Agent(BaseHTTPRequestHandler):
    """Gives one answer after the other."""

    answers: ClassVar[list[Answer]] = []
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, body = self.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@contextmanager
def answering(folder: Path, *answers: Answer) -> Iterator[Client]:
    Agent.answers[:], Agent.asked[:] = answers, []
    with UnixStreamServer(str(folder / "api.sock"), Agent) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield Client([str(folder / "api.sock")])
        finally:
            server.shutdown()
            serving.join()


@pytest.fixture
def jobs() -> list[Submission]:
    text = "name: train\nnodes: 1\ncommand: [python, t.py]\n"
    return parse_jobs(text, "job.yaml", capture_submitter({}, "/work"))


def test_it_waits_while_workers_of_the_last_job_still_stop(
    tmp_path: Path, jobs: list[Submission], capsys: pytest.CaptureFixture[str]
) -> None:
    held = refusal("stopping", HELD)
    with answering(tmp_path, held, held, (201, {"jobs": [{"name": "train"}]})) as client:
        assert send(client, jobs, "r")["jobs"] == [{"name": "train"}]
    assert [asked["request_id"] for asked in Agent.asked] == ["r"] * 3
    assert capsys.readouterr().err == f"job/train waits: {HELD}\n", "said once"


def test_a_live_job_of_the_name_is_refused_at_once(tmp_path: Path, jobs: list[Submission]) -> None:
    with answering(tmp_path, refusal("state", "a job named train is live")) as client, pytest.raises(CtlError) as error:
        send(client, jobs)
    assert error.value.code == Exit.REFUSED
    assert len(Agent.asked) == 1


def test_a_time_from_now_is_sent_as_it_is(tmp_path: Path) -> None:
    """The agent counts it, by its own clock."""
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nnodes: 1\ncommand: [python, t.py]\nbegin: +2h\npreload: []\n")
    done = {"jobs": [{"name": "a", "uid": "u1", "unmet": ""}]}
    with answering(tmp_path, (201, done)):
        result = CliRunner().invoke(cli, ["submit", str(file), "--agent", str(tmp_path / "api.sock")])
    assert result.exit_code == 0, result.output
    (row,) = Agent.asked[0]["jobs"]
    assert (row["begin_in"], row["spec"]["begin"]) == (7200.0, None)


def test_a_dry_run_of_several_jobs_prints_a_file_of_several_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    found = [{"spec": {"name": "a"}, "jobs": 1}, {"spec": {"name": "b"}, "jobs": 3}]
    _print({"jobs": found, "submitter": {"user": "ann"}})
    shown = capsys.readouterr()
    assert shown.out.startswith("name: a\n")
    assert list(yaml.safe_load_all(shown.out)) == [
        {"name": "a", "submitter": {"user": "ann"}},
        {"name": "b", "submitter": {"user": "ann"}},
    ]
    assert "job/b would be submitted, 3 times (dry run)" in shown.err


def test_a_job_that_too_few_disks_have_is_named(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nnodes: 1\ncommand: [python, t.py]\npreload: []\n")
    done = {"jobs": [{"name": "a", "uid": "u1", "unmet": ""}], "saved": {"text": "only n1 had it on disk"}}
    with answering(tmp_path, (201, done)):
        result = CliRunner().invoke(cli, ["submit", str(file), "--agent", str(tmp_path / "api.sock")])
    assert (result.exit_code, result.stdout) == (Exit.TIMED_OUT, "job/a submitted (uid u1)\n"), result.output
    assert "job/a submit: only n1 had it on disk" in result.stderr


@pytest.mark.parametrize("words", [["validate", "-"], ["run", "--nproc-per-node", "1", "--", "sleep", "1"]])
def test_a_removed_folder_is_named(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    result = CliRunner().invoke(cli, words, input="name: train\nnodes: 1\ncommand: [python, t.py]\n")
    assert result.exit_code == (Exit.USAGE if words[0] == "validate" else RUN_CODES[Exit.USAGE])
    assert "the current folder does not exist any more" in result.stderr

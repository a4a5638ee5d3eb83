"""Who asks is what the kernel says: another user's process against a live API (needs root, to become somebody else)."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.ctl.client import Client
from nodeagent.ctl.terminal import CtlError
from nodeagent.model.job import BudgetEntry, Outcome
from nodeagent.model.world import PodReport, WorkerExit
from tests.unit.api.fakes import LiveAgent, asked, live_agent, spec

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

STRANGER = pwd.getpwnam("games").pw_uid
"""An account that every Debian has, and nobody uses."""
ASK = """
import encodings.idna, http.client, json, os, socket, sys
path, method, target, body, uid = sys.argv[1:]
os.setgroups([]), os.setgid(int(uid)), os.setuid(int(uid))
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(path)
connection.request(method, target, body)
answer = connection.getresponse()
print(json.dumps([answer.status, json.loads(answer.read())]))
"""


@pytest.fixture
def agent() -> Iterator[LiveAgent]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with live_agent(Path(folder)) as started:
            yield started


def ask(agent: LiveAgent, method: str, target: str, /, **body: Any) -> tuple[int, dict[str, Any]]:
    """As a user without any rights."""
    text = json.dumps({"request_id": uuid.uuid4().hex, **body})
    command = [sys.executable, "-c", ASK, agent.socket, method, target, text, str(STRANGER)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    status, answer = json.loads(result.stdout)
    return status, answer


def test_a_stranger_may_read(agent: LiveAgent) -> None:
    agent.submit(spec())
    status, job = ask(agent, "GET", "/v1/jobs/digits")
    assert (status, job["name"]) == (200, "digits")


SECRET = "hf_s3cret"


def failed_with_a_secret(agent: LiveAgent) -> None:
    """A job of another user, with a secret in its environment and one in what its worker wrote last."""
    role = spec().role.model_copy(update={"env": {"ROLE_TOKEN": SECRET}})
    agent.submit(spec(env={"HF_TOKEN": SECRET}).model_copy(update={"roles": (role,)}))
    agent.until(lambda: agent.view.job("digits").phase == "running")
    ended = BudgetEntry(
        at=1, wall=1.0, kind="worker_failed", counts=True, node="n2", rank=3, exit=1, error=SECRET, text="x"
    )
    outcome = Outcome(code=1, text="rank 3 failed", error=SECRET)
    known = agent.view.job("digits")
    assert known.generation is not None
    report = PodReport(state="failed", exits=(WorkerExit(rank=3, local_rank=1, pid=9, code=1, error=SECRET),))
    agent.view.show(
        known.model_copy(
            update={
                "phase": "failed", "budget": {"1": ended}, "outcome": outcome, "last_reports": {"n2": report},
                "generation": known.generation.model_copy(update={"state": "ended", "reports": {"n2": report}}),
            }
        )
    )  # fmt: skip


def test_what_a_job_was_given_and_wrote_is_for_its_owner_and_operators(agent: LiveAgent) -> None:
    failed_with_a_secret(agent)
    status, job = ask(agent, "GET", "/v1/jobs/digits")
    assert (status, job["phase"], job["private"]) == (200, "failed", True)
    assert (list(job["spec"]["env"]), job["outcome"]["text"]) == (["HF_TOKEN"], "rank 3 failed")
    assert [role["env"] for role in job["spec"]["roles"]] == [{"ROLE_TOKEN": None}]
    status, jobs = ask(agent, "GET", "/v1/jobs")
    for shown in (job, jobs, ask(agent, "GET", "/v1/status")[1]):
        assert SECRET not in json.dumps(shown)
    mine = Client([agent.socket]).get("/v1/jobs/digits")
    assert (mine["private"], mine["spec"]["env"], mine["outcome"]["error"]) == (False, {"HF_TOKEN": SECRET}, SECRET)
    assert mine["spec"]["roles"][0]["env"] == {"ROLE_TOKEN": SECRET}
    assert json.dumps(mine).count(SECRET) >= 5, "the stranger's view left out all of them"


@pytest.mark.parametrize(
    ("why", "phase"),
    [("hook pre_start failed with exit code 3", "exited"), ("trouble with the fork server", "running")],
)
def test_what_a_hook_printed_is_for_the_owner_and_operators(agent: LiveAgent, why: str, phase: str) -> None:
    """And what a module that it preloads raised."""
    agent.submit(spec())
    agent.until(lambda: agent.view.job("digits").phase == "running")
    pods = agent.view.gangs[agent.view.job("digits").uid]
    pods["n2"] = pods["n2"].model_copy(update={"phase": phase, "reason": f"{why}: {SECRET}", "workers": ()})
    agent.do(agent.view.refresh)
    agent.until(lambda: SECRET in json.dumps(Client([agent.socket]).get("/v1/jobs/digits")))
    status, job = ask(agent, "GET", "/v1/jobs/digits")
    assert (status, [pod["reason"] for pod in job["pods"] if pod["node"] == "n2"]) == (200, [why])
    for shown in (job, ask(agent, "GET", "/v1/jobs")[1], ask(agent, "GET", "/v1/status")[1]):
        assert SECRET not in json.dumps(shown)


def test_logs_are_for_the_owner_and_operators(agent: LiveAgent) -> None:
    agent.submit(spec())
    status, answer = ask(agent, "GET", "/v1/jobs/digits/logs")
    assert (status, answer["error"]["code"]) == (403, "permission")
    assert "nodeagentctl describe digits" in answer["error"]["next"]


CHANGES = [
    ("POST", "/v1/jobs/digits/scale", {"target": 3}),
    ("POST", "/v1/jobs/digits/scaleout", {"count": 1}),
    ("POST", "/v1/jobs/digits/scalein", {"nodes": ["n1"]}),
    ("POST", "/v1/jobs/digits/stop", {}),
    ("POST", "/v1/jobs/digits/pause", {}),
    ("POST", "/v1/jobs/digits/restart", {}),
    ("DELETE", "/v1/jobs/digits", {}),
    ("POST", "/v1/nodes/n1/cordon", {"reason": "because"}),
    ("POST", "/v1/nodes/n1/drain", {"reason": "because"}),
    ("POST", "/v1/nodes/n1/uncordon", {}),
    ("POST", "/v1/nodes/n1/forget", {}),
    ("POST", "/v1/jobs", asked(spec("theirs", user="root"))),
]


@pytest.mark.parametrize(("method", "target", "body"), CHANGES)
def test_a_stranger_may_change_nothing(agent: LiveAgent, method: str, target: str, body: dict[str, Any]) -> None:
    agent.submit(spec())
    status, answer = ask(agent, method, target, **body)
    assert status == 403
    assert answer["error"]["next"]
    agent.do(agent.view.refresh)
    assert [(j.name, j.control.rev) for j in agent.view.cluster().jobs.values()] == [("digits", 1)]
    assert agent.view.cluster().nodes["n1"].cordon is None


def test_what_a_stranger_submits_is_theirs_whatever_the_request_says(agent: LiveAgent) -> None:
    body = asked(spec("theirs", user="games"))
    body["submitter"] |= {"user": "root", "uid": 0, "gid": 0}
    status, answer = ask(agent, "POST", "/v1/jobs", **body)
    assert status == 201, answer
    job = agent.view.job("theirs")
    assert (job.owner, job.spec.submitter.uid, job.spec.submitter.user) == (STRANGER, STRANGER, "games")
    agent.submit(spec())
    status, _ = ask(agent, "POST", "/v1/jobs/theirs/stop")
    assert status == 200


def test_no_job_of_root_unless_the_config_says_so(agent: LiveAgent) -> None:
    body = asked(spec("mine", user="root"))
    body["submitter"] |= {"user": "root", "uid": 0}
    client = Client([agent.socket])
    with pytest.raises(CtlError, match="allow_root"):
        client.change("POST", "/v1/jobs", **body)
    assert agent.view.cluster().jobs == {}

"""What the API writes is signed, and what it shows and takes of a job whose record is not what was signed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.ctl.client import Client
from nodeagent.ctl.terminal import CtlError
from nodeagent.model.job import JobRecord
from nodeagent.plan.cluster import Refusal
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.seal import Seal
from tests.unit.api.fakes import LiveAgent, asked, live_agent, spec

SEAL = Seal(ClusterKey(bytes(32)), "default")


@pytest.fixture
def agent() -> Iterator[LiveAgent]:
    with tempfile.TemporaryDirectory() as folder, live_agent(Path(folder), obeys=False, allow_root=True) as started:
        yield started


def change(agent: LiveAgent, path: str, method: str = "POST", /, **body: Any) -> JobRecord:
    """The record after the change, as the store has it."""
    name = path.split("/", maxsplit=1)[0] or "digits"
    Client([agent.socket]).change(method, f"/v1/jobs/{path}".rstrip("/"), **body)
    agent.do(agent.view.refresh)
    return agent.view.job(name)


def submitted(agent: LiveAgent) -> JobRecord:
    return change(agent, "", **asked(spec()))


def test_every_write_of_a_job_is_signed(agent: LiveAgent) -> None:
    job = submitted(agent)
    assert SEAL.admits(job) and SEAL.controls(job)
    assert job.admission is not None
    assert job.admission.by == "n1"
    for path, body in (
        ("digits/scaleout", {"count": 1}),
        ("digits/scale", {"target": 1}),
        ("digits/pause", {}),
        ("digits/resume", {}),
        ("digits/stop", {}),
    ):
        after = change(agent, path, **body)
        assert after.control.rev == job.control.rev + 1, path
        assert SEAL.controls(after) and SEAL.admits(after), path
        job = after


def refuse(agent: LiveAgent, job: JobRecord, refusal: Refusal) -> None:
    async def work() -> None:
        agent.view.distrusted = {job.uid: refusal}
        await agent.view.refresh()

    agent.do(work)


def test_a_forged_job_says_why_it_is_not_run_and_can_only_be_ended(agent: LiveAgent) -> None:
    job = agent.submit(spec())
    refuse(agent, job, Refusal("unsigned", "it has no signature", controlled=False))
    client = Client([agent.socket])
    assert client.get("/v1/jobs/digits")["reason"] == "it has no signature"
    assert client.get("/v1/jobs")["items"][0]["reason"] == "it has no signature"
    requests: dict[str, dict[str, Any]] = {"scale": {"target": 3}, "pause": {}, "resume": {}, "restart": {}}
    for path, body in requests.items():
        with pytest.raises(CtlError, match="is not run: it has no signature"):
            client.change("POST", f"/v1/jobs/digits/{path}", **body)
    assert agent.view.job("digits").control == job.control
    after = change(agent, "digits", "DELETE")
    assert (after.control.desired, after.control.delete) == ("stop", True)
    assert SEAL.controls(after)
    assert not SEAL.admits(after), "that it was asked to end makes it nobody's job"


@pytest.mark.parametrize(("path", "body"), [("resume", {}), ("scale", {"target": 2}), ("scaleout", {"count": 1})])
def test_a_request_is_made_anew(agent: LiveAgent, path: str, body: dict[str, Any]) -> None:
    """Also where it would change nothing of what the job is by its file."""
    job = submitted(agent)
    request = change(agent, "digits/pause")
    refuse(agent, job, Refusal("control", "an older wish was put back", controlled=False, rev=9))
    after = change(agent, f"digits/{path}", **body)
    assert after.control.rev == 10 > request.control.rev
    assert after.control.desired == "run"
    assert SEAL.controls(after)

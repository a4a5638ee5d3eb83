"""Checks by work and words on health for a node of another machine, asked of any agent: it asks the node's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.agent.diagnosis import Diagnosis
from nodeagent.ctl.client import Client
from nodeagent.ctl.terminal import CtlError, Exit
from nodeagent.osutil.clock import SystemClock
from nodeagent.spec.healthconfig import HealthConfig
from nodeagent.trust.ticket import Ticket, subject
from nodeagent.trust.ticket import write as sign
from tests.integration.remote_support import Door
from tests.integration.test_api_remote_logs import ctl, second, tell
from tests.unit.api.fakes import LiveAgent, PeerView, live_agent
from tests.unit.api.test_nodehealth_diag import HAND, hands

DIAG = "/v1/nodes/n2/diag"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path) as started:
        started.view.near = {"n1": started.socket}  # n2 is another machine
        yield started


def checks(agent: LiveAgent, view: PeerView, folder: Path) -> Diagnosis:
    """What checks n2."""
    health = HealthConfig.model_validate({"diag": {"python": HAND, "bound": 20}})
    config = view.config.model_copy(update={"health": health})
    environ = hands(folder, matmul=12.0)

    async def made() -> Diagnosis:
        return Diagnosis(config, environ, SystemClock(), lambda: None)

    found = view.diagnosis = agent.do(made)
    agent.view.diagnosis = agent.do(made)
    return found


def test_another_machines_node_is_checked_from_here(agent: LiveAgent, tmp_path: Path) -> None:
    with second(agent, tmp_path) as (view, door):
        tell(agent, door)
        diagnosis = checks(agent, view, tmp_path)
        result = ctl(agent, "diag", "n2")
        assert (result.exit_code, "12 TFLOP/s" in result.stdout) == (0, True), result.stderr
        assert diagnosis.report is not None
        assert agent.view.diagnosis is not None
        assert agent.view.diagnosis.report is None, "n1 was not checked"
        refused = ctl(agent, "diag", "n2", "--gpu", "GPU-x")
        assert (refused.exit_code, "GPU-x" in refused.stderr) == (Exit.NOT_FOUND, True), "n2's own words"


def test_a_word_on_its_health_goes_there_too(agent: LiveAgent, tmp_path: Path) -> None:
    with second(agent, tmp_path) as (_, door):
        tell(agent, door)
        refused = ctl(agent, "health", "ack", "n2")
        assert (refused.exit_code, "the health of node n2 is not monitored" in refused.stderr) == (Exit.REFUSED, True)


def test_it_is_for_operators_alone(agent: LiveAgent, tmp_path: Path) -> None:
    """The other agent, too, looks for whom it is asked."""
    with second(agent, tmp_path) as (view, door):
        tell(agent, door)
        diagnosis = checks(agent, view, tmp_path)
        path = f"{DIAG}?local_only=1"
        assert "only root and operators may" in post(door, path, ticket(agent, door, path, operator=False))
        assert diagnosis.report is None
        assert '"state": "running"' in post(door, path, ticket(agent, door, path, operator=True))
        agent.until(lambda: diagnosis.report is not None)


def test_a_ticket_changes_nothing_else_and_is_not_passed_on(agent: LiveAgent, tmp_path: Path) -> None:
    with second(agent, tmp_path) as (view, door):
        tell(agent, door)
        checks(agent, view, tmp_path)
        for path in ("/v1/nodes/n2/cordon", "/v1/nodes/n2/diag/more", "/v1/jobs/digits/stop"):
            answer = post(door, path, ticket(agent, door, path, operator=True))
            assert answer.startswith("HTTP/1.1 403"), path
        reading = ticket(agent, door, DIAG, operator=True, method="GET")
        assert "it is for something else" in post(door, DIAG, reading)
        elsewhere = "/v1/nodes/n1/diag?local_only=1"
        assert "ask on n1 itself" in post(door, elsewhere, ticket(agent, door, elsewhere, operator=True))


def test_a_node_that_does_not_answer(agent: LiveAgent, tmp_path: Path) -> None:
    with second(agent, tmp_path) as (_, door):
        tell(agent, door)
    with pytest.raises(CtlError, match=r"the agent of n2 could not be asked: .*Connection refused") as refused:
        Client([agent.socket]).change("POST", DIAG)
    assert refused.value.code == Exit.UNREACHABLE


def ticket(agent: LiveAgent, door: Door, path: str, *, operator: bool, method: str = "POST") -> str:
    """As n1's agent would write it."""
    with door.speak(b"GET /v1/challenge HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n") as secure:
        answer = b"".join(iter(lambda: secure.recv(4096), b""))
    challenge = str(json.loads(answer.partition(b"\r\n\r\n")[2])["challenge"])
    values: dict[str, Any] = {
        "challenge": challenge, "node": "n2", "certificate": door.certificate, "path": subject(method, path),
        "uid": os.getuid(), "name": "somebody", "operator": operator, "by": "n1",
    }  # fmt: skip
    return f"Authorization: {sign(agent.view.key, Ticket.model_validate(values))}"


def post(door: Door, path: str, header: str) -> str:
    body = json.dumps({"request_id": "r"})
    lines = [f"POST {path} HTTP/1.1", "Host: a", "Connection: close", f"Content-Length: {len(body)}", header, "", body]
    with door.speak("\r\n".join(lines).encode()) as secure:
        return b"".join(iter(lambda: secure.recv(4096), b"")).decode()

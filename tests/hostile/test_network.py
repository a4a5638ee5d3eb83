"""Somebody who reaches an agent's https port, with no credential, or with a token that he should not have.

That nobody is let in without one, over plain HTTP, by silence, or with a token that was taken out of the file is in
tests/integration/test_api_remote.py; garbage as datagrams in tests/unit/lease/test_peers.py. Here is what a valid token
cannot do, and what a web page cannot that has pointed a name of its own at 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.api.requests import MAX_BODY
from nodeagent.spec.sections import LimitsConfig
from tests.integration.remote_support import ADDRESS, TOKENS, Door, https, write_tokens
from tests.unit.api.fakes import LiveAgent, asked, live_agent, spec

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's agent lets its own user do anything")

USER = pwd.getpwnam("nobody").pw_name


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, obeys=False) as started:
        yield started


@pytest.fixture
def door(agent: LiveAgent, tmp_path: Path) -> Iterator[Door]:
    tokens = write_tokens(tmp_path / "tokens.yaml", TOKENS | {"stolen": f"user: {USER}"})
    with https(agent, agent.view, tokens=str(tokens)) as open_door:
        yield open_door


def ask(door: Door, method: str, path: str, body: bytes = b"", who: str = "stolen") -> tuple[int, dict[str, Any]]:
    generation = (
        f"{method} {path} HTTP/1.1\r\nHost: {ADDRESS}\r\nAuthorization: Bearer {who}-secret\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with door.speak(generation.encode() + body) as secure:
        answer = b"".join(iter(lambda: secure.recv(65536), b""))
    lines, _, text = answer.partition(b"\r\n\r\n")
    return int(lines.split()[1]), json.loads(text)


def submission(name: str, **more: Any) -> bytes:
    return json.dumps(asked(spec(name, user=USER, **more)) | {"request_id": f"r-{name}"}).encode()


def test_a_tokens_user_has_his_limits(agent: LiveAgent, door: Door) -> None:
    agent.view.config = agent.view.config.model_copy(update={"limits": LimitsConfig(jobs=2, requests=3)})
    answers = [ask(door, "POST", "/v1/jobs", submission(f"job-{n}")) for n in range(3)]
    assert [status for status, _ in answers] == [201, 201, 429]
    assert answers[2][1]["error"]["message"] == f"{USER} has 2 live jobs, as many as limits.jobs allows"
    status, answer = ask(door, "POST", "/v1/jobs", submission("first", priority=5))
    assert (status, "are for operators" in answer["error"]["message"]) == (403, True)


def test_what_one_token_asks_too_often_is_answered_to_another(agent: LiveAgent, door: Door) -> None:
    agent.view.config = agent.view.config.model_copy(update={"limits": LimitsConfig(requests=1)})
    codes = [ask(door, "GET", "/v1/jobs")[0] for _ in range(10)]
    assert codes[:2] == [200, 200]
    assert 429 in codes
    assert ask(door, "GET", "/v1/jobs", who="reads")[0] == 200
    assert ask(door, "GET", "/v1/jobs", who="operates")[0] == 200


def test_a_body_without_end(door: Door) -> None:
    status, answer = ask(door, "POST", "/v1/jobs", b" " * (MAX_BODY + 1))
    assert status == 400
    assert str(MAX_BODY) in answer["error"]["message"]
    assert ask(door, "GET", "/v1/jobs")[0] == 200


NOT_ITS_NAMES = (
    "Host: evil.example\r\n", "Host: evil.example:9470\r\n", "Host: 127.0.0.1.evil.example\r\n",
    "Host: localhost@evil.example\r\n", "Host: 127.0.0.1 evil.example\r\n", "Host: \r\n", "",
)  # fmt: skip


@pytest.mark.parametrize("named", NOT_ITS_NAMES)
@pytest.mark.parametrize("target", ["/metrics", "/v1/status", "/healthz/../metrics", "/%6detrics", "//metrics"])
def test_a_name_that_is_not_loopbacks_learns_nothing_of_jobs(agent: LiveAgent, target: str, named: str) -> None:
    """DNS rebinding: a browser here that follows such a name reads what the page that owns the name may read."""
    agent.submit(spec("secret-project", user=USER))
    agent.until(lambda: "secret-project" in plainly(agent, "/metrics", "Host: 127.0.0.1\r\n"))
    answer = plainly(agent, target, named)
    assert "secret-project" not in answer
    assert answer.split()[1] in ("400", "403", "404"), answer


def plainly(agent: LiveAgent, target: str, named: str) -> str:
    """What loopback HTTP answers to this request, byte for byte."""
    assert agent.server is not None
    port = int(agent.server.http_url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.sendall(f"GET {target} HTTP/1.1\r\n{named}Connection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: plain.recv(65536), b"")).decode()

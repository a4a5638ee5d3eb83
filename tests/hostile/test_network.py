"""Somebody who reaches an agent's https port, with no credential, or with a token that he should not have.

That nobody is let in without one, over plain HTTP, by silence, or with a token that was taken out of the file is in
tests/integration/test_api_remote.py; foreign names for loopback in tests/unit/api/test_page.py; garbage as datagrams in
tests/unit/lease/test_peers.py. Here is what a valid token cannot do.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.api.requests import MAX_BODY
from nodeagent.spec.sections import LimitsConfig
from tests.integration.remote_support import ADDRESS, TOKENS, Door, https, write_tokens
from tests.unit.api.fakes import LiveAgent, live_agent, spec

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
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {ADDRESS}\r\nAuthorization: Bearer {who}-secret\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with door.speak(head.encode() + body) as secure:
        answer = b"".join(iter(lambda: secure.recv(65536), b""))
    lines, _, text = answer.partition(b"\r\n\r\n")
    return int(lines.split()[1]), json.loads(text)


def submission(name: str, **more: Any) -> bytes:
    asked = spec(name, user=USER, **more).model_dump(mode="json")
    return json.dumps({"spec": asked, "request_id": f"r-{name}"}).encode()


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

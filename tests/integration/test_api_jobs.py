"""The API over a real unix socket, on the in-memory store: reading, changing, refusing."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.ctl.client import Client
from nodeagent.ctl.client import _send as send
from nodeagent.ctl.terminal import CtlError
from tests.unit.api.fakes import LiveAgent, asked, live_agent, spec

CONTRACT_JOB = {
    "name", "uid", "phase", "reason", "generation", "restarts", "min", "max", "target", "age", "duration", "chief",
    "pods",
}  # fmt: skip
CONTRACT_NODE = {"name", "state", "reason", "address", "agent_pid", "gpus", "pods"}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, allow_root=True) as started:
        yield started


@pytest.fixture
def client(agent: LiveAgent) -> Client:
    return Client([agent.socket])


def running(agent: LiveAgent, name: str) -> bool:
    return any(j.name == name and j.phase == "running" for j in agent.view.cluster().jobs.values())


def test_shapes_of_the_contract(agent: LiveAgent, client: Client) -> None:
    agent.submit(spec())
    agent.until(lambda: running(agent, "digits") and "uid-digits" in agent.view.gangs)
    agent.do(agent.view.refresh)
    listed = client.get("/v1/jobs")
    assert listed["apiVersion"] == "nodeagent/v1"
    (job,) = listed["items"]
    assert set(job) >= CONTRACT_JOB
    assert (job["phase"], job["generation"], job["target"], job["chief"]) == ("running", 1, 2, "n1")
    assert [p["node"] for p in job["pods"]] == ["n1", "n2"]
    assert {"role", "node", "phase", "shim_pid", "workers"} <= set(job["pods"][0])
    assert {"rank", "local_rank", "pid", "state", "exit"} <= set(job["pods"][1]["workers"][0])
    assert [w["rank"] for p in job["pods"] for w in p["workers"]] == [0, 1, 2, 3]
    nodes = client.get("/v1/nodes")["items"]
    assert [n["name"] for n in nodes] == ["n1", "n2", "n3"]
    assert set(nodes[0]) >= CONTRACT_NODE
    assert nodes[0]["pods"][0]["ranks"] == [0, 1]
    assert nodes[2]["pods"] == []


@pytest.mark.parametrize(
    "body",
    ["[" * 60_000, '{"jobs": [{"spec": {"name": "\\ud800"}}]}', '{"a": 1', "[]", b"\xff\xfe".decode("latin-1")],
    ids=["deep", "half a character", "broken", "a list", "not UTF-8"],
)
def test_a_body_that_is_no_json_object_is_a_usage_error(agent: LiveAgent, body: str) -> None:
    data = body.encode("latin-1")
    generation = (
        "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json; charset=nope\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(agent.socket))
        connection.sendall(generation.encode() + data)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    status, _, rest = answer.partition(b"\r\n\r\n")
    assert b" 400 " in status.splitlines()[0], answer
    assert json.loads(rest)["error"]["code"] == "usage"


def test_a_job_is_found_by_name_uid_and_prefix(agent: LiveAgent, client: Client) -> None:
    agent.submit(spec())
    for ref in ("digits", "uid-digits", "uid-d"):
        assert client.get(f"/v1/jobs/{ref}")["uid"] == "uid-digits"
    with pytest.raises(CtlError) as raised:
        client.get("/v1/jobs/digitz")
    assert raised.value.code == 3
    assert "did you mean 'digits'" in raised.value.next_step


def test_an_ambiguous_prefix_is_not_guessed(agent: LiveAgent, client: Client) -> None:
    agent.submit(spec("digits"))
    agent.submit(spec("digits2"))
    with pytest.raises(CtlError) as raised:
        client.get("/v1/jobs/uid-")
    assert raised.value.code == 2
    assert "uid-digits, uid-digits2" in raised.value.message


def mine() -> dict[str, Any]:
    """A body that submits a job of who runs this test."""
    me = os.geteuid()
    body = asked(spec("mine", user="root" if me == 0 else str(me)))
    body["submitter"] |= {"user": "root" if me == 0 else str(me), "uid": me}
    return body


def test_submit_once_for_one_request_id(agent: LiveAgent, client: Client) -> None:
    first = client.change("POST", "/v1/jobs", "req-1", **mine())
    again = client.change("POST", "/v1/jobs", "req-1", **mine())
    assert first["jobs"] == again["jobs"]
    (job,) = first["jobs"]
    assert (job["name"], job["unmet"], set(first) >= {"saved"}) == ("mine", "", True)
    assert agent.view.cluster().jobs[job["uid"]].owner == os.geteuid()
    for more in ({}, {"dry_run": True}):
        with pytest.raises(CtlError) as raised:
            client.change("POST", "/v1/jobs", "req-2", **mine(), **more)
        assert raised.value.code == 6
        assert f"a job named mine is live (uid {job['uid']}, " in raised.value.message


def test_a_spec_that_is_not_right_names_every_field(agent: LiveAgent, client: Client) -> None:
    body = asked(spec("mine"))
    body["jobs"][0]["spec"] |= {"priority": "high", "bogus": 1}
    with pytest.raises(CtlError) as raised:
        client.change("POST", "/v1/jobs", **body)
    assert raised.value.code == 2
    assert any(p.startswith("priority") for p in raised.value.problems)
    assert any(p.startswith("bogus") for p in raised.value.problems)
    assert agent.view.cluster().jobs == {}


def test_dry_run_changes_nothing(agent: LiveAgent, client: Client) -> None:
    assert client.change("POST", "/v1/jobs", **mine(), dry_run=True)["dry_run"] is True
    assert agent.view.cluster().jobs == {}


def test_life_of_a_job(agent: LiveAgent, client: Client) -> None:
    agent.submit(spec())
    agent.until(lambda: running(agent, "digits"))

    def phase() -> str:
        return str(client.get("/v1/jobs/digits")["phase"])

    after = client.change("POST", "/v1/jobs/digits/scale", target=3)
    assert (after["changed"], after["previous_target"], after["target"]) == (True, 2, 3)
    agent.until(lambda: len(client.get("/v1/jobs/digits")["pods"]) == 3)
    assert client.change("POST", "/v1/jobs/digits/scale", target=3)["changed"] is False
    after = client.change("POST", "/v1/jobs/digits/scalein", count=2, timeout=1.5)
    assert (after["target"], after["scale"]["grace"], after["scale"]["left"]) == (1, 1.5, None)
    agent.until(lambda: len(client.get("/v1/jobs/digits")["pods"]) == 1)
    after = client.change("POST", "/v1/jobs/digits/scaleout", count=1)
    assert (after["target"], after["scale"]["before"], 590 < after["scale"]["left"] <= 600) == (2, 1, True)
    agent.until(lambda: len(client.get("/v1/jobs/digits")["pods"]) == 2)
    assert client.change("POST", "/v1/jobs/digits/pause")["changed"] is True
    agent.until(lambda: phase() == "paused")
    client.change("POST", "/v1/jobs/digits/resume")
    agent.until(lambda: phase() == "running")
    before = client.get("/v1/jobs/digits")["generation"]
    client.change("POST", "/v1/jobs/digits/restart", "once")
    agent.until(lambda: client.get("/v1/jobs/digits")["generation"] > before)
    assert client.change("POST", "/v1/jobs/digits/restart", "once")["restart"]["asked"] == 1
    client.change("POST", "/v1/jobs/digits/stop")
    agent.until(lambda: phase() == "stopped")
    client.change("DELETE", "/v1/jobs/digits")
    agent.until(lambda: not client.get("/v1/jobs")["items"])


def test_delete_of_a_live_job_stops_it_first(agent: LiveAgent, client: Client) -> None:
    agent.submit(spec())
    agent.until(lambda: running(agent, "digits"))
    after = client.change("DELETE", "/v1/jobs/digits")
    assert (after["desired"], after["deleting"]) == ("stop", True)
    agent.until(lambda: not client.get("/v1/jobs")["items"])


REFUSED: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("POST", "/v1/jobs/digits/scale", {"target": 9}, 6, "allows 1 to 3"),
    ("POST", "/v1/jobs/digits/scale", {"target": 0}, 6, "allows 1 to 3"),
    ("POST", "/v1/jobs/digits/scale", {"target": "3"}, 2, "whole number"),
    ("POST", "/v1/jobs/digits/scale", {"target": 3, "timeout": -1}, 2, "timeout must be"),
    ("POST", "/v1/jobs/digits/scale", {"target": 3, "timeout": "1m"}, 2, "timeout must be"),
    ("POST", "/v1/jobs/digits/scaleout", {"count": 2}, 6, "cannot have 4 nodes"),
    ("POST", "/v1/jobs/digits/scaleout", {"count": 0}, 2, "1 or more"),
    ("POST", "/v1/jobs/digits/scaleout", {}, 2, "count must be"),
    ("POST", "/v1/jobs/digits/scalein", {"count": 2}, 6, "cannot have 0 nodes"),
    ("POST", "/v1/jobs/digits/scalein", {"nodes": []}, 2, "either count or"),
    ("POST", "/v1/jobs/digits/scalein", {"nodes": ["n1"], "count": 1}, 2, "either count or"),
    ("POST", "/v1/jobs/digits/scalein", {"nodes": ["n1", "n9"]}, 6, "does not run on n9: its nodes are n1, n2"),
    ("POST", "/v1/jobs/ended/scaleout", {"count": 1}, 6, "has ended"),
    ("POST", "/v1/jobs/nope/scalein", {"count": 1}, 3, "no job 'nope'"),
    ("POST", "/v1/jobs/nope/scale", {"target": 2}, 3, "no job 'nope'"),
    ("POST", "/v1/jobs/nope/stop", {}, 3, "no job 'nope'"),
    ("DELETE", "/v1/jobs/nope", {}, 3, "no job 'nope'"),
    ("POST", "/v1/jobs/ended/scale", {"target": 2}, 6, "has ended"),
    ("POST", "/v1/jobs/ended/pause", {}, 6, "has ended"),
    ("POST", "/v1/jobs/ended/resume", {}, 6, "has ended"),
    ("POST", "/v1/jobs/ended/restart", {}, 6, "has ended"),
    ("POST", "/v1/jobs/ended/stop", {}, 6, "has ended"),
    ("POST", "/v1/jobs/digits/dance", {}, 3, "no such path"),
    ("PUT", "/v1/jobs/digits/scale", {"target": 2}, 2, "PUT is not for /v1/jobs/digits/scale"),
    ("POST", "/v1/nodes/n9/cordon", {"reason": "x"}, 3, "no node 'n9'"),
    ("POST", "/v1/nodes/n2/cordon", {}, 2, "reason"),
    ("POST", "/v1/nodes/n2/drain", {"reason": "  "}, 2, "reason"),
]


@pytest.mark.parametrize(("method", "path", "body", "code", "says"), REFUSED)
def test_refusals_change_nothing(
    agent: LiveAgent, client: Client, method: str, path: str, body: dict[str, Any], code: int, says: str
) -> None:
    agent.submit(spec())
    agent.submit(spec("ended"))
    client.change("POST", "/v1/jobs/ended/stop")
    agent.until(lambda: running(agent, "digits") and agent.view.job("ended").phase == "stopped")
    rev = {j.uid: j.control for j in agent.view.cluster().jobs.values()}
    with pytest.raises(CtlError) as raised:
        client.change(method, path, **body)
    assert raised.value.code == code
    assert says in raised.value.message
    assert raised.value.next_step
    agent.do(agent.view.refresh)
    assert {j.uid: j.control for j in agent.view.cluster().jobs.values()} == rev
    assert all(n.cordon is None for n in agent.view.cluster().nodes.values())


def test_a_method_that_a_path_does_not_take_is_answered_with_those_that_it_takes(client: Client) -> None:
    response = send(client.sockets[0], "PUT", "/v1/jobs", None, print, vouched=True)
    response.close()
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD, POST")


def test_changes_need_a_request_id(agent: LiveAgent, client: Client) -> None:
    agent.submit(spec())
    with pytest.raises(CtlError) as raised:
        client._call("POST", "/v1/jobs/digits/stop", {})
    assert raised.value.code == 2
    assert "request_id" in raised.value.message


def test_cordon_drain_uncordon(agent: LiveAgent, client: Client) -> None:
    assert client.change("POST", "/v1/nodes/n3/cordon", reason="disk")["state"] == "cordoned"
    assert client.get("/v1/nodes/n3")["reason"].startswith("disk (by ")
    assert client.change("POST", "/v1/nodes/n3/drain", reason="disk")["state"] == "drained", "nothing ran there"
    assert client.change("POST", "/v1/nodes/n3/uncordon")["state"] == "ready"


def test_a_store_that_is_away_is_reported_as_such(agent: LiveAgent, client: Client) -> None:
    agent.submit(spec())
    agent.until(lambda: running(agent, "digits"))
    agent.view.away_since = 1700000000.0
    agent.view.store.away = True
    with pytest.raises(CtlError) as raised:
        client.change("POST", "/v1/jobs/digits/stop")
    assert raised.value.code == 5
    assert "2023-11-1" in raised.value.message
    assert client.get("/v1/jobs/digits")["store_away_since"] == 1700000000.0
    assert client.get("/v1/jobs")["items"][0]["phase"] == "running"


def test_events(agent: LiveAgent, client: Client) -> None:
    agent.submit(spec())
    agent.until(lambda: running(agent, "digits"))
    all_events = list(client.stream("/v1/events"))
    kinds = [e["kind"] for e in all_events]
    assert kinds.index("JobSubmitted") < kinds.index("GenerationForming") < kinds.index("GenerationActive")
    assert [e["id"] for e in client.stream("/v1/events", limit=2)] == [e["id"] for e in all_events[-2:]]
    rest = list(client.stream("/v1/events", after=all_events[0]["id"]))
    assert [e["id"] for e in rest] == [e["id"] for e in all_events[1:]]
    assert {e["uid"] for e in client.stream("/v1/events", job="digits")} == {"uid-digits"}
    following = client.stream("/v1/events", follow=True, after=all_events[-1]["id"])
    client.change("POST", "/v1/jobs/digits/pause")
    assert next(following)["kind"] == "JobPauseRequested"
    following.close()

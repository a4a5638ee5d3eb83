"""Ended jobs that no view has any more, over the API and with the tool: read when asked for, deleted, and no longer
changed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nodeagent.ctl.client import Client
from nodeagent.ctl.main import cli
from nodeagent.ctl.terminal import CtlError, Exit
from nodeagent.pods.folder import log_folder
from tests.submitting import submit_one
from tests.unit.api.fakes import LiveAgent, live_agent, spec


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    """One job runs; of those that have ended, two are in the history."""
    with live_agent(tmp_path, allow_root=True) as started:
        for name in ("old", "older", "new"):
            started.submit(spec(name))
            started.until(lambda name=name: phase(started, name) == "running")  # type: ignore[misc]
            Client([started.socket]).change("POST", f"/v1/jobs/{name}/stop")
            started.until(lambda name=name: phase(started, name) == "stopped")  # type: ignore[misc]
        started.do(lambda: started.view.store.shelve(["uid-old", "uid-older"], 0.0, 1000))
        started.until(lambda: [job.name for job in started.view.cluster().jobs.values()] == ["new"])
        started.submit(spec("olden"))
        started.until(lambda: phase(started, "olden") == "running" and "uid-olden" in started.view.gangs)
        yield started


@pytest.fixture
def client(agent: LiveAgent) -> Client:
    return Client([agent.socket])


def phase(agent: LiveAgent, name: str) -> str:
    return next((job.phase for job in agent.view.cluster().jobs.values() if job.name == name), "")


def ctl(agent: LiveAgent, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--agent", agent.socket, *words])


def test_the_list_has_the_view_and_all_of_it_the_history(agent: LiveAgent, client: Client) -> None:
    assert [job["name"] for job in client.get("/v1/jobs")["items"]] == ["new", "olden"]
    first = client.get("/v1/history", limit=1)
    assert [job["name"] for job in first["items"]] == ["old"]
    second = client.get("/v1/history", limit=1, after=first["next"])
    assert [job["name"] for job in second["items"]] == ["older"]
    assert client.get("/v1/history", after=second["next"])["items"] == []
    assert ctl(agent, "get", "-o", "name").output.split() == ["job/new", "job/olden"]
    assert ctl(agent, "get", "--all", "-o", "name").output.split() == ["job/old", "job/older", "job/new", "job/olden"]
    listed = json.loads(ctl(agent, "get", "--all", "-o", "json").output)["items"]
    assert [job["phase"] for job in listed][:3] == ["stopped"] * 3
    with pytest.raises(CtlError) as raised:
        client.get("/v1/history", after="*")
    assert raised.value.code == Exit.USAGE


@pytest.mark.parametrize("ref", ["old", "uid-old"])
def test_one_job_is_found_by_its_name_and_uid(agent: LiveAgent, client: Client, ref: str) -> None:
    shown = client.get(f"/v1/jobs/{ref}")
    assert (shown["uid"], shown["phase"]) == ("uid-old", "stopped")
    assert shown["spec"]["name"] == "old"
    assert [one["number"] for one in shown["generations"]] == [1]
    assert "stopped" in ctl(agent, "describe", ref).output.lower()
    assert {event["uid"] for event in client.stream("/v1/events", job=ref)} == {"uid-old"}


def test_the_beginning_of_a_uid_counts_with_both(agent: LiveAgent, client: Client) -> None:
    assert client.get("/v1/jobs/uid-older")["name"] == "older"
    assert client.get("/v1/jobs/uid-n")["name"] == "new"
    for begins in ("uid-", "uid-ol", "uid-olde"):
        with pytest.raises(CtlError) as raised:
            client.get(f"/v1/jobs/{begins}")
        assert raised.value.code == Exit.USAGE
        assert "several uids" in raised.value.message
    with pytest.raises(CtlError) as raised:
        client.get("/v1/jobs/old-")
    assert raised.value.code == Exit.NOT_FOUND
    agent.do(lambda: submit_one(agent.view.store, "uid-second", spec("old"), 1000, time.time(), "alice", "again"))
    agent.do(agent.view.refresh)
    assert client.get("/v1/jobs/old")["phase"] != "stopped", "who lives has the name"


def test_a_damaged_record_is_named_and_hides_no_other(agent: LiveAgent, client: Client) -> None:
    agent.view.server.spoil("past:uid-old")
    page = client.get("/v1/history", limit=1)
    assert (page["items"], [one["key"] for one in page["unread"]]) == ([], ["past:uid-old"])
    shown = ctl(agent, "get", "--all", "-o", "name")
    assert shown.stdout.split() == ["job/older", "job/new", "job/olden"]
    warning = "nodeagentctl: left out, since the store's record cannot be read: past:uid-old: "
    assert shown.stderr.startswith(warning) and "WRONGTYPE" in shown.stderr
    listed = json.loads(ctl(agent, "get", "--all", "-o", "json").stdout)
    assert [one["key"] for one in listed["unread"]] == ["past:uid-old"]
    used = ctl(agent, "usage", "--by", "job")
    assert used.exit_code == 0 and "past:uid-old: " in used.stderr
    for ref in ("old", "uid-old"):
        with pytest.raises(CtlError) as raised:
            client.get(f"/v1/jobs/{ref}")
        assert raised.value.code == Exit.NOT_FOUND
        assert raised.value.message.startswith("job uid-old is in the history, and its record there cannot be read: ")
    with pytest.raises(CtlError) as raised:
        client.get("/v1/jobs/uid-ol")
    assert raised.value.code == Exit.USAGE and "uid-old, uid-olden, uid-older" in raised.value.message
    assert client.get("/v1/jobs/older")["uid"] == "uid-older"


def test_its_output_is_read_as_ever(agent: LiveAgent, client: Client) -> None:
    folder = log_folder(agent.view.config.dirs.logs, "old", "uid-old") / "g1"
    folder.mkdir(parents=True)
    (folder / "rank0.log").write_text("2026-01-01T00:00:01.000000Z stdout F the end\n")
    assert "the end" in [line["text"] for line in client.stream("/v1/jobs/old/logs", local_only=True)]
    assert "the end" in [line["text"] for line in client.stream("/v1/jobs/old/logs", follow=True, local_only=True)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("stop", {}),
        ("resume", {}),
        ("pause", {}),
        ("restart", {}),
        ("scale", {"target": 1}),
        ("scalein", {"count": 1}),
    ],
)
def test_it_has_ended_and_cannot_be_changed(client: Client, path: str, body: dict[str, Any]) -> None:
    with pytest.raises(CtlError) as raised:
        client.change("POST", f"/v1/jobs/old/{path}", **body)
    assert "has ended" in raised.value.message
    assert client.get("/v1/jobs/old")["phase"] == "stopped"


def test_it_can_be_deleted(agent: LiveAgent, client: Client) -> None:
    assert client.change("DELETE", "/v1/jobs/old")["changed"] is True
    with pytest.raises(CtlError) as raised:
        client.get("/v1/jobs/old")
    assert raised.value.code == Exit.NOT_FOUND
    done = ctl(agent, "delete", "older")
    assert (done.exit_code, done.output.strip()) == (0, "job/older deleted")
    assert json.loads(ctl(agent, "events", "-o", "json").stdout)["items"][-1]["by"] != ""
    assert client.get("/v1/history")["items"] == []


def test_while_the_store_is_away_the_view_answers(agent: LiveAgent, client: Client) -> None:
    agent.view.away_since = 1700000000.0
    agent.view.store.away = True
    assert client.get("/v1/jobs/uid-olden")["name"] == "olden"
    with pytest.raises(CtlError) as raised:
        client.get("/v1/jobs/old")
    assert raised.value.code == Exit.UNREACHABLE, "it may be in the history"

"""``usage`` against a live API: whose rows are shown, and in which formats."""

from __future__ import annotations

import csv
import io
import json
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from nodeagent.ctl.main import cli
from tests.integration.remote_support import TOKENS, https, token, write_tokens
from tests.unit.api.fakes import LiveAgent, live_agent, spec

USER, UID = "nobody", pwd.getpwnam("nobody").pw_uid


@pytest.fixture
def still(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, obeys=False, allow_root=True) as started:
        yield started


def ctl(agent: LiveAgent, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--agent", agent.socket, *words], prog_name="nodeagentctl")


def rows(agent: LiveAgent, *words: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(ctl(agent, "usage", *words, "-o", "json").stdout)["items"]}


def used(agent: LiveAgent) -> None:
    """A job that runs, and another user's that is gone."""
    gone = agent.submit(spec("gone"), owner=UID)
    agent.do(lambda: agent.view.form(gone, 1))
    agent.do(agent.view.refresh)
    agent.do(lambda: agent.view.end(agent.view.job("gone"), "stopped", "no need"))
    agent.do(lambda: agent.view.store.remove(gone.uid))
    job = agent.submit(spec(), owner=UID + 1)
    agent.do(lambda: agent.view.form(job, 2))
    agent.do(agent.view.refresh)


def test_usage(still: LiveAgent) -> None:
    assert ctl(still, "usage").stderr.startswith("no devices were used from 2")
    used(still)
    assert {user: (row["jobs"], row["queue"]) for user, row in rows(still).items()} == {
        USER: (1, "default"), str(UID + 1): (1, "default"),
    }  # fmt: skip
    assert "only jobs that still have a record are listed" in ctl(still, "usage", "--by", "job").stderr
    assert ctl(still, "usage", "--by", "queue").stderr == ""
    (job,) = rows(still, "--by", "job").values()
    assert (job["name"], job["jobs"]) == ("digits", 1)
    (queue,) = rows(still, "--by", "queue").values()
    assert (queue["name"], queue["user"], queue["jobs"]) == ("default", None, 2)
    assert rows(still, "--since", "2020-01-01", "--until", "2020-01-02") == {}
    table = ctl(still, "usage").stdout.splitlines()
    assert table[0].split() == ["USER", "GPU-HOURS", "SLOT-HOURS", "LOST", "GOODPUT", "WAITED", "JOBS"]
    assert (len(table), table[-1].split()[0]) == (4, "(all)")
    wide = ctl(still, "usage", "-o", "wide").stdout.splitlines()[0].split()
    assert wide[-4:] == ["RESTARTS", "USER", "QUEUE", "UID"]
    found = ctl(still, "usage", "-o", "csv").stdout
    assert {row["name"]: row["jobs"] for row in csv.DictReader(io.StringIO(found))} == {USER: "1", str(UID + 1): "1"}
    assert yaml.safe_load(ctl(still, "usage", "-o", "yaml").stdout)["by"] == "user"


def test_what_is_wrong_is_reported(still: LiveAgent) -> None:
    for words, message in (
        (("--since", "monday"), "neither a date nor a number of days"),
        (("--since", "1d", "--until", "3d"), "is after until"),
    ):
        result = ctl(still, "usage", *words)
        assert (result.exit_code, message in result.stderr) == (2, True)
    assert ctl(still, "usage", "--by", "node").exit_code == 2


def test_a_job_of_the_history_is_listed_and_counted_once(still: LiveAgent) -> None:
    used(still)
    still.do(lambda: still.view.end(still.view.job("digits"), "stopped", "no need"))
    still.do(lambda: still.view.store.shelve(["uid-digits"], 0.0, 100))
    still.do(still.view.refresh)
    assert still.view.cluster().jobs == {}
    before = rows(still)[str(UID + 1)]
    assert before["jobs"] == 1
    assert rows(still, "--by", "job")["digits"]["slot_hours"] == before["slot_hours"]


def test_who_is_no_operator_sees_his_own(still: LiveAgent, tmp_path: Path) -> None:
    used(still)
    tokens = str(write_tokens(tmp_path / "tokens.yaml", TOKENS | {"users": f"user: {USER}"}))
    with https(still, still.view, tokens=tokens) as door:

        def shown(who: str) -> set[str]:
            words = ["--agent", door.url, "--fingerprint", door.certificate, "--token-file", token(tmp_path, who)]
            found = CliRunner().invoke(cli, [*words, "usage", "-o", "json"])
            return {row["name"] for row in json.loads(found.stdout)["items"]}

        assert shown("operates") == {USER, str(UID + 1)}
        assert shown("users") == {USER}
        assert shown("reads") == set(), "it acts as no user"

"""``top``, ``hosts`` and the output formats against a live API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from nodeagent.agent.machine import machine_usage
from nodeagent.ctl.main import cli
from nodeagent.model.facts import PodUsage
from tests.unit.api.fakes import LiveAgent, live_agent, spec


@pytest.fixture
def still(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, obeys=False, allow_root=True) as started:
        yield started


def ctl(agent: LiveAgent, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--agent", agent.socket, *words], prog_name="nodeagentctl")


def formed(agent: LiveAgent) -> None:
    """A job on n1 and n2 that uses something."""
    job = agent.submit(spec())
    agent.do(lambda: agent.view.form(job, 2))
    usage = PodUsage(cpu=0.5, memory=300 << 20, processes=4, machine=machine_usage())
    gang = agent.view.gangs[job.uid]
    gang.update({name: pod.model_copy(update={"usage": usage}) for name, pod in gang.items()})
    agent.do(agent.view.refresh)


def test_top(still: LiveAgent) -> None:
    formed(still)
    nodes, jobs = ctl(still, "top").stdout.split("\n\n")
    assert nodes.splitlines()[0].split() == ["NODE", "STATE", "LOAD", "MEMORY", "GPUS", "SLOTS", "CPU", "RSS", "JOBS"]
    assert nodes.splitlines()[1].split()[-5:] == ["-", "2/4", "50%", "300Mi", "digits"]
    assert nodes.splitlines()[3].split() == ["n3", "ready", "-", "-", "-", "0/4", "-", "-", "-"]
    assert jobs.splitlines()[1].split() == ["digits", "RUNNING", "2", "4", "0", "100%", "600Mi"]
    wide = ctl(still, "top", "-o", "wide").stdout
    assert "digits/worker   n1     RUNNING   2         4           50%   300Mi" in wide
    assert ctl(still, "top", "-o", "name").stdout.split() == ["node/n1", "node/n2", "node/n3", "job/digits"]
    found = json.loads(ctl(still, "top", "--watch", "-o", "json").stdout)
    assert (found["items"][0]["memory"], found["jobs"][0]["cpu"]) == (300 << 20, 1.0)
    assert ctl(still, "top", "--watch").exit_code == 0, "off a terminal it prints once"


def test_top_while_the_store_is_away_still_says_who_is_where(still: LiveAgent) -> None:
    formed(still)
    still.view.store.away = True
    row = ctl(still, "top").stdout.splitlines()[1].split()
    assert row[-4:] == ["2/4", "-", "-", "digits"]


def test_hosts(still: LiveAgent) -> None:
    assert ctl(still, "hosts").exit_code == 3
    assert ctl(still, "hosts", "nope").exit_code == 3
    job = still.submit(spec())
    waiting = ctl(still, "hosts", "digits", "--format", "horovod")
    assert (waiting.exit_code, waiting.stdout) == (6, "")
    assert "job digits does not train now: queued" in waiting.stderr
    still.do(lambda: still.view.form(job, 2))
    still.do(still.view.refresh)
    assert ctl(still, "hosts").stdout == "10.0.0.1:2\n10.0.0.2:2\n"


def test_every_format_of_events_and_describe(still: LiveAgent) -> None:
    formed(still)
    items = json.loads(ctl(still, "events", "-o", "json").stdout)["items"]
    assert yaml.safe_load(ctl(still, "events", "-o", "yaml").stdout)["items"] == items
    assert ctl(still, "events", "-o", "name").stdout.split() == [f"event/{e['id']}" for e in items]
    wide = ctl(still, "events", "-o", "wide").stdout.splitlines()
    assert [line.split()[0] for line in wide] == ["ID", *(e["id"] for e in items)]
    assert ctl(still, "describe", "digits", "-o", "name").stdout == "job/digits\n"
    assert ctl(still, "describe", "n2", "-o", "name").stdout == "node/n2\n"
    assert ctl(still, "describe", "digits", "-o", "wide").stdout.startswith("Job:         digits")

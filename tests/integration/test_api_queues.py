"""``nodeagentctl queue`` against a live API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nodeagent.ctl.main import cli
from tests.unit.api.fakes import LiveAgent, live_agent

FILE = """\
queues:
  research: {weight: 3, capability: {slots: 8}}
  vision: {parent: research}
  product: {priority: 5}
"""
JOB = """\
name: mine
command: [python, train.py]
nodes: 2
workers_per_node: 2
queue: vision
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, obeys=False, allow_root=True) as started:
        yield started


def ctl(agent: LiveAgent, *words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["--agent", agent.socket, *words], input=text, prog_name="nodeagentctl")


def rows(agent: LiveAgent) -> list[str]:
    return [line.split()[0] for line in ctl(agent, "queue", "get").stdout.splitlines()[1:]]


def test_queues_are_made_changed_and_removed_one_by_one(agent: LiveAgent) -> None:
    assert ctl(agent, "queue", "create", "team", "weight=2", "users=[ann, bob]").stdout == "queue/team created\n"
    assert ctl(agent, "queue", "set", "team", "weight=3").stdout == "queue/team changed: weight\n"
    again = ctl(agent, "queue", "set", "team", "weight=3")
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "the queues are so already\n")
    assert ctl(agent, "queue", "close", "team").stdout == "queue/team changed: state\n"
    shown = json.loads(ctl(agent, "queue", "get", "team", "-o", "json").stdout)
    assert (shown["weight"], shown["users"], shown["state"]) == (3.0, ["ann", "bob"], "closed")
    assert ctl(agent, "queue", "open", "team").exit_code == 0
    assert ctl(agent, "queue", "delete", "team").stdout == "queue/team deleted\n"
    assert rows(agent) == ["default"]


def test_a_file_makes_the_whole_tree(agent: LiveAgent, tmp_path: Path) -> None:
    file = tmp_path / "queues.yaml"
    file.write_text(FILE)
    dry = ctl(agent, "queue", "apply", "-f", str(file), "--dry-run")
    assert dry.stdout.splitlines() == [f"queue/{name} would be created" for name in ("product", "research", "vision")]
    assert rows(agent) == ["default"]
    assert ctl(agent, "queue", "apply", "-f", str(file)).exit_code == 0
    assert rows(agent) == ["default", "product", "research", "vision"]
    assert ctl(agent, "queue", "apply", "-f", "-", text="queues: {}").exit_code == 0
    assert rows(agent) == ["default"]


def test_every_mistake_of_a_file_is_reported_and_nothing_changes(agent: LiveAgent) -> None:
    result = ctl(agent, "queue", "apply", "-f", "-", text="queues:\n  a: {parent: b}\n  c: {weight: 2, weigth: 1}\n")
    assert result.exit_code == 2
    assert "<stdin>:3:18: unknown key 'weigth' in queues.c, did you mean 'weight'?" in result.stderr
    assert rows(agent) == ["default"]


def test_a_job_goes_to_its_queue_and_describe_says_so(agent: LiveAgent) -> None:
    ctl(agent, "queue", "apply", "-f", "-", text=FILE)
    refused = ctl(agent, "submit", "-", text=JOB.replace("vision", "vison"))
    assert (refused.exit_code, "did you mean 'vision'?" in refused.stderr) == (3, True)
    refused = ctl(agent, "submit", "-", text=JOB.replace("queue: vision", "queue: research"))
    assert (refused.exit_code, "takes no jobs itself" in refused.stderr) == (6, True)
    refused = ctl(agent, "submit", "-", text=JOB.replace("nodes: 2", "nodes: 5"))
    assert (refused.exit_code, "could never start" in refused.stderr) == (6, True)
    assert ctl(agent, "submit", "-", text=JOB).exit_code == 0
    assert json.loads(ctl(agent, "get", "mine", "-o", "json").stdout)["in_queue"] == "vision"
    described = ctl(agent, "queue", "describe", "vision").stdout
    assert "Parent:      research" in described
    assert "mine" in described.splitlines()[-1]
    refused = ctl(agent, "queue", "delete", "vision")
    assert (refused.exit_code, "it has live jobs (mine)" in refused.stderr) == (6, True)

"""A command that is not on enough disks yet: what the API and the tool say of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.agent.savedview import Acknowledged
from nodeagent.ctl import client
from nodeagent.ctl.client import Client, job_path
from tests.integration.test_api_tool import JOB_FILE, ctl, started
from tests.unit.api.fakes import LiveAgent, live_agent

UNSAVED = "accepted and will be carried out, but only 1 of 2 nodes (n1) had it on disk after"
COMMANDS = (
    ("pause", "digits", "--no-wait"), ("scale", "digits", "3", "--no-wait"), ("delete", "digits", "--no-wait"),
    ("cordon", "n3", "--reason", "fan"), ("uncordon", "n3"), ("drain", "n3", "--reason", "fan", "--no-wait"),
    ("queue", "create", "q", "weight=2"), ("reserve", "nodes", "n3", "from", "+2h", "for", "1h"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command gives up at once, unless a test says otherwise."""
    monkeypatch.setattr(client, "ASK_AGAIN_EVERY", 0.01)
    monkeypatch.setattr(client, "ASK_FOR_SAVED", 0.0)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    with live_agent(tmp_path, allow_root=True) as one:
        started(one)
        yield one


def test_an_answer_says_on_whose_disks_it_is(agent: LiveAgent) -> None:
    after = Client([agent.socket]).change("POST", job_path("digits") + "/pause")
    assert after["saved"] == {"nodes": ["n1", "n2"], "wanted": 2, "text": ""}


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_command_that_ends_with_the_answer_is_done_when_it_is_saved(agent: LiveAgent, words: tuple[str, ...]) -> None:
    agent.view.disks = ("n1",)
    late = ctl(agent, *words)
    assert (late.exit_code, UNSAVED in late.stderr) == (4, True), late.output
    assert " --request-id " in late.stderr


def saved_late(agent: LiveAgent, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on a change is saved when it is asked for a second time, and the command asks again. The revisions that
    were waited for come into the list."""
    asked = list[int]()

    async def late(rev: int, _era: str) -> Acknowledged:
        asked.append(rev)
        return Acknowledged(nodes=("n1", "n2")[: len(asked)], wanted=2, waited=0.0)

    monkeypatch.setattr(agent.view, "acknowledged", late)
    monkeypatch.setattr(client, "ASK_FOR_SAVED", 60.0)
    return asked


ANSWERS = (
    "pause asked for", "target 2 -> 3", "delete asked for", "node/n3 cordoned", "node/n3 uncordoned", "drain",
    "queue/q created", "window/w1 made: n3",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "answer"), [*zip(COMMANDS, ANSWERS, strict=True)], ids=[words[0] for words in COMMANDS]
)
def test_a_command_asks_again_until_it_is_saved(
    agent: LiveAgent, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], answer: str
) -> None:
    """Nodes that are busy are late. The answer is the first one's."""
    agent.obeys = False  # what is deleted stays until then
    asked = saved_late(agent, monkeypatch)
    done = ctl(agent, *words)
    assert (done.exit_code, len(asked), done.stderr) == (0, 2, "")
    assert answer in done.stdout


def test_a_job_that_is_gone_before_its_deletion_is_saved_is_deleted(
    agent: LiveAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.view.disks = ("n1",)
    monkeypatch.setattr(client, "ASK_FOR_SAVED", 60.0)
    done = ctl(agent, "delete", "digits", "--no-wait")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "digits" not in ctl(agent, "get").stdout


def test_a_node_that_is_forgotten_again_until_it_is_saved_is_not_removed(
    agent: LiveAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who forgets a node a second time removes it, and its cordon: the same request is not a second time."""
    ctl(agent, "cordon", "n3", "--reason", "fan")
    agent.view.silent.add("n3")
    agent.until(lambda: "n3" in agent.view.cluster().lapsed)
    late = saved_late(agent, monkeypatch)
    done = ctl(agent, "forget", "n3")
    assert (done.exit_code, len(late), done.stderr, done.stdout) == (0, 2, "", "node/n3 forgotten\n")
    node = Client([agent.socket]).get("/v1/nodes/n3")
    assert (node["state"], node["draining"]) == ("lost", False)
    kinds = [event["kind"] for event in Client([agent.socket]).stream("/v1/events")]
    assert (kinds.count("NodeForgotten"), kinds.count("NodeRemoved")) == (1, 0)


def test_a_removed_node_is_no_reason_to_refuse_the_same_request(agent: LiveAgent) -> None:
    agent.view.silent.add("n3")
    agent.until(lambda: "n3" in agent.view.cluster().lapsed)
    assert ctl(agent, "forget", "n3").exit_code == 0
    agent.view.disks, again = ("n1",), ("forget", "n3", "--request-id", "mine-1")
    unsaved = ctl(agent, *again)
    assert (unsaved.exit_code, UNSAVED in unsaved.stderr, unsaved.stdout) == (4, True, "node/n3 removed\n")
    agent.view.disks = ("n1", "n2")
    saved = ctl(agent, *again, "-o", "json")
    assert (saved.exit_code, json.loads(saved.stdout)["removed"]) == (0, True), saved.stderr
    assert ctl(agent, *again).stdout == "node/n3 removed\n"
    other = ctl(agent, "cordon", "n2", "--reason", "fan", "--request-id", "mine-1")
    assert (other.exit_code, "was used for another change before" in other.stderr) == (6, True)


def test_a_submit_that_is_not_saved_is_submitted_all_the_same(agent: LiveAgent) -> None:
    agent.view.disks = ("n1",)
    again = ("submit", "-", "--request-id", "mine-1")
    late = ctl(agent, *again, text=JOB_FILE)
    assert late.exit_code == 4
    assert "job/mine submitted" in late.stdout
    assert UNSAVED in late.stderr
    agent.view.disks = ("n1", "n2")
    done = ctl(agent, *again, text=JOB_FILE)
    assert (done.exit_code, done.stdout, done.stderr) == (0, late.stdout, "")


def test_a_command_that_waits_for_more_warns_and_goes_on(agent: LiveAgent) -> None:
    agent.view.disks = ("n1",)
    done = ctl(agent, "pause", "digits")
    assert (done.exit_code, done.stdout) == (0, "job/digits paused\n")
    assert done.stderr.count(f"nodeagentctl: warning: job/digits pause: it is {UNSAVED}") == 1

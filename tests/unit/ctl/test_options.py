"""Names as ``-o name`` prints them, and which job is meant where none is named."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from nodeagent.ctl import control, describe, nodes
from nodeagent.ctl.client import Client
from nodeagent.ctl.main import cli
from tests.unit.ctl.test_main import commands

NAMED = [
    (name, param)
    for name, command in commands()
    for param in command.params
    if (param.metavar or "").strip("[].") in ("JOB", "NODE", "JOB] N|ROLE=N")
]


EMPTY = (
    "nodeagentctl: the name of the node is empty; nothing was changed\n"
    "  next: name one, see: nodeagentctl nodes (is a variable of your shell not set?)\n"
)


@pytest.mark.parametrize(("command", "param"), NAMED, ids=[f"{name} {param.name}" for name, param in NAMED])
def test_each_command_takes_names_as_lists_print_them(command: str, param: click.Parameter) -> None:
    kind = "node" if "NODE" in (param.metavar or "") else "job"
    assert param.type.convert(f"{kind}/a", None, None) == "a", command
    assert param.type.convert("a", None, None) == "a"


def test_they_are_found_at_all() -> None:
    assert {
        ("drain", "node"),
        ("pause", "job"),
        ("events", "job_named"),
        ("scale", "words"),
        ("local kill", "node"),
    } <= {(name, param.name) for name, param in NAMED}


@pytest.mark.parametrize("name", ["", "node/"])
@pytest.mark.parametrize(
    ("command", "param"),
    [(command, param) for command, param in NAMED if "NODE" in (param.metavar or "")],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_an_empty_name_of_a_node_is_refused_before_anything_is_asked(
    command: str, param: click.Parameter, name: str
) -> None:
    """What an unset variable of the shell leaves, which is more than to leave the name out."""
    option = ["--node"] if isinstance(param, click.Option) else []
    result = CliRunner().invoke(cli, ["--agent", "/nowhere", *command.split(), *option, name])
    assert (result.exit_code, result.stderr) == (2, EMPTY)


def test_an_empty_name_behind_its_kind_is_no_node_to_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "connect", lambda _ctx: Client([]))
    result = CliRunner().invoke(cli, ["describe", "node/"])
    assert (result.exit_code, result.stderr) == (2, EMPTY)


def test_a_drain_of_what_the_list_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    class Agent:
        def change(self, _method: str, path: str, *_: object, **_more: object) -> dict[str, object]:
            asked.append(path)
            return {"name": "n1"}

    monkeypatch.setattr(nodes, "connect", lambda _ctx: Agent())
    result = CliRunner().invoke(cli, ["drain", "node/n1", "--reason", "disk", "--no-wait"])
    assert (result.output, asked) == ("node/n1 draining\n", ["/v1/nodes/n1/drain"])


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        ([], "there is no job, and none was named\n  next: submit one: nodeagentctl submit FILE\n"),
        (["stopped"], "no job is live, and none was named\n  next: name an ended one, see: nodeagentctl get\n"),
        (["running", "queued"], "2 jobs are live; which one?\n  next: name one of: j0, j1\n"),
    ],
)
def test_who_names_no_job_learns_which_there_are(phases: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Agent:
        def get(self, _path: str) -> dict[str, object]:
            return {"items": [{"name": f"j{i}", "uid": f"u{i}", "phase": phase} for i, phase in enumerate(phases)]}

    monkeypatch.setattr(control, "connect", lambda _ctx: Agent())
    result = CliRunner().invoke(cli, ["pause"])
    assert result.stderr == f"nodeagentctl: {says}"

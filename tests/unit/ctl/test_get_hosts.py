"""Which hosts a job's world has: from the JSON of jobs and nodes."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from nodeagent.ctl import get
from nodeagent.ctl.get import members
from nodeagent.ctl.main import cli

JOB = {"uid": "u", "generation": 3, "world_nodes": 2}


def node(name: str, ranks: list[int], generation: int = 3, address: str = "", **more: Any) -> dict[str, Any]:
    pod = {"uid": "u", "generation": generation, "ranks": ranks}
    return {"hostname": f"host-{name}", "address": address or f"10.0.0.{name[1:]}", "pods": [pod]} | more


def test_by_rank_and_only_members() -> None:
    nodes = [node("n1", [2, 3]), node("n2", [0, 1]), node("n3", []), node("n4", [0], pods=[])]
    assert list((members(nodes, JOB) or {}).items()) == [("10.0.0.2", 2), ("10.0.0.1", 2)]


def test_another_generation_is_not_mixed_in() -> None:
    assert members([node("n1", [0, 1]), node("n2", [2, 3], generation=4)], JOB) is None


def test_nodes_of_one_address_are_one_host() -> None:
    nodes = [node("n1", [0, 1], address="127.0.0.1"), node("n2", [2, 3, 4], address="127.0.0.1")]
    assert members(nodes, JOB) == {"127.0.0.1": 5}


def test_an_address_with_colons_is_reported_by_its_hostname() -> None:
    nodes = [node("n1", [0], address="fd00::1"), node("n2", [1])]
    assert members(nodes, JOB) == {"host-n1": 1, "10.0.0.2": 1}


@pytest.mark.parametrize(
    ("form", "lines"), [("horovod", "10.0.0.2:2\n10.0.0.1:3\n"), ("mpi", "10.0.0.2 slots=2\n10.0.0.1 slots=3\n")]
)
def test_the_lines_of_each_format(form: str, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Agent:
        def get(self, _path: str) -> dict[str, Any]:
            return JOB | {"phase": "running", "generation_state": "active"}

        def pages(self, _path: str) -> dict[str, Any]:
            return {"items": [node("n1", [2, 3, 4]), node("n2", [0, 1])]}

    monkeypatch.setattr(get, "connect", lambda _: Agent())
    done = CliRunner().invoke(cli, ["hosts", "j", "--format", form], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, lines)

"""The nodes of the status page: of many, those that somebody has to look at."""

from __future__ import annotations

import pytest

from nodeagent.api import status
from nodeagent.api.status import nodes_json
from nodeagent.plan.cluster import Cluster
from tests.unit.ctl import samples
from tests.unit.plan.build import make_node

NODES = {
    node.id: node
    for node in (
        make_node("a", gpus=2), make_node("b", gpus=2), make_node("c", gpus=2, cordon=True), make_node("d", gpus=2),
        make_node("e", gpus=2, sick=[1]), make_node("f", gpus=2, lost=True),
    )
}  # fmt: skip
TOTALS = {
    "nodes": 6, "states": {"ready": 4, "cordoned": 1, "lost": 1}, "gpus": 10, "healthy": 9, "used": 0, "phases": {}
}  # fmt: skip


@pytest.mark.parametrize(("most", "names", "more"), [(6, "abcdef", 0), (5, "abcef", 1), (3, "cef", 3), (2, "ce", 4)])
def test_those_are_shown_of_which_there_is_something_to_say(
    monkeypatch: pytest.MonkeyPatch, most: int, names: str, more: int
) -> None:
    monkeypatch.setattr(status, "MAX_NODES", most)
    found = nodes_json(Cluster(served=0, nodes=NODES, jobs={}), 0.0)
    assert [node["name"] for node in found["nodes"]] == list(names)
    assert (found["more_nodes"], found["totals"]) == (more, TOTALS)


def test_gpus_of_jobs_are_used() -> None:
    """Whether their nodes are shown or not."""
    found = nodes_json(samples.cluster(samples.job()), 0.0)
    booked = [gpu for node in found["nodes"] for gpu in node["gpus"] if gpu["job"] is not None]
    assert found["totals"]["used"] == len(booked) > 0

"""Alive and gone: two questions about one life of a node, never both true. And the names in a sentence."""

from __future__ import annotations

import pytest

from nodeagent.model.node import NodeRecord
from nodeagent.plan.cluster import some
from tests.unit.plan.build import life, make_cluster, make_node


@pytest.mark.parametrize(
    ("nodes", "lapsed", "live", "gone"),
    [
        ([make_node("n1")], [], True, False),
        ([make_node("n1")], ["n1"], False, True),
        ([make_node("n1", lost=True)], [], False, True),
        ([make_node("n1", left=True)], [], False, True),
        ([make_node("n1", of_life="reborn")], [], False, True),
        ([], [], False, True),
    ],
)
def test_live_and_gone(nodes: list[NodeRecord], lapsed: list[str], live: bool, gone: bool) -> None:
    cluster = make_cluster(nodes, lapsed=lapsed)
    assert cluster.live("n1", life("n1")) is live
    assert cluster.gone("n1", life("n1")) is gone


def test_live_without_a_life_accepts_any_life() -> None:
    assert make_cluster([make_node("n1", of_life="reborn")]).live("n1")


def test_a_sentence_names_some_and_counts_the_others() -> None:
    assert some(["a", "b"]) == "a, b"
    assert some([f"n{i}" for i in range(10)], 8).endswith("n7 and 2 more")

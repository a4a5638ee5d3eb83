"""A node's state in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nodeagent.agent.gauges import node_state
from nodeagent.model.node import Cordon
from nodeagent.plan.nodes.availability import BY as WINDOW
from tests.unit.plan.build import make_cluster, make_node


@pytest.mark.parametrize(
    ("more", "lapsed", "state"), [({"lost": True}, [], "lost"), ({"left": True}, [], "left"), ({}, ["n1"], "silent")]
)
@pytest.mark.parametrize(("drain", "word"), [(True, "drained"), (False, "cordoned")])
def test_the_cordon_of_a_node_that_is_away_is_in_its_reason(
    more: dict[str, Any], lapsed: list[str], state: str, drain: bool, word: str
) -> None:
    """It stays: the node takes no work when it is back."""
    cordon = Cordon(reason="disk", by="olga", at=1.0, drain=drain)
    node = make_node("n1", **more).model_copy(update={"cordon": cordon})
    cluster = replace(make_cluster([node]), lapsed=frozenset(lapsed))
    found, reason = node_state(node, cluster)
    assert (found, reason.endswith(f"; {word}: disk (by olga)")) == (state, True)
    for plain in (None, cordon.model_copy(update={"by": WINDOW})):
        assert "disk" not in node_state(node.model_copy(update={"cordon": plain}), cluster)[1]

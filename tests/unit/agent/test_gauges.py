"""A node's state in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from nodeagent.agent.gauges import ClusterGauges, node_state
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Cordon
from nodeagent.model.world import Generation
from nodeagent.plan.nodes.availability import BY as WINDOW
from tests.unit.plan.build import make_cluster, make_generation, make_job, make_node


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


def test_a_node_whose_agent_is_silent_says_so_until_its_lease_lapses() -> None:
    node = make_node("n1", mute=True, cordon=True)
    why = "its agent is silent or cut off from the store: no new work until it is back; cordoned: disk (by op)"
    assert node_state(node, make_cluster([node])) == ("mute", why)
    assert node_state(node, make_cluster([node], lapsed=["n1"]))[0] == "silent"
    facts = node.facts.model_copy(update={"restarting": 1.0})
    ending = make_node("n1", mute=True).model_copy(update={"facts": facts})
    state, reason = node_state(ending, make_cluster([ending]))
    assert (state, reason.endswith("until the next start, and it gets no new work")) == ("restarting", True)


@pytest.mark.parametrize(
    ("jobs", "state"),
    [
        ([], "drained"),
        ([make_job("queued")], "drained"),
        ([make_job("running", make_generation(["n1", "n2"]))], "draining"),
        ([make_job("forming", make_generation(["n2"], state="forming", holders=["n1"]))], "draining"),
        ([make_job("running", make_generation(["n2"]))], "drained"),
        ([make_job("holding", make_generation(["n1", "n2"], state="ended"))], "drained"),
    ],
)
def test_a_node_is_drained_when_no_work_is_left_on_it(jobs: list[JobRecord], state: str) -> None:
    node = make_node("n1", drain=True)
    assert node_state(node, make_cluster([node, "n2"], *jobs))[0] == state


def test_a_page_asks_each_job_once_where_its_work_is_however_many_nodes_are_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, occupied = list[int](), vars(Generation)["occupied"].fget

    def counted(generation: Generation) -> tuple[str, ...]:
        asked.append(generation.number)
        return tuple(occupied(generation))

    nodes = [make_node(f"n{i}", drain=True) for i in range(1, 10)]
    jobs = [make_job("running", make_generation([f"n{i}"], number=i), uid=f"u{i}") for i in range(1, 5)]
    registry, cluster = CollectorRegistry(), make_cluster(nodes, *jobs)
    monkeypatch.setattr(Generation, "occupied", property(counted))
    ClusterGauges(registry).read(cluster)
    assert sorted(asked) == [1, 2, 3, 4]
    states = [registry.get_sample_value("nodeagent_nodes", {"state": state}) for state in ("draining", "drained")]
    assert states == [4, 5]

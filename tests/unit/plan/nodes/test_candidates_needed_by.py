"""Whether somebody would miss a node's agent: those with a part in a job are, spares and the drained are not."""

from __future__ import annotations

import pytest

from nodeagent.model.world import Generation
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.nodes.members import needed_by
from tests.unit.plan.build import life, make_cluster, make_generation, make_holder, make_job, make_node


def cluster(generation: Generation | None, failsafe_members: tuple[str, ...] = (), drain: bool = False) -> Cluster:
    nodes = [make_node("n1", drain=drain, peer=True), make_node("n2", peer=True), make_node("n3", peer=True)]
    job = make_job("running", generation, failsafe_members=failsafe_members)
    return make_cluster(nodes, job)


def test_a_member_is_needed_until_the_generation_has_ended() -> None:
    generation = make_generation(["n1", "n2"])
    assert "runs here" in needed_by(cluster(generation), "n1", life("n1"))
    assert not needed_by(cluster(generation.model_copy(update={"state": "ended"})), "n1", life("n1"))


def test_a_holder_is_needed_even_then() -> None:
    held = {"state": "ended", "holders": {"n1": make_holder("n1")}}
    assert needed_by(cluster(make_generation(["n1", "n2"]).model_copy(update=held)), "n1", life("n1"))


@pytest.mark.parametrize(("node", "of_life"), [("n3", life("n3")), ("n1", "another life")])
def test_a_spare_and_another_life_are_not(node: str, of_life: str) -> None:
    assert not needed_by(cluster(make_generation(["n1", "n2"])), node, of_life)


def test_a_failsafe_member_is_needed_unless_its_node_is_drained() -> None:
    generation = make_generation(["n2", "n3"])
    assert "failsafe member" in needed_by(cluster(generation, ("n1", "n2")), "n1", life("n1"))
    assert not needed_by(cluster(generation, ("n1", "n2"), drain=True), "n1", life("n1"))
    assert not needed_by(cluster(generation.model_copy(update={"state": "ended"}), ("n1", "n2")), "n1", life("n1"))


def test_without_a_generation_nobody_is() -> None:
    assert not needed_by(cluster(None), "n1", life("n1"))

"""What is said of a placement: what the job asks, and where its nodes stand."""

from __future__ import annotations

import pytest

from nodeagent.model.constraints import Constraints, Match
from nodeagent.plan.placing.topology import placed_text, placement_asked
from tests.unit.plan.build import make_cluster, make_generation, make_job, make_node, make_spec

FAST, SPOT = Match(label="fast"), Match(label="class", values=("spot", "old"))


def test_what_a_job_asks() -> None:
    assert placement_asked(make_spec()) == ""
    full = Constraints(require=(FAST,), exclude=(SPOT,), prefer=(FAST, SPOT), avoid=(SPOT,), spread="rack")
    words = (
        "with fast, without class=spot|old; prefers fast and class=spot|old; avoids class=spot|old; spread over rack"
    )
    assert placement_asked(make_spec(placement=full)) == words
    assert placement_asked(make_spec(within="rack", segments=2)) == "all in one rack; segments of 2"
    one = make_spec(placement=Constraints(pack="node")).role
    two = make_spec(within="zone").model_copy(
        update={"roles": (one.model_copy(update={"name": "ps"}), make_spec().role)}
    )  # fmt: skip
    assert placement_asked(two) == "ps packed by node; all in one zone"


@pytest.mark.parametrize(
    ("racks", "where"),
    [
        (["a1", "a1"], "in one rack, a/a1"),
        (["a1", "a2"], "in one zone, a"),
        (["b1", "a2", "b2"], "by zone: a (1), b (2)"),
        (["", "a1"], "by zone: - (1), a (1)"),
        ([f"{z}1" for z in "abcdefgh"], "by zone: a (1), b (1), c (1), d (1), e (1), f (1) and 2 more"),
    ],
)
def test_where_its_nodes_stand(racks: list[str], where: str) -> None:
    nodes = [
        make_node(f"n{i}", labels={"zone": r[:1], "rack": r} if r else {}, topology=("zone", "rack"))
        for i, r in enumerate(racks)
    ]
    job = make_job("running", make_generation([n.id for n in nodes]), spec=make_spec(size=(1, 8)))
    assert placed_text(make_cluster(nodes, job), job) == where


def test_nothing_is_reported_where_nobody_says_where_nodes_stand() -> None:
    job = make_job("running", make_generation(["n1"]))
    assert placed_text(make_cluster(["n1"], job), job) == ""
    assert placed_text(make_cluster(["n1"]), make_job()) == ""

"""Whose turn it is: members by rank, then nodes that are ready, then the others; a reporter at once."""

from __future__ import annotations

from nodeagent.model.node import NodeRecord
from nodeagent.plan.nodes.members import order, turn
from tests.unit.plan.build import failed, make_cluster, make_exit, make_generation, make_job, make_node


def test_order() -> None:
    job = make_job("running", make_generation(["n5", "n3"]))
    nodes: list[NodeRecord | str] = ["n3", "n5", "n10", "n2", make_node("n1", ready={}), make_node("n0", left=True)]
    cluster = make_cluster(nodes, job, lapsed=["n10"])
    assert order(cluster, job) == ["n5", "n3", "n2", "n1"]
    assert [turn(cluster, job, n) for n in ("n5", "n3", "n2", "n1")] == [0, 1, 2, 3]
    assert turn(cluster, job, "n10") == turn(cluster, job, "nobody") == 4


def test_the_dead_are_passed_over() -> None:
    job = make_job("running", make_generation(["n1", "n2"]))
    assert turn(make_cluster(["n1", "n2"], job, lapsed=["n1"]), job, "n2") == 0


def test_who_reported_a_fault_goes_at_once() -> None:
    reports = {"n3": failed(make_exit(), seq=1)}
    job = make_job("running", make_generation(["n1", "n2", "n3"], reports=reports))
    cluster = make_cluster(["n1", "n2", "n3"], job)
    assert [turn(cluster, job, n) for n in ("n1", "n2", "n3")] == [0, 1, 0]


def test_without_a_generation() -> None:
    assert order(make_cluster(["n2", "n1"]), make_job()) == ["n1", "n2"]

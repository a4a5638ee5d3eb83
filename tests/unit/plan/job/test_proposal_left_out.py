"""Which nodes the workers of a new generation learn of: those that the last one had, and those that have a fault."""

from __future__ import annotations

from nodeagent.model.node import NodeRecord
from nodeagent.plan.job.proposal import MOST_LEFT_OUT, left_out, place
from tests.unit.plan.build import PREPARING, UID, UNFIT, make_cluster, make_generation, make_job, make_node, make_spec


def named(nodes: list[NodeRecord | str], members: list[str], lapsed: list[str] | None = None) -> dict[str, str]:
    job = make_job("running", make_generation(members), spec=make_spec(size=(1, 3)), target=3)
    cluster = make_cluster(nodes, job, lapsed=lapsed or [])
    return left_out(cluster, job, place(cluster, job))


def test_members_of_the_last_generation_and_nodes_with_a_fault_are_named() -> None:
    nodes: list[NodeRecord | str] = ["n1", "n2", make_node("n3", ready={UID: UNFIT}), make_node("n4", cordon=True)]
    assert named(nodes, ["n1", "n2"], lapsed=["n2"]) == {
        "n2": "n2 is not live (its lease has lapsed)",
        "n3": "n3 cannot run it: /shared/x is missing",
        "n4": "n4 is cordoned (disk)",
    }


def test_nodes_that_are_busy_gone_or_were_never_checked_are_not() -> None:
    busy, unready = make_node("n2", slots=0), make_node("n3", ready={UID: PREPARING})
    assert named(["n1", busy, unready, make_node("n4", ready={}), make_node("n5", left=True)], ["n1"]) == {}


def test_of_many_only_so_many_are_named_and_members_of_the_last_generation_first() -> None:
    nodes: list[NodeRecord | str] = ["n1", *(make_node(f"n{i}", cordon=True) for i in range(2, 100))]
    found = named(nodes, ["n1", "n99"])
    assert len(found) == MOST_LEFT_OUT
    assert next(iter(found)) == "n99"

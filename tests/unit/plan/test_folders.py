"""Nodes that see another checkpoint folder than the job's: who they are, what is said, and what it does to a gang."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import Incarnation, NodeRecord, Readiness
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import left_out, place
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.nodes.candidates import candidates, strays
from nodeagent.plan.pods.actions import PodAction, Promise
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.steps import End, Propose
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import (
    NOW,
    PREPARING,
    UID,
    WALL,
    life,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)
from tests.unit.plan.planning import plan_node


def a_spec(minimum: int = 2, maximum: int = 4) -> JobSpec:
    return make_spec(size=(minimum, maximum), checkpoint_dir="/w/ckpt")


def node(name: str, folder: str, state: str = "ready", cordon: bool = False, left: bool = False) -> NodeRecord:
    readiness = Readiness.model_validate({"state": state, "folder": folder})
    return make_node(name, ready={UID: readiness}, cordon=cordon, left=left)


def why(name: str, right: str) -> str:
    text = f"checkpoint_dir /w/ckpt there is not the folder that {right} sees; it must be one shared folder"
    return f"{name} cannot run it: {text}"


def out_of(job: JobRecord, *nodes: NodeRecord, lapsed: tuple[str, ...] = ()) -> dict[str, str]:
    return strays(make_cluster(nodes, job, lapsed=lapsed), job)


def test_most_nodes_are_right() -> None:
    found = out_of(make_job(spec=a_spec()), node("n1", "x"), node("n2", "y"), node("n10", "y"), node("n3", ""))
    assert found == {"n1": why("n1", "n2")}


def test_of_as_many_the_naturally_first_is_right() -> None:
    assert out_of(make_job(spec=a_spec()), node("n10", "x"), node("n9", "y")) == {"n10": why("n10", "n9")}


@pytest.mark.parametrize("state", ["active", "ended"])
def test_survivors_are_right(state: str) -> None:
    generation = make_generation(["n3"]).model_copy(update={"state": state})
    job = make_job("running" if state == "active" else "holding", generation, spec=a_spec(1), active=1)
    nodes = [node("n1", "x"), node("n2", "x"), node("n3", "y")]
    assert out_of(job, *nodes) == {"n1": why("n1", "n3"), "n2": why("n2", "n3")}
    assert out_of(job, *nodes, lapsed=("n3",)) == {}, "what a dead node saw does not count"


def test_most_survivors_are_right() -> None:
    job = make_job("running", make_generation(["n1", "n2", "n3"]), spec=a_spec())
    nodes = [node("n1", "x"), node("n2", "y"), node("n3", "y"), *(node(f"n{i}", "x") for i in range(4, 9))]
    assert set(out_of(job, *nodes)) == {"n1", "n4", "n5", "n6", "n7", "n8"}


def test_what_counts() -> None:
    job = make_job(spec=a_spec())
    assert out_of(job, node("n1", "x"), node("n2", "x", "preparing"), node("n3", "")) == {}
    assert out_of(job, node("n1", "x"), node("n2", "y", "preparing")) == {"n2": why("n2", "n1")}
    assert out_of(job, node("n1", "x"), node("n2", "y", left=True)) == {}
    assert out_of(make_job(spec=a_spec(1, 1)), node("n1", "x"), node("n2", "y")) == {}, "a job of one node"


def test_a_stray_is_unfit_and_looked_at_again_and_the_next_node_is_asked() -> None:
    job = make_job(spec=a_spec(2, 2))
    nodes = [node("n1", "x"), node("n2", "y"), node("n3", "x"), make_node("n4", ready={}), make_node("n5", ready={})]
    cluster = make_cluster(nodes, job)
    first, second, *_ = candidates(cluster, job)
    assert (first.standing, second.standing, second.why, second.devices) == ("fit", "unfit", why("n2", "n1"), ())
    placement = place(cluster, job)
    assert [c.node for c in placement.chosen] == ["n1", "n3"]
    assert left_out(cluster, job, placement)["n2"] == why("n2", "n1")
    assert [n for n in cluster.nodes if should_prepare(cluster, job, n)] == ["n1", "n2", "n3", "n4"]


def test_a_stray_that_is_out_anyway_is_reported_as_such() -> None:
    job = make_job(spec=a_spec())
    cluster = make_cluster([node("n1", "x"), node("n2", "x"), node("n3", "y", cordon=True)], job)
    assert [c.why for c in candidates(cluster, job)] == ["", "", "n3 is cordoned (disk)"]


def test_a_job_of_two_nodes_with_a_folder_each_waits_and_says_so() -> None:
    job = make_job(spec=a_spec(2, 2))
    cluster = make_cluster([node("n1", "x"), node("n2", "y")], job)
    assert decide(cluster, job, WALL).step is None
    assert explain(cluster, job, WALL) == (f"needs 2 nodes, 1 fit: {why('n2', 'n1')}",)
    assert isinstance(decide(make_cluster([node("n1", "x"), node("n2", "x")], job), job, WALL).step, Propose)


def test_healthy_training_goes_on() -> None:
    generation = make_generation(["n1", "n2"])
    job = make_job("running", generation, spec=a_spec(1, 2))
    assert decide(make_cluster([node("n1", "x"), node("n2", "y")], job), job, WALL).step is None
    job = make_job("running", generation, spec=a_spec(1, 4))
    decision = decide(make_cluster([node("n1", "x"), node("n2", "x"), node("n3", "y")], job), job, WALL)
    assert decision.step is None
    assert decision.why == (f"runs on 2 of 4 nodes: 2 of 4 nodes fit: {why('n3', 'n1')}",)


def forming(minimum: int, *nodes: NodeRecord, acks: tuple[str, ...] = ()) -> tuple[Cluster, JobRecord]:
    generation = make_generation(["n1", "n2", "n3"], state="forming", number=2, acks=acks)
    job = make_job("forming", generation, spec=a_spec(minimum, 3), active=1)
    return make_cluster(nodes, job, served=NOW), job


def test_a_member_that_proves_to_be_a_stray_is_left_out_at_once() -> None:
    nodes = [node("n1", "x"), node("n2", "y"), node("n3", "x")]
    step = decide(*forming(2, *nodes, acks=("n1", "n3")), WALL).step
    assert isinstance(step, Propose)
    assert set(step.members) == {"n1", "n3"}
    assert why("n2", "n1") in step.cause.text
    step = decide(*forming(3, *nodes), WALL).step
    assert isinstance(step, End)
    assert (step.phase, why("n2", "n1") in step.reason) == ("holding", True)


def test_a_stray_does_not_acknowledge() -> None:
    """Its record may still say that it is getting ready; its own shim knows better."""
    cluster, _ = forming(2, node("n1", "x"), make_node("n2", ready={UID: PREPARING}), node("n3", "x"))
    me = Incarnation(life=life("n2"), start=1)

    def actions(folder: str) -> tuple[PodAction, ...]:
        return plan_node(cluster, "n2", me, {UID: PodStatus(uid=UID, phase="ready", folder=folder)}, 2)

    assert actions("y") == ()
    (promise,) = actions("x")
    assert isinstance(promise, Promise)

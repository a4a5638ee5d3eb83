"""A node whose agent is silent gets no new work, and nobody waits for its acknowledgement; what trains goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.nodes import failsafe
from nodeagent.plan.nodes.candidates import candidate, staying
from nodeagent.plan.nodes.members import order
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.queueing.room import room_for
from nodeagent.plan.steps import Decision, End, Propose
from tests.unit.plan.build import (
    NOW,
    UID,
    UNFIT,
    WALL,
    failed,
    make_cluster,
    make_exit,
    make_generation,
    make_job,
    make_node,
    make_spec,
)

LATE = NOW + 15_000
"""The deadline of a generation that forms."""
SILENT = "the agent of n3 is silent or cut off from the store"
WHY = "n3 gets no new work: its agent is silent or cut off from the store"


def mute(name: str, **more: object) -> NodeRecord:
    return make_node(name, mute=True, **more)  # type: ignore[arg-type]


def forming(
    acks: Sequence[str] = ("n1", "n2"), size: tuple[int, int] = (1, 4), holders: Sequence[str] = ()
) -> JobRecord:
    nodes = ("n1", "n2", "n3")
    generation = make_generation(nodes, state="forming", number=2, cause="join", acks=acks, holders=holders)
    return make_job("forming", generation, active=1, target=3, spec=make_spec(size=size))


def takes(cluster: Cluster) -> Decision:
    return decide(cluster, cluster.jobs[UID], WALL)


def test_it_is_no_candidate_and_no_spare_and_makes_no_room() -> None:
    job = make_job("running", make_generation(["n1", "n2"]), target=3)
    cluster = make_cluster(["n1", "n2", mute("n3")], job)
    one = candidate(cluster, job, cluster.nodes["n3"])
    assert (one.standing, one.why) == ("out", WHY)
    assert not should_prepare(cluster, job, "n3")
    assert [c.node for c in place(cluster, job).chosen] == ["n1", "n2"]
    assert takes(cluster) == Decision(None, (f"runs on 2 of 3 nodes: 2 of 3 nodes fit: {WHY}",))
    waits = make_job("queued", spec=make_spec(size=(3, 3)))
    cluster = make_cluster(["n1", "n2", mute("n3")], waits)
    room = room_for(cluster, waits)
    assert (room.fit, room.enough, room.enough_soon) == (2, False, False)
    assert explain(cluster, waits, WALL)[0] == f"needs 3 nodes, 2 fit: {WHY}"


def test_a_job_that_no_other_node_can_run_waits_for_it() -> None:
    """It does not fail, as it would where each node has said that it cannot run it."""
    waits = make_job("queued", spec=make_spec(size=(1, 1)))
    cluster = make_cluster([make_node("n1", ready={UID: UNFIT}), mute("n3", ready={})], waits)
    assert takes(cluster).step is None


def test_a_member_that_trains_stays_and_the_gang_grows_when_its_agent_is_back() -> None:
    job = make_job("running", make_generation(["n1", "n2"]), target=4)
    cluster = make_cluster(["n1", mute("n2"), "n3", "n4"], job)
    why = "runs on 2 of 4 nodes; n3, n4 joins later: the agent of n2 is silent or cut off from the store"
    assert takes(cluster) == Decision(None, (why,))
    assert staying(cluster, job) == 2
    back = make_cluster(["n1", "n2", "n3", "n4"], job)
    step = takes(back).step
    assert isinstance(step, Propose)
    assert set(step.members) == {"n1", "n2", "n3", "n4"}


def test_after_a_fault_the_gang_goes_on_without_it() -> None:
    """Its old workers may run: it is a holder, as the store sees to."""
    generation = make_generation(["n1", "n2"], reports={"n1": failed(make_exit(signal=9))})
    job = make_job("running", generation, target=2)
    step = takes(make_cluster(["n1", mute("n2"), "n3"], job)).step
    assert isinstance(step, Propose)
    assert (set(step.members), step.lost) == ({"n1", "n3"}, ())
    assert step.outside == {"n2": "n2 gets no new work: its agent is silent or cut off from the store"}


@pytest.mark.parametrize("holders", [(), ("n3",)])
def test_a_forming_generation_does_not_wait_for_its_acknowledgement(holders: Sequence[str]) -> None:
    job = forming(holders=holders)
    nodes: list[NodeRecord | str] = ["n1", "n2", mute("n3"), "n4"]
    step = takes(make_cluster(nodes, job)).step
    assert isinstance(step, Propose)
    assert (set(step.members), step.lost, step.spend) == ({"n1", "n2", "n4"}, (), None)
    assert step.cause.text == f"because of join; {SILENT}"
    assert step.setbacks is None, "it is as good as before once its agent is back"
    smaller = takes(make_cluster(nodes[:3], job)).step
    assert isinstance(smaller, Propose) and set(smaller.members) == {"n1", "n2"}


def test_nor_does_the_job_remember_it_at_the_deadline() -> None:
    job = forming(acks=["n1"])
    step = takes(make_cluster(["n1", "n2", mute("n3")], job, served=LATE)).step
    assert isinstance(step, Propose) and set(step.members) == {"n1", "n2"}
    assert step.setbacks is not None
    assert [one.node for one in step.setbacks] == ["n2"]


def test_a_gang_that_needs_it_holds_with_the_reason_and_starts_when_its_agent_is_back() -> None:
    job = forming(size=(3, 3))
    step = takes(make_cluster(["n1", "n2", mute("n3")], job)).step
    assert isinstance(step, End)
    assert (step.phase, step.lost, step.spend) == ("holding", (), None)
    assert step.reason == f"because of join; {SILENT}; holds: needs 3 nodes, 2 fit: {WHY}"
    holds = make_job(
        "holding", make_generation(["n1", "n2", "n3"], state="ended"), active=1, spec=make_spec(size=(3, 3))
    )
    assert takes(make_cluster(["n1", "n2", mute("n3")], holds)).step is None
    again = takes(make_cluster(["n1", "n2", "n3"], holds)).step
    assert isinstance(again, Propose) and set(again.members) == {"n1", "n2", "n3"}


def test_one_that_has_acknowledged_is_waited_for_no_more_and_stays() -> None:
    job = forming(acks=["n2", "n3"])
    assert takes(make_cluster(["n1", "n2", mute("n3")], job)).step is None


def test_on_a_record_that_may_be_older_than_the_generation_nobody_is_left_out() -> None:
    job = forming().model_copy(update={"rev": 9})
    cluster = replace(make_cluster(["n1", "n2", mute("n3")], job), rev=8)
    waits = takes(cluster)
    assert waits.step is None and "waits for the next heartbeat" in waits.why[0]
    assert isinstance(takes(replace(cluster, rev=9)).step, Propose)


def test_who_speaks_goes_first() -> None:
    job = make_job("running", make_generation(["n1", "n2"]), failsafe_members=["n1", "n2"])
    cluster = make_cluster([mute("n1"), "n2", "n3"], job)
    assert order(cluster, job) == ["n2", "n3", "n1"]
    assert failsafe.chooser(cluster, job) == "n2"
    alone = make_job("running", make_generation(["n1", "n2"]))
    assert failsafe.chooser(cluster, alone) == "n2"


def test_it_lends_nobody_time_that_it_could_not_know_of() -> None:
    job = make_job("running", make_generation(["n1"]))
    members = job.generation.members.values() if job.generation is not None else ()
    nodes = [make_node("n1", peer=True), mute("n2", peer=True), *(make_node(n, peer=True) for n in ("n3", "n4"))]
    assert set(failsafe.choose(make_cluster(nodes, job), job.uid, members)) == {"n1", "n3", "n4"}

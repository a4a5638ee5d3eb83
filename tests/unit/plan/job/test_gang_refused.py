"""Jobs whose record is not what was signed: nothing of them is started, and only a signed wish ends them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.world import Token
from nodeagent.plan.cluster import Cluster, Refusal
from nodeagent.plan.job.gang import decide
from nodeagent.plan.pods.actions import Prepare, Promise, Retire, Start, Stop
from nodeagent.plan.steps import Decision, End, Propose, Remove
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import (
    READY,
    SUCCEEDED,
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


def refusing(job: JobRecord, controlled: bool, *others: JobRecord) -> Cluster:
    refusal = Refusal("changed", "it was changed in the store", controlled)
    return replace(make_cluster(["n1", "n2"], job, *others), refused={job.uid: refusal})


@pytest.mark.parametrize(
    "job",
    [
        make_job(),
        make_job("forming", make_generation(["n1"], state="forming", acks=["n1"])),
        make_job("running", make_generation(["n1", "n2"]), restart=1),
        make_job("running", make_generation(["n1", "n2"]), desired="pause"),
    ],
    ids=["queued", "forming", "restart", "pause"],
)
def test_no_step_is_taken_of_a_refused_job(job: JobRecord) -> None:
    decision = decide(refusing(job, True), job, WALL)
    assert decision == Decision(None, ("it was changed in the store",))


def test_a_refused_job_is_stopped_when_an_operator_signed_that() -> None:
    job = make_job("running", make_generation(["n1"]), desired="stop")
    assert isinstance(decide(refusing(job, True), job, WALL).step, End)
    assert decide(refusing(job, False), job, WALL).step is None
    over = make_job("stopped", delete=True)
    assert isinstance(decide(refusing(over, False), over, WALL).step, Remove)


def test_what_a_refused_job_reported_is_not_believed() -> None:
    job = make_job("running", make_generation(["n1"], reports={"n1": SUCCEEDED}), desired="stop")
    for cluster, phase in ((refusing(job, True), "stopped"), (make_cluster(["n1"], job), "succeeded")):
        step = decide(cluster, job, WALL).step
        assert isinstance(step, End)
        assert step.phase == phase


def test_a_refused_job_holds_up_nobody_in_the_queue() -> None:
    spec = make_spec(name="b", priority=9)
    forged, mine = make_job(uid="u-b", spec=spec), make_job(order=1)
    nodes = [make_node(n, ready={UID: READY, "u-b": READY}) for n in ("n1", "n2", "n3", "n4")]
    cluster = make_cluster(nodes, forged, mine)
    assert decide(cluster, mine, WALL).step is None
    refused = replace(cluster, refused={"u-b": Refusal("unsigned", "no", False)})
    assert isinstance(decide(refused, mine, WALL).step, Propose)


def actions(job: JobRecord, *statuses: PodStatus, refused: bool) -> list[type]:
    cluster = refusing(job, True) if refused else make_cluster(["n1", "n2"], job)
    mine = Incarnation(life=life("n1"), start=1)
    return [type(a) for a in plan_node(cluster, "n1", mine, {s.uid: s for s in statuses}, standbys=2)]


def pod(**fields: object) -> PodStatus:
    return PodStatus.model_validate({"uid": UID, "phase": "ready"} | fields)


G1 = Token(number=1, id="g1")


@pytest.mark.parametrize(
    ("job", "statuses", "action"),
    [
        (make_job(), (), Prepare),
        (make_job("forming", make_generation(["n1"], state="forming")), (pod(),), Promise),
        (make_job("running", make_generation(["n1"])), (pod(highest=G1),), Start),
    ],
    ids=["prepare", "promise", "start"],
)
def test_nothing_of_it_is_started(job: JobRecord, statuses: tuple[PodStatus, ...], action: type) -> None:
    assert actions(job, *statuses, refused=False) == [action]
    assert actions(job, *statuses, refused=True) == []


def test_what_runs_may_be_stopped_and_cleared_away() -> None:
    assert actions(make_job("stopped"), pod(), refused=True) == [Retire]
    running = pod(phase="running", highest=G1, generation=G1)
    assert actions(make_job("running", make_generation(["n2"], number=2)), running, refused=True) == [Stop]


def test_nothing_is_promised_while_what_is_older_is_stopped() -> None:
    again = make_job("forming", make_generation(["n1"], state="forming", number=2, holders=["n1"]))
    running = pod(phase="running", highest=G1, generation=G1)
    assert actions(again, running, refused=False) == [Stop, Promise]
    assert actions(again, running, refused=True) == [Stop]

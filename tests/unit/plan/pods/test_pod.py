"""What a node does for the pods of all its jobs: which it prepares, keeps, retires, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.model.job import Phase, Scale
from nodeagent.model.node import Incarnation, NodeRecord
from nodeagent.plan.pods.actions import Prepare, Retire, SendAck, Stop
from tests.unit.plan.build import (
    PREPARING,
    READY,
    UID,
    UNFIT,
    life,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)
from tests.unit.plan.planning import plan_node
from tests.unit.plan.pods.podstates import NEW, OLD, RUNNING, act, active, ended_generation, forming, status


def test_a_stuck_pod_lets_the_others_go_on_without_this_node() -> None:
    stuck = status("stuck", generation=OLD)
    assert act(forming(), stuck) is None
    ack = act(forming(("n1",), members=("n2",)), stuck)
    assert isinstance(ack, SendAck)
    assert ack.ack.stuck
    ended = make_job("stopped", make_generation(["n1"], state="ended", holders=["n1"]), active=1)
    ack = act(ended, stuck)
    assert isinstance(ack, SendAck)
    assert ack.ack.stuck


def test_a_stuck_pod_gives_way_only_once_its_devices_are_given_to_nobody() -> None:
    """Before, they went to the next job while what did not end had them."""
    stuck = status("stuck", generation=OLD, held=("cpu0", "cpu1"))
    ended = make_job("stopped", make_generation(["n1"], state="ended", holders=["n1"]), active=1)
    for job in (ended, forming(("n1",), members=("n2",))):
        for held, gives_way in (((), False), (("cpu0",), False), (("cpu0", "cpu1"), True)):
            nodes = [holding("n1", *held), make_node("n2")]
            cluster, incarnation = make_cluster(nodes, job), Incarnation(life=life("n1"), start=3)
            actions = plan_node(cluster, "n1", incarnation, {UID: stuck}, 2)
            acks = [action.ack.stuck for action in actions if isinstance(action, SendAck)]
            assert acks == ([True] if gives_way else [])


def holding(name: str, *devices: str) -> NodeRecord:
    node = make_node(name)
    return node.model_copy(update={"facts": node.facts.model_copy(update={"held": dict.fromkeys(devices, UID)})})


def test_an_ended_job_stops_acknowledges_and_retires() -> None:
    phase: Phase = "stopped"
    running = status("running", generation=OLD, workers=RUNNING)
    stop = act(make_job(phase, ended_generation("n1"), active=1), running)
    assert isinstance(stop, Stop)
    assert stop.grace == 30.0
    quiet = status("exited", generation=OLD)
    ack = act(make_job(phase, ended_generation("n1"), active=1), quiet)
    assert isinstance(ack, SendAck)
    assert ack.ack.ended
    assert act(make_job(phase, ended_generation(), active=1), quiet) == Retire(UID, "the job has ended")
    assert act(make_job(phase, ended_generation(), active=1), None) is None
    late = act(make_job(phase, ended_generation(), active=1), running)
    assert isinstance(late, Stop)
    assert late.grace is None, "it should not run any more"


def test_a_paused_job_keeps_its_members_ready() -> None:
    """Its interpreters stay warm, so that it goes on without importing anew."""
    paused = make_job("paused", ended_generation(), active=1, desired="pause")
    assert act(paused, status("exited", generation=OLD)) is None
    assert isinstance(act(paused, None), Prepare), "the shim died meanwhile"
    assert isinstance(act(paused, status("ready"), node="n4", nodes=("n1", "n4")), Retire), "it was no member"
    me = Incarnation(life=life("n1"), start=1)
    cordoned = make_cluster([make_node("n1", cordon=True)], paused)
    assert [type(a) for a in plan_node(cordoned, "n1", me, {UID: status("ready")}, 2)] == [Retire]


def test_only_so_many_paused_jobs_are_kept_ready() -> None:
    jobs = [make_job("paused", ended_generation(), active=1, desired="pause", uid=f"u-{i}") for i in range(3)]
    pods = {f"u-{i}": status("ready") for i in range(3)}
    kept = plan_node(make_cluster(["n1"], *jobs), "n1", Incarnation(life=life("n1"), start=1), pods, 2)
    assert [(type(a), a.uid) for a in kept] == [(Retire, "u-2")]


def test_full_jobs_keep_one_spare() -> None:
    full = active(members=("n1", "n2"))
    assert act(full, None, node="n3", nodes=("n1", "n2", "n3")) == Prepare(UID, "the job may need this node")
    assert act(full, None, node="n4", nodes=("n1", "n2", "n3", "n4")) is None
    assert isinstance(act(full, status("ready"), node="n4", nodes=("n1", "n2", "n3", "n4")), Retire)


def test_a_job_that_is_gone_from_the_store() -> None:
    assert act(None, status("running", generation=OLD, workers=RUNNING)) == Retire(
        UID, "the job is gone from the store"
    )


def test_a_queued_job_is_prepared_for() -> None:
    assert isinstance(act(make_job(), None), Prepare)
    assert isinstance(act(make_job(), status("gone")), Prepare)
    for phase in ("preparing", "ready"):
        assert act(make_job(), status(phase)) is None


def test_an_unfit_pod_is_looked_at_again_and_never_retired_while_the_job_waits() -> None:
    """Retiring it would lose the verdict, and the node would be asked again, for ever."""
    for readiness in ({UID: UNFIT}, {UID: PREPARING}, {}):
        cluster = make_cluster([make_node("n1", ready=readiness)], make_job())
        (action,) = plan_node(cluster, "n1", Incarnation(life=life("n1"), start=1), {UID: status("unfit")}, 2)
        assert isinstance(action, Prepare)


def test_at_most_one_action_for_each_job_in_a_fixed_order() -> None:
    jobs = [make_job(uid=u) for u in ("u-c", "u-a", "u-b")]
    actions = plan_node(
        make_cluster(["n1"], *jobs), "n1", Incarnation(life=life("n1"), start=1), {"u-z": status("ready")}, 2
    )
    assert [(type(a), a.uid) for a in actions] == [
        (Prepare, "u-a"),
        (Prepare, "u-b"),
        (Prepare, "u-c"),
        (Retire, "u-z"),
    ]


def test_only_so_many_standbys_for_running_jobs_of_others() -> None:
    jobs = [
        make_job("running", make_generation(["n2"]), uid=f"u-{i}", target=1, spec=make_spec(priority=p))
        for i, p in enumerate((0, 5, 0))
    ]
    cluster = make_cluster(["n1", "n2"], *jobs)
    me = Incarnation(life=life("n1"), start=1)
    taken = plan_node(cluster, "n1", me, {}, 2)
    assert [(type(a), a.uid) for a in taken] == [(Prepare, "u-1"), (Prepare, "u-0")], "the highest priority first"
    kept = plan_node(cluster, "n1", me, {f"u-{i}": status("ready") for i in range(3)}, 1)
    assert [(type(a), a.uid) for a in kept] == [(Retire, "u-0"), (Retire, "u-2")]


def test_a_job_that_is_short_of_nodes_gets_a_pod_beyond_the_standbys() -> None:
    """Found by the simulation: two older jobs had their spares here, and the third never grew again."""
    full = [make_job("running", make_generation(["n2"]), uid=f"u-{i}", target=1, order=i) for i in range(2)]
    short = make_job("running", make_generation(["n3"]), uid="u-2", target=2, order=2)
    here = make_node("n1", ready={job.uid: READY for job in full})
    cluster = make_cluster([here, make_node("n2", ready={}), make_node("n3", ready={})], *full, short)
    me, ready = Incarnation(life=life("n1"), start=1), {f"u-{i}": status("ready") for i in range(2)}
    assert plan_node(cluster, "n1", me, ready, 2) == (Prepare("u-2", "the job may need this node"),)


@pytest.mark.parametrize(("going", "prepared"), [("drained", True), ("scaled in", True), ("cordoned", False)])
def test_who_is_about_to_leave_is_replaced_beyond_the_standbys(going: str, prepared: bool) -> None:
    """Found by the simulation: the only node that was free for it kept two standbys, and the drain never ended."""
    full = [make_job("running", make_generation(["n2"]), uid=f"u-{i}", target=1, order=i) for i in range(2)]
    mine = make_job("running", make_generation(["n3"]), uid="u-2", target=1, order=2)
    if going == "scaled in":
        scale = Scale(request="r", want=1, before=2, leaving=("n3",))
        mine = mine.model_copy(update={"control": mine.control.model_copy(update={"scale": scale})})
    there = make_node("n3", ready={}, drain=going == "drained", cordon=going == "cordoned")
    here = make_node("n1", ready={job.uid: READY for job in full})
    cluster = make_cluster([here, make_node("n2", ready={}), there], *full, mine)
    me, ready = Incarnation(life=life("n1"), start=1), {f"u-{i}": status("ready") for i in range(2)}
    wanted = (Prepare("u-2", "the job may need this node"),) if prepared else ()
    assert plan_node(cluster, "n1", me, ready, 2) == wanted


def test_what_runs_for_a_job_that_cannot_be_read_goes_on() -> None:
    cluster = make_cluster(["n1"])
    me, running = Incarnation(life=life("n1"), start=1), {UID: status("running", generation=NEW)}
    assert [type(a) for a in plan_node(cluster, "n1", me, running, 2)] == [Retire], "a job that is not there"
    assert plan_node(replace(cluster, unread=frozenset({UID})), "n1", me, running, 2) == ()

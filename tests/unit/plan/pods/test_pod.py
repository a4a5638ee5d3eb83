"""What a node does for its pods: stop, promise, acknowledge, start, report, retire; each step only after the last."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nodeagent.model.job import Checkpoint, JobRecord, Phase, Scale
from nodeagent.model.node import Incarnation, NodeRecord
from nodeagent.model.pod import WorkerState
from nodeagent.model.world import Generation, Place, PodReport, Starved, Token, WorkerExit
from nodeagent.plan.pods.actions import (
    PodAction,
    Prepare,
    Promise,
    ReportPod,
    Retire,
    SendAck,
    Start,
    Stop,
    asks_the_store,
)
from nodeagent.plan.pods.running import stands_still
from nodeagent.pods.base import GivenUp, PodStatus, Rendezvous
from nodeagent.pods.environment import worker_environments
from tests.unit.plan.build import (
    PREPARING,
    READY,
    SUCCEEDED,
    UID,
    UNFIT,
    failed,
    life,
    make_cluster,
    make_exit,
    make_generation,
    make_job,
    make_node,
    make_spec,
)
from tests.unit.plan.planning import plan_node

OLD, NEW = Token(number=1, id="g1"), Token(number=2, id="g2")
RUNNING = (WorkerState(rank=0, local_rank=0, pid=7, state="running"),)
ENDED = (WorkerState(rank=0, local_rank=0, pid=7, state="exited", exit=0),)


def status(phase: str, **more: object) -> PodStatus:
    return PodStatus.model_validate({"uid": UID, "phase": phase} | more)


def act(
    job: JobRecord | None, now: PodStatus | None, *, node: str = "n1", nodes: tuple[str, ...] = ("n1", "n2")
) -> PodAction | None:
    """The first action for the only pod; only a stop has another one beside it."""
    actions = acts(job, now, node=node, nodes=nodes)
    assert len(actions) <= (2 if actions and isinstance(actions[0], Stop) else 1)
    return actions[0] if actions else None


def acts(
    job: JobRecord | None, now: PodStatus | None, *, node: str = "n1", nodes: tuple[str, ...] = ("n1", "n2")
) -> tuple[PodAction, ...]:
    cluster = make_cluster([make_node(n) for n in nodes], *([job] if job is not None else []))
    statuses = {UID: now} if now is not None else {}
    return plan_node(cluster, node, Incarnation(life=life(node), start=3), statuses, 2)


def forming(
    holders: tuple[str, ...] = ("n1", "n2"),
    *,
    planned: bool = False,
    acks: tuple[str, ...] = (),
    members: tuple[str, ...] = ("n1", "n2"),
) -> JobRecord:
    generation = make_generation(
        members, state="forming", number=2, cause="restart", holders=holders, planned=planned, acks=acks
    )
    return make_job("forming", generation, active=1)


# --- forming


def test_first_it_stops_what_is_older_with_grace_only_if_planned() -> None:
    old = status("running", generation=OLD, highest=OLD, workers=RUNNING)
    at_once = act(forming(), old)
    assert isinstance(at_once, Stop)
    assert (at_once.grace, at_once.why) == (None, "generation 2 is forming: because of restart")
    planned = act(forming(planned=True), old)
    assert isinstance(planned, Stop)
    assert planned.grace == 30.0
    for of_generation, grace in ((7.0, 7.0), (0.0, 0.0), (None, 30.0)):
        generation = make_generation(
            ["n1"], state="forming", number=2, holders=["n1", "n2"], planned=True, grace=of_generation
        )
        for node in ("n1", "n2"):  # one stays, one leaves: a scale-in's own time is for both
            reported = act(make_job("forming", generation, active=1), old, node=node)
            assert isinstance(reported, Stop)
            assert reported.grace == grace
    stopping = act(forming(), status("stopping", generation=OLD, highest=OLD))
    assert isinstance(stopping, Stop), "asked again until it is seen: a shorter grace overrides a longer one"


def broken(job: JobRecord) -> bool:
    stop = act(job, status("running", generation=OLD, highest=OLD, workers=RUNNING))
    assert isinstance(stop, Stop)
    assert stop.grace == (30.0 if job.generation is not None and job.generation.planned else None)
    return stop.broken


@pytest.mark.parametrize(
    ("own", "of_generation", "grace", "sooner"),
    [
        ((None, None), None, 30.0, {}),
        ((5.0, None), None, 30.0, {"server": 5.0}),
        ((5.0, 60.0), None, 60.0, {"server": 5.0}),
        ((5.0, None), 90.0, 90.0, {"server": 5.0}),
        ((5.0, 60.0), 2.0, 2.0, {}),
        ((5.0, 6.0), None, 6.0, {"server": 5.0}),
    ],
)
def test_each_role_has_its_own_grace(
    own: tuple[float | None, float | None], of_generation: float | None, grace: float, sooner: dict[str, float]
) -> None:
    spec = make_spec()
    named = zip(("server", "trainer"), own, strict=True)
    roles = tuple(spec.role.model_copy(update={"name": name, "grace": seconds}) for name, seconds in named)
    generation = make_generation(["n1"], state="ended", number=2, holders=["n1"], planned=True, grace=of_generation)
    places = tuple(Place(role=role.name, index=0, workers=1, devices=("cpu0",)) for role in roles)
    held = {"n1": generation.holders["n1"].model_copy(update={"places": places})}
    job = make_job(
        "holding", generation.model_copy(update={"holders": held}), spec=spec.model_copy(update={"roles": roles})
    )
    stop = act(job, status("running", generation=OLD, highest=OLD, workers=RUNNING))
    assert isinstance(stop, Stop)
    assert (stop.grace, stop.sooner) == (grace, sooner)


def test_who_waits_for_a_rank_that_died_as_it_left_is_not_left_to_its_grace() -> None:
    missed = PodReport(state="left", exits=(make_exit(1, signal=9, stopped=True).model_copy(update={"missed": True}),))
    died = PodReport(state="failed", exits=(make_exit(1, signal=9),))  # before its node had heard that they leave
    well = PodReport(state="left", exits=(make_exit(1, code=0, stopped=True),))
    for report in (None, PodReport(state="left"), well, missed, died):
        for planned in (True, False):
            job = forming(planned=planned).model_copy(update={"last_reports": {"n2": report} if report else {}})
            assert broken(job) == (report in (missed, died) and planned)


def test_nor_is_who_waits_for_a_node_that_was_lost_as_it_left() -> None:
    lost = make_generation(["n1"], state="forming", number=2, cause="node_lost", holders=["n1"], planned=True)
    assert broken(make_job("forming", lost, active=1))
    before = make_generation(["n1"], state="ended", cause="node_lost", holders=["n1"], planned=True)
    assert not broken(make_job("pausing", before, active=1)), "that was why it had formed"


def test_it_promises_while_what_is_older_dies_but_not_while_that_has_its_grace() -> None:
    old = status("running", generation=OLD, highest=OLD, workers=RUNNING)

    def promised(job: JobRecord, pod: PodStatus, node: str = "n1") -> PodAction | None:
        stop, *more = acts(job, pod, node=node)
        assert isinstance(stop, Stop)
        return more[0] if more else None

    assert promised(forming(), old) == Promise(UID, NEW, True, "generation 2 is forming", above=2)
    assert promised(forming(), old, "n2") == Promise(UID, NEW, False, "generation 2 is forming")
    assert promised(forming(planned=True), old) is None, "it may still need its rendezvous"
    assert promised(forming(), status("stopping", generation=OLD, highest=NEW)) is None, "once is enough"
    assert promised(forming(members=("n1",)), old, "n2") is None, "it only leaves"


def test_then_it_promises_and_rank_0_holds_a_rendezvous() -> None:
    stopped = status("exited", generation=OLD, highest=OLD)
    assert act(forming(), stopped) == Promise(UID, NEW, True, "generation 2 is forming", above=2)
    assert act(forming(), stopped, node="n2") == Promise(UID, NEW, False, "generation 2 is forming")


@pytest.mark.parametrize("shared", [(), ("n1", "n2"), ("n2", "n3"), ("n1", "n2", "n3")])
@pytest.mark.parametrize("hosted", [True, False])
def test_it_takes_a_rendezvous_after_which_there_is_room_for_the_ports_of_all_workers(
    shared: tuple[str, ...], hosted: bool
) -> None:
    """As they are told of them, whichever nodes share an address."""
    names = ("n1", "n2", "n3")
    plain = {name: make_node(name) for name in names}
    at = {name: "10.9.9.9" if name in shared else f"10.0.0.{i}" for i, name in enumerate(names)}
    nodes = {
        name: node.model_copy(update={"facts": node.facts.model_copy(update={"address": at[name]})})
        for name, node in plain.items()
    }
    generation = make_generation(names, state="forming", number=2, workers=4)
    cluster = make_cluster(nodes.values(), make_job("forming", generation))
    statuses = {UID: status("ready", generation=OLD, highest=OLD)}
    (promise,) = plan_node(cluster, "n1", Incarnation(life=life("n1"), start=3), statuses, 2)
    assert isinstance(promise, Promise)

    generation = generation.model_copy(
        update={"state": "active", "address": f"{at['n1']}:29400", "store_hosted": hosted}
    )
    found = set()
    for name in names:
        for env in worker_environments(make_job("running", generation), generation, nodes[name], nodes):
            given = [*json.loads(env["TF_CONFIG"])["cluster"]["worker"], env["JAX_COORDINATOR_ADDRESS"]]
            found |= {int(address.rpartition(":")[2]) - 29400 for address in given}
    assert 0 <= promise.above - max(found) <= (0 if hosted else 1), "JAX needs one more where torch's store is served"


def test_then_it_acknowledges_rank_0_with_its_address() -> None:
    promised = status("ready", highest=NEW)
    stale = Rendezvous(token=OLD, address="h:1", store_hosted=True)
    for now in (promised, status("ready", highest=NEW, rendezvous=stale)):
        assert isinstance(act(forming(), now), Promise), "a shim that has read its promise holds no address"
    held = Rendezvous(token=NEW, address="h:2", store_hosted=True)
    ack = act(forming(), status("ready", highest=NEW, rendezvous=held))
    assert isinstance(ack, SendAck)
    assert (ack.token, ack.ack.life, ack.ack.address, ack.ack.store_hosted) == (NEW, "life-n1", "h:2", True)
    assert not ack.ack.ended
    other = act(forming(), promised, node="n2")
    assert isinstance(other, SendAck)
    assert (other.ack.address, other.ack.stuck, other.last) == ("", False, None)


def test_it_acknowledges_once_and_starts_nothing_before_all_have() -> None:
    promised = status("ready", highest=NEW, rendezvous=Rendezvous(token=NEW, address="h:2", store_hosted=False))
    assert act(forming((), acks=("n1",)), promised) is None
    assert isinstance(act(forming(("n1",), acks=("n1",)), promised), SendAck), "the store has it still as a holder"


def test_the_ack_carries_how_the_last_generation_ended() -> None:
    crashed = status("exited", generation=OLD, highest=NEW, exits=(make_exit(code=3),), workers=ENDED)
    ack = act(forming(), crashed, node="n2")
    assert isinstance(ack, SendAck)
    assert ack.last == failed(make_exit(code=3), seq=0)
    saved = make_exit(code=101, stopped=True).model_copy(update={"left_at": 12, "saved_in": 0.3})
    ack = act(forming(), crashed.model_copy(update={"exits": (saved,)}), node="n2")
    assert isinstance(ack, SendAck)
    assert ack.last == PodReport(state="left", exits=(saved,), reason="checkpoint at step 12 in 0.30 s")
    unreported = crashed.model_copy(update={"exits": (make_exit(signal=15, stopped=True),)})
    ack = act(forming(), unreported, node="n2")
    assert isinstance(ack, SendAck)
    assert ack.last is None, "nothing is known of how they took it"
    older = crashed.model_copy(update={"generation": Token(number=9, id="g9")})
    ack = act(forming(), older, node="n2")
    assert isinstance(ack, SendAck)
    assert ack.last is None


def test_an_answer_that_is_waited_for_tells_of_a_shim_that_died() -> None:
    """Else the workers that ended because of it would be taken for the cause."""
    silent = {"silent": {"n2": life("n2")}}
    again = status("ready", lost=OLD, highest=NEW)
    ended = make_generation(["n1", "n2"], state="ended", number=1, holders=["n1", "n2"])
    holding = make_job("holding", ended, active=1)
    gone = status("gone", reason="the shim died", generation=OLD, workers=RUNNING)
    for job, now in ((forming(), again), (holding, gone)):
        ack = act(job.model_copy(update=silent), now, node="n2")
        assert isinstance(ack, SendAck)
        assert ack.last == PodReport(state="lost", reason="the shim died")
        ack = act(job, now, node="n2")
        assert isinstance(ack, SendAck)
        assert ack.last is None, "it has answered before"
    for other in (
        again.model_copy(update={"lost": NEW}),
        gone.model_copy(update={"workers": ENDED}),
        gone.model_copy(update={"generation": NEW}),
    ):
        job = forming() if other.phase == "ready" else holding
        ack = act(job.model_copy(update=silent), other, node="n2")
        assert isinstance(ack, SendAck)
        assert ack.last is None


def test_a_member_without_a_usable_pod_gets_ready_first() -> None:
    assert isinstance(act(forming(), None), Prepare)
    assert isinstance(act(forming(), status("gone")), Prepare)
    for phase in ("preparing", "unfit"):
        assert act(forming(), status(phase)) is None


def test_a_holder_that_is_no_member_stops_and_acknowledges_without_a_promise() -> None:
    job = forming(("n1",), members=("n2",))
    assert isinstance(act(job, status("running", generation=OLD, workers=RUNNING)), Stop)
    ack = act(job, status("exited", generation=OLD, highest=OLD))
    assert isinstance(ack, SendAck)
    assert ack.ack.address == ""
    assert isinstance(act(job, None), SendAck), "nothing runs where there is no shim"


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


def test_a_stuck_pod_of_an_active_generation_is_reported_once() -> None:
    """What its shim saw counts, if it saw the end of its workers; else they are lost with it."""
    orphan = status("stuck", reason="the shim died, and processes 7 do not end, even with SIGKILL")
    report = act(active(), orphan)
    assert isinstance(report, ReportPod)
    assert (report.report.state, report.report.reason) == ("lost", orphan.reason)
    assert act(active({"n1": report.report}), orphan) == Stop(UID, None, "what runs here does not end")
    fenced = act(active(), status("stuck", generation=NEW, highest=NEW, fenced=True))
    assert isinstance(fenced, ReportPod)
    assert fenced.report.state == "fenced"


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


# --- active


def active(
    reports: dict[str, PodReport] | None = None, members: tuple[str, ...] = ("n1", "n2"), workers: int = 1
) -> JobRecord:
    return make_job("running", make_generation(members, number=2, reports=reports, workers=workers), target=2)


def test_it_starts_when_active_and_promised() -> None:
    assert act(active(), status("ready", highest=NEW)) == Start(UID, NEW, "generation 2 is active")
    assert act(active(), status("exited", generation=OLD, highest=NEW)) == Start(UID, NEW, "generation 2 is active")


def test_without_a_promise_it_refuses() -> None:
    shown = act(active(), status("ready", highest=OLD))
    assert isinstance(shown, ReportPod)
    assert shown.report.state == "refused"


def test_what_runs_of_an_older_generation_is_killed_first() -> None:
    assert act(active(), status("running", generation=OLD, highest=NEW, workers=RUNNING)) == Stop(
        UID, None, "generation 2 is active"
    )
    unknown = status("stuck", highest=NEW)
    assert isinstance(act(active(), unknown), ReportPod), "nothing is started beside what lives, whatever it is"


def test_an_agent_that_comes_back_leaves_running_workers_alone() -> None:
    for phase in ("starting", "running"):
        assert act(active(), status(phase, generation=NEW, highest=NEW, workers=RUNNING)) is None


def test_it_reports_what_changes_once() -> None:
    crashed = status("exited", generation=NEW, highest=NEW, workers=ENDED, exits=(make_exit(code=7),))
    shown = act(active(), crashed)
    assert isinstance(shown, ReportPod)
    assert (shown.report, shown.why) == (failed(make_exit(code=7), seq=0), "rank 0 failed: exit code 7")
    assert act(active({"n1": failed(make_exit(code=7), seq=4)}), crashed) is None
    more = crashed.model_copy(update={"exits": (make_exit(code=7), make_exit(1, signal=9, order=1))})
    assert isinstance(act(active({"n1": failed(make_exit(code=7), seq=4)}, workers=2), more), ReportPod)


def test_a_shim_that_is_gone_took_its_workers_with_it() -> None:
    shown = act(active(), None)
    assert isinstance(shown, ReportPod)
    assert shown.report == PodReport(state="lost", reason="its shim is gone, and its workers with it")
    shown = act(active(), status("gone", reason="the shim was killed"))
    assert isinstance(shown, ReportPod)
    assert shown.why == "the shim was killed"
    assert act(active({"n1": shown.report}), status("gone", reason="the shim was killed")) is None


def test_a_shim_that_goes_after_its_workers_had_ended_changes_nothing() -> None:
    for sent in (SUCCEEDED, failed(make_exit(code=7))):
        assert act(active({"n1": sent}), status("gone")) is None
        assert act(active({"n1": sent}), None) is None


def test_a_node_of_another_life_is_no_member() -> None:
    cluster = make_cluster(["n1", "n2"], active())
    running = status("running", generation=NEW, workers=RUNNING)
    (action,) = plan_node(cluster, "n1", Incarnation(life="reborn", start=1), {UID: running}, 2)
    assert action == Stop(UID, None, "this node is not in the newest generation")


# --- its agent cannot read or tell anything


NOT_STARTED = status("exited", generation=OLD, highest=NEW, workers=ENDED, exits=(make_exit(code=0),))
CRASHED = status("exited", generation=NEW, highest=NEW, workers=ENDED, exits=(make_exit(code=7),))
DONE = status("exited", generation=NEW, highest=NEW, workers=ENDED, exits=(make_exit(code=0),))
UP = status("running", generation=NEW, highest=NEW, workers=RUNNING)


@pytest.mark.parametrize(
    ("job", "pod", "barred", "still"),
    [
        (forming(), NOT_STARTED, 0, True),
        (forming(holders=(), acks=("n1",)), NOT_STARTED, 0, True),
        (forming(), None, 0, True),
        (forming(members=("n2",)), NOT_STARTED, 0, False),
        (active(), NOT_STARTED, 0, True),
        (active(), NOT_STARTED, 2, False),
        (active(), UP, 0, False),
        (active(), CRASHED, 0, True),
        (active(), CRASHED, 2, False),
        (active({"n1": failed(make_exit(code=7))}), CRASHED, 0, False),
        (active(), DONE, 0, False),
        (active({"n1": SUCCEEDED}), status("gone"), 0, False),
        (make_job("holding", make_generation(["n1"], state="ended")), NOT_STARTED, 0, False),
    ],
)
def test_a_node_stands_still_if_others_may_wait_for_what_it_has_to_start_or_to_tell(
    job: JobRecord, pod: PodStatus | None, barred: int, still: bool
) -> None:
    pods = {UID: pod} if pod is not None else {}
    cluster = make_cluster(["n1", "n2"], job)
    assert stands_still(cluster, "n1", life("n1"), pods, lambda _uid: barred) is still
    busy = pods | {"another": UP.model_copy(update={"uid": "another"})}
    assert not stands_still(cluster, "n1", life("n1"), busy, lambda _uid: barred), "something runs"
    assert not stands_still(cluster, "n1", "reborn", pods, lambda _uid: barred), "a member in another life"


@pytest.mark.parametrize(("pod", "still"), [(NOT_STARTED, True), (DONE, False), (UP, False), (status("ready"), False)])
def test_an_agent_that_has_read_nothing_goes_by_what_its_pods_have_promised(pod: PodStatus, still: bool) -> None:
    assert stands_still(make_cluster(["n1"]), "n1", life("n1"), {UID: pod}, lambda _uid: 0.0) is still


# --- given up


@pytest.mark.parametrize(
    ("holders", "members", "given_up"),
    [
        (("n1", "n2"), ("n1", "n2"), None),
        (("n1", "n2"), ("n1", "n2", "n3"), None),
        (("n1", "n2"), ("n1", "n3"), GivenUp(stays=True, world=2, since=(1, 40))),
        (("n1", "n2"), ("n1",), GivenUp(stays=True, world=1, since=(1, 40))),
        (("n1",), ("n2",), GivenUp(stays=False, world=1, since=(1, 40))),
    ],
)
def test_snapshots_are_written_out_where_a_node_of_the_gang_is_given_up(
    holders: tuple[str, ...], members: tuple[str, ...], given_up: GivenUp | None
) -> None:
    checkpoint = Checkpoint(name="c", step=40, number=1, order=2)
    old = status("running", generation=OLD, highest=OLD, workers=RUNNING)
    for planned in (True, False):
        job = forming(holders, members=members, planned=planned).model_copy(update={"checkpoint": checkpoint})
        for node in holders:  # also those that stay: their parts may be needed
            stop = act(job, old, node=node, nodes=("n1", "n2", "n3"))
            assert isinstance(stop, Stop)
            assert stop.given_up == (given_up if planned else None)


def test_a_node_in_another_life_does_not_stay() -> None:
    job = forming(planned=True)
    assert job.generation is not None
    reborn = {**job.generation.members, "n2": job.generation.members["n2"].model_copy(update={"life": "another"})}
    job = job.model_copy(update={"generation": job.generation.model_copy(update={"members": reborn})})
    stop = act(job, status("running", generation=OLD, highest=OLD, workers=RUNNING))
    assert isinstance(stop, Stop)
    assert stop.given_up == GivenUp(stays=True, world=2)


def test_when_the_whole_gang_is_stopped_all_of_it_is_written_and_that_is_reported() -> None:
    job = make_job("pausing", ended_generation("n1", "n2"), active=1)
    stop = act(job, status("running", generation=OLD, highest=OLD, workers=RUNNING))
    assert isinstance(stop, Stop)
    assert stop.given_up == GivenUp(stays=False, world=0)
    last = job.model_copy(update={"last_number": 1})
    ack = act(last, status("exited", generation=OLD, highest=OLD, written="snapshot of step 7 written out in 0.10 s"))
    assert isinstance(ack, SendAck)
    assert ack.last == PodReport(state="left", reason="snapshot of step 7 written out in 0.10 s")


# --- not needed, not there


def ended_generation(*holders: str) -> Generation:
    return make_generation(["n1", "n2"], state="ended", holders=holders, planned=True)


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


def test_workers_that_were_stopped_under_an_active_generation_are_reported() -> None:
    """Found by the simulation: whoever stopped them left, the goodbye was lost, and the next start came within the
    lease: nobody ever noticed that nothing ran."""
    killed = make_exit(0, signal=9, stopped=True)
    stopped = status("exited", generation=NEW, highest=NEW, workers=ENDED, exits=(killed,))
    reported = act(active(), stopped)
    assert isinstance(reported, ReportPod)
    assert (reported.report.state, reported.report.reason) == (
        "fenced",
        "an agent that left this node stopped its workers",
    )
    ended = stopped.model_copy(update={"generation": OLD})
    assert not isinstance(act(forming(), ended), ReportPod), "stopped as planned"


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


# --- a worker has failed by itself


def running_at(generation: Generation, *exits: WorkerExit) -> PodStatus:
    return status("running", generation=generation.token, highest=generation.token, workers=RUNNING, exits=exits)


def test_who_has_a_worker_that_failed_stops_the_others_and_tells_the_store_meanwhile() -> None:
    generation = make_generation(["n1", "n2"], number=2, workers=2)
    crash = make_exit(1, code=7)
    first, second = acts(make_job("running", generation), running_at(generation, crash))
    assert first == Stop(UID, None, "rank 1 on n1 failed first: exit code 7")
    assert isinstance(second, ReportPod)
    assert second.report == PodReport(state="failed", exits=(crash,))
    assert (asks_the_store(first), asks_the_store(second)) == (False, True)


def test_who_hears_of_it_does_not_wait_for_the_next_generation_either() -> None:
    crash = make_exit(1, code=7)
    generation = make_generation(["n1", "n2"], number=2, reports={"n2": failed(crash)})
    job = make_job("running", generation)
    assert acts(job, running_at(generation)) == (Stop(UID, None, "rank 1 on n2 failed first: exit code 7"),)
    killed = make_exit(0, signal=9, stopped=True)
    over = running_at(generation, killed).model_copy(update={"phase": "exited", "workers": ENDED})
    assert act(job, over) is None, "not reported as workers that somebody else stopped"
    late = running_at(generation, make_exit(0, code=3))
    assert [type(action) for action in acts(job, late)] == [Stop, ReportPod], "it failed too, which is told"
    assert act(job, status("ready", highest=generation.token)) is None, "not started any more"


def test_victims_do_not_doom_a_generation() -> None:
    """The one that failed first shall end by itself, or nobody would know of what."""
    victim = make_exit(1, code=1, error="RuntimeError: Connection closed by peer [127.0.0.1]:5")
    generation = make_generation(["n1", "n2"], number=2, reports={"n2": failed(victim)})
    assert act(make_job("running", generation), running_at(generation)) is None
    both = make_generation(["n1", "n2"], number=2, workers=2)
    mine = act(make_job("running", both), running_at(generation, victim))
    assert isinstance(mine, ReportPod)


def test_a_failure_is_reported_once_however_many_are_stopped_after_it() -> None:
    crash, killed = make_exit(1, code=7), make_exit(0, signal=9, stopped=True)
    generation = make_generation(["n1", "n2"], number=2, reports={"n1": failed(crash)})
    job = make_job("running", generation)
    dying = running_at(generation, crash, killed)
    assert acts(job, dying) == (Stop(UID, None, "rank 1 on n1 failed first: exit code 7"),)
    assert act(job, dying.model_copy(update={"phase": "exited"})) is None


@pytest.mark.parametrize(("held", "free"), [(3, True), (5, False)])
def test_what_a_killed_workers_pod_held_is_judged_by_its_share_of_the_node(held: int, free: bool) -> None:
    """It has one slot of four. So it is, too, where the report goes with the acknowledgement."""
    hit = make_exit(signal=9).model_copy(update={"starved": Starved(held=held, total=16)})
    crashed = status("exited", generation=NEW, highest=NEW, workers=ENDED, exits=(hit,))
    shown = act(active(), crashed)
    assert isinstance(shown, ReportPod)
    assert (shown.report.state, bool(shown.report.crowded)) == ("failed", free)
    ended = make_generation(["n1", "n2"], state="ended", number=2, holders=["n1"])
    job = make_job("holding", ended).model_copy(update={"last_number": 2})
    answer = act(job, crashed)
    assert isinstance(answer, SendAck) and answer.last is not None
    assert bool(answer.last.crowded) is free


def test_a_shim_that_names_roles_that_its_job_has_not_stops_no_agent() -> None:
    """The rule looked the name up: a KeyError that ended root's agent, and the next one, and the next."""
    generation = make_generation(["n1"], number=2)
    odd = running_at(generation).model_copy(
        update={"waiting": ("none",), "ready": ("none.7", ""), "rounds": {"none": 3, "": -1}, "down": ("none", "")}
    )
    assert acts(make_job("running", generation), odd) == (), "nothing of it is reported either"


def test_what_comes_after_nobody_is_not_released() -> None:
    """A shim that says that it waits was given the order in each round, and each time it was logged."""
    generation = make_generation(["n1"], number=2)
    job = make_job("running", generation)
    role = job.spec.roles[0].name
    place = Place(role=role, index=0, workers=1, devices=("cpu0",))
    member = generation.members["n1"].model_copy(update={"places": (place,)})
    job = make_job("running", generation.model_copy(update={"members": {"n1": member}}))
    assert acts(job, running_at(generation).model_copy(update={"waiting": (role,)})) == ()

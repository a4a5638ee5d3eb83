"""The next step of a job that waits, forms or runs: the rule for each situation, with the sentence that says why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nodeagent.model.job import BudgetEntry, Desired, JobRecord, Phase, Scale
from nodeagent.model.jobspec import Policy
from nodeagent.model.node import NodeRecord, Readiness
from nodeagent.model.timing import Timing
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.steps import Activate, Decision, End, JudgeFault, Propose, Remove
from tests.unit.plan.build import (
    NOW,
    PORTLESS,
    PREPARING,
    READY,
    SUCCEEDED,
    UID,
    UNFIT,
    WALL,
    WARMING,
    life,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
    spend,
)

Nodes = Sequence[NodeRecord | str]
COOL = round(Timing().cooldown * 1000)


def take(nodes: Nodes, job: JobRecord, *others: JobRecord, lapsed: Sequence[str] = (), served: int = NOW) -> Decision:
    return decide(make_cluster(nodes, job, *others, lapsed=lapsed, served=served), job, WALL)


def proposed(decision: Decision) -> Propose:
    assert isinstance(decision.step, Propose), decision
    return decision.step


def ended(decision: Decision) -> End:
    assert isinstance(decision.step, End), decision
    return decision.step


def waits(decision: Decision) -> str:
    assert decision.step is None, decision
    return "; ".join(decision.why)


# --- queued


def test_a_queued_job_starts_when_its_target_is_ready() -> None:
    step = proposed(take(["n1", "n2"], make_job(spec=make_spec(size=(2, 2)))))
    assert sorted(step.members) == ["n1", "n2"]
    assert (step.cause.kind, step.planned, step.spend, step.lost) == ("start", False, None, ())
    assert step.form_ms == 15_000


def test_it_waits_for_nodes_that_get_ready_but_not_for_ever() -> None:
    job = make_job(spec=make_spec(size=(1, 2)), since=NOW - 59_999)
    nodes: Nodes = ["n1", make_node("n2", ready={UID: PREPARING})]
    decision = take(nodes, job)
    assert waits(decision) == "waits for n2 to get ready"
    assert decision.at == NOW + 1
    assert list(proposed(take(nodes, job, served=NOW + 1)).members) == ["n1"]


def test_it_waits_below_min_and_says_what_is_missing() -> None:
    job = make_job(spec=make_spec(size=(2, 2)))
    nodes: Nodes = ["n1", make_node("n2", cordon=True)]
    assert waits(take(nodes, job)) == "needs 2 nodes, 1 fit"
    assert explain(make_cluster(nodes, job), job, WALL) == ("needs 2 nodes, 1 fit: n2 is cordoned (disk)",)


def test_it_fails_when_no_node_can_run_it_with_the_code_of_a_shell() -> None:
    step = ended(take([make_node("n1", ready={UID: UNFIT})], make_job()))
    assert step.phase == "failed"
    assert step.outcome is not None
    assert (step.outcome.code, step.reason) == (127, "no node can run it: n1 cannot run it: /shared/x is missing")


def test_what_was_printed_where_it_cannot_run_is_in_its_outcome_and_not_in_its_reason() -> None:
    step = ended(take([make_node("n1", ready={UID: UNFIT.model_copy(update={"error": "s3cret"})})], make_job()))
    assert step.outcome is not None
    assert step.outcome.error == "s3cret"
    assert "s3cret" not in step.reason + step.outcome.text


def test_a_reason_that_many_nodes_give_is_shown_once() -> None:
    step = ended(take([make_node(f"n{i}", ready={UID: UNFIT}) for i in range(1, 6)], make_job()))
    assert step.reason == "no node can run it: n1, n2, n3 and 2 more cannot run it: /shared/x is missing"


@pytest.mark.parametrize("left", [True, False])
def test_it_does_not_fail_while_nodes_are_away_that_may_run_it(left: bool) -> None:
    """A restart of the good ones must not end it."""
    bad = make_node("n2", ready={UID: UNFIT})
    assert waits(take([make_node("n1", left=left, lost=not left, ready={}), bad], make_job())) == (
        "no live node can run it: n2 cannot run it: /shared/x is missing; it waits for n1, which is away"
    )
    same = make_node("n1", left=left, lost=not left, ready={UID: UNFIT})
    assert ended(take([same, bad], make_job())).phase == "failed", "it has said so already"


def test_it_waits_while_what_is_missing_may_still_come() -> None:
    full = Readiness(state="unfit", reason="/state cannot be written to: No space left on device", passing=True)
    decision = take([make_node("n1", ready={UID: UNFIT}), make_node("n2", ready={UID: full})], make_job())
    assert waits(decision) == (
        "no node can run it: n1 cannot run it: /shared/x is missing; "
        "n2 cannot run it: /state cannot be written to: No space left on device; it starts when one can"
    )
    assert not decision.at, "for as long as the view stays the same"


@pytest.mark.parametrize(
    "other",
    [make_node("n2", ready={UID: PREPARING}), make_node("n2", ready={}), make_node("n2")],
    ids=["preparing", "unasked", "ready"],
)
def test_it_does_not_fail_while_another_node_may_still_run_it(other: NodeRecord) -> None:
    job = make_job(spec=make_spec(size=(2, 2)))
    assert "needs 2 nodes" in waits(take([make_node("n1", ready={UID: UNFIT}), other], job))


def test_the_queue_is_by_priority_then_by_order_and_blocked_jobs_hold_nobody_up() -> None:
    mine = make_job(order=2)
    earlier = make_job(uid="u-b", spec=make_spec(name="b"), order=1)
    urgent = make_job(uid="u-c", spec=make_spec(name="c", priority=5), order=9)
    too_big = make_job(uid="u-d", spec=make_spec(name="d", size=(9, 9), priority=9), order=0)
    node = make_node("n1", ready={uid: make_node("x").readiness[UID] for uid in (UID, "u-b", "u-c", "u-d")})
    assert waits(take([node], mine, earlier)) == "job b is before it in the queue (priority 0)"
    assert waits(take([node], earlier, mine, urgent)) == "job c is before it in the queue (priority 5)"
    proposed(take([node], urgent, mine, earlier, too_big))


def test_a_job_whose_nodes_are_just_getting_ready_is_not_overtaken_but_not_for_ever() -> None:
    mine = make_job(order=2)
    node = make_node("n1", ready={UID: READY, "u-c": PREPARING})
    for since, overtaken in ((NOW - 59_000, False), (NOW - 60_000, True)):
        urgent = make_job(uid="u-c", spec=make_spec(name="c", priority=5), order=9, since=since)
        if overtaken:
            proposed(take([node], mine, urgent))
        else:
            assert waits(take([node], mine, urgent)) == "job c is before it in the queue (priority 5)"
    elsewhere = make_node("n1", ready={UID: READY, "u-c": UNFIT})
    proposed(take([elsewhere], mine, make_job(uid="u-c", spec=make_spec(name="c", priority=5), since=NOW)))


# --- nodes without a free port


def leader(decision: Decision) -> str:
    return next(m.node for m in proposed(decision).members.values() if m.group_rank == 0)


def test_a_node_without_a_free_port_is_not_asked_to_lead_and_takes_part() -> None:
    step = take([make_node("n1", ready={UID: PORTLESS}), "n2"], forming(["n2"], spec=make_spec(size=(2, 2))))
    assert leader(step) == "n2" and sorted(proposed(step).members) == ["n1", "n2"]
    assert proposed(step).cause.text.endswith(f"; n1 cannot lead it: {PORTLESS.reason}")
    nodes: Nodes = ["n1", make_node("n2", ready={UID: PORTLESS})]
    assert take(nodes, forming(["n1", "n2"])).step == Activate(forming().generation.token)  # type: ignore[union-attr]
    assert waits(take(nodes, forming(["n1"]))) == "waits for n2 to acknowledge generation 2", "it need not lead"


def test_a_job_of_one_node_goes_where_there_are_ports() -> None:
    nodes = [make_node("n1", ready={UID: PORTLESS}), make_node("n2")]
    assert leader(take(nodes, make_job(spec=make_spec(size=(1, 1))))) == "n2"


@pytest.mark.parametrize("other", [[], [make_node("n2", cordon=True)], [make_node("n2", ready={UID: PORTLESS})]])
def test_where_no_node_has_a_port_the_job_waits_and_says_who_has_them(other: list[NodeRecord]) -> None:
    nodes = [make_node("n1", ready={UID: PORTLESS}), *other]
    waiting = make_job(spec=make_spec(size=(1, 2)))
    assert f"n1 cannot run it: {PORTLESS.reason}" in "; ".join(
        (waits(take(nodes, waiting)), *explain(make_cluster(nodes, waiting), waiting, WALL))
    )
    again = make_job("holding", make_generation(["n1", "n2"], state="ended"), active=1)
    assert f"n1 cannot run it: {PORTLESS.reason}" in waits(take(nodes, again))
    held = ended(take(nodes, forming(["n2"])))
    assert held.phase == "holding" and f"n1 cannot run it: {PORTLESS.reason}" in held.reason


def test_where_the_only_node_with_a_port_is_kept_for_others_the_job_waits() -> None:
    """Else it would be proposed again and again, with a first node that cannot lead."""
    nodes = [make_node("n1", ready={UID: PORTLESS}), make_node("n2")]
    placement = place(make_cluster(nodes, one := make_job(spec=make_spec(size=(1, 2)))), one, {"n2"})
    assert not placement.fits and f"n1 cannot lead it: {PORTLESS.reason}" in placement.missing


# --- forming


def forming(acks: Sequence[str] = (), holders: Sequence[str] = (), **more: object) -> JobRecord:
    generation = make_generation(["n1", "n2"], state="forming", number=2, cause="restart", acks=acks, holders=holders)
    return make_job("forming", generation, active=1, **({"target": 2} | more))  # type: ignore[arg-type]


def test_forming_waits_for_acknowledgements_and_for_holders() -> None:
    assert waits(take(["n1", "n2"], forming(["n1"]))) == "waits for n2 to acknowledge generation 2"
    assert waits(take(["n1", "n2", "n3"], forming(["n1", "n2"], ["n3"]))) == "waits for n3 to stop older workers"


def test_whole_it_is_activated() -> None:
    assert isinstance(take(["n1", "n2"], forming(["n1", "n2"])).step, Activate)


def test_a_member_that_is_lost_is_left_out() -> None:
    step = proposed(take(["n1", "n2", "n3"], forming(["n1"]), lapsed=["n2"]))
    assert sorted(step.members) == ["n1", "n3"]
    assert step.members["n1"].group_rank == 0
    assert (step.lost, step.cause.kind, step.spend) == (("n2",), "restart", None)
    assert step.cause.text == "because of restart; then node n2 lost"


def test_a_lost_holder_needs_a_new_generation_too() -> None:
    step = proposed(take(["n1", "n2", "n3"], forming(["n1", "n2"], ["n3"]), lapsed=["n3"]))
    assert (sorted(step.members), step.lost, step.cause.text) == (["n1", "n2"], ("n3",), "because of restart")


def test_a_holder_lost_as_its_workers_left_becomes_the_cause_and_the_others_stop_as_planned() -> None:
    generation = make_generation(
        ["n1", "n2", "n3"], state="forming", number=2, cause="join", holders=["n1", "n2"], planned=True
    )
    job = make_job("forming", generation, active=1)
    step = proposed(take(["n1", "n2", "n3"], job, lapsed=["n2"]))
    assert (step.cause.kind, step.cause.node, step.planned, step.spend) == ("node_lost", "n2", True, None)
    assert step.cause.text == "node n2 lost, while workers left since because of join"
    step = proposed(take(["n1", "n2", "n3"], job, lapsed=["n3"]))
    assert (sorted(step.members), step.planned, step.spend) == (["n1", "n2"], True, None)
    assert (step.cause.kind, step.cause.text) == ("join", "because of join; then node n3 lost")


def test_past_its_deadline_the_silent_are_left_out_unless_they_still_stop_older_workers() -> None:
    late = NOW + 15_000
    step = proposed(take(["n1", "n2", "n3"], forming(["n1"]), served=late))
    assert sorted(step.members) == ["n1", "n3"]
    assert step.cause.text == "because of restart; n2 did not acknowledge in time"
    assert sorted(proposed(take(["n1", "n2", "n3"], forming(["n1"], ["n2"]), served=late)).members) == ["n1", "n2"]
    assert take(["n1", "n2"], forming(["n1"]), served=late - 1).step is None


def test_a_member_that_proves_unfit_is_left_out_at_once_with_its_reason() -> None:
    nodes: Nodes = ["n1", make_node("n2", ready={UID: UNFIT}), "n3"]
    step = proposed(take(nodes, forming(["n1"])))
    assert sorted(step.members) == ["n1", "n3"]
    assert step.cause.text == "because of restart; n2 cannot run it: /shared/x is missing"


def test_forming_that_cannot_become_whole_holds() -> None:
    step = ended(take(["n1"], forming(["n1"], spec=make_spec(size=(2, 2))), lapsed=["n2"]))
    assert (step.phase, step.lost) == ("holding", ("n2",))
    assert "holds: needs 2 nodes, 1 fit" in step.reason


# --- running, nothing wrong


def running(size: int = 2, **more: object) -> JobRecord:
    generation = make_generation([f"n{i}" for i in range(1, size + 1)], since=int(str(more.pop("formed", 0))))
    return make_job("running", generation, **({"target": size} | more))  # type: ignore[arg-type]


def test_what_time_alone_may_change_is_not_steady() -> None:
    gang = make_generation(["n1", "n2"])
    grows = Scale(request="r", want=3, before=2, deadline=NOW + 1, state="pending")
    assert take(["n1", "n2"], make_job("running", gang, target=2)).steady
    assert take(["n1", "n2"], make_job("failed", gang)).steady
    assert not take(["n1", "n2"], make_job("running", gang, target=3, scale=grows)).steady
    fresh = make_generation(["n1", "n2"], since=NOW)
    assert not take(["n1", "n2", "n3"], make_job("running", fresh, target=3)).steady, "it joins after the cool-down"
    assert take(["n1"], make_job("queued", spec=make_spec(size=(2, 2)))).steady
    assert not take(["n1"], make_job("queued", spec=make_spec(size=(2, 2)), scale=grows)).steady


def test_nothing_to_do() -> None:
    assert take(["n1", "n2", "n3"], running()) == Decision(None)


def test_success() -> None:
    generation = make_generation(["n1", "n2"], reports={"n1": SUCCEEDED, "n2": SUCCEEDED})
    step = ended(take(["n1", "n2"], make_job("running", generation)))
    assert step.phase == "succeeded"
    assert step.outcome is not None
    assert step.outcome.code == 0


def test_a_node_lost_after_all_have_succeeded_is_not_missed() -> None:
    generation = make_generation(["n1", "n2"], reports={"n1": SUCCEEDED, "n2": SUCCEEDED})
    step = ended(take(["n1", "n2"], make_job("running", generation), lapsed=["n2"]))
    assert (step.phase, step.lost) == ("succeeded", ("n2",))


@pytest.mark.parametrize(("desired", "early"), [("pause", "pausing"), ("stop", "stopped")])
def test_what_is_asked_for_after_all_have_succeeded_comes_too_late(desired: Desired, early: Phase) -> None:
    for reports, phase in (({"n1": SUCCEEDED, "n2": SUCCEEDED}, "succeeded"), ({"n1": SUCCEEDED}, early)):
        job = make_job("running", make_generation(["n1", "n2"], reports=reports), desired=desired)
        assert ended(take(["n1", "n2"], job)).phase == phase


def test_a_gang_of_which_some_have_finished_does_not_grow() -> None:
    job = make_job("running", make_generation(["n1", "n2"], reports={"n1": SUCCEEDED}), target=3)
    assert waits(take(["n1", "n2", "n3"], job)) == "some pods have finished; waits for the others"


@pytest.mark.parametrize("done", ["n1", "n2"])
def test_that_some_have_finished_keeps_neither_node_nor_order_waiting(done: str) -> None:
    """The others may run for a week still."""
    generation = make_generation(["n1", "n2"], reports={done: SUCCEEDED})
    drained: Nodes = ["n1", make_node("n2", drain=True), "n3"]
    step = proposed(take(drained, make_job("running", generation)))
    assert (sorted(step.members), step.cause.kind) == (["n1", "n3"], "drain")
    assert proposed(take(["n1", "n2"], make_job("running", generation, restart=1))).cause.kind == "restart"
    assert sorted(proposed(take(["n1", "n2"], make_job("running", generation, target=1))).members) == ["n1"]


def test_a_restart_that_was_asked_for() -> None:
    step = proposed(take(["n1", "n2"], running(restart=1)))
    assert (step.cause.kind, step.cause.text, step.planned) == ("restart", "restarted by ann", True)
    assert step.spend is not None
    assert (step.spend.kind, step.spend.counts) == ("restart", False)
    assert step.form_ms == 45_000  # the job's grace on top
    spec = make_spec()
    longer = spec.model_copy(update={"roles": (spec.role.model_copy(update={"grace": 60.0}),)})
    assert proposed(take(["n1", "n2"], running(restart=1, spec=longer))).form_ms == 75_000
    done = running(restart=1).model_copy(update={"restart_done": 1})
    assert take(["n1", "n2"], done).step is None


def test_a_drain_moves_work_away_and_holds_where_nothing_is_left() -> None:
    nodes: Nodes = ["n1", make_node("n2", drain=True), "n3"]
    step = proposed(take(nodes, running()))
    assert (sorted(step.members), step.cause.kind, step.planned) == (["n1", "n3"], "drain", True)
    policy = Policy(on=("PodEvicted",), do="FailJob")
    failed = ended(take(nodes, running(spec=make_spec(policies=(policy,)))))
    assert (failed.phase, failed.planned) == ("failed", True)
    held = ended(take(nodes[:2], running(spec=make_spec(size=(2, 2)))))
    assert (held.phase, held.planned) == ("holding", True)
    assert held.spend is not None
    assert (held.spend.kind, held.spend.counts) == ("drain", False)


def test_a_cordon_alone_moves_nothing() -> None:
    assert take(["n1", make_node("n2", cordon=True), "n3"], running()).step is None


def test_scaling_down_lets_the_highest_ranks_go() -> None:
    step = proposed(take(["n1", "n2", "n3"], running(3, target=2, rev=2)))
    assert sorted(step.members) == ["n1", "n2"]
    assert (step.cause.kind, step.cause.text, step.planned) == ("scale", "scaled from 3 to 2 nodes by ann", True)


@pytest.mark.parametrize("wanted", [{"restart": 1}, {"target": 2}], ids=["restart", "scale"])
def test_a_request_that_cannot_be_met_does_not_stop_healthy_training(wanted: dict[str, int]) -> None:
    job = running(3, spec=make_spec(size=(2, 3)), **wanted)
    nodes: Nodes = ["n1", make_node("n2", cordon=True), make_node("n3", cordon=True)]
    assert waits(take(nodes, job)).startswith("not yet ")
    drained: Nodes = [nodes[0], nodes[1], make_node("n3", drain=True)]
    assert ended(take(drained, job)).phase == "holding", "a drain is a need, and does not wait behind the wish"


@pytest.mark.parametrize(("formed", "joined"), [(NOW - COOL + 1, 0), (0, NOW - COOL + 1)])
def test_below_target_it_grows_only_when_gang_and_newcomer_have_been_steady(formed: int, joined: int) -> None:
    job = running(2, target=3, formed=formed)
    nodes: Nodes = ["n1", "n2", make_node("n3", joined=joined)]
    decision = take(nodes, job)
    assert waits(decision) == "runs on 2 of 3 nodes; n3 joins after the cool-down of 30 s"
    assert decision.at == NOW + 1
    step = proposed(take(nodes, job, served=NOW + 1))
    assert (step.cause.kind, step.cause.text, step.planned) == ("join", "n3 joined", True)


def test_who_trains_goes_on_until_the_newcomer_is_warm() -> None:
    nodes: Nodes = ["n1", "n2", make_node("n3", ready={UID: WARMING})]
    assert waits(take(nodes, running(2, target=3))) == "runs on 2 of 3 nodes: n3 is still warming up its workers"
    nodes = ["n1", make_node("n2", ready={UID: WARMING}), "n3"]
    assert proposed(take(nodes, running(2, target=3))).cause.text == "n3 joined", "a member's is no reason to wait"


def test_it_stops_once_for_newcomers_that_get_ready_together() -> None:
    first = make_node("n3", ready={UID: Readiness(state="ready", since=NOW - COOL + 1)})
    nodes: Nodes = ["n1", "n2", first, *(make_node(n, ready={UID: PREPARING}) for n in ("n10", "n4"))]
    decision = take(nodes, running(2, target=5))
    assert waits(decision) == "runs on 2 of 5 nodes; n3 joins together with n4, n10 (still getting ready)"
    assert decision.at == NOW + 1, "a cool-down after the first was ready"
    assert proposed(take(nodes, running(2, target=5), served=NOW + 1)).cause.text == "n3 joined"
    assert proposed(take(nodes, running(2, target=3))).cause.text == "n3 joined", "the others are not needed"
    nodes = ["n1", "n2", first, make_node("n10", ready={UID: UNFIT}), make_node("n4", ready={})]
    assert proposed(take(nodes, running(2, target=5))).cause.text == "n3 joined", "no other is getting ready"


def test_a_need_does_not_wait_for_warm_workers() -> None:
    nodes: Nodes = ["n1", make_node("n2", drain=True), make_node("n3", ready={UID: WARMING})]
    assert set(proposed(take(nodes, running(2, target=2))).members) == {"n1", "n3"}
    assert set(proposed(take(["n1", make_node("n2", ready={UID: WARMING})], make_job())).members) == {"n1", "n2"}


def test_nobody_to_grow_with() -> None:
    decision = take(["n1", "n2"], running(2, target=3))
    assert waits(decision) == "runs on 2 of 3 nodes: 2 of 3 nodes fit, and there are no others"
    cordoned: Nodes = ["n1", make_node("n2", cordon=True), "n3"]
    assert "n2 is cordoned" in waits(take(cordoned, running(2, target=3))), "no swap of a member for a newcomer"


# --- stop, pause, resume, ended


LIVE: list[JobRecord] = [
    make_job(desired="stop"),
    forming(desired="stop"),
    running(desired="stop"),
    make_job("holding", make_generation(["n1"], state="ended"), active=1, desired="stop"),
    make_job("pausing", make_generation(["n1"], state="ended", holders=["n1"]), active=1, desired="stop"),
    make_job("paused", make_generation(["n1"], state="ended"), active=1, desired="stop"),
]


@pytest.mark.parametrize("job", LIVE, ids=lambda job: str(job.phase))
def test_stop(job: JobRecord) -> None:
    step = ended(take(["n1", "n2"], job))
    assert (step.phase, step.reason, step.planned) == ("stopped", "stopped by ann", True)
    assert step.outcome is not None
    assert step.outcome.code == 143


def test_a_stop_goes_before_a_fault() -> None:
    step = ended(take(["n1"], running(desired="stop")))
    assert (step.phase, step.lost) == ("stopped", ("n2",))


@pytest.mark.parametrize(
    ("job", "phase"),
    [
        (make_job(desired="pause"), "paused"),
        (forming(desired="pause"), "paused"),
        (forming(holders=["n1"], desired="pause"), "pausing"),
        (running(desired="pause"), "pausing"),
        (make_job("holding", make_generation(["n1"], state="ended"), active=1, desired="pause"), "paused"),
        (
            make_job("holding", make_generation(["n1"], state="ended", holders=["n1"]), active=1, desired="pause"),
            "pausing",
        ),
        (make_job("pausing", make_generation(["n1"], state="ended"), active=1, desired="pause"), "paused"),
    ],
)
def test_pause(job: JobRecord, phase: Phase) -> None:
    step = ended(take(["n1", "n2"], job))
    assert step.phase == phase
    assert step.reason == "paused by ann; go on with: nodeagentctl resume a"


def test_pausing_waits_for_the_workers_and_paused_stays() -> None:
    generation = make_generation(["n1", "n2"], state="ended", holders=["n1", "n2"])
    job = make_job("pausing", generation, active=1, desired="pause")
    assert waits(take(["n1", "n2"], job)) == "waits for the workers on n1, n2 to end"
    assert ended(take(["n1", "n2"], job, lapsed=["n1", "n2"])).phase == "paused"
    assert "resume" in waits(take(["n1"], make_job("paused", desired="pause")))


@pytest.mark.parametrize("phase", ["pausing", "paused"])
def test_resume(phase: Phase) -> None:
    job = make_job(phase, make_generation(["n1", "n2"], state="ended"), active=1, target=2)
    step = proposed(take(["n1", "n2"], job))
    assert (step.cause.kind, step.cause.text, step.planned) == ("resume", "resumed by ann", False)
    held = ended(take([], job))
    assert (held.phase, held.reason) == ("holding", "needs 1 node, 0 fit: no node has joined")


@pytest.mark.parametrize("grace", [None, 7.0])
def test_resume_leaves_those_who_still_save_their_grace(grace: float | None) -> None:
    generation = make_generation(["n1", "n2"], state="ended", holders=["n2"], planned=True, grace=grace)
    step = proposed(take(["n1", "n2"], make_job("pausing", generation, active=1, target=2)))
    assert (step.cause.kind, step.planned, step.grace) == ("resume", True, grace)


def test_a_paused_job_that_no_node_can_run_holds_first() -> None:
    """The table of phases has no way from paused to failed."""
    assert ended(take([make_node("n1", ready={UID: UNFIT})], make_job("paused"))).phase == "holding"


@pytest.mark.parametrize("phase", ["succeeded", "failed", "stopped"])
def test_ended(phase: Phase) -> None:
    job = make_job(phase, make_generation(["n1"], state="ended"), active=1)
    assert take(["n1"], job) == Decision(None)
    deleted = make_job(phase, make_generation(["n1"], state="ended"), active=1, delete=True)
    assert isinstance(take(["n1"], deleted).step, Remove)
    stopping = make_job(phase, make_generation(["n1"], state="ended", holders=["n1"]), active=1, delete=True)
    assert waits(take(["n1"], stopping)) == "its last workers are being stopped on n1"
    assert isinstance(take(["n1"], stopping, lapsed=["n1"]).step, Remove)


def test_a_record_stays_while_a_failsafe_member_may_lend_time() -> None:
    """The store refused to remove it, and every agent asked again in each round."""
    job = make_job("stopped", make_generation(["n1"], state="ended"), active=1, delete=True)
    lends = job.model_copy(update={"failsafe_members": {"n1": life("n1"), "n2": life("n2")}})
    assert waits(take(["n1", "n2", "n3"], lends)) == "waits for one of n1, n2 to let go of the last generation"
    silent = waits(take(["n1", "n2", "n3"], lends, lapsed=["n1", "n2"]))
    assert "nothing has been received from n1, n2" in silent
    assert "nodeagentctl forget NODE" in silent


def test_a_job_that_was_stopped_while_it_formed_pays_for_no_lost_node() -> None:
    """Its entry stayed what it was at first: a fault of the worker that had told of it."""
    entry = BudgetEntry(at=1, wall=1.0, kind="worker_failed", counts=True, node="n1", rank=0, text="rank 0 failed")
    generation = make_generation(["n1", "n2"], state="ended", number=2)
    job = make_job("stopped", generation, active=1, budget={"1": entry}, silent=["n2"], last_number=1)
    assert take(["n1", "n2"], job) == Decision(None), "n2 has not answered yet"
    judged = take(["n1", "n2"], job, lapsed=["n2"])
    assert isinstance(judged.step, JudgeFault)
    assert (judged.step.number, judged.step.spend.kind, judged.step.spend.counts) == (1, "node_lost", False)
    answered = job.model_copy(update={"silent": {}})
    assert take(["n1", "n2"], answered, lapsed=["n2"]) == Decision(None)


# --- holding


def holding(**more: object) -> JobRecord:
    generation = make_generation(["n1", "n2"], state="ended")
    return make_job("holding", generation, active=1, **({"spec": make_spec(size=(2, 2))} | more))  # type: ignore[arg-type]


def test_a_held_job_goes_on_when_enough_nodes_are_back() -> None:
    step = proposed(take(["n1", "n2"], holding()))
    assert (step.cause.kind, step.cause.text) == ("join", "enough nodes are back")
    step = proposed(take(["n1", "n2"], holding(budget={"1": spend("node_lost", counts=False)})))
    assert (step.cause.kind, step.cause.text) == ("node_lost", "it was node_lost")


def test_it_settles_a_moment_before_it_starts_smaller_than_its_target() -> None:
    nodes: Nodes = ["n1", make_node("n3", ready={UID: PREPARING})]
    job = holding(spec=make_spec(size=(1, 2)), since=NOW - 4999)
    assert waits(take(nodes, job)) == "waits for n3 to get ready"
    proposed(take(nodes, job, served=NOW + 1))


def test_backoff_is_waited_out() -> None:
    job = holding(not_before=NOW + 1, reason="starts again in 4 s")
    decision = take(["n1", "n2"], job)
    assert (waits(decision), decision.at) == ("starts again in 4 s", NOW + 1)
    proposed(take(["n1", "n2"], job, served=NOW + 1))


def test_one_that_never_ran_holds_for_as_long_as_it_takes() -> None:
    """It was paused in the queue and resumed, or its first forming fell apart."""
    for generation in (None, make_generation(["n1", "n2"], state="ended")):
        spec = make_spec(size=(2, 2), hold_timeout=60.0)
        found = take(["n1"], make_job("holding", generation, spec=spec, since=NOW - 61_000))
        assert (waits(found), found.at) == ("needs 2 nodes, and only 1 is known", 0)


def test_hold_timeout() -> None:
    job = holding(spec=make_spec(size=(2, 2), hold_timeout=60.0), since=NOW - 59_999)
    assert "needs 2 nodes" in waits(take(["n1"], job))
    step = ended(take(["n1"], job, served=NOW + 1))
    assert step.phase == "failed"
    assert step.reason.startswith("held for longer than its hold_timeout of 60 s: needs 2 nodes, 1 fit")
    proposed(take(["n1", "n2"], job, served=NOW + 1))

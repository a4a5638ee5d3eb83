"""What a gang does after a fault: re-form, back off, hold or fail; and what it learns of the culprit meanwhile."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Policy, RestartLimits
from nodeagent.model.world import AloneRestart, PodReport, WorkerExit
from nodeagent.plan.job.gang import decide
from nodeagent.plan.steps import Decision, End, JudgeFault, Propose
from tests.unit.plan.build import (
    NOW,
    VICTIM,
    WALL,
    failed,
    make_cluster,
    make_exit,
    make_generation,
    make_job,
    make_spec,
    spend,
)

CRASH = {"n1": failed(make_exit(code=7, error="boom"))}
VICTIMS = {"n1": failed(make_exit(error=VICTIM))}
NONE = RestartLimits(max=0)


def running(reports: dict[str, PodReport], limits: RestartLimits | None = None, **more: object) -> JobRecord:
    generation = make_generation(more.pop("nodes", ["n1", "n2"]), reports=reports, number=5)  # type: ignore[arg-type]
    spec = make_spec(size=(1, 2), restarts=limits)
    return make_job("running", generation, **({"spec": spec} | more))  # type: ignore[arg-type]


def held(limits: RestartLimits, *, nodes: int = 1, **more: object) -> JobRecord:
    """Holding since generation 5 ended with victims only; n1 has stopped its workers, n2 has not been heard."""
    generation = make_generation(["n1", "n2"], state="ended", number=5, acks=["n1", "n2"], holders=["n2"])
    base = {"active": 5, "budget": {"5": spend("collective")}, "spec": make_spec(size=(nodes, 2), restarts=limits)}
    base |= {"silent": ["n2"], "last_reports": VICTIMS}
    return make_job("holding", generation, **(base | more))  # type: ignore[arg-type]


def take(job: JobRecord, *lapsed: str, served: int = NOW) -> Decision:
    return decide(make_cluster(["n1", "n2"], job, lapsed=lapsed, served=served), job, WALL)


def test_the_gang_is_formed_again_at_once_and_the_budget_pays() -> None:
    step = take(running(CRASH)).step
    assert isinstance(step, Propose)
    assert (step.cause.kind, step.cause.rank, step.planned, step.lost) == ("worker_failed", 0, False, ())
    assert step.spend is not None
    assert (step.spend.counts, step.spend.exit, step.spend.error) == (True, 7, "boom")


def test_a_lost_node_costs_nothing() -> None:
    step = take(running({}), "n2").step
    assert isinstance(step, Propose)
    assert (list(step.members), step.lost, step.cause.kind) == (["n1"], ("n2",), "node_lost")
    assert step.spend is not None
    assert not step.spend.counts


@pytest.mark.parametrize(("left", "waits"), [(None, False), (1, True), (1000, True), (1001, False)])
def test_a_lost_node_is_not_missed_before_those_that_go_with_it_are_known(left: int | None, waits: bool) -> None:
    """A node whose beats arrive has more than a heartbeat and a call's bound left of its lease."""
    job = running({})
    decision = decide(make_cluster(["n1", "n2"], job, lapsed=["n2"], next_lapse=left), job, WALL)
    assert (decision.step is None) == waits
    assert decision.why[0].startswith("node n2 lost")


@pytest.mark.parametrize(("ago", "waits"), [(0, True), (1999, True), (2000, False)])
def test_who_was_cut_off_with_a_lost_node_has_lapsed_by_then(ago: int, waits: bool) -> None:
    """Nodes of which none has anything to do with the job, and whose beats come late again and again, kept every gang
    from recovering for ever."""
    job = running({})
    cluster = make_cluster(["n1", "n2"], job, lapsed=["n2"], lapsed_at={"n2": NOW - ago}, next_lapse=1)
    decision = decide(cluster, job, WALL)
    assert (decision.step is None) == waits
    assert not waits or decision.at == NOW - ago + 2000


def kept_by(*names: str) -> JobRecord:
    return running({}, failsafe_members={name: f"life-{name}" for name in names})


def comes_back(job: JobRecord, returned: dict[str, int]) -> Decision:
    """n2 was lost 10 s ago."""
    nodes = [f"n{i}" for i in range(1, 6)]
    cluster = make_cluster(nodes, job, lapsed=["n2"], lapsed_at={"n2": NOW - 10_000}, returned=returned)
    return decide(cluster, job, WALL)


def test_a_lost_node_is_not_missed_while_those_that_went_with_it_come_back() -> None:
    for job in (running({}), kept_by("n1", "n2")):
        decision = comes_back(job, {"n1": NOW - 1499})
        assert decision.step is None
        assert decision.why == ("node n2 lost; waits a moment: another node has just come back, so it may as well",)
        assert decision.at == NOW + 1
        assert comes_back(job, {"n1": NOW - 1500}).step is not None


def test_a_lost_node_is_missed_where_one_that_had_to_agree_was_never_away() -> None:
    """Only if all that had to agree were away may the lost node have been lent time."""
    job = kept_by("n1", "n2", "n3")
    assert comes_back(job, {"n1": NOW, "n3": NOW}).step is None
    for returned in ({"n5": NOW}, {"n1": NOW}, {"n3": NOW}, {"n1": NOW - 10_001, "n3": NOW}):
        assert comes_back(job, returned).step is not None, returned


def test_members_that_come_and_go_do_not_put_off_for_ever_that_a_node_is_missed() -> None:
    job = kept_by("n1", "n3", "n4")
    for ago, waits in ((2499, True), (2500, False)):
        assert (comes_back(job, {"n1": NOW - ago, "n3": NOW - 1200, "n4": NOW}).step is None) == waits


def test_a_crash_is_recovered_from_whichever_node_goes_or_comes() -> None:
    job = running(CRASH)
    cluster = make_cluster(["n1", "n2"], job, next_lapse=1, returned={"n1": NOW})
    assert isinstance(decide(cluster, job, WALL).step, Propose)


def test_a_lost_node_costs_nothing_even_with_an_empty_budget() -> None:
    assert isinstance(take(running({}, NONE), "n2").step, Propose)


def test_too_few_nodes_are_left() -> None:
    step = take(running({}, spec=make_spec(size=(2, 2))), "n2").step
    assert isinstance(step, End)
    assert (step.phase, step.lost) == ("holding", ("n2",))
    assert step.spend is not None
    assert "n2 is not live" in step.reason


def test_backoff() -> None:
    earlier = {str(i): spend("worker_failed") for i in (1, 2)}
    step = take(running(CRASH, budget=earlier)).step
    assert isinstance(step, End)
    assert (step.phase, step.delay_ms, step.planned) == ("holding", 500, False)
    assert step.reason.endswith("restart 3 of 10 within 3600 s; starts again in 0.5 s")


def test_the_budget_is_spent() -> None:
    step = take(running(CRASH, NONE, nodes=["n1"])).step
    assert isinstance(step, End)
    assert step.phase == "failed"
    assert step.reason.startswith("restart budget spent: it allows no restart; last: rank 0 on n1 failed first")
    assert step.outcome is not None
    assert (step.outcome.code, step.outcome.error) == (7, "boom")


def alone(*ranks: int, code: int = 7, at: int = NOW) -> PodReport:
    """Of a pod whose workers of these ranks were started again alone, one after the other."""
    restarts = [
        AloneRestart(rank=rank, order=i, at=at, exit=code, text=f"server.{rank}, rank {rank}, failed: exit code {code}")
        for i, rank in enumerate(ranks)
    ]
    return PodReport(state="running", alone=tuple(restarts))


def test_workers_that_restart_alone_spend_the_budget_together() -> None:
    two = RestartLimits(max=2, window=60)
    reports = {"n1": alone(0), "n2": alone(1)}
    assert take(running(reports, two)).step is None
    step = take(running(reports | {"n1": alone(0, 0)}, two)).step
    assert isinstance(step, End) and step.spend is not None
    text = "restart budget spent: 2 restarts within 60 s; last: server.0, rank 0, failed: exit code 7 on n1"
    assert step.spend.fails == text
    assert (step.phase, step.spend.alone) == ("holding", (NOW, NOW)), "the third did not come"
    later = {"n1": alone(0, 0, at=NOW - 500), "n2": alone(1)}
    step = take(running(later, two)).step
    assert isinstance(step, End) and step.spend is not None
    assert step.spend.fails.endswith("last: server.1, rank 1, failed: exit code 7 on n2")
    old = {"n1": alone(0, 0, 0, at=NOW - 60_001)}
    assert take(running(old, two)).step is None, "outside of the window"


def test_a_policy_that_fails_the_job_is_heeded_for_workers_that_restart_alone() -> None:
    spec = make_spec(policies=(Policy(on=("WorkerFailed",), exit_code=3, do="FailJob"),))
    assert take(running({"n1": alone(0)}, spec=spec)).step is None
    step = take(running({"n1": alone(0, code=3)}, spec=spec)).step
    assert isinstance(step, End) and step.spend is not None
    assert step.spend.fails.startswith("a policy of the job says FailJob for WorkerFailed: server.0")


FAIL = Policy(on=("WorkerFailed",), exit_code=3, do="FailJob")


@pytest.mark.parametrize(
    ("own", "place", "code", "fails"),
    [
        ((FAIL,), "server.0", 3, True),
        ((FAIL,), "server.0", 4, False),
        ((), "server.0", 4, False),
        (None, "server.0", 4, True),
        ((), "trainer.1", 4, True),
        ((FAIL,), "trainer.1", 3, False),
    ],
)
def test_a_roles_policies_stand_in_place_of_the_jobs(
    own: tuple[Policy, ...] | None, place: str, code: int, fails: bool
) -> None:
    base = make_spec(size=(1, 2), policies=(FAIL.model_copy(update={"exit_code": 4}),))
    roles = tuple(base.role.model_copy(update={"name": name}) for name in ("server", "trainer"))
    roles = (roles[0].model_copy(update={"policies": own}), roles[1])
    spec = base.model_copy(update={"roles": roles})
    exited = make_exit(code=code).model_copy(update={"place": place})
    step = take(running({"n1": failed(exited)}, spec=spec)).step
    assert isinstance(step, End | Propose) and step.spend is not None
    text = "a policy of the job says FailJob for WorkerFailed"
    assert step.spend.fails[: len(text)] == (text if fails else "")


def test_what_restarted_alone_is_not_forgotten_when_the_gang_is_formed_anew() -> None:
    three = RestartLimits(max=3, window=60, backoff_max=0)
    both = {"n1": alone(0, 0), "n2": failed(make_exit(code=7))}
    step = take(running(both, three)).step
    assert isinstance(step, Propose) and step.spend is not None
    assert (step.spend.counts, step.spend.alone) == (True, (NOW, NOW))
    later = running({"n1": failed(make_exit(code=7))}, three, budget={"4": step.spend})
    found = take(later).step
    assert isinstance(found, End) and found.spend is not None and "restart budget spent" in found.spend.fails
    lost = take(running({"n1": alone(0, 0)}, three), "n2").step
    assert isinstance(lost, Propose) and lost.spend is not None
    assert (lost.spend.counts, lost.spend.alone) == (False, (NOW, NOW))


def test_a_policy_and_an_early_failure_end_the_job() -> None:
    policy = make_spec(policies=(Policy(on=("*",), do="FailJob"),))
    for job in (
        running(CRASH, spec=policy, nodes=["n1"]),
        running(CRASH, restarts=0, nodes=["n1"]).model_copy(update={"first_active": NOW - 1}),
    ):
        step = take(job).step
        assert isinstance(step, End)
        assert step.phase == "failed"
        assert step.outcome is not None
        assert step.outcome.code == 7


# --- judged when everybody has answered, or is lost


HIDDEN = {
    "exit 7 with its own message": make_exit(code=7, error="training aborted: see the log"),
    "raise X from None": make_exit(error="ValueError: step 12 failed"),
    "tensorflow": make_exit(error="tensorflow.python.framework.errors_impl.UnavailableError: Socket closed"),
    "jax": make_exit(signal=6, error="Terminating process because another task died: JaxRuntimeError"),
    "gloo, aborted pair": make_exit(error="Application timeout caused pair closure"),
    "gloo, enforce": make_exit(error="[enforce fail at external/gloo/gloo/transport/tcp/pair.cc:446]"),
    "gloo, known": make_exit(error=VICTIM),
    "no output": make_exit(code=1),
}
"""How workers of several libraries end when a peer is gone: most say nothing that a pattern would know."""


def after(step: Propose | End, job: JobRecord, *answered: str) -> JobRecord:
    """The job as the store has it after this step, and after these nodes' answers."""
    assert job.generation is not None
    assert step.spend is not None
    reports = job.generation.reports or job.last_reports
    silent = [n for n in job.generation.members if n not in answered and n not in reports]
    ended = isinstance(step, End)
    generation = make_generation(
        list(job.generation.members), acks=answered, holders=silent,
        state="ended" if ended else "forming", number=5 if ended else 6,
    )  # fmt: skip
    return job.model_copy(
        update={
            "phase": "holding" if ended else "forming",
            "generation": generation,
            "budget": job.budget | {"5": step.spend},
            "silent": {n: job.generation.members[n].life for n in silent if step.spend.counts},
            "last_reports": reports,
            "last_number": 5,
            "reason": step.reason if isinstance(step, End) else step.cause.text,
            "not_before": NOW + step.delay_ms if isinstance(step, End) else 0,
        }
    )


@pytest.mark.parametrize("exited", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("limits", [RestartLimits(), NONE])
def test_a_lost_node_is_the_cause_whatever_its_peers_wrote(
    exited: WorkerExit, early: bool, limits: RestartLimits
) -> None:
    """A node goes in the first 30 s, or later, or where the budget allows no restart: it costs nothing in the end, and
    does not end the job."""
    job = running({"n1": failed(exited)}, limits, restarts=0 if early else 3)
    job = job.model_copy(update={"first_active": NOW - 1000})
    first = take(job).step
    assert isinstance(first, Propose | End)
    assert isinstance(first, Propose) or first.phase == "holding"
    then = after(first, job, "n1")
    assert take(then).step is None, "nobody knows yet"
    second = take(then, "n2").step
    assert isinstance(second, Propose | End)
    assert isinstance(second, Propose) or (second.phase, second.delay_ms) == ("holding", 0)
    assert second.spend is not None
    assert (second.spend.kind, second.spend.counts, second.spend.node) == ("node_lost", False, "n2")
    third = take(after(second, then, "n1"), "n2").step if isinstance(second, End) else second
    assert isinstance(third, Propose)
    assert (list(third.members), third.cause.kind) == (["n1"], "node_lost")


def test_an_early_failure_ends_the_job_once_everybody_has_answered() -> None:
    job = running(CRASH, restarts=0).model_copy(update={"first_active": NOW - 1000})
    first = take(job).step
    assert isinstance(first, End)
    assert (first.phase, first.outcome) == ("holding", None)
    assert first.reason.endswith("; judged when n2 has answered, or proved to be lost")
    then = after(first, job, "n1")
    assert take(then).why == (first.reason,)
    last = take(after(first, job, "n1", "n2"), served=NOW + 60_000).step
    assert isinstance(last, End)
    assert (last.phase, last.outcome and last.outcome.code) == ("failed", 7)
    assert last.reason.startswith("failed within 30 s of its first start, so it is not started again: rank 0 on n1")


def test_a_killed_worker_within_the_first_seconds_is_no_typo_in_any_order_of_reports() -> None:
    job = running(CRASH, restarts=0).model_copy(update={"first_active": NOW - 1000})
    first = take(job).step
    assert isinstance(first, End)
    then = after(first, job, "n1", "n2")
    then = then.model_copy(update={"last_reports": CRASH | {"n2": failed(make_exit(1, signal=9), seq=2)}})
    second = take(then).step
    assert isinstance(second, End)
    assert (second.phase, second.delay_ms) == ("holding", 0)
    assert second.spend is not None
    assert (second.spend.node, second.spend.rank, second.spend.counts, second.spend.fails) == ("n2", 1, True, "")
    assert isinstance(take(then.model_copy(update={"budget": {"5": second.spend}})).step, Propose)


@pytest.mark.parametrize(
    ("report", "kind", "counts"),
    [
        (PodReport(state="fenced", seq=2), "fenced", False),
        (PodReport(state="lost", seq=2), "pod_failed", True),
        (failed(make_exit(1, signal=9), seq=2), "worker_failed", True),
    ],
)
def test_what_no_peer_can_cause_is_the_cause_although_it_comes_late(report: PodReport, kind: str, counts: bool) -> None:
    """Its node's answer arrives last, and lets the next generation start: that goes on, the entry is put right."""
    generation = make_generation(["n1", "n2"], number=6)
    job = make_job("running", generation, budget={"5": spend("worker_failed")}, last_number=5, restarts=3)
    job = job.model_copy(update={"last_reports": CRASH | {"n2": report}})
    step = take(job).step
    assert isinstance(step, JudgeFault)
    assert (step.number, step.spend.kind, step.spend.node, step.spend.counts) == (5, kind, "n2", counts)
    assert take(job.model_copy(update={"budget": {"5": step.spend}})).step is None, "once"


@pytest.mark.parametrize("ends", ["pause", "stop", "a fault", "a lost node", "success", "its time limit"])
def test_whatever_ends_a_generation_waits_until_it_is_written_down_what_ended_the_one_before(ends: str) -> None:
    """Random seed 24: a pause ended the new generation at once, and the job had paid for a victim for ever."""
    reports = {"a fault": CRASH, "success": {n: PodReport(state="succeeded") for n in ("n1", "n2")}}.get(ends, {})
    generation = make_generation(["n1", "n2"], reports=reports, number=6)
    job = make_job(
        "running", generation, budget={"5": spend("worker_failed")}, last_number=5, spec=make_spec(size=(1, 2))
    )
    job = job.model_copy(update={"last_reports": CRASH | {"n2": PodReport(state="fenced", seq=2)}})
    if ends in ("pause", "stop"):
        job = job.model_copy(update={"control": job.control.model_copy(update={"desired": ends})})
    if ends == "its time limit":
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"time_limit": 1.0}), "ran": 2000})
    lapsed = ["n2"] if ends == "a lost node" else []
    step = take(job, *lapsed).step
    assert isinstance(step, JudgeFault)
    assert (step.number, step.spend.kind, step.spend.counts) == (5, "fenced", False)
    then = take(job.model_copy(update={"budget": {"5": step.spend}}), *lapsed).step
    assert isinstance(then, End | Propose)
    phases = {"pause": "pausing", "stop": "stopped", "success": "succeeded", "its time limit": "failed"}
    assert (then.phase if isinstance(then, End) else "formed again") == phases.get(ends, "formed again")


def test_a_job_that_the_fault_before_has_ended_is_not_formed_again_for_the_next_fault() -> None:
    entry = spend("worker_failed").model_copy(update={"fails": "a policy says so"})
    generation = make_generation(["n1", "n2"], reports=CRASH, number=6)
    job = make_job("running", generation, budget={"5": entry}, last_number=5, spec=make_spec(size=(1, 2)))
    for lapsed in ((), ("n2",)):
        step = take(job, *lapsed).step
        assert isinstance(step, End)
        assert (step.phase, step.reason) == ("failed", "a policy says so")


def test_a_verdict_that_comes_late_ends_the_job_all_the_same() -> None:
    """Victims were seen first, so the gang was formed again; then the culprit's own exit matched a policy."""
    spec = make_spec(size=(1, 2), policies=(Policy(on=("WorkerFailed",), exit_code=3, do="FailJob"),))
    late = VICTIMS | {"n2": failed(make_exit(1, code=3), seq=2)}
    job = make_job("running", make_generation(["n1", "n2"], number=6), budget={"5": spend("collective")}, last_number=5)
    job = job.model_copy(update={"last_reports": late, "spec": spec})
    step = take(job).step
    assert isinstance(step, JudgeFault)
    end = take(job.model_copy(update={"budget": {"5": step.spend}})).step
    assert isinstance(end, End)
    assert (end.phase, end.outcome and end.outcome.code, end.spend) == ("failed", 3, None)


def test_who_resumes_a_job_that_waited_for_a_verdict_starts_it_again() -> None:
    entry = spend("worker_failed").model_copy(update={"fails": "too many"})
    generation = make_generation(["n1", "n2"], state="ended", number=5)
    job = make_job("paused", generation, active=5, budget={"5": entry}, silent=["n2"])
    step = take(job).step
    assert isinstance(step, Propose)
    assert step.spend is not None
    assert (step.spend.counts, step.spend.fails) == (True, "")


def test_who_runs_nothing_of_it_any_more_is_not_waited_for() -> None:
    """A store that had lost the job does not know who may still run it."""
    entry = spend("worker_failed").model_copy(update={"fails": "too many"})
    generation = make_generation(["n1", "n2"], state="ended", number=5)
    step = take(make_job("holding", generation, active=5, budget={"5": entry}, silent=["n2"])).step
    assert isinstance(step, End)
    assert step.phase == "failed"


def forming() -> JobRecord:
    generation = make_generation(
        ["n1", "n2"], state="forming", number=6, cause="collective", acks=["n1"], holders=["n2"]
    )
    budget = {"5": spend("collective")}
    return make_job("forming", generation, active=5, budget=budget, last_reports=VICTIMS, silent=["n2"])


def test_a_node_that_lapses_after_its_victims_reported_is_not_counted() -> None:
    first = take(running(VICTIMS)).step
    assert isinstance(first, Propose)
    assert sorted(first.members) == ["n1", "n2"], "its lease runs still"
    assert first.spend is not None
    assert first.spend.counts
    second = take(forming(), "n2").step
    assert isinstance(second, Propose)
    assert (list(second.members), second.cause.kind, second.lost) == (["n1"], "node_lost", ("n2",))
    assert second.spend is not None
    assert not second.spend.counts


def test_a_node_that_dies_after_it_had_acknowledged_was_not_the_culprit() -> None:
    step = take(forming(), "n1").step
    assert isinstance(step, Propose)
    assert (step.cause.kind, step.spend) == ("collective", None)


def test_the_culprit_may_be_a_holder_that_is_no_member_any_more() -> None:
    job = forming()
    assert job.generation is not None
    members = {"n1": job.generation.members["n1"]}
    step = take(
        job.model_copy(update={"generation": job.generation.model_copy(update={"members": members})}), "n2"
    ).step
    assert isinstance(step, Propose)
    assert step.cause.kind == "node_lost"


def test_victims_alone_do_not_exhaust_the_budget_before_a_lease_has_passed() -> None:
    step = take(running(VICTIMS, NONE)).step
    assert isinstance(step, End)
    assert (step.phase, step.delay_ms) == ("holding", 0)
    assert step.reason.endswith("judged when n2 has answered, or proved to be lost")
    assert step.spend is not None
    assert step.spend.fails.startswith("restart budget spent")


def test_then_a_lost_node_makes_it_no_fault_of_the_job() -> None:
    entry = spend("collective").model_copy(update={"fails": "budget spent", "node": "n1", "rank": 0})
    waiting = held(NONE, budget={"5": entry})
    assert take(waiting).step is None
    step = take(waiting, "n2").step
    assert isinstance(step, End)
    assert (step.phase, step.delay_ms, step.lost) == ("holding", 0, ("n2",))
    assert step.spend is not None
    assert (step.spend.kind, step.spend.counts) == ("node_lost", False)
    again = take(held(NONE, budget={"5": step.spend}, silent=[]), "n2").step
    assert isinstance(again, Propose)
    assert (list(again.members), again.cause.kind) == (["n1"], "node_lost")


def test_and_otherwise_it_fails_with_the_blamed_workers_code() -> None:
    late = VICTIMS | {"n2": failed(make_exit(1, code=9), seq=2)}
    step = take(held(NONE, last_reports=late, silent=[])).step
    assert isinstance(step, End)
    assert step.phase == "failed"
    assert step.outcome is not None
    assert step.outcome.code == 9


def test_a_lost_node_ends_a_backoff_and_is_not_forgotten_while_too_few_are_left() -> None:
    job = held(RestartLimits(), nodes=2, not_before=NOW + 9000, reason="wait")
    step = take(job, "n2").step
    assert isinstance(step, End)
    assert step.spend is not None
    assert not step.spend.counts

"""What a gang does after a fault: re-form, back off, hold or fail; and what it learns of the culprit meanwhile."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Policy, RestartLimits
from nodeagent.model.world import PodReport
from nodeagent.plan.gang import decide
from nodeagent.plan.steps import Decision, End, Propose
from tests.unit.plan.build import (
    NOW,
    VICTIM,
    WALL,
    failed,
    make_cluster,
    make_exit,
    make_head,
    make_job,
    make_spec,
    spend,
)

LEASE = 3500
"""A lease and one credit, in ms: by then every dead node has lapsed."""
CRASH = {"n1": failed(make_exit(code=7, error="boom"))}
VICTIMS = {"n1": failed(make_exit(error=VICTIM))}
NONE = RestartLimits(max=0)


def running(reports: dict[str, PodReport], limits: RestartLimits | None = None, **more: object) -> JobRecord:
    head = make_head(["n1", "n2"], reports=reports, number=5)
    spec = make_spec(size=(1, 2), restarts=limits)
    return make_job("running", head, **({"spec": spec} | more))  # type: ignore[arg-type]


def held(limits: RestartLimits, *, nodes: int = 1, **more: object) -> JobRecord:
    """Holding since generation 5 ended with victims only; n1 has stopped its workers, n2 has not been heard."""
    head = make_head(["n1", "n2"], state="ended", number=5, acks=["n1", "n2"], holders=["n2"])
    base = {"active": 5, "budget": {"5": spend("collective")}, "spec": make_spec(size=(nodes, 2), restarts=limits)}
    return make_job("holding", head, **(base | more))  # type: ignore[arg-type]


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


def test_a_lost_node_is_not_missed_while_those_that_went_with_it_come_back() -> None:
    job = running({})
    decision = decide(make_cluster(["n1", "n2"], job, lapsed=["n2"], more_to_return=True), job, WALL)
    assert decision.step is None
    assert decision.why == ("node n2 lost; waits a moment: another node has just come back, so it may as well",)


def test_a_crash_is_mended_whoever_goes_or_comes_meanwhile() -> None:
    job = running(CRASH)
    cluster = make_cluster(["n1", "n2"], job, next_lapse=1, more_to_return=True)
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
    step = take(running(CRASH, NONE)).step
    assert isinstance(step, End)
    assert step.phase == "failed"
    assert step.reason.startswith("restart budget spent: 0 restarts within 3600 s; last: rank 0 on n1 failed first")
    assert step.outcome is not None
    assert (step.outcome.code, step.outcome.error) == (7, "boom")


def test_a_policy_and_an_early_failure_end_the_job() -> None:
    policy = make_spec(policies=(Policy(on=("*",), do="FailJob"),))
    for job in (running(CRASH, spec=policy), running(CRASH, restarts=0).model_copy(update={"first_active": NOW - 1})):
        step = take(job).step
        assert isinstance(step, End)
        assert step.phase == "failed"
        assert step.outcome is not None
        assert step.outcome.code == 7


# --- victims only: who was it?


def forming() -> JobRecord:
    head = make_head(["n1", "n2"], state="forming", number=6, cause="collective", acks=["n1"], holders=["n2"])
    return make_job("forming", head, active=5, budget={"5": spend("collective")}, last_reports=VICTIMS)


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
    assert job.head is not None
    members = {"n1": job.head.members["n1"]}
    step = take(job.model_copy(update={"head": job.head.model_copy(update={"members": members})}), "n2").step
    assert isinstance(step, Propose)
    assert step.cause.kind == "node_lost"


def test_victims_alone_do_not_exhaust_the_budget_before_a_lease_has_passed() -> None:
    step = take(running(VICTIMS, NONE)).step
    assert isinstance(step, End)
    assert (step.phase, step.delay_ms) == ("holding", LEASE)
    assert step.reason.endswith("fails unless a node proves to be lost")


def test_then_a_lost_node_makes_it_no_fault_of_the_job() -> None:
    waiting = held(NONE, not_before=NOW + 1, reason="wait")
    assert take(waiting).step is None
    step = take(waiting, "n2").step
    assert isinstance(step, End)
    assert (step.phase, step.delay_ms, step.lost) == ("holding", 0, ("n2",))
    assert step.spend is not None
    assert (step.spend.kind, step.spend.counts) == ("node_lost", False)
    after = held(NONE, budget={"5": step.spend})
    again = take(after, "n2").step
    assert isinstance(again, Propose)
    assert (list(again.members), again.cause.kind) == (["n1"], "node_lost")


def test_and_otherwise_it_fails_with_the_blamed_workers_code() -> None:
    step = take(held(NONE, last_reports=VICTIMS | {"n2": failed(make_exit(1, code=9), seq=2)})).step
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

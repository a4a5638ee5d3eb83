"""The budget: what counts in the window, what is allowed, how long it waits. Beside it the wait of who asks to be
re-formed again and again, and the policies."""

from __future__ import annotations

import pytest

from nodeagent.model.job import BudgetEntry, JobRecord
from nodeagent.model.jobspec import ActionName, EventName, Policy, RestartLimits
from nodeagent.plan.failure.budget import check_budget, restarts_spent
from nodeagent.plan.failure.policies import match
from nodeagent.plan.job.gang import decide
from nodeagent.plan.steps import End, Propose
from tests.unit.plan.build import (
    NOW,
    WALL,
    failed,
    make_cluster,
    make_exit,
    make_generation,
    make_job,
    make_spec,
    spend,
)


def job(*ages: float, maximum: int = 3, **limits: float) -> JobRecord:
    """A job with one counted fault for each age, in seconds."""
    spec = make_spec(restarts=RestartLimits(max=maximum, window=100.0, **limits))
    budget = {str(i): spend("worker_failed", at=NOW - round(age * 1000)) for i, age in enumerate(ages, 1)}
    return make_job(spec=spec, budget=budget)


def test_only_what_counts_and_is_in_the_window_is_spent() -> None:
    one = job(0, 100, 100.001, 500)
    assert restarts_spent(one, NOW) == 2
    free = one.model_copy(update={"budget": one.budget | {"9": spend("node_lost", counts=False)}})
    assert restarts_spent(free, NOW) == 2


def test_max_restarts_are_allowed_and_not_one_more() -> None:
    assert check_budget(job(1, 2), NOW).allowed
    assert check_budget(job(1, 2), NOW).why == "restart 3 of 3 within 100 s"
    refused = check_budget(job(1, 2, 3), NOW)
    assert (refused.allowed, refused.restarts_spent) == (False, 4)
    assert refused.why == "restart budget spent: 3 restarts within 100 s"
    assert check_budget(job(1, maximum=1), NOW).why == "restart budget spent: 1 restart within 100 s"
    none = check_budget(job(maximum=0), NOW)
    assert (none.allowed, none.why) == (False, "restart budget spent: it allows no restart")


@pytest.mark.parametrize(
    ("before", "low", "high", "wait"),
    [
        (0, 0.0, 30.0, 0),
        (1, 0.0, 30.0, 0),
        (2, 0.0, 30.0, 500),
        (3, 0.0, 30.0, 1000),
        (8, 0.0, 30.0, 30_000),
        (50, 0.0, 30.0, 30_000),
        (0, 2.0, 30.0, 2000),
        (2, 2.0, 30.0, 2000),
        (3, 2.0, 30.0, 4000),
        (9, 0.0, 0.0, 0),
        (0, 5.0, 1.0, 1000),
    ],
)
def test_backoff(before: int, low: float, high: float, wait: int) -> None:
    one = job(*[1.0] * before, maximum=60, backoff_min=low, backoff_max=high)
    assert check_budget(one, NOW).delay_ms == wait


# --- who asks to be re-formed --------------------------------------------------------------------


EARLY = 30_000
"""``Timing.early``, in ms."""


def asks(
    ran: int, budget: dict[str, BudgetEntry], *, code: int = 101, limits: RestartLimits | None = None
) -> JobRecord:
    """A job whose generation 99 ran for so many ms until a worker asked for a new one."""
    generation = make_generation(["n1"], number=99, since=NOW - ran, reports={"n1": failed(make_exit(code=code))})
    spec = make_spec(restarts=limits or RestartLimits(max=0, window=100.0))
    return make_job("running", generation, spec=spec, budget=budget)


def requests(*ages: float, progressed: bool = False) -> dict[str, BudgetEntry]:
    """One request to be re-formed for each age, in seconds."""
    one = spend("reform", counts=False, exit_code=101).model_copy(update={"progressed": progressed})
    return {str(i): one.model_copy(update={"at": NOW - round(age * 1000)}) for i, age in enumerate(ages, 1)}


def waits(job: JobRecord) -> tuple[int, str]:
    """How long the job waits (ms) and what it says; it always starts again."""
    step = decide(make_cluster(["n1"], job), job, WALL).step
    if isinstance(step, Propose):
        return 0, ""
    assert isinstance(step, End)
    assert step.phase == "holding"
    return step.delay_ms, step.reason


def test_a_job_whose_port_is_taken_at_each_start_waits_ever_longer_and_pays_nothing() -> None:
    robbed = failed(make_exit(code=1)).model_copy(update={"taken": "uid 7 listens on port 9"})
    for before, delay in ((0, 0), (1, 0), (2, 500), (4, 2000)):
        job = asks(1000, {n: e.model_copy(update={"kind": "port_taken"}) for n, e in requests(*[1.0] * before).items()})
        generation = job.generation.model_copy(update={"reports": {"n1": robbed}})  # type: ignore[union-attr]
        found, why = waits(job.model_copy(update={"generation": generation}))
        assert found == delay and (not delay or f"; lost its ports {before + 1} times within 100 s" in why)


@pytest.mark.parametrize("code", [101, 102])
def test_who_asks_to_be_re_formed_soon_after_each_start_waits_ever_longer_and_pays_nothing(code: int) -> None:
    delays = [waits(asks(1000, requests(*[1.0] * before), code=code))[0] for before in range(10)]
    assert delays == [0, 0, 500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]
    assert waits(asks(1000, requests(*[1.0] * 4), code=code))[1] == (
        f"rank 0 on n1 failed first: exit code {code}; asked to be re-formed 5 times within 100 s, "
        "each within 30 s of a start; starts again in 2 s"
    )


def test_the_first_request_waits_for_nothing_whatever_the_least_wait_is() -> None:
    limits = RestartLimits(max=0, window=100.0, backoff_min=5.0)
    assert waits(asks(1000, {}, limits=limits)) == (0, "")
    assert waits(asks(1000, requests(1), limits=limits))[0] == 5000


@pytest.mark.parametrize(("ran", "delay"), [(EARLY - 1, 4000), (EARLY, 0), (3_600_000, 0)])
def test_a_request_after_a_longer_run_waits_for_nothing_and_makes_none_wait(ran: int, delay: int) -> None:
    job = asks(ran, requests(*[1.0] * 5))
    assert waits(job)[0] == delay
    step = decide(make_cluster(["n1"], job), job, WALL).step
    assert isinstance(step, End | Propose)
    assert step.spend is not None
    assert (step.spend.progressed, step.spend.counts) == (not delay, False)
    assert waits(asks(1000, requests(*[1.0] * 5, progressed=True)))[0] == 0


def test_only_requests_within_the_window_make_the_next_one_wait() -> None:
    assert waits(asks(1000, requests(1, 2, 99.9, 100, 100.001, 500)))[0] == 2000
    others = {"7": spend("worker_failed"), "8": spend("node_lost", counts=False), "9": spend("hang")}
    assert waits(asks(1000, others))[0] == 0


POLICIES = (
    Policy(on=("WorkerFailed",), exit_code=3, do="FailJob"),
    Policy(on=("NodeLost", "PodEvicted"), do="FailJob"),
    Policy(on=("*",), exit_code=4, do="FailJob"),
    Policy(on=("WorkerFailed",), do="RestartJob"),
    Policy(on=("*",), do="FailJob"),
)


@pytest.mark.parametrize(
    ("event", "code", "action"),
    [
        ("WorkerFailed", 3, "FailJob"),
        ("WorkerFailed", 4, "FailJob"),
        ("WorkerFailed", 5, "RestartJob"),
        ("WorkerFailed", None, "RestartJob"),
        ("NodeLost", None, "FailJob"),
        ("PodFailed", 3, "FailJob"),
    ],
)
def test_the_first_match_wins(event: EventName, code: int | None, action: ActionName) -> None:
    assert match(POLICIES, event, code) == action


def test_no_match() -> None:
    assert match(POLICIES[:3], "WorkerFailed", 5) is None
    assert match((), "WorkerFailed", 5) is None

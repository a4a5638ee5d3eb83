"""The budget: what counts in the window, what is allowed, how long it waits; and the policies beside it."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import ActionName, EventName, Policy, RestartLimits
from nodeagent.plan.failure.faults import check_budget, restarts_spent
from nodeagent.plan.failure.policies import match
from tests.unit.plan.build import NOW, make_job, make_spec, spend


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

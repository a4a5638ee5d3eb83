"""Policies with a timeout: when they act, and when no more."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord, Phase
from nodeagent.model.jobspec import ActionName, After, EventName, Policy
from nodeagent.model.world import GenerationState
from nodeagent.plan.failure.timeouts import next_due
from nodeagent.plan.job.gang import decide
from nodeagent.plan.steps import Decision, End
from tests.unit.plan.build import NOW, WALL, make_cluster, make_generation, make_job, make_spec, spend

SINCE = NOW - 60_000


def policy(event: EventName, do: ActionName = "AbortJob", timeout: float = 60.0, code: int | None = None) -> Policy:
    return Policy(on=(event,), do=do, timeout=timeout, exit_code=code)


def job_in(phase: Phase, *policies: Policy, since: int = SINCE, **more: object) -> JobRecord:
    """Of four nodes, of which there is one."""
    states: dict[Phase, GenerationState] = {
        "forming": "forming",
        "running": "active",
        "holding": "ended",
        "paused": "ended",
    }
    generation = make_generation(["n1", "n2"], state=states[phase], number=6) if phase in states else None
    base: dict[str, object] = {"spec": make_spec(size=(4, 4), policies=policies), "since": since}
    if phase == "holding":
        base["active"] = 6
    return make_job(phase, generation, **(base | more))  # type: ignore[arg-type]


def take(job: JobRecord, served: int = NOW) -> Decision:
    nodes = ["n1", "n2"] if job.phase in ("forming", "running") else ["n1"]
    return decide(make_cluster(nodes, job, served=served), job, WALL)


@pytest.mark.parametrize(
    ("phase", "event", "ends"),
    [
        ("queued", "PodPending", "paused"),
        ("holding", "PodPending", "paused"),
        ("forming", "Unknown", "paused"),
        ("running", "PodRunning", "pausing"),
    ],
)
def test_what_has_lasted_for_its_time_is_acted_on_and_not_before(phase: Phase, event: EventName, ends: Phase) -> None:
    job = job_in(phase, policy(event))
    due = next_due(job)
    assert due is not None and (due.at, due.action) == (NOW, "AbortJob")
    before = take(job, NOW - 1)
    assert (before.step, before.at) == (None, NOW), "it is decided again then"
    step = take(job).step
    assert isinstance(step, End)
    assert step.phase == ends
    assert step.reason.startswith(f"a policy of the job says AbortJob for {event}: ")
    assert "for 1 min; go on with" in step.reason


@pytest.mark.parametrize(
    "job",
    [
        job_in("forming", policy("PodPending")),
        job_in("running", policy("PodPending")),
        job_in("queued", policy("PodRunning")),
        job_in("queued", policy("PodPending"), desired="pause"),
        job_in("queued", Policy(on=("NodeLost",), do="FailJob")),
        job_in("paused", policy("PodPending"), active=6),
        job_in("running", policy("NodeLost"), budget={"6": spend("node_lost", counts=False)}),
        job_in("holding", policy("NodeLost"), budget={"6": spend("hang")}),
        job_in("holding", policy("WorkerFailed", code=3), budget={"6": spend("worker_failed", exit_code=4)}),
    ],
)
def test_nobody_waits_for_what_is_not_so(job: JobRecord) -> None:
    assert next_due(job) is None


@pytest.mark.parametrize(
    ("kind", "event"), [("node_lost", "NodeLost"), ("drain", "PodEvicted"), ("worker_failed", "*"), ("fenced", "*")]
)
def test_a_fault_lasts_until_the_job_runs_again(kind: str, event: EventName) -> None:
    entry = spend(kind, at=SINCE, exit_code=4)
    holding = job_in("holding", policy(event, "TerminateJob"), budget={"6": entry}, since=SINCE - 7)
    step = take(holding).step
    assert isinstance(step, End) and step.phase == "stopped"
    assert f"it was {kind}, and it has not run again for 1 min" in step.reason
    resumed = job_in("holding", policy(event, "TerminateJob"), budget={"6": entry}, since=NOW - 5)
    assert take(resumed).step is None, "who resumes it has the time begin anew"


def test_a_try_to_form_does_not_begin_the_time_of_a_fault_anew() -> None:
    budget = {"5": spend("node_lost", at=SINCE)}
    for phase in ("forming", "holding"):
        job = job_in(phase, policy("NodeLost", "FailJob"), budget=budget, active=5, since=NOW - 5, last_number=5)
        assert take(job).step is None, "as if it had run until then"
        step = take(job.model_copy(update={"stands_since": SINCE})).step
        assert isinstance(step, End) and step.phase == "failed"
        assert take(job.model_copy(update={"stands_since": SINCE + 1})).step is None, "resumed since"


def test_the_policy_that_is_due_first_acts() -> None:
    job = job_in("queued", policy("PodPending", "FailJob", 61.0), policy("PodPending", "TerminateJob", 60.0))
    step = take(job, NOW + 5_000).step
    assert isinstance(step, End) and step.phase == "stopped"


def test_a_time_to_begin_and_other_jobs_are_waited_for_first() -> None:
    later = job_in("queued", policy("PodPending"), not_before=NOW - 1)
    due = next_due(later)
    assert due is not None and due.at == NOW - 1 + 60_000
    spec = make_spec(policies=(policy("PodPending"),), after=(After(uid="u-b", name="b"),))
    assert next_due(job_in("queued", spec=spec)) is None

"""Policies: what each action makes of a job, and when."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord, Phase
from nodeagent.model.jobspec import ActionName, Policy
from nodeagent.model.world import PodReport
from nodeagent.plan.gang import decide
from nodeagent.plan.steps import Decision, End, Judge, Propose
from tests.unit.plan.build import (
    NOW,
    WALL,
    failed,
    make_cluster,
    make_exit,
    make_head,
    make_job,
    make_node,
    make_spec,
    spend,
)

CRASH = {"n1": failed(make_exit(code=7, error="boom")), "n2": failed(make_exit(1), seq=2)}
ENDINGS: tuple[tuple[ActionName, Phase, int | None], ...] = (
    ("AbortJob", "pausing", None),
    ("TerminateJob", "stopped", 143),
    ("CompleteJob", "succeeded", 0),
    ("FailJob", "failed", 7),
)


def take(job: JobRecord, *lapsed: str, served: int = NOW) -> Decision:
    return decide(make_cluster(["n1", "n2"], job, lapsed=lapsed, served=served), job, WALL)


def ended(decision: Decision) -> End:
    assert isinstance(decision.step, End)
    return decision.step


def running(reports: dict[str, PodReport], *policies: Policy, **more: object) -> JobRecord:
    head = make_head(["n1", "n2"], reports=reports, number=5)
    spec = make_spec(size=(1, 2), policies=policies)
    return make_job("running", head, **({"spec": spec} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(("action", "phase", "code"), ENDINGS)
def test_an_action_ends_or_pauses_the_job(action: ActionName, phase: Phase, code: int | None) -> None:
    step = ended(take(running(CRASH, Policy(on=("WorkerFailed",), exit_code=7, do=action))))
    assert (step.phase, step.outcome and step.outcome.code) == (phase, code)
    assert step.reason.startswith(f"a policy of the job says {action} for WorkerFailed: rank 0 on n1 failed first")
    assert (step.by_policy, step.planned) == (action == "CompleteJob", action != "FailJob")
    assert (step.control is not None) is (action == "AbortJob")


def test_restart_job_goes_on_as_without_a_policy() -> None:
    assert isinstance(take(running(CRASH, Policy(on=("*",), do="RestartJob"))).step, Propose)


def test_an_abort_pauses_the_job_at_no_cost_until_somebody_resumes_it() -> None:
    job = running(CRASH, Policy(on=("WorkerFailed",), do="AbortJob"))
    step = ended(take(job))
    assert step.control is not None and step.spend is not None
    assert (step.control.desired, step.control.by, step.spend.counts) == ("pause", "a policy of the job", False)
    assert step.reason.endswith("; go on with: nodeagentctl resume a")
    head = make_head(["n1", "n2"], state="ended", number=5)
    more = {"active": 5, "budget": {"5": step.spend}, "last_reports": CRASH, "spec": job.spec}
    pausing = make_job("pausing", head, reason=step.reason, **more)  # type: ignore[arg-type]
    pausing = pausing.model_copy(update={"control": step.control})
    paused = ended(take(pausing))
    assert (paused.phase, paused.reason) == ("paused", step.reason), "the reason stays"
    resumed = take(make_job("paused", head, **more))  # type: ignore[arg-type]
    assert isinstance(resumed.step, Propose), "the fault is not judged once more"
    assert resumed.step.cause.kind == "resume"


@pytest.mark.parametrize(("action", "phase", "code"), ENDINGS)
def test_what_might_come_of_a_lost_node_waits_for_all_answers(
    action: ActionName, phase: Phase, code: int | None
) -> None:
    job = running({"n1": CRASH["n1"]}, Policy(on=("WorkerFailed",), do=action))
    step = ended(take(job))
    assert step.spend is not None
    assert (step.phase, step.spend.counts, step.spend.ends) == ("holding", True, "paused" if code is None else phase)
    head = make_head(["n1", "n2"], state="ended", number=5, holders=["n2"])
    more = {"active": 5, "budget": {"5": step.spend}, "spec": job.spec}
    waits = make_job("holding", head, silent=["n2"], last_reports={"n1": CRASH["n1"]}, **more)  # type: ignore[arg-type]
    assert take(waits).step is None
    answered = make_job("holding", head, last_reports=CRASH, **more)  # type: ignore[arg-type]
    step = ended(take(answered))
    assert (step.phase, step.outcome and step.outcome.code) == (phase, code)
    lost = take(waits, "n2")
    assert isinstance(lost.step, End) and lost.step.phase == "holding" and lost.step.spend is not None
    assert (lost.step.spend.kind, lost.step.spend.counts) == ("node_lost", False)


@pytest.mark.parametrize(("action", "phase", "code"), ENDINGS)
def test_a_verdict_that_comes_late_ends_or_pauses_the_job_all_the_same(
    action: ActionName, phase: Phase, code: int | None
) -> None:
    job = running({}, Policy(on=("WorkerFailed",), exit_code=7, do=action), budget={"4": spend("collective")})
    job = job.model_copy(update={"last_number": 4, "last_reports": CRASH})
    judged = take(job).step
    assert isinstance(judged, Judge) and judged.spend.fails
    step = ended(take(job.model_copy(update={"budget": {"4": judged.spend}})))
    assert (step.phase, step.outcome and step.outcome.code, step.spend) == (phase, code, None)


@pytest.mark.parametrize(("action", "phase", "code"), ENDINGS)
def test_a_drain_may_end_or_pause_the_job(action: ActionName, phase: Phase, code: int | None) -> None:
    job = running({}, Policy(on=("PodEvicted",), do=action))
    step = ended(decide(make_cluster(["n1", make_node("n2", drain=True)], job), job, WALL))
    assert (step.phase, step.planned) == (phase, True)
    assert (step.outcome and step.outcome.code) == (1 if code == 7 else code)

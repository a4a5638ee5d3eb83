"""Policies: what each action makes of a job, and when."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord, Phase
from nodeagent.model.jobspec import ActionName, Nodes, Policy
from nodeagent.model.world import Place, PodReport
from nodeagent.plan.job.gang import decide
from nodeagent.plan.steps import Decision, End, JudgeFault, Propose
from tests.unit.plan.build import (
    NOW,
    SUCCEEDED,
    WALL,
    failed,
    make_cluster,
    make_exit,
    make_generation,
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
    generation = make_generation(["n1", "n2"], reports=reports, number=5)
    spec = make_spec(size=(1, 2), policies=policies)
    return make_job("running", generation, **({"spec": spec} | more))  # type: ignore[arg-type]


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
    generation = make_generation(["n1", "n2"], state="ended", number=5)
    more = {"active": 5, "budget": {"5": step.spend}, "last_reports": CRASH, "spec": job.spec}
    pausing = make_job("pausing", generation, reason=step.reason, **more)  # type: ignore[arg-type]
    pausing = pausing.model_copy(update={"control": step.control})
    paused = ended(take(pausing))
    assert (paused.phase, paused.reason) == ("paused", step.reason), "the reason stays"
    resumed = take(make_job("paused", generation, **more))  # type: ignore[arg-type]
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
    generation = make_generation(["n1", "n2"], state="ended", number=5, holders=["n2"])
    more = {"active": 5, "budget": {"5": step.spend}, "spec": job.spec}
    waits = make_job("holding", generation, silent=["n2"], last_reports={"n1": CRASH["n1"]}, **more)  # type: ignore[arg-type]
    assert take(waits).step is None
    answered = make_job("holding", generation, last_reports=CRASH, **more)  # type: ignore[arg-type]
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
    assert isinstance(judged, JudgeFault) and judged.spend.fails
    step = ended(take(job.model_copy(update={"budget": {"4": judged.spend}})))
    assert (step.phase, step.outcome and step.outcome.code, step.spend) == (phase, code, None)


@pytest.mark.parametrize(("action", "phase", "code"), ENDINGS)
def test_a_drain_may_end_or_pause_the_job(action: ActionName, phase: Phase, code: int | None) -> None:
    job = running({}, Policy(on=("PodEvicted",), do=action))
    step = ended(decide(make_cluster(["n1", make_node("n2", drain=True)], job), job, WALL))
    assert (step.phase, step.planned) == (phase, True)
    assert (step.outcome and step.outcome.code) == (1 if code == 7 else code)


# --- roles


def of_roles(reports: dict[str, PodReport], *policies: Policy, **own: tuple[Policy, ...]) -> JobRecord:
    """server.0 and trainer.0 run on n1, trainer.1 on n2."""
    spec = make_spec(size=(1, 2), policies=policies)
    roles = tuple(
        spec.role.model_copy(
            update={"name": name, "nodes": Nodes(min=size, max=size, target=size), "policies": own.get(name)}
        )
        for name, size in (("server", 1), ("trainer", 2))
    )
    generation = make_generation(["n1", "n2"], reports=reports, number=5, workers=2)
    places = {"n1": ("server.0", "trainer.0"), "n2": ("trainer.1",)}
    members = {
        node: member.model_copy(update={"places": tuple(make_place(name) for name in places[node])})
        for node, member in generation.members.items()
    }
    generation = generation.model_copy(update={"members": members})
    return make_job("running", generation, spec=spec.model_copy(update={"roles": roles}))


def make_place(name: str) -> Place:
    role, _, index = name.partition(".")
    return Place(role=role, index=int(index), workers=1, devices=(f"cpu{index}",))


def done(*roles: str) -> PodReport:
    return PodReport(state="running", tasks=roles)


COMPLETE = Policy(on=("TaskCompleted",), do="CompleteJob")
ABORT_LOST = Policy(on=("NodeLost",), do="AbortJob")
FAIL_LOST = Policy(on=("*",), do="FailJob")


@pytest.mark.parametrize(
    ("reports", "phase"),
    [
        ({"n1": done("server", "trainer"), "n2": done("trainer")}, "succeeded"),
        ({"n1": done("trainer"), "n2": done("trainer")}, "succeeded"),
        ({"n1": done("trainer")}, None),
        ({"n1": done("server")}, "succeeded"),  # the job's list is any role's
        ({}, None),
    ],
)
def test_a_role_whose_workers_have_all_ended_well_completes_the_job(
    reports: dict[str, PodReport], phase: Phase | None
) -> None:
    decision = take(of_roles(reports, COMPLETE))
    assert (decision.step is None) is (phase is None)
    if phase is not None:
        step = ended(decision)
        assert (step.phase, step.by_policy, step.planned) == (phase, True, True)
        assert "says CompleteJob for TaskCompleted: every worker of role" in step.reason


def test_only_the_role_whose_list_says_so_completes_the_job() -> None:
    both = {"n1": done("server"), "n2": PodReport(state="running")}
    assert take(of_roles(both, trainer=(COMPLETE,))).step is None
    trained = {"n1": done("trainer"), "n2": done("trainer")}
    assert ended(take(of_roles(trained, trainer=(COMPLETE,)))).phase == "succeeded"
    assert ended(take(of_roles({"n1": done("server")}, COMPLETE, trainer=()))).phase == "succeeded"
    assert take(of_roles(trained, COMPLETE, trainer=())).step is None


def test_a_job_of_one_role_is_completed_when_all_have_reported() -> None:
    end = Policy(on=("TaskCompleted",), do="TerminateJob")
    well = {"n1": SUCCEEDED, "n2": SUCCEEDED}
    assert ended(take(running(well, end))).phase == "stopped"
    assert take(running({"n1": SUCCEEDED}, end)).step is None


@pytest.mark.parametrize(("action", "phase"), [("AbortJob", "stopped"), ("CompleteJob", "succeeded")])
def test_a_stop_is_not_turned_into_a_pause_by_what_was_completed_before(action: ActionName, phase: Phase) -> None:
    job = running({"n1": SUCCEEDED, "n2": SUCCEEDED}, Policy(on=("TaskCompleted",), do=action), desired="stop")
    assert ended(take(job)).phase == phase


def test_the_only_role_may_have_the_list() -> None:
    job = running(CRASH, FAIL_LOST)
    role = job.spec.role.model_copy(update={"policies": (Policy(on=("WorkerFailed",), do="AbortJob"),)})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"roles": (role,)})})
    assert ended(take(job)).phase == "pausing"


@pytest.mark.parametrize(
    ("lost", "policies", "own", "phase"),
    [
        ("n2", (FAIL_LOST,), {"trainer": (ABORT_LOST,)}, "pausing"),
        ("n2", (FAIL_LOST,), {"server": (ABORT_LOST,)}, "failed"),
        ("n1", (FAIL_LOST,), {"server": (ABORT_LOST,)}, "pausing"),
        ("n1", (FAIL_LOST,), {"trainer": (ABORT_LOST,)}, "pausing"),
        ("n1", (), {"server": (FAIL_LOST,), "trainer": (ABORT_LOST,)}, "failed"),
        ("n1", (FAIL_LOST,), {"server": (), "trainer": ()}, "holding"),
        ("n1", (FAIL_LOST,), {"server": ()}, "failed"),
    ],
)
def test_of_a_node_the_lists_of_its_roles_are_asked_before_the_jobs(
    lost: str, policies: tuple[Policy, ...], own: dict[str, tuple[Policy, ...]], phase: Phase
) -> None:
    job = of_roles({}, *policies, **own)
    other = {"n1": "n2", "n2": "n1"}[lost]
    assert ended(decide(make_cluster([other], job, lapsed=[lost]), job, WALL)).phase == phase


@pytest.mark.parametrize(("node", "phase"), [("n1", "stopped"), ("n2", "pausing")])
def test_of_a_drained_node_the_lists_of_its_roles_are_asked(node: str, phase: Phase) -> None:
    own = (Policy(on=("PodEvicted",), do="TerminateJob"),)
    job = of_roles({}, Policy(on=("PodEvicted",), do="AbortJob"), server=own)
    other = {"n1": "n2", "n2": "n1"}[node]
    step = ended(decide(make_cluster([other, make_node(node, drain=True)], job), job, WALL))
    assert (step.phase, step.planned) == (phase, True)


def test_of_a_pod_that_died_its_roles_are_asked() -> None:
    policy = Policy(on=("PodFailed",), do="TerminateJob")
    died = {"n1": PodReport(state="lost", seq=1), "n2": failed(make_exit(1), seq=2)}
    step = ended(take(of_roles(died, server=(policy,))))
    assert step.phase == "stopped" and step.spend is not None and step.spend.roles == ("server", "trainer")
    on_n2 = {"n2": PodReport(state="lost", seq=1), "n1": failed(make_exit(0), seq=2)}
    assert isinstance(take(of_roles(on_n2, server=(policy,))).step, Propose)

"""Roles of an active generation that start one after another, and workers that are started again alone."""

from __future__ import annotations

from nodeagent.model.node import Incarnation
from nodeagent.model.pod import WorkerState
from nodeagent.model.world import PodReport
from nodeagent.plan.job.gang import decide
from nodeagent.plan.pods.actions import PodAction, Release, ReportPod
from nodeagent.plan.steps import Propose
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import UID, WALL, failed, make_cluster, make_exit, make_generation, make_job
from tests.unit.plan.placing.ofroles import TWO, roles_spec
from tests.unit.plan.planning import plan_node

AFTER = (TWO[0], TWO[1].model_copy(update={"after": ("pserver",)}))


def next_action(reports: dict[str, PodReport], *, ready: tuple[str, ...] = ()) -> PodAction | None:
    """Of n1, which runs pserver.0 and where trainer.0 waits."""
    job = make_job(spec=roles_spec(*AFTER))
    step = decide(make_cluster(["n1", "n2"], job), job, WALL).step
    assert isinstance(step, Propose)
    generation = make_generation(["n1", "n2"], reports=reports).model_copy(update={"members": step.members})
    running = make_job(spec=job.spec, phase="running", generation=generation)
    status = PodStatus(
        uid=UID, phase="running", generation=generation.token, highest=generation.token, ready=ready,
        waiting=("trainer",),
        workers=(WorkerState(rank=0, local_rank=0, pid=7, state="running"),),
    )  # fmt: skip
    found = plan_node(make_cluster(["n1", "n2"], running), "n1", Incarnation(life="life-n1", start=1), {UID: status}, 1)
    return found[0] if found else None


def test_a_restart_alone_is_reported_once() -> None:
    """With what was told before; also by an agent that has just begun."""
    job = make_job(spec=roles_spec(*TWO))
    step = decide(make_cluster(["n1", "n2"], job), job, WALL).step
    assert isinstance(step, Propose)
    sent: PodReport | None = None
    looks: list[tuple[list[int], str]] = [([], ""), ([0], "pserver.0"), ([0], ""), ([0, 1], "trainer.0")]
    for exits, name in looks:
        reports = {} if sent is None else {"n1": sent}
        generation = make_generation(["n1", "n2"], reports=reports).model_copy(update={"members": step.members})
        running = make_job(spec=job.spec, phase="running", generation=generation)
        workers = tuple(WorkerState(rank=r, local_rank=r, pid=7, state="running") for r in (0, 1))
        restarted = tuple(make_exit(rank=rank, signal=9, order=rank) for rank in exits)
        status = PodStatus(
            uid=UID,
            phase="running",
            generation=generation.token,
            highest=generation.token,
            workers=workers,
            restarted=restarted,
        )
        cluster = make_cluster(["n1", "n2"], running)
        found = plan_node(cluster, "n1", Incarnation(life="life-n1", start=1), {UID: status}, 1)
        if not name:
            assert found == ()
            continue
        assert isinstance(found[0], ReportPod)
        sent = found[0].report
        assert [one.rank for one in sent.alone] == exits
        assert (
            found[0].why
            == f"{name}, rank {exits[-1]}, failed: SIGKILL (9); it is to be started again while the gang goes on"
        )


def reported(*ready: str) -> PodReport:
    return PodReport(state="running", ready=ready)


def test_what_is_ready_is_reported_once() -> None:
    action = next_action({}, ready=("pserver.0",))
    assert isinstance(action, ReportPod) and action.report == reported("pserver.0")
    assert next_action({"n1": reported("pserver.0")}, ready=("pserver.0",)) is None


def test_a_role_starts_when_all_places_before_it_are_ready() -> None:
    assert next_action({"n1": reported("pserver.0"), "n2": reported()}, ready=("pserver.0",)) is None
    both = {"n1": reported("pserver.0"), "n2": reported("pserver.1")}
    action = next_action(both, ready=("pserver.0",))
    assert isinstance(action, Release)
    assert (action.roles, action.why) == (("trainer",), "all places of pserver are ready")


def test_a_pod_has_not_succeeded_if_some_of_its_workers_never_started() -> None:
    """They waited for another role when an agent that left had the pod stopped."""
    job = make_job(spec=roles_spec(*AFTER))
    step = decide(make_cluster(["n1", "n2"], job), job, WALL).step
    assert isinstance(step, Propose)
    generation = make_generation(["n1", "n2"]).model_copy(update={"members": step.members})
    running = make_job(spec=job.spec, phase="running", generation=generation)
    status = PodStatus(
        uid=UID, phase="exited", generation=generation.token, highest=generation.token, exits=(make_exit(0, code=0),),
        workers=(WorkerState(rank=0, local_rank=0, pid=7, state="exited", exit=0),),
    )  # fmt: skip
    found = plan_node(make_cluster(["n1", "n2"], running), "n1", Incarnation(life="life-n1", start=1), {UID: status}, 1)
    assert isinstance(found[0], ReportPod)
    assert found[0].report.state == "fenced"


def test_a_place_whose_workers_have_ended_well_keeps_nobody_waiting() -> None:
    """Its pod says nothing of what is ready any more, and may have ended before it was seen to be."""
    both = {"n1": reported("pserver.0"), "n2": PodReport(state="succeeded")}
    assert isinstance(next_action(both, ready=("pserver.0",)), Release)
    left = {"n1": reported("pserver.0"), "n2": PodReport(state="left")}
    assert not isinstance(next_action(left, ready=("pserver.0",)), Release)


def test_a_doomed_generation_starts_nobody() -> None:
    both = {
        "n1": reported("pserver.0"),
        "n2": failed(make_exit(2, code=7)).model_copy(update={"ready": ("pserver.1",)}),
    }
    assert not isinstance(next_action(both, ready=("pserver.0",)), Release)

"""What went wrong and what it costs: kinds, counting, policies, early failures, late blame."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord, Spend
from nodeagent.model.jobspec import Policy
from nodeagent.model.node import NodeRecord
from nodeagent.model.world import Cause, PodReport, WorkerExit
from nodeagent.plan.faults import all_succeeded, awaited, find_fault, judged_cause, judged_when, late_fault
from tests.unit.plan.build import (
    NOW,
    SUCCEEDED,
    VICTIM,
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

FAIL_ON_3 = (Policy(on=("WorkerFailed",), exit_code=3, do="FailJob"),)


def running(reports: dict[str, PodReport], **more: object) -> JobRecord:
    return make_job("running", make_head(["n1", "n2"], reports=reports), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reports", "lapsed", "kind", "counts", "text"),
    [
        ({"n1": failed(make_exit(code=7))}, "", "worker_failed", True, "rank 0 on n1 failed first: exit code 7"),
        ({"n1": failed(make_exit(signal=9))}, "n2", "node_lost", False, "node n2 lost"),
        ({"n1": failed(make_exit(signal=9)), "n2": failed(make_exit(1), seq=2)}, "n2", "worker_failed", True,
         "rank 0 on n1 failed first: SIGKILL (9)"),
        ({"n1": failed(make_exit(code=7)), "n2": PodReport(state="fenced", seq=2)}, "", "fenced", False,
         "workers stopped themselves, without a lease, on n2"),
        ({"n1": failed(make_exit(code=7)), "n2": PodReport(state="lost", seq=2)}, "", "pod_failed", True,
         "the pod died on n2"),
        ({"n1": failed(make_exit(signal=9), seq=2), "n2": PodReport(state="lost", seq=1)}, "", "pod_failed", True,
         "the pod died on n2"),
        ({"n1": failed(make_exit(signal=9)), "n2": PodReport(state="fenced", seq=2)}, "", "worker_failed", True,
         "rank 0 on n1 failed first: SIGKILL (9)"),
        ({"n1": failed(make_exit(error=VICTIM))}, "", "collective", True, "rank 0 on n1 lost its peers (exit code 1)"),
        ({"n1": failed(make_exit(error=VICTIM))}, "n2", "node_lost", False, "node n2 lost"),
        ({"n1": failed(make_exit(code=101))}, "", "reform", False, "rank 0 on n1 failed first: exit code 101"),
        ({"n1": failed(make_exit(code=101, error=VICTIM))}, "", "reform", False, "rank 0 on n1 lost its peers"),
        ({}, "n2", "node_lost", False, "node n2 lost"),
        ({"n1": PodReport(state="lost", reason="its shim is gone", seq=1)}, "", "pod_failed", True,
         "the pod died on n1: its shim is gone"),
        ({"n1": PodReport(state="refused", reason="hook failed", seq=1)}, "", "pod_failed", True,
         "the pod could not start on n1: hook failed"),
        ({"n1": PodReport(state="fenced", seq=1)}, "", "fenced", False,
         "workers stopped themselves, without a lease, on n1"),
        ({"n1": failed(make_exit(error=VICTIM)), "n2": PodReport(state="fenced", seq=2)}, "", "fenced", False,
         "workers stopped themselves, without a lease, on n2"),
        ({"n1": failed(make_exit(error=VICTIM)), "n2": PodReport(state="lost", seq=2)}, "", "pod_failed", True,
         "the pod died on n2"),
    ],
)  # fmt: skip
def test_kinds(reports: dict[str, PodReport], lapsed: str, kind: str, counts: bool, text: str) -> None:
    job = running(reports)
    fault = find_fault(make_cluster(["n1", "n2"], job, lapsed=[lapsed]), job, WALL)
    assert fault is not None
    assert (fault.cause.kind, fault.spend.kind, fault.spend.counts) == (kind, kind, counts)
    assert fault.cause.text.startswith(text)
    assert fault.fail == ""
    assert fault.spend.at == NOW


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], "nodes n1, n2 lost"),
        ([make_node("n1", left=True), make_node("n2", left=True)], "nodes n1, n2 left"),
        ([make_node("n1", left=True), make_node("n2", lost=True)], "nodes n1, n2 lost"),
        ([make_node("n1", of_life="reborn"), make_node("n2")], "node n1 lost"),
    ],
)
def test_nodes_that_went(nodes: list[NodeRecord], text: str) -> None:
    job = running({})
    fault = find_fault(make_cluster(nodes, job), job, WALL)
    assert fault is not None
    assert (fault.cause.text, fault.cause.node, fault.spend.counts) == (text, "n1", False)


def test_nothing_is_wrong() -> None:
    job = running({"n1": SUCCEEDED})
    assert find_fault(make_cluster(["n1", "n2"], job), job, WALL) is None
    assert not all_succeeded(job)
    assert all_succeeded(running({"n1": SUCCEEDED, "n2": SUCCEEDED}))
    queued = make_job()
    assert find_fault(make_cluster([], queued), queued, WALL) is None
    assert not all_succeeded(queued)


@pytest.mark.parametrize(
    ("exited", "since_start", "restarts", "fails"),
    [
        (make_exit(code=1), 30_000, 0, True),
        (make_exit(code=1), 30_001, 0, False),
        (make_exit(code=1), 1000, 1, False),  # not the first start
        (make_exit(signal=9), 1000, 0, False),  # nobody mistypes a SIGKILL
        (make_exit(code=1, error=VICTIM), 1000, 0, False),  # somebody else was first
        (make_exit(code=101), 1000, 0, False),
    ],
)
def test_an_early_exit_with_an_error_fails_the_job_at_once(
    exited: WorkerExit, since_start: int, restarts: int, fails: bool
) -> None:
    job = running({"n1": failed(exited)}, restarts=restarts)
    fault = find_fault(make_cluster(["n1", "n2"], job, served=since_start), job, WALL)
    assert fault is not None
    assert bool(fault.fail) is fails
    if fails:
        assert fault.fail.startswith("failed within 30 s of its first start")
        assert fault.outcome.code == 1


def test_policies_decide_before_the_rule_of_early_failures() -> None:
    restart = make_spec(policies=(Policy(on=("WorkerFailed",), do="RestartJob"),))
    job = running({"n1": failed(make_exit(code=1))}, restarts=0, spec=restart)
    fault = find_fault(make_cluster(["n1", "n2"], job, served=1), job, WALL)
    assert fault is not None
    assert fault.fail == ""


@pytest.mark.parametrize(("code", "fails"), [(3, True), (4, False)])
def test_a_policy_fails_the_job(code: int, fails: bool) -> None:
    job = running({"n1": failed(make_exit(code=code, error="boom"))}, spec=make_spec(policies=FAIL_ON_3))
    fault = find_fault(make_cluster(["n1", "n2"], job), job, WALL)
    assert fault is not None
    assert bool(fault.fail) is fails
    assert (fault.outcome.code, fault.outcome.error, fault.spend.error) == (code, "boom", "boom")


def test_a_policy_on_lost_nodes() -> None:
    job = running({}, spec=make_spec(policies=(Policy(on=("NodeLost",), do="FailJob"),)))
    fault = find_fault(make_cluster(["n1"], job), job, WALL)
    assert fault is not None
    assert fault.fail == "a policy of the job says FailJob for NodeLost: node n2 lost"


def forming(**more: object) -> JobRecord:
    """Re-forming; n1 has acknowledged, n2 has not."""
    head = make_head(["n1", "n2"], state="forming", number=2, cause="collective", acks=["n1"], holders=["n2"])
    base = {"active": 1, "budget": {"1": spend("collective")}, "restarts": 0, "silent": ["n2"]}
    return make_job("forming", head, **(base | more))  # type: ignore[arg-type]


def test_who_has_to_answer() -> None:
    crash = failed(make_exit(code=7))
    for reports, awaits in (({"n1": crash}, ("n2",)), ({"n1": crash, "n2": failed(make_exit(1), seq=2)}, ())):
        job = running(reports)
        fault = find_fault(make_cluster(["n1", "n2"], job), job, WALL)
        assert fault is not None
        assert fault.awaits == awaits
    job = forming()
    assert awaited(make_cluster(["n1", "n2"], job), job) == ("n2",)
    assert awaited(make_cluster(["n1", "n2"], job, lapsed=["n2"]), job) == ()
    assert awaited(make_cluster([]), make_job()) == ()
    names = [f"n{i}" for i in range(1, 8)]
    assert judged_when(names[:1]) == "judged when n1 has answered, or proved to be lost"
    assert judged_when(names) == "judged when n1, n2, n3, n4, n5 and 2 more have answered, or proved to be lost"


def test_a_late_exit_ends_a_job_that_failed_at_its_start_or_by_policy() -> None:
    reports = {"n1": failed(make_exit(0, error=VICTIM), seq=1), "n2": failed(make_exit(1, code=3), seq=2)}
    early = forming(last_reports=reports, budget={"1": spend("collective", at=1000)})
    found = late_fault(make_cluster(["n1", "n2"], early, served=1000), early, WALL)
    assert found is not None
    assert (found.outcome.code, bool(found.fail), found.awaits) == (3, True, ("n2",))
    by_policy = forming(last_reports=reports, restarts=4, spec=make_spec(policies=FAIL_ON_3))
    assert late_fault(make_cluster(["n1", "n2"], by_policy), by_policy, WALL) is not None
    neither = forming(last_reports=reports, restarts=4)
    assert late_fault(make_cluster(["n1", "n2"], neither), neither, WALL) is None


@pytest.mark.parametrize("kind", ["collective", "worker_failed", "hang", "pod_failed"])
def test_a_node_that_has_not_answered_since_was_the_cause(kind: str) -> None:
    job = forming(budget={"1": spend(kind)}, restarts=1)
    assert late_fault(make_cluster(["n1", "n2"], job), job, WALL) is None
    found = late_fault(make_cluster(["n1", "n2"], job, lapsed=["n2"]), job, WALL)
    assert found is not None
    assert (found.cause.kind, found.cause.node, found.spend.counts) == ("node_lost", "n2", False)
    assert late_fault(make_cluster(["n1", "n2"], job, lapsed=["n1"]), job, WALL) is None, "n1 outlived the fault"
    reborn = [make_node("n1"), make_node("n2", of_life="reborn")]
    assert late_fault(make_cluster(reborn, job), job, WALL) is not None, "the life that was in the gang is gone"


def test_the_cause_that_is_shown_is_the_one_that_was_judged() -> None:
    first = Cause(kind="collective", text="rank 2 lost its peers", node="n2", rank=2)
    head = make_head(["n1", "n2"], number=2).model_copy(update={"cause": first})
    entry = Spend(at=NOW, wall=WALL, kind="pod_failed", counts=True, node="n1", text="the shim ended")
    job = make_job("running", head, last_number=1)
    assert judged_cause(job) == first
    judged = judged_cause(job.model_copy(update={"budget": {"1": entry}}))
    assert judged == Cause(kind="pod_failed", text="the shim ended", node="n1")
    scaled = head.model_copy(update={"cause": Cause(kind="scale", text="scaled")})
    assert judged_cause(job.model_copy(update={"head": scaled, "budget": {"1": entry}})) == scaled.cause, "no fault"
    ended = job.model_copy(update={"last_number": 2, "budget": {"2": entry}})
    assert judged_cause(ended) == first, "of the next generation, which is not there yet"
    assert judged_cause(make_job("queued")) is None


def test_nothing_is_late() -> None:
    assert late_fault(make_cluster([]), make_job(), WALL) is None
    free = forming(budget={"1": spend("node_lost", counts=False)})
    assert late_fault(make_cluster([], free), free, WALL) is None

"""What went wrong and what it costs: kinds, counting, policies, early failures, late blame."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Policy, RestartLimits
from nodeagent.model.node import NodeRecord
from nodeagent.model.world import PodReport, WorkerExit
from nodeagent.plan.faults import all_succeeded, find_fault, late_blame, over_budget
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
        ({"n1": failed(make_exit(signal=9))}, "n2", "worker_failed", True, "rank 0 on n1 failed first: SIGKILL (9)"),
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
    """Re-forming for victims only; n1 has acknowledged."""
    head = make_head(["n1", "n2"], state="forming", number=2, cause="collective", acks=["n1"], holders=["n2"])
    base = {"active": 1, "budget": {"1": spend("collective")}, "restarts": 0}
    return make_job("forming", head, **(base | more))  # type: ignore[arg-type]


def test_late_blame_ends_a_job_that_failed_at_its_start_or_by_policy() -> None:
    reports = {"n1": failed(make_exit(0, error=VICTIM), seq=1), "n2": failed(make_exit(1, code=3), seq=2)}
    early = forming(last_reports=reports)
    found = late_blame(make_cluster(["n1", "n2"], early, served=1000), early, WALL)
    assert found is not None
    assert found.outcome.code == 3
    by_policy = forming(last_reports=reports, restarts=4, spec=make_spec(policies=FAIL_ON_3))
    assert late_blame(make_cluster(["n1", "n2"], by_policy), by_policy, WALL) is not None
    neither = forming(last_reports=reports, restarts=4)
    assert late_blame(make_cluster(["n1", "n2"], neither), neither, WALL) is None


def test_late_blame_of_a_node_that_has_not_been_heard_since() -> None:
    job = forming(last_reports={"n1": failed(make_exit(error=VICTIM))})
    assert late_blame(make_cluster(["n1", "n2"], job), job, WALL) is None
    found = late_blame(make_cluster(["n1", "n2"], job, lapsed=["n2"]), job, WALL)
    assert found is not None
    assert (found.cause.kind, found.cause.node, found.spend.counts) == ("node_lost", "n2", False)
    assert late_blame(make_cluster(["n1", "n2"], job, lapsed=["n1"]), job, WALL) is None, "n1 outlived the fault"


def test_late_blame_only_where_the_culprit_is_unknown() -> None:
    job = forming(budget={"1": spend("worker_failed")})
    assert late_blame(make_cluster([], job), job, WALL) is None
    assert late_blame(make_cluster([]), make_job(), WALL) is None


def test_over_budget_names_the_culprit_when_it_is_known_by_then() -> None:
    spec = make_spec(restarts=RestartLimits(max=0))
    victims = {"n1": failed(make_exit(0, error=VICTIM), seq=1)}
    job = make_job("holding", spec=spec, active=1, budget={"1": spend("collective")}, last_reports=victims)
    outcome = over_budget(job, NOW)
    assert outcome is not None
    assert (outcome.code, outcome.text) == (
        1,
        "restart budget spent: 0 restarts within 3600 s; last: it was collective",
    )
    known = job.model_copy(update={"last_reports": victims | {"n2": failed(make_exit(1, code=7), seq=2)}})
    outcome = over_budget(known, NOW)
    assert outcome is not None
    assert outcome.code == 7
    assert over_budget(job.model_copy(update={"spec": make_spec()}), NOW) is None

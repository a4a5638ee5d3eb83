"""What went wrong and what it costs: kinds, counting, policies, early failures."""

from __future__ import annotations

import random

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Policy
from nodeagent.model.node import NodeRecord
from nodeagent.model.world import AloneRestart, PodReport, WorkerExit
from nodeagent.plan.failure.faults import all_succeeded, find_fault
from nodeagent.plan.failure.judgement import late_fault
from tests.unit.plan.build import (
    NOW,
    SUCCEEDED,
    VICTIM,
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

ROBBED = PodReport(state="failed", taken="uid 7 listens on port 9", seq=2)
"""Of workers that were only stopped."""
FAIL_ON_3 = (Policy(on=("WorkerFailed",), exit_code=3, do="FailJob"),)


def running(reports: dict[str, PodReport], **more: object) -> JobRecord:
    return make_job("running", make_generation(["n1", "n2"], reports=reports), **more)  # type: ignore[arg-type]


def forming(**more: object) -> JobRecord:
    """Re-forming; n1 has acknowledged, n2 has not."""
    generation = make_generation(
        ["n1", "n2"], state="forming", number=2, cause="collective", acks=["n1"], holders=["n2"]
    )
    base = {"active": 1, "budget": {"1": spend("collective")}, "restarts": 0, "silent": ["n2"]}
    return make_job("forming", generation, **(base | more))  # type: ignore[arg-type]


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
        ({"n1": PodReport(state="fenced", reason="the order came too late", seq=1)}, "", "fenced", False,
         "no worker of the job runs on n1: the order came too late"),
        ({"n1": PodReport(state="fenced", reason="an agent left", exits=(make_exit(signal=15, stopped=True),), seq=1)},
         "", "fenced", False, "workers stopped themselves, without a lease, on n1: an agent left"),
        ({"n1": failed(make_exit(error=VICTIM)), "n2": PodReport(state="fenced", seq=2)}, "", "fenced", False,
         "workers stopped themselves, without a lease, on n2"),
        ({"n1": failed(make_exit(error=VICTIM)), "n2": PodReport(state="lost", seq=2)}, "", "pod_failed", True,
         "the pod died on n2"),
        ({"n1": failed(make_exit(code=7)), "n2": ROBBED}, "", "port_taken", False,
         "uid 7 listens on port 9 of n2, which was kept for the job's workers"),
        ({"n2": ROBBED}, "", "port_taken", False, "uid 7 listens on port 9 of n2"),
        ({"n1": failed(make_exit(signal=9)), "n2": ROBBED}, "", "worker_failed", True, "rank 0 on n1 failed first"),
        ({"n1": PodReport(state="lost", seq=1), "n2": ROBBED}, "", "pod_failed", True, "the pod died on n1"),
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


def test_what_a_hook_printed_is_in_no_text_that_everybody_reads() -> None:
    report = PodReport(state="refused", reason="hook pre_start failed with exit code 3", error="s3cret", seq=1)
    job = running({"n1": report})
    fault = find_fault(make_cluster(["n1", "n2"], job), job, WALL)
    assert fault is not None
    assert (fault.outcome.error, fault.spend.error) == ("s3cret", "s3cret")
    assert fault.cause.text == "the pod could not start on n1: hook pre_start failed with exit code 3"
    assert (fault.outcome.text, fault.spend.text) == (fault.cause.text, fault.cause.text)


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
        (make_exit(code=1, error=VICTIM), 1000, 0, False),  # formed again until n2 has answered
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


def test_a_port_that_somebody_else_took_is_no_mistake_of_the_script() -> None:
    """Also where that is heard of only after workers elsewhere have failed for it."""
    job = running({"n1": failed(make_exit(code=1)), "n2": ROBBED}, spec=make_spec(policies=FAIL_ON_3))
    fault = find_fault(make_cluster(["n1", "n2"], job, served=1000), job, WALL)
    assert fault is not None and (fault.fail, fault.spend.counts, fault.cause.rank) == ("", False, None)
    entry = spend("worker_failed").model_copy(update={"fails": "failed within 30 s of its first start"})
    reports, ended = job.generation.reports, make_generation(["n1", "n2"], state="ended")  # type: ignore[union-attr]
    later = make_job("holding", ended, budget={"1": entry}, last_number=1, last_reports=reports)
    found = late_fault(make_cluster(["n1", "n2"], later, served=1000), later, WALL)
    assert found is not None and (found.fail, found.cause.kind) == ("", "port_taken")


@pytest.mark.parametrize(("ended_with", "fails"), [(137, False), (1, True)])
def test_a_server_that_was_killed_first_is_no_mistake_of_the_script(ended_with: int, fails: bool) -> None:
    """Its role is started again, and a trainer that cannot do without it fails: the kill is nobody's mistake."""
    killed = AloneRestart(rank=0, order=0, at=500, exit=ended_with, text="server.0, rank 0, failed", round=1)
    job = running({"n1": failed(make_exit(code=1)).model_copy(update={"alone": (killed,)})}, restarts=0)
    fault = find_fault(make_cluster(["n1", "n2"], job, served=1000), job, WALL)
    assert fault is not None
    assert bool(fault.fail) is fails
    assert fault.cause.text == "rank 0 on n1 failed first: exit code 1 (shortly before, server.0, rank 0, failed on n1)"
    later = find_fault(make_cluster(["n1", "n2"], job, served=40_000), job, WALL)
    assert later is not None and later.cause.text == "rank 0 on n1 failed first: exit code 1"


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


@pytest.mark.parametrize(("code", "fails"), [(3, True), (4, False)])
@pytest.mark.parametrize("error", ["boom", VICTIM])
def test_a_policy_is_asked_of_all_that_may_be_the_cause_whatever_they_wrote(code: int, fails: bool, error: str) -> None:
    """rank 0 is reported first; rank 1 took longer to end."""
    reports = {"n1": failed(make_exit(0, code=1, error=error)), "n2": failed(make_exit(1, code=code), seq=2)}
    job = running(reports, spec=make_spec(policies=FAIL_ON_3))
    fault = find_fault(make_cluster(["n1", "n2"], job), job, WALL)
    assert fault is not None
    assert bool(fault.fail) is fails
    if fails and error != VICTIM:
        assert fault.fail.endswith("; rank 1 on n2 ended with exit code 3")
    alone = running({"n1": failed(make_exit(code=code, error=error))}, spec=make_spec(policies=FAIL_ON_3))
    fault = find_fault(make_cluster(["n1", "n2"], alone), alone, WALL)
    assert fault is not None
    assert bool(fault.fail) is fails
    killed = running(reports | {"n1": failed(make_exit(0, signal=9))}, spec=make_spec(policies=FAIL_ON_3))
    fault = find_fault(make_cluster(["n1", "n2"], killed), killed, WALL)
    assert fault is not None
    assert fault.fail == "", "rank 1 may have died of it"


def test_who_asks_to_be_re_formed_does_so_by_being_the_first_of_those_that_failed() -> None:
    for text in ("", VICTIM):
        asks, dies = failed(make_exit(0, code=101), seq=1), failed(make_exit(1, error=text), seq=2)
        for reports, kind, counts in (
            ({"n1": asks, "n2": dies}, "reform", False),
            ({"n1": asks.model_copy(update={"seq": 3}), "n2": dies}, "collective" if text else "worker_failed", True),
        ):
            job = running(reports)
            fault = find_fault(make_cluster(["n1", "n2"], job), job, WALL)
            assert fault is not None
            assert (fault.cause.kind, fault.spend.counts) == (kind, counts)


def test_what_workers_wrote_changes_neither_the_verdict_nor_the_cost() -> None:
    """All members have answered, early or late, under any policy."""
    rng = random.Random(7)
    names = ["n1", "n2", "n3"]
    verdicts = set()
    for _ in range(400):
        policies = tuple(
            Policy(
                on=("WorkerFailed",), exit_code=rng.choice([None, 1, 3, 137]), do=rng.choice(["FailJob", "RestartJob"])
            )
            for _ in range(rng.randrange(3))
        )
        ends = [(rng.choice([1, 3, 101]), rng.choice([None, None, None, 6, 9, 11])) for _ in names]
        seqs = rng.sample(range(1, 4), 3)
        found = set()
        served, restarts = rng.choice([1000, NOW]), rng.choice([0, 10])
        for _ in range(4):
            reports = {
                name: failed(make_exit(i, code=code, signal=signal, error=rng.choice(["", "boom", VICTIM])), seq=seq)
                for i, (name, (code, signal), seq) in enumerate(zip(names, ends, seqs, strict=True))
            }  # fmt: skip
            generation = make_generation(names, reports=reports)
            budget = {str(1000 + i): spend("worker_failed", at=served) for i in range(restarts)}
            spec = make_spec(policies=policies)
            job = make_job("running", generation, restarts=restarts, spec=spec, budget=budget)
            fault = find_fault(make_cluster(names, job, served=served), job, WALL)
            assert fault is not None
            found.add((bool(fault.fail), fault.spend.counts, fault.awaits))
        assert len(found) == 1, (policies, ends, seqs)
        verdicts |= found
    assert len(verdicts) == 3, "it fails, it costs, it is free"


def test_a_gang_whose_workers_all_speak_of_lost_peers_fails_early_once_everybody_has_answered() -> None:
    """It is formed again meanwhile: a lost node, or a killed worker, is the usual cause, and no recovery shall wait."""
    victims = {"n1": failed(make_exit(error=VICTIM))}
    job = running(victims, restarts=0)
    fault = find_fault(make_cluster(["n1", "n2"], job, served=1000), job, WALL)
    assert fault is not None
    assert (fault.cause.kind, fault.fail, fault.awaits) == ("collective", "", ("n2",))
    entry = {"1": spend("collective", at=1000)}
    waits = forming(last_reports=victims, budget=entry)
    assert late_fault(make_cluster(["n1", "n2"], waits), waits, WALL) is None, "n2 has not answered"
    lost = late_fault(make_cluster(["n1", "n2"], waits, lapsed=["n2"]), waits, WALL)
    assert lost is not None
    assert (lost.cause.kind, lost.fail, lost.spend.counts) == ("node_lost", "", False)
    generation = make_generation(["n1", "n2"], number=2)
    runs = make_job("running", generation, last_number=1, restarts=1, budget=entry).model_copy(
        update={"last_reports": victims, "first_active": 0}
    )
    found = late_fault(make_cluster(["n1", "n2"], runs), runs, WALL)
    assert found is not None
    assert found.fail.startswith("failed within 30 s of its first start, so it is not started again: rank 0 on n1 lost")
    both = running(victims | {"n2": failed(make_exit(1, error=VICTIM), seq=2)}, restarts=0)
    at_once = find_fault(make_cluster(["n1", "n2"], both, served=1000), both, WALL)
    assert at_once is not None
    assert at_once.fail.endswith("; fix the script, or what keeps its workers apart, and submit it again")
    later = find_fault(make_cluster(["n1", "n2"], both, served=30_001), both, WALL)
    assert later is not None
    assert (later.fail, later.spend.counts) == ("", True)


def test_a_policy_on_lost_nodes() -> None:
    job = running({}, spec=make_spec(policies=(Policy(on=("NodeLost",), do="FailJob"),)))
    fault = find_fault(make_cluster(["n1"], job), job, WALL)
    assert fault is not None
    assert fault.fail == "a policy of the job says FailJob for NodeLost: node n2 lost"

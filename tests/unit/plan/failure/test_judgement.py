"""Who has to answer before a fault is judged, and what becomes known of it then."""

from __future__ import annotations

import pytest

from nodeagent.model.job import BudgetEntry
from nodeagent.model.world import Cause
from nodeagent.plan.failure.faults import find_fault
from nodeagent.plan.failure.judgement import awaited, judged_cause, judged_when, late_fault
from tests.unit.plan.build import (
    NOW,
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
from tests.unit.plan.failure.test_faults import FAIL_ON_3, forming, running


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
    generation = make_generation(["n1", "n2"], number=2).model_copy(update={"cause": first})
    entry = BudgetEntry(at=NOW, wall=WALL, kind="pod_failed", counts=True, node="n1", text="the shim ended")
    job = make_job("running", generation, last_number=1)
    assert judged_cause(job) == first
    judged = judged_cause(job.model_copy(update={"budget": {"1": entry}}))
    assert judged == Cause(kind="pod_failed", text="the shim ended", node="n1")
    scaled = generation.model_copy(update={"cause": Cause(kind="scale", text="scaled")})
    assert judged_cause(job.model_copy(update={"generation": scaled, "budget": {"1": entry}})) == scaled.cause, (
        "no fault"
    )
    ended = job.model_copy(update={"last_number": 2, "budget": {"2": entry}})
    assert judged_cause(ended) == first, "of the next generation, which is not there yet"
    assert judged_cause(make_job("queued")) is None


def test_nothing_is_late() -> None:
    assert late_fault(make_cluster([]), make_job(), WALL) is None
    free = forming(budget={"1": spend("node_lost", counts=False)})
    assert late_fault(make_cluster([], free), free, WALL) is None

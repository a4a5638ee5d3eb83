"""A podman that cannot start a container: whose fault that is, what the job does, and that it costs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from nodeagent.model.job import BudgetEntry, JobRecord, Setback
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import Timing
from nodeagent.model.world import PodReport
from nodeagent.plan.failure.runtimes import ENOUGH, FAILS_WITHIN
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes.setbacks import left_out
from nodeagent.plan.pods.report import read_report
from nodeagent.plan.steps import Decision, End, Propose
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import (
    NOW,
    UNFIT,
    WALL,
    life,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
    spend,
)

WORD = "podman failed: Error: no space left on device"
EARLY = int(Timing().early * 1000)


def cannot(seq: int = 1) -> PodReport:
    return PodReport(state="refused", reason=WORD, runtime_failed=True, seq=seq)


def first(
    reports: Mapping[str, PodReport],
    *,
    nodes: Sequence[str] = ("n1", "n2"),
    size: tuple[int, int] = (2, 2),
    since: int = NOW - 1000,
) -> JobRecord:
    """The first generation of a job, which became active a second ago."""
    generation = make_generation(nodes, reports=reports, number=1, since=since)
    return make_job("running", generation, spec=make_spec(size=size), restarts=0)


def trained(reports: Mapping[str, PodReport], **more: object) -> JobRecord:
    """The same job an hour later."""
    job = first(reports, **more)  # type: ignore[arg-type]
    return job.model_copy(update={"restarts": 1, "budget": {"1": spend("join", counts=False)}})


def take(job: JobRecord, nodes: Sequence[NodeRecord | str] = ("n1", "n2"), served: int = NOW) -> Decision:
    return decide(make_cluster(nodes, job, served=served), job, WALL)


def remembered(*nodes: str, times: int = 1) -> tuple[Setback, ...]:
    return tuple(Setback(node=n, kind="runtime", life=life(n), times=times, at=NOW) for n in nodes)


def test_what_the_shim_says_is_the_reason() -> None:
    status = PodStatus(uid="u", phase="exited", refused=WORD, runtime_failed=True)
    assert read_report(status) == cannot(0)


def test_an_elastic_gang_goes_on_without_the_node_and_nothing_is_spent() -> None:
    step = take(trained({"n2": cannot()}, size=(1, 2))).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n1"] and not step.planned
    assert (step.cause.kind, step.cause.node) == ("runtime_failed", "n2")
    assert step.cause.text == "podman failed on n2: Error: no space left on device"
    assert step.spend is not None and (step.spend.kind, step.spend.counts) == ("runtime_failed", False)
    assert step.setbacks == remembered("n2")


def test_a_gang_of_fixed_size_waits_and_tries_the_node_again_at_once_then_less_and_less_often() -> None:
    job = trained({"n2": cannot()})
    waits = []
    for _ in range(4):
        step = take(job).step
        assert isinstance(step, End) and (step.phase, step.delay_ms) == ("holding", 0)
        assert step.reason == "podman failed on n2: Error: no space left on device"
        assert step.spend is not None and not step.spend.counts
        held = make_job("holding", make_generation(["n1", "n2"], state="ended"), spec=make_spec(size=(2, 2)))
        held = held.model_copy(update={"setbacks": step.setbacks})
        found = left_out(held, make_cluster(["n1", "n2"], held).nodes, NOW)
        waits.append((found["n2"][1] - NOW) // 1000 if found else 0)
        job = job.model_copy(update={"setbacks": step.setbacks})
    assert waits == [0, 60, 120, 240]


def test_one_on_which_it_has_run_since_is_as_good_as_any_other() -> None:
    job = trained({"n1": cannot()}, since=NOW - EARLY).model_copy(update={"setbacks": remembered("n2", times=4)})
    step = take(job).step
    assert isinstance(step, End) and step.setbacks == remembered("n1")


def test_at_the_first_start_the_others_are_waited_for_a_moment() -> None:
    job = first({"n2": cannot()})
    waits = take(job)
    assert (waits.step, waits.at) == (None, NOW - 1000 + int(FAILS_WITHIN * 1000))
    assert waits.why == (
        "podman failed on n2: Error: no space left on device; waits a moment for what happens on the other nodes",
    )
    over = take(job, served=waits.at).step
    assert isinstance(over, End) and over.phase == "holding", "n1 runs it: it is n2's fault"


def test_what_no_node_can_start_ends_the_job_with_a_true_sentence() -> None:
    step = take(first({"n1": cannot(2), "n2": cannot(1)})).step
    assert isinstance(step, End) and step.phase == "failed" and step.spend is not None and not step.spend.counts
    assert step.reason == (
        "no node can run it: podman failed on n1, n2: Error: no space left on device; "
        "look at the job's image and binds, or at podman there"
    )


@pytest.mark.parametrize("ready", [None, {"u-a": UNFIT}])
def test_each_node_that_the_job_could_have_is_tried_before(ready: dict[str, object] | None) -> None:
    job = first({"n1": cannot()}, nodes=("n1",), size=(1, 1))
    other = make_node("n2", ready=ready)  # type: ignore[arg-type]
    step = take(job, ["n1", other]).step
    if ready is not None:
        assert isinstance(step, End) and step.phase == "failed"
        return
    assert isinstance(step, Propose) and sorted(step.members) == ["n2"]
    again = first({"n2": cannot()}, nodes=("n2",), size=(1, 1)).model_copy(
        update={"setbacks": step.setbacks, "restarts": 1, "budget": {"1": step.spend}}
    )
    found = take(again, ["n1", other]).step
    assert isinstance(found, End) and "podman failed on n1, n2:" in found.reason
    anew = take(again, [make_node("n1", of_life="another"), other]).step
    assert isinstance(anew, Propose) and sorted(anew.members) == ["n1"], "its agent was started anew: it may be mended"


def test_of_a_large_cluster_a_few_nodes_are_enough() -> None:
    names = [f"n{i}" for i in range(1, ENOUGH + 3)]
    job = first({f"n{ENOUGH}": cannot()}, nodes=(f"n{ENOUGH}",), size=(1, 1))
    before = {str(i): BudgetEntry(at=NOW, wall=WALL, kind="runtime_failed", counts=False) for i in range(1, ENOUGH)}
    job = job.model_copy(update={"restarts": ENOUGH - 1, "budget": before})
    step = take(job.model_copy(update={"setbacks": remembered(*names[: ENOUGH - 2])}), names).step
    assert isinstance(step, Propose)
    step = take(job.model_copy(update={"setbacks": remembered(*names[: ENOUGH - 1])}), names).step
    assert isinstance(step, End) and step.phase == "failed"


@pytest.mark.parametrize("since", [NOW - 1000, NOW - EARLY - 1])
def test_a_job_that_ran_waits_wherever_it_fails(since: int) -> None:
    reports = {"n1": cannot(2), "n2": cannot(1)}
    job = trained(reports, since=since) if since == NOW - 1000 else first(reports, since=since)
    step = take(job).step
    assert isinstance(step, End) and step.phase == "holding" and step.setbacks == remembered("n1", "n2")

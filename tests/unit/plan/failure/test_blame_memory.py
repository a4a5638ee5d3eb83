"""A worker that the kernel killed for want of memory: whether its pod had more than its share, and what that costs."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord, Setback
from nodeagent.model.jobspec import Policy
from nodeagent.model.node import NodeRecord
from nodeagent.model.world import AloneRestart, PodReport, Starved, WorkerExit
from nodeagent.plan.failure.blame import MOST_MEMORY, memory_share, within_share
from nodeagent.plan.failure.budget import restarts_spent
from nodeagent.plan.failure.faults import find_fault
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes.setbacks import LONGEST, doubtful, left_out
from nodeagent.plan.pods.report import with_crowd
from nodeagent.plan.steps import End, Propose
from tests.unit.plan.build import (
    NOW,
    WALL,
    failed,
    life,
    make_cluster,
    make_exit,
    make_generation,
    make_job,
    make_node,
    make_spec,
)

GB = 10**9
FULL = "memory was full, and its pod held 3.0 GB of 16.0 GB, within its share of 8.0 GB"


def killed(rank: int = 0, held: int = 3, total: int = 16) -> WorkerExit:
    exited = make_exit(rank, signal=9, error="nodeagent: out of memory: the kernel killed 1 process(es) of this pod")
    return exited.model_copy(update={"starved": Starved(held=held * GB, total=total * GB)})


def crowd(*exits: WorkerExit, seq: int = 1) -> PodReport:
    """Of a pod with half of its node."""
    report = with_crowd(failed(*(exits or (killed(),)), seq=seq), 0.5)
    assert report is not None
    return report


@pytest.mark.parametrize(
    ("node", "devices", "share"),
    [
        (make_node("n1", slots=4), ["cpu0"], 0.25),
        (make_node("n1", slots=4), ["cpu0", "cpu1", "cpu2", "cpu3"], MOST_MEMORY),
        (make_node("n1", slots=8, gpus=4), ["GPU-n1-0"], 0.25),
        (make_node("n1", slots=8, gpus=4), ["cpu7"], 0.125),
        (make_node("n1", slots=8, gpus=4), ["GPU-n1-0", "cpu0", "cpu1", "cpu2", "cpu3"], 0.5),
        (make_node("n1", slots=4, gpus=4, sick=[1, 2, 3]), ["GPU-n1-0"], 0.25),
        (make_node("n1", slots=0), ["cpu0"], 0.0),
    ],
)
def test_the_share_of_the_memory_is_that_of_the_devices(node: NodeRecord, devices: list[str], share: float) -> None:
    assert memory_share(node.facts, devices) == share


@pytest.mark.parametrize(("held", "words"), [(3, FULL), (8, FULL.replace("3.0", "8.0")), (9, "")])
def test_a_pod_within_its_share_is_not_at_fault(held: int, words: str) -> None:
    assert within_share(Starved(held=held * GB, total=16 * GB), 0.5) == words
    assert within_share(None, 0.5) == ""


def test_only_the_worker_that_counts_on_its_node_is_looked_at() -> None:
    assert crowd().crowded == FULL
    assert crowd(make_exit(1, code=1), killed()).crowded == FULL, "who was killed counts before who failed"
    assert crowd(make_exit(1, signal=9), killed().model_copy(update={"order": 1})).crowded == ""
    assert with_crowd(PodReport(state="succeeded"), 0.5) == PodReport(state="succeeded")
    assert with_crowd(None, 0.5) is None


def running(reports: dict[str, PodReport], **more: object) -> JobRecord:
    return make_job("running", make_generation(["n1", "n2"], reports=reports), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reports", "kind", "counts"),
    [
        ({"n1": crowd()}, "crowded", False),
        ({"n1": crowd(killed(held=9))}, "worker_failed", True),
        ({"n1": crowd(seq=2), "n2": failed(make_exit(1, signal=9), seq=1)}, "worker_failed", True),
        ({"n1": crowd(), "n2": failed(make_exit(1, signal=9), seq=2)}, "crowded", False),
        ({"n1": crowd(seq=2), "n2": failed(make_exit(1, code=1), seq=1)}, "crowded", False),
    ],
)
def test_what_it_costs(reports: dict[str, PodReport], kind: str, counts: bool) -> None:
    spec = make_spec(policies=(Policy(on=("WorkerFailed",), exit_code=137, do="RestartJob"),))
    job = running(reports, spec=spec)
    fault = find_fault(make_cluster(["n1", "n2"], job), job, WALL)
    assert fault is not None and (fault.cause.kind, fault.spend.counts, fault.fail) == (kind, counts, "")
    if kind == "crowded":
        assert fault.cause.text.startswith("rank 0 on n1 failed first: SIGKILL (9), out of memory")
        assert fault.cause.text.endswith(f"; {FULL}: it costs no restart")


def test_a_worker_that_is_started_again_alone_costs_nothing_either() -> None:
    one = AloneRestart(rank=0, order=0, at=NOW, exit=137, text="rank 0 failed")
    free = one.model_copy(update={"crowded": True, "order": 1})
    job = running({"n1": PodReport(state="running", alone=(one, free, free), seq=1)})
    assert restarts_spent(job, NOW) == 1


def test_the_job_remembers_the_node_and_takes_others_first() -> None:
    job = running({"n1": crowd()})
    step = decide(make_cluster(["n1", "n2", "n3"], job), job, WALL).step
    assert isinstance(step, End)
    assert (step.phase, step.delay_ms, step.spend is not None and step.spend.counts) == ("holding", 0, False)
    assert step.setbacks == (Setback(node="n1", kind="crowded", life=life("n1"), times=1, at=NOW),)
    held = make_job("holding", make_generation(["n1", "n2"], state="ended"), target=2)
    held = held.model_copy(update={"setbacks": step.setbacks})
    assert doubtful(held) == {"n1"}
    cluster = make_cluster(["n1", "n2", "n3"], held)
    assert left_out(held, cluster.nodes, NOW) == {}, "it may not start without it: it is tried again at once"
    again = decide(cluster, held, WALL).step
    assert isinstance(again, Propose) and sorted(again.members) == ["n2", "n3"]


def test_a_node_whose_memory_is_full_again_and_again_is_left_out_for_longer_each_time() -> None:
    """Else the job would lose its workers there for ever, at no cost. That it acknowledges is no proof."""
    waits, at = [], NOW
    times: tuple[Setback, ...] = ()
    for _ in range(9):
        job = running({"n1": crowd()}).model_copy(update={"setbacks": times})
        step = decide(make_cluster(["n1", "n2"], job, served=at), job, WALL).step
        assert isinstance(step, End) and step.setbacks is not None
        times = step.setbacks
        held = make_job("holding", make_generation(["n1", "n2"], state="ended"))
        held = held.model_copy(update={"setbacks": times})
        found = left_out(held, make_cluster(["n1", "n2"], held, served=at).nodes, at)
        waits.append((found["n1"][1] - at) // 1000 if found else 0)
        at += 1000 * waits[-1] + 1
    assert waits == [0, 60, 120, 240, 480, 960, 1920, LONGEST, LONGEST]


def test_it_is_forgotten_once_nothing_happened_for_twice_as_long() -> None:
    one = Setback(node="n1", kind="crowded", life=life("n1"), times=3, at=NOW)
    job = make_job("running", make_generation(["n1", "n2"]), target=2, restart=1).model_copy(
        update={"setbacks": (one,)}
    )
    for served, kept in ((NOW + int(2000 * LONGEST) - 1, None), (NOW + int(2000 * LONGEST), ())):
        step = decide(make_cluster(["n1", "n2"], job, served=served), job, WALL).step
        assert isinstance(step, Propose) and step.setbacks == kept

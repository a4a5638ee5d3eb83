"""A gang that was stopped on purpose starts in a smaller domain than it was in, if nothing is lost by that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.model.constraints import Constraints, Match
from nodeagent.model.job import Checkpoint, Desired, JobRecord, Phase
from nodeagent.model.jobspec import JobSpec, Nodes, Role
from nodeagent.model.world import Place, PodReport
from nodeagent.plan.job.gang import decide
from tests.unit.plan.build import PREPARING, WALL, WARMING, make_cluster, make_exit, make_generation, make_job
from tests.unit.plan.build import make_spec as spec_of
from tests.unit.plan.test_constrained import chosen, node, preparing, racks, starts_on

WRITTEN_OUT = "ckpt-000003-step-40-g1-snapshot"
LEFT = PodReport(state="left", exits=(make_exit().model_copy(update={"left_at": 40, "saved_in": 0.1}),))
KILLED = PodReport(state="left", exits=(make_exit().model_copy(update={"overdue": 30.0}),))
SCATTERED = racks(a1="n1 n2", b1="n3 n4")


def stopped(
    phase: Phase = "holding",
    nodes: tuple[str, ...] = ("n1", "n3"),
    *,
    spec: JobSpec | None = None,
    planned: bool = True,
    desired: Desired = "run",
    name: str = WRITTEN_OUT,
    step: int = 40,
    reports: PodReport | None = None,
) -> JobRecord:
    """Its generation 1 ran on these nodes, and has ended."""
    job = make_job(
        phase, make_generation(nodes, state="ended", planned=planned), spec=spec or spec_of(size=(2, 2)), active=1,
        desired=desired, last_reports=dict.fromkeys(nodes, reports) if reports is not None else None,
    )  # fmt: skip
    saved = Checkpoint(name=name, step=step, number=1, order=3) if name else None
    return job.model_copy(update={"checkpoint": saved})


@pytest.mark.parametrize("phase", ["holding", "queued", "paused"])
def test_it_starts_in_the_smallest_domain_that_is_ready(phase: Phase) -> None:
    job = stopped(phase)
    cluster = make_cluster(SCATTERED, job)
    assert starts_on(cluster, job) == ["n1", "n2"]
    step = decide(cluster, job, WALL).step
    assert step is not None
    assert step.cause.text.endswith("its nodes are closer together now")  # type: ignore[union-attr]
    busy = make_job("running", make_generation(["n2"]), uid="u-b", spec=spec_of(name="b"))
    assert starts_on(make_cluster(SCATTERED, job, busy), job) == ["n4", "n3"], "n3 keeps its rank"


@pytest.mark.parametrize(
    "job",
    [
        stopped(planned=False),
        stopped(name=""),
        stopped(name="mine"),
        stopped(name="mine", reports=KILLED),
        stopped(name="mine", step=39, reports=LEFT),
        stopped().model_copy(update={"checkpoint": Checkpoint(name=WRITTEN_OUT, step=40, number=0, order=3)}),
    ],
    ids=["a fault", "no checkpoint", "no word", "not all saved", "older than its last step", "of another generation"],
)
def test_it_stays_where_its_memory_may_be_all_that_has_its_last_steps(job: JobRecord) -> None:
    cluster = make_cluster(SCATTERED, job)
    assert starts_on(cluster, job) == ["n1", "n3"]
    assert "closer" not in decide(cluster, job, WALL).why[0]


def test_it_moves_if_each_worker_left_after_a_step_that_is_saved() -> None:
    job = stopped(name="mine", reports=LEFT)
    assert starts_on(make_cluster(SCATTERED, job), job) == ["n1", "n2"]


def test_what_still_stops_or_runs_does_not_move() -> None:
    job = stopped()
    assert job.generation is not None
    stopping = job.model_copy(
        update={"generation": make_generation(["n1", "n3"], state="ended", planned=True, holders=["n1"])}
    )
    assert chosen(make_cluster(SCATTERED, stopping), stopping) == ["n1", "n3"]
    runs = job.model_copy(update={"phase": "running", "generation": make_generation(["n1", "n3"])})
    assert decide(make_cluster(SCATTERED, runs), runs, WALL).step is None


def test_it_waits_for_no_domain_and_for_no_node_that_is_still_warming_up() -> None:
    job = stopped()
    for state in (PREPARING, WARMING, None):
        late = [*racks(a1="n1", b1="n3"), node("n2", "a1", ready=state), node("n4", "b1", ready=state)]
        assert starts_on(make_cluster(late, job), job) == ["n1", "n3"]


def test_it_moves_for_a_smaller_domain_alone() -> None:
    job = stopped(nodes=("n1", "n2"))
    assert chosen(make_cluster(racks(a1="n1 n2 n5", b1="n3 n4"), job), job) == ["n1", "n2"]
    apart = stopped()
    assert chosen(make_cluster(racks(a1="n1", a2="n2", b1="n3"), apart), apart) == ["n1", "n2"]  # one zone
    assert chosen(make_cluster(racks(a1="n1", b1="n3", c1="n4"), apart), apart) == ["n1", "n3"]
    plain = [node(n) for n in ("n1", "n2", "n3", "n4")]
    assert chosen(make_cluster(plain, apart), apart) == ["n1", "n3"]


def test_nor_to_become_smaller_nor_away_from_nodes_that_it_prefers() -> None:
    three = stopped(nodes=("n1", "n2", "n3"), spec=spec_of(size=(2, 3)))
    assert chosen(make_cluster(racks(a1="n1 n2", b1="n3"), three), three) == ["n1", "n2", "n3"]
    likes = stopped(spec=spec_of(size=(2, 2), placement=Constraints(prefer=(Match(label="fast"),))))
    nodes = [node("n1", "a1", fast="1"), node("n2", "a1"), node("n3", "b1", fast="1")]
    assert chosen(make_cluster(nodes, likes), likes) == ["n1", "n3"]
    spread = stopped(spec=spec_of(size=(2, 2), placement=Constraints(spread="rack")))
    assert chosen(make_cluster(SCATTERED, spread), spread) == ["n1", "n3"]


def test_a_gang_of_roles_moves_as_well() -> None:
    def role(name: str) -> Role:
        return Role(name=name, command=("x",), nodes=Nodes(min=1, max=1, target=1), workers_per_node=1)

    job = stopped(spec=spec_of().model_copy(update={"roles": (role("x"), role("y"))}))
    assert job.generation is not None
    members = {
        n: m.model_copy(update={"places": (Place(role=r, index=0, workers=1, devices=("cpu0",)),)})
        for (n, m), r in zip(job.generation.members.items(), "xy", strict=True)
    }
    job = job.model_copy(update={"generation": job.generation.model_copy(update={"members": members})})
    assert sorted(chosen(make_cluster(SCATTERED, job), job)) == ["n1", "n2"]
    late = [*racks(a1="n1", b1="n3"), node("n2", "a1", ready=PREPARING), node("n4", "b1", ready=PREPARING)]
    assert sorted(starts_on(make_cluster(late, job), job)) == ["n1", "n3"]
    assert sorted(preparing(make_cluster(late, job), job)) == ["n1", "n2", "n3"]
    fault = make_generation(["n1", "n3"], state="ended").model_copy(update={"members": members})
    bound = job.model_copy(update={"generation": fault})
    assert sorted(chosen(make_cluster(SCATTERED, bound), bound)) == ["n1", "n3"]


def test_nodes_get_ready_where_it_would_be_closer_together() -> None:
    nodes = [*racks(a1="n1", b1="n3"), *racks(None, a1="n2", b1="n4 n5")]
    for job in (stopped(), stopped("paused", desired="pause")):
        cluster = make_cluster(nodes, job)
        assert sorted(preparing(cluster, job)) == ["n1", "n2", "n3"]
    kept = stopped("paused", desired="pause", name="")
    assert sorted(preparing(make_cluster(nodes, kept), kept)) == ["n1", "n3"]
    near = stopped("paused", ("n4", "n5"), desired="pause")
    assert preparing(make_cluster(racks(b1="n3 n4 n5", a1="n1"), near), near) == ["n4", "n5"]


def test_where_nodes_get_ready_already_others_do_not() -> None:
    job = stopped("paused", desired="pause")
    nodes = [*racks(a1="n1", b1="n3"), node("n2", "a1", ready=None), node("n4", "b1", ready=PREPARING)]
    assert preparing(make_cluster(nodes, job), job) == ["n1", "n3", "n4"]
    gone = replace(make_cluster(nodes, job), lapsed=frozenset({"n4"}))
    assert sorted(preparing(gone, job)) == ["n1", "n2", "n3"]

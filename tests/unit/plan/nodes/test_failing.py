"""Nodes on which job after job fails: which they are, that they are taken last, and that people are shown them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.model.job import JobRecord, Phase
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.findings.cluster import judge_cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes.failing import failing_nodes
from nodeagent.plan.nodes.health import worn_nodes
from nodeagent.plan.steps import Propose
from tests.unit.plan.build import NOW, WALL, make_cluster, make_generation, make_job, make_spec, spend


def ended(
    i: int, node: str = "n1", *, owner: int = 1, phase: Phase = "failed", after: int = 2000, restarts: int = 0,
    kind: str = "worker_failed",
) -> JobRecord:  # fmt: skip
    """The i-th job of the cluster, so long (ms) after its start."""
    at = NOW - 600_000 + 10_000 * i
    entry = spend(kind, at=at).model_copy(update={"node": node})
    job = make_job(
        phase, make_generation([node], state="ended"), uid=f"u-{i}", owner=owner, since=at, active=1, restarts=restarts,
        budget={"1": entry} if phase == "failed" else {}, spec=make_spec(name=f"j{i}"),
    )  # fmt: skip
    return job.model_copy(update={"first_active": at - after})


def bad(*jobs: JobRecord) -> set[str]:
    return set(failing_nodes(make_cluster(["n1", "n2"], *jobs)))


ROW = ended(1), ended(2, owner=2), ended(3)


def test_three_in_a_row_of_different_users() -> None:
    assert bad(*ROW) == {"n1"}
    assert not bad(*ROW[:2])
    assert not bad(*ROW[:2], ended(3, "n2"))


@pytest.mark.parametrize(
    "other",
    [
        ended(3, after=40_000),
        ended(3, restarts=2),
        ended(3, kind="node_lost"),
        ended(3, phase="stopped"),
        ended(3, phase="succeeded"),
        ended(4, phase="succeeded"),
    ],
)
def test_another_end_is_no_part_of_it_and_a_success_ends_it(other: JobRecord) -> None:
    jobs = ROW if other.uid == "u-4" else ROW[:2]
    assert not bad(*jobs, other)


def test_one_command_of_one_user_may_be_wrong_unless_it_works_elsewhere() -> None:
    own = ended(1), ended(2), ended(3)
    assert not bad(*own)
    assert bad(*own, ended(4, "n2", phase="succeeded")) == {"n1"}
    assert not bad(*own, ended(0, phase="succeeded")), "here it worked"


def test_such_a_node_is_taken_last() -> None:
    job = make_job(spec=make_spec(size=(1, 1)))
    cluster = make_cluster(["n1", "n2"], job, *ROW)
    assert worn_nodes(cluster) == {"n1"}
    step = decide(cluster, job, WALL).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n2"]
    alone = make_cluster(["n1"], job, *ROW)
    step = decide(alone, job, WALL).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n1"], "where there is no other"


def findings(cluster: Cluster) -> list[tuple[str, str]]:
    return [(found.what, found.fix) for where, found in judge_cluster(cluster, {}, {}) if where == "node/n1"]


def test_doctor_names_it_and_what_to_do_unless_something_has_been_running_there_for_a_while() -> None:
    cluster = make_cluster(["n1", "n2"], *ROW)
    assert findings(cluster) == [
        (
            "the last 3 jobs here failed within 30 s of their start: j1, j2, j3; it is taken last",
            "nodeagentctl describe j3; nodeagentctl cordon n1 --reason TEXT; nodeagentctl diag n1",
        )
    ]
    runs = make_job("running", make_generation(["n1"], since=NOW - 31_000), uid="u-9")
    assert not findings(make_cluster(["n1", "n2"], *ROW, runs))
    assert not findings(replace(cluster, lapsed=frozenset({"n1"})))


def test_it_is_worked_out_once_for_the_same_jobs() -> None:
    cluster = make_cluster(["n1", "n2"], *ROW)
    found = failing_nodes(cluster)
    other = replace(cluster, jobs={**cluster.jobs, "u-8": make_job(uid="u-8")})
    assert failing_nodes(cluster) is found is failing_nodes(other)

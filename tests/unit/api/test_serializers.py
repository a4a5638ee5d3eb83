"""Which pods a job shows: those of its newest generation, not what the store still keeps of nodes that left it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from nodeagent.api.jobpods import WorkersTime
from nodeagent.api.serializers import job_json, lent_json, pods_json, shown_to
from nodeagent.ctl.get import COLUMNS
from nodeagent.model.node import Incarnation, NodeFacts, NodeRecord
from nodeagent.model.pod import PodPhase, PodState, WorkerState
from nodeagent.model.world import PodReport
from nodeagent.plan.cluster import Cluster
from tests.unit.api.test_jobdetail_generations import GENERATION, RECORD
from tests.unit.plan.build import make_holder


def node(name: str) -> NodeRecord:
    facts = NodeFacts(
        address="10.0.0.1", hostname=name, boot_id="b", agent_pid=1, agent_version="0", started=0.0, cpu_slots=2
    )
    return NodeRecord(id=name, incarnation=Incarnation(life="l", start=1), joined=0, facts=facts)


def pod(name: str, generation: int, state: Literal["running", "exited"]) -> PodState:
    worker = WorkerState(rank=0, local_rank=0, pid=9, state=state)
    return PodState(
        uid="u1", job="digits", role="worker", node=name, phase="running", generation=generation, workers=(worker,)
    )


CLUSTER = Cluster(served=0, nodes={n: node(n) for n in ("n1", "n2", "n3", "n4")}, lapsed=frozenset({"n4"}))
PUBLISHED = {
    "n1": pod("n1", 2, "running"),
    "n2": pod("n2", 1, "running"),
    "n3": pod("n3", 1, "exited"),
    "n4": pod("n4", 1, "exited"),
}


def test_a_node_that_left_the_gang_is_not_in_it_whatever_the_store_still_keeps() -> None:
    gang, spares = pods_json(RECORD, CLUSTER, PUBLISHED, away=False)
    assert [p["node"] for p in gang] == ["n1"]
    assert [p["node"] for p in spares] == ["n3"], "n2 runs nothing any more, n4 is silent"


def test_time_is_shown_to_a_tenth_of_a_second() -> None:
    shown = {"state": "lease", "node": "n1", "left": 1.2, "why": ""}
    assert lent_json(WorkersTime("lease", "n1", 1.24, "")) == shown
    assert lent_json(None) is None


def test_a_node_that_is_still_stopping_is_shown() -> None:
    generation = GENERATION.model_copy(update={"holders": {"n2": make_holder("n2", "l")}})
    gang, _ = pods_json(RECORD.model_copy(update={"generation": generation}), CLUSTER, PUBLISHED, away=False)
    assert [(p["node"], p["generation"]) for p in gang] == [("n1", 2), ("n2", 1)]


@pytest.mark.parametrize(
    ("phase", "of", "shown"),
    [
        ("exited", 1, ("preparing", 2)),
        ("exited", 2, ("exited", 2)),
        ("stopping", 1, ("stopping", 1)),
        ("stuck", 1, ("stuck", 1)),
        ("ready", 0, ("ready", 0)),
    ],
)
def test_that_workers_of_an_older_generation_have_ended_ends_none_of_this_one(
    phase: PodPhase, of: int, shown: tuple[str, int]
) -> None:
    """After a scale-out ``get`` left out the chief for a moment."""
    older = PUBLISHED["n1"].model_copy(update={"phase": phase, "generation": of})
    row = job_json(RECORD, CLUSTER, {"n1": older}, 0.0)
    assert [(pod["phase"], pod["generation"]) for pod in row["pods"]] == [shown]
    (nodes,) = (column.cell(row) for column in COLUMNS if column.title == "NODE")
    assert (nodes == "n1") == (shown[0] != "exited")


def test_workers_of_a_pod_that_succeeded_have_exited_0() -> None:
    """Its report does not list them."""
    generation = GENERATION.model_copy(update={"reports": {"n1": PodReport(state="succeeded")}})
    (pod, *_), _ = pods_json(RECORD.model_copy(update={"generation": generation}), CLUSTER, {}, away=False)
    assert (pod["phase"], [(w["state"], w["exit"]) for w in pod["workers"]]) == ("exited", [("exited", 0)])
    generation = generation.model_copy(update={"state": "ended", "reports": {}})
    over = RECORD.model_copy(
        update={"generation": generation, "last_number": 2, "last_reports": {"n1": PodReport(state="succeeded")}}
    )
    (pod, *_), _ = pods_json(over, CLUSTER, {}, away=False)
    assert [(w["state"], w["exit"]) for w in pod["workers"]] == [("exited", 0)]


def test_the_duration_is_the_time_that_it_had_its_nodes() -> None:
    """As for its time limit: neither a pause nor a wait counts, nor what came before its first start."""
    times = {"submitted": 1.0, "started": 101.0, "first_active": 100_000, "since": 110_000, "ran": 10_000}
    paused = RECORD.model_copy(update={"phase": "paused", **times})
    assert job_json(paused, replace(CLUSTER, served=900_000), {}, 901.0)["duration"] == 10.0
    again = paused.model_copy(update={"phase": "running", "since": 890_000})
    assert job_json(again, replace(CLUSTER, served=900_000), {}, 901.0)["duration"] == 20.0
    over = paused.model_copy(update={"phase": "stopped", "ended": 901.0})
    assert job_json(over, replace(CLUSTER, served=990_000), {}, 991.0)["duration"] == 10.0
    assert job_json(paused.model_copy(update={"first_active": None}), CLUSTER, {}, 901.0)["duration"] is None


def test_what_a_command_of_a_job_printed_is_for_those_who_may_see_the_job() -> None:
    answer = "ready db.0 failed with exit code 3: the password is wrong: s3cret"
    other = "working_dir /w is missing"
    pods = [{"reason": reason} for reason in (answer, other, "")]
    row = {"outcome": None, "pods": pods, "spares": pods[:1]}
    hidden = shown_to(row, seen=False)
    assert [pod["reason"] for pod in hidden["pods"]] == ["ready db.0 failed with exit code 3", other, ""]
    assert hidden["spares"] == [{"reason": "ready db.0 failed with exit code 3"}]
    assert shown_to(row, seen=True)["pods"][0]["reason"] == answer

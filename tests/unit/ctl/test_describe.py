"""What ``describe`` says of a node, and what to do next, where something is wrong with it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nodeagent.api.jobdetail import node_setbacks
from nodeagent.api.serializers import node_json
from nodeagent.ctl.describe import node_lines
from nodeagent.model.job import Setback
from nodeagent.model.node import Readiness
from nodeagent.plan.cluster import Cluster
from tests.unit.plan.build import NOW, UID, life, make_cluster, make_generation, make_job, make_node

FIT = "nothing is wrong"
RECHECKED = "correct what Cannot run says; the checks are made again by themselves"


def setback(node: str, times: int = 1) -> Setback:
    return Setback(node=node, kind="unanswered", life=life(node), times=times, at=NOW)


def seen(ready: Readiness | None = None, *setbacks: Setback) -> Cluster:
    """Three seconds after a job has gone on without these nodes."""
    job = make_job("running", make_generation(["n1"]), target=3).model_copy(update={"setbacks": setbacks})
    nodes = [make_node("n1"), make_node("n2"), make_node("n3", ready={} if ready is None else {UID: ready})]
    return make_cluster(nodes, job, served=NOW + 3000)


def shown(cluster: Cluster, node: str = "n3") -> dict[str, Any]:
    """As the route gives it."""
    found = node_json(cluster.nodes[node], cluster, time.time())
    return found | {"unreachable": [], "setbacks": node_setbacks(node, cluster), "store_away_since": None}


def next_step(cluster: Cluster, **more: Any) -> str:
    return node_lines(shown(cluster) | more)[-1].removeprefix("Next:").strip()


@pytest.mark.parametrize(("state", "step"), [("ready", FIT), ("preparing", FIT), ("unfit", RECHECKED)])
def test_who_cannot_run_a_job_is_not_well(state: Any, step: str) -> None:
    cluster = seen(Readiness(state=state, reason="/w: Read-only file system"))
    assert next_step(cluster) == step
    assert (f"  {UID}: /w: Read-only file system" in node_lines(shown(cluster))) == (state == "unfit")


def test_who_is_left_out_by_a_job_is_not_well_and_is_tried_again() -> None:
    cluster = seen(None, setback("n3", 2), setback("n2", 3))
    lines = node_lines(shown(cluster))
    at = lines.index("Left out:")
    assert lines[at + 1] == (
        "  by job a: it did not acknowledge a generation in time twice in a row; tried again in 117s"
    )
    assert next_step(cluster) == (
        "nothing: job a tries this node again in 117s; what went wrong: nodeagentctl describe job/a"
    )
    assert "Left out:" not in node_lines(shown(cluster, "n1")) and next_step(seen(None, setback("n2"))) == FIT


def test_of_two_jobs_the_one_that_tries_it_first_is_named() -> None:
    rows = [{"job": "a", "text": "was lost", "left": 90.0}, {"job": "b", "text": "was lost", "left": 7.0}]
    assert "job b tries this node again in 7s" in next_step(seen(), setbacks=rows)


@pytest.mark.parametrize("node", ["n1", "n3"])
def test_an_agent_without_its_store_calls_nobody_well(node: str) -> None:
    lines = node_lines(shown(seen(), node) | {"store_away_since": 1_700_000_000.0})
    assert "get the store to answer the agent that was asked" in lines[-1]

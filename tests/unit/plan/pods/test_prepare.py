"""Who keeps a pod of a job ready before it is needed."""

from __future__ import annotations

import pytest

from nodeagent.model.node import NodeRecord, Readiness
from nodeagent.plan.pods.prepare import should_prepare
from tests.unit.plan.build import (
    PREPARING,
    READY,
    UID,
    UNFIT,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)


def test_members_the_missing_and_one_spare_keep_a_pod() -> None:
    job = make_job("running", make_generation(["n1", "n2"]), target=3)
    cluster = make_cluster(["n1", "n2", "n10", "n4", "n3", make_node("n5", cordon=True)], job)
    assert [n for n in cluster.nodes if should_prepare(cluster, job, n)] == ["n1", "n2", "n4", "n3"]
    full = make_job("running", make_generation(["n1", "n2"]), target=2)
    assert [n for n in cluster.nodes if should_prepare(cluster, full, n)] == ["n1", "n2", "n3"]


@pytest.mark.parametrize("begun", [READY, PREPARING])
def test_a_spare_is_kept_when_a_node_of_a_lower_name_comes(begun: Readiness) -> None:
    """Otherwise its fork server is thrown away, and the job has none until the other one is warm."""
    job = make_job("running", make_generation(["n2"]), target=1)
    came, spare = make_node("n1", ready={}), make_node("n3", ready={UID: begun})
    cluster = make_cluster([came, "n2", spare], job)
    assert [n for n in cluster.nodes if should_prepare(cluster, job, n)] == ["n2", "n3"]
    wider = make_job("running", make_generation(["n2"]), target=2)
    assert [n for n in cluster.nodes if should_prepare(cluster, wider, n)] == ["n1", "n2", "n3"]


def test_of_those_who_have_begun_the_ready_one_stays() -> None:
    job = make_job("running", make_generation(["n2"]), target=1)
    cluster = make_cluster([make_node("n1", ready={UID: PREPARING}), "n2", "n3"], job)
    assert [n for n in cluster.nodes if should_prepare(cluster, job, n)] == ["n2", "n3"]


def test_the_verdict_of_an_unfit_node_is_kept_and_the_next_is_asked() -> None:
    """Otherwise the node would forget it, be asked again, and so on for ever."""
    job = make_job(spec=make_spec(size=(1, 1)))
    nodes = [make_node("n1", ready={UID: UNFIT}), *(make_node(f"n{i}", ready={}) for i in (2, 3, 4))]
    cluster = make_cluster(nodes, job)
    assert [n for n in cluster.nodes if should_prepare(cluster, job, n)] == ["n1", "n2", "n3"]


@pytest.mark.parametrize("within", ["", "rack"])
def test_the_others_judge_a_job_too_that_has_no_room_since_a_check_failed(within: str) -> None:
    """One node may fail its check before another has begun with it: the job must not wait for ever for that reason."""
    job = make_job(spec=make_spec(size=(2, 2), within=within))
    for state in ({}, {UID: PREPARING}, {UID: READY}):  # whatever it says, its pod stays: else it would come and go
        nodes = [make_node(f"n{i}", ready=r, labels={"rack": "r"}) for i, r in ((1, state), (2, {UID: UNFIT}))]
        cluster = make_cluster(nodes, job)
        assert [n for n in cluster.nodes if should_prepare(cluster, job, n)] == ["n1", "n2"]


def test_nobody_prepares_what_shall_not_run() -> None:
    cluster = make_cluster(["n1"])
    for job in (make_job("failed"), make_job(desired="pause"), make_job(desired="stop")):
        assert not should_prepare(cluster, job, "n1")


def test_a_job_takes_the_spare_that_fewest_others_have() -> None:
    """A node keeps two standbys: were the first one the spare of all jobs, the third would never have any."""
    job = make_job("running", make_generation(["n1"]), target=1)
    two, one = {"u-x": READY, "u-y": PREPARING}, {"u-x": READY}
    others = [make_node("n2", ready=two), make_node("n3", ready=one), make_node("n4", ready=one)]
    cluster = make_cluster(["n1", *others], job)
    assert [n for n in cluster.nodes if should_prepare(cluster, job, n)] == ["n1", "n3"]


def test_a_spare_that_has_begun_is_kept_though_others_have_it_too() -> None:
    job = make_job("running", make_generation(["n1"]), target=1)
    crowded = {"u-x": READY, "u-y": READY, UID: PREPARING}
    cluster = make_cluster(["n1", make_node("n2", ready=crowded), make_node("n3", ready={})], job)
    assert [n for n in cluster.nodes if should_prepare(cluster, job, n)] == ["n1", "n2"]


def test_nodes_that_are_needed_are_chosen_by_their_order_and_only_the_spare_by_its_load() -> None:
    """Where the job grows is placement's business: it must not change with who else is ready there."""
    job = make_job("running", make_generation(["n1"]), target=2)
    busy = {"u-x": READY}
    nodes: list[NodeRecord | str] = [
        "n1",
        make_node("n2", ready=busy),
        make_node("n3", ready=busy),
        make_node("n4", ready={}),
    ]
    cluster = make_cluster(nodes, job)
    assert [n for n in cluster.nodes if should_prepare(cluster, job, n)] == ["n1", "n2", "n4"]

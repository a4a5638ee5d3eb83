"""Placement: all or nothing, survivors first, never a device twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord, Readiness
from nodeagent.plan.job.proposal import make_world, place
from nodeagent.plan.placing.placement import Placement
from tests.unit.plan.build import (
    PREPARING,
    READY,
    REPEATABLE,
    UID,
    UNFIT,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)


def names(placement: Placement) -> list[str]:
    return [c.node for c in placement.chosen]


def test_up_to_the_target_in_natural_order() -> None:
    job = make_job(spec=make_spec(size=(2, 8)), target=3)
    placement = place(make_cluster(["n10", "n2", "n1", "n9"], job), job)
    assert names(placement) == ["n1", "n2", "n9"]
    assert placement.fits


def test_below_min_nothing_fits_and_every_reason_is_named() -> None:
    job = make_job(spec=make_spec(size=(4, 4)))
    nodes: list[NodeRecord | str] = [
        "n1",
        make_node("n2", cordon=True),
        make_node("n3", ready={UID: UNFIT}),
        make_node("n4", ready={UID: PREPARING}),
        make_node("n5", slots=0),
        make_node("n6", left=True),
    ]
    placement = place(make_cluster(nodes, job), job)
    assert not placement.fits
    assert placement.missing == (
        "needs 4 nodes, 1 fit: n2 is cordoned (disk); n3 cannot run it: /shared/x is missing; "
        "n4 is getting ready (imports torch); n5 has 0 free worker slots, 1 needed; n6 has left"
    )
    assert [c.node for c in placement.pending] == ["n4"]


def test_a_long_list_of_reasons_is_cut() -> None:
    job = make_job(spec=make_spec(size=(4, 4)))
    placement = place(make_cluster([make_node(f"n{i}", cordon=True) for i in range(11)], job), job)
    assert placement.missing.endswith("; and 3 more")


def test_without_any_node() -> None:
    job = make_job(spec=make_spec(size=(2, 2)))
    assert place(make_cluster([], job), job).missing == "needs 2 nodes, 0 fit: no node has joined"


def test_survivors_come_first_by_rank_and_the_highest_ranks_go_first() -> None:
    job = make_job("running", make_generation(["n9", "n5", "n7"]), target=2)
    cluster = make_cluster(["n1", "n5", "n7", "n9"], job)
    assert names(place(cluster, job)) == ["n9", "n5"]
    assert names(place(make_cluster(["n1", "n5", "n7", "n9"], job, lapsed=["n9"]), job)) == ["n5", "n7"]


def test_a_member_keeps_its_place_while_it_gets_ready_again_but_not_when_cordoned() -> None:
    job = make_job("running", make_generation(["n1", "n2"]), target=2)
    nodes: list[NodeRecord | str] = [make_node("n1", ready={UID: PREPARING}), make_node("n2", cordon=True), "n3"]
    assert names(place(make_cluster(nodes, job), job)) == ["n1", "n3"]


def test_without_leaves_out_members_and_others() -> None:
    job = make_job("running", make_generation(["n1", "n2"]), target=4)
    assert names(place(make_cluster(["n1", "n2", "n3", "n4"], job), job, without=["n2", "n3"])) == ["n1", "n4"]


def test_two_jobs_share_nodes_without_colliding() -> None:
    first = make_job("running", make_generation(["n1", "n2"], workers=3), uid="u-1", spec=make_spec(workers=3))
    second = make_job(spec=make_spec(workers=2, name="b"))
    cluster = make_cluster([make_node("n1", slots=4), make_node("n2", slots=5)], first, second)
    placement = place(cluster, second)
    assert names(placement) == ["n2"]
    assert placement.chosen[0].devices == ("cpu3", "cpu4")


WORKERS: list[int | str] = [1, 2, "gpu"]
READINESS = st.sampled_from([READY, READY, READY, PREPARING, UNFIT])


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[NodeRecord], list[JobRecord]]:
    jobs = [
        make_job(
            uid=f"u{i}",
            spec=make_spec(
                name=f"j{i}",
                size=(low := draw(st.integers(1, 3)), low + draw(st.integers(0, 2))),
                workers=draw(st.sampled_from(WORKERS)),
                gpus=draw(st.sampled_from([None, 0, 1, 2])),
                uneven=draw(st.booleans()),
            ),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    nodes = []
    for i in range(draw(st.integers(0, 6))):
        gpus = draw(st.sampled_from([0, 0, 2, 4]))
        ready: dict[str, Readiness] = {j.uid: draw(READINESS) for j in jobs}
        nodes.append(
            make_node(
                f"n{i}",
                slots=draw(st.integers(0, 6)),
                gpus=gpus,
                sick=draw(st.sets(st.integers(0, 3))),
                ready=ready,
                cordon=draw(st.sampled_from([False, False, False, True])),
            )
        )
    return nodes, jobs


@REPEATABLE
@given(clusters())
def test_jobs_placed_one_after_another_never_share_a_device(drawn: tuple[list[NodeRecord], list[JobRecord]]) -> None:
    nodes, jobs = drawn
    facts = {n.id: n.facts for n in nodes}
    taken: set[tuple[str, str]] = set()
    placed: list[JobRecord] = []
    for job in jobs:
        cluster = make_cluster(nodes, *placed, *jobs[len(placed) :])
        placement = place(cluster, job)
        assert len(placement.chosen) <= job.control.target
        assert {c.node for c in placement.chosen} | {c.node for c in placement.others} == set(facts)
        if placement.fits:
            members = make_world(None, placement.chosen, job.spec.role, facts, {})
            mine = [(n, d) for n, m in members.items() for d in m.devices]
            assert len(set(mine)) == len(mine)
            assert not taken & set(mine), "a device is given twice"
            assert all(d in facts[n].devices() for n, d in mine), "a device that is not there or not healthy"
            assert not any(n.cordon for n in nodes if n.id in members)
            taken |= set(mine)
            generation = make_generation([], number=1).model_copy(update={"members": members})
            job = job.model_copy(update={"phase": "running", "generation": generation})  # noqa: PLW2901 (the job as placed)
        placed.append(job)

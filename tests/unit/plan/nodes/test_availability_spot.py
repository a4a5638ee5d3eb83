"""Nodes that may be taken away: who uses them, and what a notice makes of a gang."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Notice
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.nodes.availability import SPARE
from nodeagent.plan.nodes.candidates import candidates
from nodeagent.plan.nodes.health import takes_work
from nodeagent.plan.nodes.members import needed_by, survivors
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.reservations import reserved
from nodeagent.plan.queueing.room import room_for
from nodeagent.plan.steps import End, Propose
from tests.unit.plan.build import (
    NOW,
    REPEATABLE,
    WALL,
    life,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)
from tests.unit.plan.job.test_gang_properties import clusters
from tests.unit.plan.nodes.test_availability import shifted


def chosen(cluster: Cluster, job: JobRecord) -> list[str]:
    return [c.node for c in place(cluster, job).chosen]


@pytest.mark.parametrize(
    ("size", "allow", "found"),
    [((1, 1), False, ["n2"]), ((2, 2), False, []), ((1, 2), False, ["n2", "n1"]), ((2, 2), True, ["n2", "n1"])],
)
def test_a_job_that_needs_all_its_nodes_uses_none_that_may_go(
    size: tuple[int, int], allow: bool, found: list[str]
) -> None:
    job = make_job(spec=make_spec(size=size).model_copy(update={"spot": allow}))
    placement = place(make_cluster([make_node("n1", spot=True), make_node("n2")], job), job)
    assert [c.node for c in placement.chosen if placement.fits] == found
    if not found:
        assert "n1 is a spot node, which a job that needs all its nodes uses only with spot: allow" in placement.missing


@pytest.mark.parametrize("topology", [(), ("rack",)])
def test_others_are_taken_first_but_a_member_stays(topology: tuple[str, ...]) -> None:
    nodes = [make_node(f"n{i}", spot=i == 1, topology=topology) for i in (1, 2, 3)]
    job = make_job(spec=make_spec(size=(1, 2)))
    assert sorted(chosen(make_cluster(nodes, job), job)) == ["n2", "n3"]
    runs = make_job("running", make_generation(["n1", "n2"]), spec=make_spec(size=(1, 2)))
    assert sorted(chosen(make_cluster(nodes, runs), runs)) == ["n1", "n2"]


def test_nodes_get_ready_in_the_same_order() -> None:
    job = make_job(spec=make_spec(size=(1, 2), time_limit=60), target=1)
    cluster = make_cluster([make_node("n1", spot=True, ready={}), make_node("n2", ready={})], job)
    rigid = make_job(spec=make_spec(size=(1, 1)))
    assert [node for node in cluster.nodes if should_prepare(cluster, job, node)] == ["n1", "n2"], "one is the spare"
    alone = make_cluster(cluster.nodes.values(), rigid)
    assert [node for node in alone.nodes if should_prepare(alone, rigid, node)] == ["n2"]


def test_they_are_not_given_back_to_who_would_not_use_them() -> None:
    auto = make_spec(size=(1, 2), name="b")
    role = auto.role.model_copy(update={"nodes": auto.role.nodes.model_copy(update={"auto": True, "target": 1})})
    auto = auto.model_copy(update={"roles": (role,)})
    runs = make_job("running", make_generation(["n1", "n2"]), uid="u-b", spec=auto, target=1)
    waits = make_job(spec=make_spec(size=(1, 1), workers=4), order=1)
    for spot, gives in ((True, {}), (False, {"u-b": {"n2": "u-a"}})):
        cluster = make_cluster([make_node("n1"), make_node("n2", spot=spot)], runs, waits)
        assert transfers(cluster).gives == gives


@REPEATABLE
@given(clusters(), st.lists(st.booleans(), min_size=6, max_size=6), st.sampled_from([(1, 1), (1, 3)]), st.booleans())
def test_the_room_that_is_counted_is_what_placement_would_find(
    cluster: Cluster, spot: list[bool], size: tuple[int, int], asked: bool
) -> None:
    """``asked``: nodes have looked at the jobs already."""
    nodes = {}
    for name, node in cluster.nodes.items():
        facts = node.facts.model_copy(update={"spot": spot[int(name[1:]) - 1]})
        nodes[name] = node.model_copy(update={"facts": facts, "readiness": node.readiness if asked else {}})
    jobs = {uid: shifted(job, size, None) for uid, job in cluster.jobs.items()}
    cluster = replace(cluster, nodes=nodes, jobs=jobs)
    for job in cluster.jobs.values():
        members = {m.node for m in survivors(cluster, job)}
        counted = Counter(
            "fit" if c.standing == "pending" and c.node in members else c.standing for c in candidates(cluster, job)
        )
        room = room_for(cluster, job)
        assert (room.fit, room.pending, room.unfit) == (counted["fit"], counted["pending"], counted["unfit"])


@pytest.mark.parametrize(("spot", "kept"), [(False, [["n1", "n2"]]), (True, [])])
def test_none_is_kept_for_a_gang_that_would_not_use_it(spot: bool, kept: list[list[str]]) -> None:
    """Else others would be kept off for nothing."""
    first, busy = (
        make_job(spec=make_spec(size=(2, 2))),
        make_job("running", make_generation(["n2"]), uid="u-b", order=1),
    )
    cluster = make_cluster([make_node("n1", slots=1, spot=spot), make_node("n2", slots=1)], first, busy)
    assert [sorted(one.nodes) for one in reserved(cluster).found] == kept


# --- a notice


def leaving(seconds: float) -> Notice:
    """Its own wall clock is an hour behind."""
    return Notice(until=WALL - 3600 + seconds, until_served=NOW + millis(seconds), text="to be taken away at noon UTC")


@pytest.mark.parametrize(("seconds", "grace"), [(120.0, None), (20.0, 20.0 - SPARE), (1.0, 0.0)])
def test_a_gang_leaves_by_a_planned_stop_that_ends_in_time(seconds: float, grace: float | None) -> None:
    job = make_job("running", make_generation(["n1", "n2"]), spec=make_spec(size=(1, 2)))
    cluster = make_cluster([make_node("n1", notice=leaving(seconds)), "n2"], job)
    step = decide(cluster, job, WALL).step
    assert isinstance(step, Propose)
    assert (sorted(step.members), step.planned, step.grace) == (["n2"], True, grace)
    assert (step.cause.kind, step.cause.text) == ("drain", "node n1 is to be taken away at noon UTC")
    assert step.spend is not None
    assert not step.spend.counts


@pytest.mark.parametrize(("seconds", "grace"), [(120.0, None), (20.0, 20.0 - SPARE)])
def test_a_gang_that_has_to_hold_leaves_in_time_too(seconds: float, grace: float | None) -> None:
    job = make_job("running", make_generation(["n1", "n2"]), spec=make_spec(size=(2, 2)))
    step = decide(make_cluster([make_node("n1", notice=leaving(seconds)), "n2"], job), job, WALL).step
    assert isinstance(step, End)
    assert (step.phase, step.planned, step.grace) == ("holding", True, grace)


def test_it_takes_no_work_and_says_why() -> None:
    job = make_job(spec=make_spec(size=(1, 1)))
    cluster = make_cluster([make_node("n1", notice=leaving(60))], job)
    assert not takes_work(cluster, "n1")
    assert "n1 is to be taken away at noon UTC" in place(cluster, job).missing


def test_nobody_waits_for_it_as_a_failsafe_member() -> None:
    job = make_job("running", make_generation(["n2"]), failsafe_members=["n1"])
    assert needed_by(make_cluster(["n1", "n2"], job), "n1", life("n1")) == "it is a failsafe member of job a"
    assert needed_by(make_cluster([make_node("n1", notice=leaving(60)), "n2"], job), "n1", life("n1")) == ""

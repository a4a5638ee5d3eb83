"""Maintenance windows: what they mean for the nodes of a view, and what follows for jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import NodeRecord
from nodeagent.model.window import Window, Windows
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.nodes import availability
from nodeagent.plan.nodes.availability import BRIEF, BY, MARGIN, UNLIMITED, Closing, closed, closing, takes
from nodeagent.plan.nodes.candidates import candidates
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.queueing.room import room_for
from nodeagent.plan.steps import Propose
from tests.unit.plan.build import NOW, REPEATABLE, WALL, make_cluster, make_generation, make_job, make_node, make_spec
from tests.unit.plan.job.test_gang_properties import clusters

HOUR = 3600.0
TEXT = "in maintenance from 08:00 to 09:00 UTC: kernel update (by alice)"
GRACE = 30.0
"""Of jobs that say nothing of it."""


def window(start: float, *nodes: str, seconds: float = HOUR, name: str = "w1") -> Window:
    """``start``: seconds from NOW on."""
    begin = NOW + int(start * 1000)
    return Window(
        id=name, nodes=nodes or ("n1",), start=begin, end=begin + int(seconds * 1000),
        starts=1_900_000_000.0, ends=1_900_003_600.0, by="alice", text=TEXT,
    )  # fmt: skip


def look(cluster: Cluster, *found: Window) -> Closing:
    return closing(cluster.notes, Windows(rev=1, windows=found), cluster.nodes, cluster.jobs.values(), cluster.served)


def with_windows(cluster: Cluster, *found: Window) -> Cluster:
    """The view as an agent would have it."""
    seen = look(cluster, *found)
    return replace(cluster, nodes=closed(cluster.notes, cluster.nodes, seen.nodes), windows_until=seen.until)


def later(cluster: Cluster, seconds: float) -> Cluster:
    return replace(cluster, served=cluster.served + int(seconds * 1000))


def chosen(cluster: Cluster, job: JobRecord) -> list[str]:
    return [c.node for c in place(cluster, job).chosen]


# --- what a view has in it


def test_a_node_leaves_before_its_window_begins_and_works_again_when_it_is_over() -> None:
    cluster, one = make_cluster(["n1", "n2"]), window(600)
    ahead = with_windows(cluster, one).nodes["n1"]
    assert ahead.cordon is None
    assert ahead.window is not None
    assert (ahead.window.leaves, ahead.window.left) == (False, 540_000)
    for at in (600 - MARGIN, 600, 600 + HOUR - 1):
        node = with_windows(later(cluster, at), one).nodes["n1"]
        assert node.window is not None
        assert node.cordon is not None
        assert (node.window.leaves, node.cordon.drain, node.cordon.by) == (True, True, BY)
    assert with_windows(later(cluster, 600 + HOUR), one) == later(cluster, 600 + HOUR)
    assert with_windows(cluster, one).nodes["n2"] is cluster.nodes["n2"]


def test_what_is_reported_of_it() -> None:
    (node, _) = with_windows(make_cluster(["n1", "n2"]), window(0)).nodes.values()
    assert node.cordon is not None
    assert node.cordon.reason == TEXT


def test_who_has_a_job_with_a_longer_grace_leaves_earlier() -> None:
    job = make_job("running", make_generation(["n1"]), spec=make_spec().model_copy(update={"grace": 300.0}))
    cluster, one = make_cluster(["n1", "n2"], job), window(600, "n[1-2]")
    found = look(later(cluster, 600 - MARGIN - 300), one).nodes
    assert {node: window.leaves for node, window in found.items()} == {"n1": True, "n2": False}
    assert not look(later(cluster, 600 - MARGIN - 301), one).nodes["n1"].leaves


def test_a_persons_cordon_stays_in_its_words_and_is_a_drain_meanwhile() -> None:
    cluster = make_cluster([make_node("n1", cordon=True)])
    before, during = (with_windows(cluster, window(start)).nodes["n1"].cordon for start in (600, 0))
    assert before == cluster.nodes["n1"].cordon
    assert during is not None
    assert (during.reason, during.by, during.drain) == ("disk", "op", True)


def test_of_several_windows_the_first_that_is_not_over_counts() -> None:
    cluster = make_cluster(["n1"])
    two = window(2 * HOUR, name="w2"), window(0, name="w1")
    assert look(cluster, *two).nodes["n1"].window == "w1"
    assert look(later(cluster, HOUR), *two).nodes["n1"].window == "w2"
    assert look(later(cluster, 4 * HOUR), *two) == Closing({})


@REPEATABLE
@given(st.integers(0, 3 * 86_400_000), st.integers(0, 3 * 86_400_000), st.integers(1, 86_400_000))
def test_nothing_changes_before_the_time_that_is_named(start: int, wait: int, lasts: int) -> None:
    """Whoever looks again at that time, and then only, misses nothing."""
    cluster = make_cluster(["n1"])
    one = window(start / 1000, seconds=lasts / 1000)
    now, until = NOW, 0
    while now <= NOW + wait:
        seen = look(replace(cluster, served=now), one)
        until = seen.until
        if not until:
            break
        assert until > now
        assert look(replace(cluster, served=until - 1), one) == seen
        assert look(replace(cluster, served=until), one).nodes != seen.nodes
        now = until + max(0, wait // 20 - 1)
    assert until or now >= one.end


def test_what_has_not_changed_is_the_very_same_object() -> None:
    """Else everything would be worked out anew in each round."""
    cluster, found = make_cluster(["n1", "n2"]), (window(600), window(700, "n2", name="w2"))
    record = Windows(rev=1, windows=found)
    first = look_at(cluster, record, 0)
    again = look_at(cluster, record, 30)
    assert again["n1"] is not first["n1"], "less is left"
    assert look_at(cluster, record, 30)["n1"] is again["n1"]
    moved = replace(cluster, nodes={**cluster.nodes, "n2": make_node("n2", slots=9)})
    assert look_at(moved, record, 30)["n1"] is again["n1"]


def look_at(cluster: Cluster, record: Windows, seconds: float) -> dict[str, NodeRecord]:
    found = closing(cluster.notes, record, cluster.nodes, (), later(cluster, seconds).served)
    return dict(closed(cluster.notes, cluster.nodes, found.nodes))


# --- who may start


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        (make_spec(size=(2, 2), time_limit=100), 100),
        (make_spec(size=(2, 2), time_limit=1e7), 1e7),
        (make_spec(size=(2, 2)), UNLIMITED),
        (make_spec(size=(1, 2)), BRIEF),
        (make_spec(size=(1, 2), time_limit=1e7), BRIEF),
        (make_spec(size=(1, 2), time_limit=60), 60),
    ],
)
def test_how_long_a_job_needs_a_node(spec: JobSpec, seconds: float) -> None:
    assert takes(spec) == (seconds + GRACE) * 1000


def test_who_has_left_does_not_come_back_before_the_window() -> None:
    """Whose grace is long leaves early: what is left then is time for others."""
    spec = make_spec(size=(1, 2)).model_copy(update={"grace": 3600.0})
    one, gone = window(HOUR + MARGIN), make_job("running", make_generation(["n2"]), spec=spec)
    cluster = with_windows(make_cluster(["n1", "n2"], gone), one)
    assert chosen(cluster, gone) == ["n2"]
    ended = make_job("holding", make_generation(["n1"], state="ended"), spec=spec)
    assert chosen(with_windows(make_cluster(["n1", "n2"], ended), one), ended) == ["n2"]


@pytest.mark.parametrize("holders", [(), ("n1", "n2")])
def test_a_gang_that_forms_anew_keeps_its_nodes_until_it_has_to_leave_them(holders: tuple[str, ...]) -> None:
    """``holders``: where its workers are still to end."""
    spec, one = make_spec(size=(2, 2)), window(HOUR)
    runs = make_job("running", make_generation(["n1", "n2"]), spec=spec)
    cluster = with_windows(make_cluster(["n1", "n2", "n3"], runs), one)
    assert chosen(cluster, runs) == ["n1", "n2"]
    ended = make_job("holding", make_generation(["n1", "n2"], state="ended", holders=holders), spec=spec)
    again = replace(cluster, jobs={ended.uid: ended})
    assert chosen(again, ended) == ["n2", "n3"]


@pytest.mark.parametrize(
    ("start", "limit", "size", "found"),
    [
        (4 * HOUR, HOUR, (1, 1), ["n1"]),
        (4 * HOUR, 4 * HOUR, (1, 1), ["n2"]),
        (4 * HOUR, None, (1, 1), ["n2"]),
        (UNLIMITED + 2 * HOUR, None, (1, 1), ["n1"]),
        (4 * HOUR, None, (1, 2), ["n1", "n2"]),
        (BRIEF + MARGIN, None, (1, 2), ["n2"]),
        (BRIEF + 2 * MARGIN, None, (1, 2), ["n1", "n2"]),
        (-60, HOUR, (1, 2), ["n2"]),
    ],
)
def test_a_job_starts_where_it_ends_before_the_window_or_can_go_on_without_the_node(
    start: float, limit: float | None, size: tuple[int, int], found: list[str]
) -> None:
    job = make_job(spec=make_spec(size=size, time_limit=limit))
    assert chosen(with_windows(make_cluster(["n1", "n2"], job), window(start)), job) == found


def test_a_job_that_waits_for_the_window_says_so() -> None:
    job = make_job(spec=make_spec(size=(1, 1)))
    cluster = with_windows(make_cluster(["n1"], job), window(HOUR))
    assert "n1 is in maintenance from" in place(cluster, job).missing
    assert "the job may not have ended by then" in place(cluster, job).missing


def test_no_node_gets_ready_for_a_job_that_may_not_start_there() -> None:
    job = make_job(spec=make_spec(size=(1, 1)))
    bare = make_cluster([make_node("n1", ready={}), make_node("n2", ready={})], job)
    cluster = with_windows(bare, window(HOUR))
    assert [node for node in cluster.nodes if should_prepare(cluster, job, node)] == ["n2"]


def shifted(job: JobRecord, size: tuple[int, int], limit: float | None) -> JobRecord:
    spec = job.spec
    nodes = spec.role.nodes.model_copy(update={"min": size[0], "max": size[1], "target": size[1]})
    role = spec.role.model_copy(update={"nodes": nodes})
    return job.model_copy(update={"spec": spec.model_copy(update={"roles": (role,), "time_limit": limit})})


@REPEATABLE
@given(
    clusters(),
    st.lists(st.sampled_from([5000.0, 300.0, 100_000.0, 0.0, None]), min_size=6, max_size=6),
    st.sampled_from([None, 60.0, HOUR]),
    st.sampled_from([(1, 1), (1, 3)]),
    st.booleans(),
)
def test_the_room_that_is_counted_is_what_placement_would_find(
    cluster: Cluster, starts: Iterable[float | None], limit: float | None, size: tuple[int, int], asked: bool
) -> None:
    """``asked``: nodes have looked at the jobs already."""
    found = [window(at, f"n{i}", name=f"w{i}") for i, at in enumerate(starts, 1) if at is not None]
    jobs = {uid: shifted(job, size, limit) for uid, job in cluster.jobs.items()}
    nodes = {n: r if asked else r.model_copy(update={"readiness": {}}) for n, r in cluster.nodes.items()}
    cluster = with_windows(replace(cluster, jobs=jobs, nodes=nodes), *found)
    for job in cluster.jobs.values():
        members = {m.node for m in survivors(cluster, job)}
        counted = Counter(
            "fit" if c.standing == "pending" and c.node in members else c.standing for c in candidates(cluster, job)
        )
        room = room_for(cluster, job)
        assert (room.fit, room.pending, room.unfit) == (counted["fit"], counted["pending"], counted["unfit"])


# --- what runs


def running(size: tuple[int, int] = (1, 2)) -> tuple[Cluster, JobRecord]:
    job = make_job("running", make_generation(["n1", "n2"]), spec=make_spec(size=size))
    return make_cluster(["n1", "n2", "n3"], job), job


def test_a_gang_stays_where_it_is_until_it_has_to_leave() -> None:
    cluster, job = running((2, 2))
    found = with_windows(cluster, window(MARGIN + GRACE + 1))
    assert decide(found, job, WALL).step is None


def test_it_leaves_in_time_and_another_node_takes_the_place() -> None:
    cluster, job = running((2, 2))
    found = with_windows(cluster, window(MARGIN + GRACE))
    step = decide(found, job, WALL).step
    assert isinstance(step, Propose)
    assert (sorted(step.members), step.planned) == (["n2", "n3"], True)
    assert step.cause.kind == "drain"
    assert step.cause.text == f"node n1 is {TEXT}"
    assert step.spend is not None
    assert not step.spend.counts


def test_a_drain_of_a_persons_own_is_not_put_down_to_a_window_ahead() -> None:
    cluster, job = running((1, 2))
    drained = replace(cluster, nodes={**cluster.nodes, "n1": make_node("n1", drain=True)})
    step = decide(with_windows(drained, window(HOUR)), job, WALL).step
    assert isinstance(step, Propose)
    assert step.cause.text == "node n1 is being drained"


def test_several_nodes_are_drained() -> None:
    cluster, job = running((1, 2))
    both = {name: make_node(name, drain=True) for name in ("n1", "n2")}
    step = decide(replace(cluster, nodes={**cluster.nodes, **both}), job, WALL).step
    assert isinstance(step, Propose)
    assert step.cause.text == "nodes n1, n2 are being drained"


def test_a_window_that_is_over_for_a_day_is_outdated() -> None:
    one = window(0)
    assert not availability.outdated(one, one.end + 86_399_999)
    assert availability.outdated(one, one.end + 86_400_000)

"""Nodes that were no good to a job: for how long it goes on without them, and what it remembers of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from nodeagent.model.job import JobRecord, Phase, Setback
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import Timing
from nodeagent.model.world import GenerationState
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.findings.cluster import judge_cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.nodes.candidates import candidate
from nodeagent.plan.nodes.setbacks import FEW, FIRST, KEPT, LONGEST, NEW, doubtful, grows_at, marked
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.queueing.room import room_for
from nodeagent.plan.steps import Decision, End, Propose
from tests.unit.plan.build import (
    NOW,
    UID,
    WALL,
    life,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
    verdict,
)

MINUTE = int(FIRST * 1000)
HOUR = int(LONGEST * 1000)
LATE = NOW + 15_000
"""The deadline of a generation that forms."""


def late(node: str, times: int = 1, at: int = NOW, of_life: str = "") -> Setback:
    return Setback(node=node, kind="unanswered", life=of_life or life(node), times=times, at=at)


def remembers(job: JobRecord, *found: Setback) -> JobRecord:
    return job.model_copy(update={"setbacks": found})


def view(nodes: Sequence[NodeRecord | str], job: JobRecord, served: int = NOW, lapsed: Sequence[str] = ()) -> Cluster:
    """As an agent would have it."""
    plain = make_cluster(nodes, job, served=served, lapsed=lapsed)
    seen = marked(plain.notes, plain.nodes, plain.jobs, served)
    return replace(plain, nodes=seen.nodes, left_out_until=seen.until)


def later(cluster: Cluster, served: int, nodes: object = None) -> Cluster:
    """The view of the same agent at another time, of the same records unless given."""
    plain = nodes if nodes is not None else {n: r.model_copy(update={"left_out": {}}) for n, r in cluster.nodes.items()}
    seen = marked(cluster.notes, plain, cluster.jobs, served)  # type: ignore[arg-type]
    return replace(cluster, nodes=seen.nodes, left_out_until=seen.until, served=served)


def takes(cluster: Cluster) -> Decision:
    return decide(cluster, cluster.jobs[UID], WALL)


def running(*found: Setback, target: int = 3, nodes: Sequence[str] = ("n1", "n2")) -> JobRecord:
    return remembers(make_job("running", make_generation(nodes), target=target), *found)


def forming(
    acks: Sequence[str], size: tuple[int, int] = (1, 4), nodes: Sequence[str] = ("n1", "n2", "n3")
) -> JobRecord:
    generation = make_generation(nodes, state="forming", number=2, cause="join", acks=acks)
    return make_job("forming", generation, active=1, target=3, spec=make_spec(size=size))


# --- what is remembered


def test_who_did_not_acknowledge_in_time_is_remembered_with_the_next_generation() -> None:
    step = takes(view(["n1", "n2", "n3"], forming(["n1", "n2"]), served=LATE)).step
    assert isinstance(step, Propose)
    assert sorted(step.members) == ["n1", "n2"]
    assert step.setbacks == (late("n3", at=LATE),)
    again = remembers(forming(["n1", "n2"]), late("n3", times=3), late("n9", times=2))
    step = takes(view(["n1", "n2", "n3"], again, served=LATE)).step
    assert isinstance(step, Propose)
    assert step.setbacks == (late("n9", times=2), late("n3", times=4, at=LATE)), "the newest last"


def test_it_is_remembered_with_the_end_of_a_job_that_cannot_run_without_it() -> None:
    step = takes(view(["n1", "n2", "n3"], forming(["n1", "n2"], size=(3, 3)), served=LATE)).step
    assert isinstance(step, End)
    assert (step.phase, step.setbacks) == ("holding", (late("n3", at=LATE),))


def test_nobody_is_late_before_the_deadline_nor_who_is_lost_nor_who_still_stops_older_workers() -> None:
    job = remembers(forming(["n1"]), late("n7"))
    for cluster in (
        view(["n1", "n2", "n3"], job, lapsed=["n2", "n3"]),
        view(["n1", "n2", "n3"], job, lapsed=["n2", "n3"], served=LATE),
    ):
        step = takes(cluster).step
        assert isinstance(step, Propose) and step.setbacks is None
    generation = make_generation(["n1", "n2"], state="forming", number=2, acks=["n1"], holders=["n2"])
    step = takes(view(["n1", "n2"], make_job("forming", generation, active=1, target=2), served=LATE)).step
    assert isinstance(step, Propose) and step.setbacks is None


def test_who_has_acknowledged_since_is_remembered_no_more() -> None:
    job = remembers(
        make_job("running", make_generation(["n1", "n2"]), target=2, restart=1), late("n2", 7), late("n3", 2)
    )
    step = takes(view(["n1", "n2", "n3"], job)).step
    assert isinstance(step, Propose) and step.setbacks == (late("n3", 2),)
    step = takes(
        view(
            ["n1", "n2", "n3"], job.model_copy(update={"control": job.control.model_copy(update={"desired": "pause"})})
        )
    ).step
    assert isinstance(step, End) and step.setbacks == (late("n3", 2),)


def test_another_life_begins_anew_and_what_is_gone_for_hours_is_forgotten() -> None:
    reborn = make_node("n3", of_life="another")
    job = forming(["n1", "n2"])
    members = dict(job.generation.members) if job.generation is not None else {}
    members["n3"] = members["n3"].model_copy(update={"life": "another"})
    assert job.generation is not None
    generation = job.generation.model_copy(update={"members": members, "missing": {"n3": "another"}})
    job = remembers(
        job.model_copy(update={"generation": generation}), late("n3", 9, at=LATE - 1), late("n8", at=LATE - 2 * HOUR)
    )
    step = takes(view(["n1", "n2", reborn], job, served=LATE)).step
    assert isinstance(step, Propose)
    assert step.setbacks == (late("n3", 9, at=LATE - 1), late("n3", 1, at=LATE, of_life="another"))


def test_a_job_remembers_so_many_the_newest() -> None:
    names = [f"n{i}" for i in range(1, KEPT + 20)]
    job = remembers(forming(["n1"], size=(1, 100), nodes=names), late("n999", at=LATE - 5))
    step = takes(view(names, job, served=LATE)).step
    assert isinstance(step, Propose)
    assert step.setbacks is not None and len(step.setbacks) == KEPT
    assert {one.at for one in step.setbacks} == {LATE}


def lost(node: str, times: int = 1, at: int = NOW) -> Setback:
    return Setback(node=node, kind="lost", times=times, at=at)


def with_newcomer(*found: Setback, joined: int = NOW - 40_000, state: GenerationState = "active") -> JobRecord:
    """Generation 2 of n1, n2, and n3 that joined then."""
    generation = make_generation(["n1", "n2", "n3"], number=2, state=state, acks=["n1", "n2"], since=NOW - 35_000)
    members = dict(generation.members)
    members["n3"] = members["n3"].model_copy(update={"joined": joined})
    generation = generation.model_copy(update={"members": members})
    phase: Phase = "running" if state == "active" else "forming"
    return remembers(make_job(phase, generation, active=2, target=3), *found)


@pytest.mark.parametrize("state", ["active", "forming"])
def test_who_is_lost_soon_after_it_joined_is_remembered_by_name(state: GenerationState) -> None:
    step = takes(view(["n1", "n2", "n3"], with_newcomer(state=state), lapsed=["n3"])).step
    assert isinstance(step, Propose) and (sorted(step.members), step.setbacks) == (["n1", "n2"], (lost("n3"),))
    reborn = make_node("n3", of_life="another")
    step = takes(view(["n1", "n2", reborn], with_newcomer(lost("n3", 2, NOW - 9)))).step
    assert isinstance(step, Propose) and step.setbacks == (lost("n3", 3),)
    job = running(lost("n3", 3), target=3)
    cluster = view(["n1", "n2", reborn], job, NOW + 2 * MINUTE - 1)
    assert takes(cluster).step is None, "a new life is what such a node has each time"
    assert "n3 was lost soon after it had joined 3 times in a row" in takes(cluster).why[0]
    assert isinstance(takes(later(cluster, NOW + 2 * MINUTE)).step, Propose)
    step = takes(view(["n1", "n2", reborn], running(lost("n3"), target=3))).step
    assert isinstance(step, Propose) and "n3" in step.members, "once is nothing"


def test_who_is_lost_once_or_after_a_while_is_not_remembered() -> None:
    for joined in (0, NOW - int(NEW * 1000) - 1):
        step = takes(view(["n1", "n2", "n3"], with_newcomer(joined=joined), lapsed=["n3"])).step
        assert isinstance(step, Propose) and step.setbacks is None
    step = takes(view(["n1", "n2", "n3"], with_newcomer(), lapsed=["n2"])).step
    assert isinstance(step, Propose) and step.setbacks is None


def test_who_turns_unfit_soon_after_it_joined_is_remembered() -> None:
    sick = make_node("n3", health=[verdict()])
    step = takes(view(["n1", "n2", sick], with_newcomer())).step
    assert isinstance(step, Propose)
    assert (sorted(step.members), step.cause.kind) == (["n1", "n2"], "hardware")
    assert step.setbacks == (Setback(node="n3", kind="unfit", times=1, at=NOW),)


def test_who_has_stayed_for_long_is_as_good_as_any_other() -> None:
    job = with_newcomer(lost("n3", 5), lost("n9"), joined=NOW - int(NEW * 1000) - 1)
    step = takes(view(["n1", "n2", "n3"], job, lapsed=["n2"])).step
    assert isinstance(step, Propose) and step.setbacks == (lost("n9"),)
    step = takes(view(["n1", "n2", "n3"], with_newcomer(lost("n3", 5)), lapsed=["n2"])).step
    assert isinstance(step, Propose) and step.setbacks is None, "and no sooner"


def test_a_member_is_new_for_a_while_whichever_generations_follow() -> None:
    step = takes(view(["n1", "n2", "n3"], running())).step
    assert isinstance(step, Propose)
    assert {n: m.joined for n, m in step.members.items()} == {"n1": 0, "n2": 0, "n3": NOW}
    job = with_newcomer(joined=NOW - 40_000)
    step = takes(view(["n1", "n2", "n3"], job, lapsed=["n2"])).step
    assert isinstance(step, Propose) and step.members["n3"].joined == NOW - 40_000
    step = takes(view(["n1", "n2", "n3"], job, NOW + int(NEW * 1000), lapsed=["n2"])).step
    assert isinstance(step, Propose) and step.members["n3"].joined == 0
    step = takes(view(["n1", "n2"], make_job(target=2))).step
    assert isinstance(step, Propose) and not any(m.joined for m in step.members.values()), "its first start"


def test_a_job_that_stands_still_takes_who_was_lost_at_once_but_who_failed_once_only() -> None:
    ended = make_generation(["n1", "n2"], state="ended", number=2)
    job = make_job("holding", ended, active=1, spec=make_spec(size=(2, 2)))
    step = takes(view(["n1", "n2"], remembers(job, lost("n2", 6)))).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n1", "n2"]
    for times in (1, 2):
        bad = Setback(node="n2", kind="failed", times=times, at=NOW)
        assert (takes(view(["n1", "n2"], remembers(job, bad))).step is None) == (times == 2)


# --- for how long it is left out


@pytest.mark.parametrize(
    ("times", "minutes"), [(1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 32), (7, 60), (8, 60), (10**9, 60)]
)
def test_a_gang_that_runs_does_not_grow_with_it_for_twice_as_long_each_time(times: int, minutes: int) -> None:
    job = running(late("n3", times))
    cluster = view(["n1", "n2", "n3"], job, NOW + 60 * 1000 * minutes - 1)
    assert takes(cluster).step is None
    assert "n3 did not acknowledge a generation in time" in takes(cluster).why[0]
    assert cluster.left_out_until == NOW + 60 * 1000 * minutes
    step = takes(later(cluster, cluster.left_out_until)).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n1", "n2", "n3"]


def test_another_node_joins_meanwhile() -> None:
    step = takes(view(["n1", "n2", "n3", "n4"], running(late("n3", 5)))).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n1", "n2", "n4"]
    step = takes(view(["n1", "n2", "n3", "n4"], running(late("n3", 1)), NOW + MINUTE)).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n1", "n2", "n4"], "it is taken last"


def test_in_another_life_it_is_as_good_as_any_other() -> None:
    step = takes(view(["n1", "n2", make_node("n3", of_life="another")], running(late("n3", 5)))).step
    assert isinstance(step, Propose) and "n3" in step.members


def test_a_member_is_left_out_of_nothing() -> None:
    job = running(late("n2", 5), target=2)
    cluster = view(["n1", "n2"], job)
    assert takes(cluster) == Decision(None)
    assert candidate(cluster, job, cluster.nodes["n2"]).standing == "fit"
    assert not doubtful(job)


def test_a_job_that_needs_it_tries_again_at_once_and_then_waits_and_says_so() -> None:
    ended = make_generation(["n1", "n2"], state="ended", number=2)
    job = remembers(make_job("holding", ended, active=1, spec=make_spec(size=(2, 2))), late("n2"))
    step = takes(view(["n1", "n2"], job)).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n1", "n2"]
    job = remembers(job, late("n2", 2))
    cluster = view(["n1", "n2"], job, NOW + MINUTE - 1)
    assert takes(cluster).step is None and not room_for(cluster, job).enough
    assert (
        "n2 did not acknowledge a generation in time twice in a row: it is tried again later"
        in explain(cluster, job, WALL)[0]
    )
    step = takes(later(cluster, NOW + MINUTE)).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n1", "n2"]
    cluster = view(["n1", "n2", "n3"], job)
    step = takes(cluster).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n1", "n3"], "another one ends its wait at once"


def test_while_one_waits_for_such_a_node_another_job_is_not_kept_waiting() -> None:
    ended = make_generation(["n1", "n2"], state="ended", number=2)
    first = remembers(make_job("holding", ended, active=1, spec=make_spec(size=(2, 2))), late("n2", 4))
    ready = {UID: make_node("x").readiness[UID], "u-b": make_node("x").readiness[UID]}
    other = make_job(uid="u-b", spec=make_spec(name="b", size=(1, 1)), order=5)
    plain = make_cluster([make_node("n1", slots=1, ready=ready), "n2"], first, other)
    seen = marked(plain.notes, plain.nodes, plain.jobs, NOW)
    assert isinstance(decide(replace(plain, nodes=seen.nodes), other, WALL).step, Propose)


def test_a_crowd_of_such_nodes_does_not_stop_a_gang_once_each() -> None:
    found, at, stops = list[Setback](), NOW, list[int]()
    while at < NOW + HOUR:
        job = running(*found)
        if not grows_at(job, at):
            stops.append(at)
            found.append(late(f"x{len(found)}", at=at))
        at += 30_000
    assert len(stops) <= 9, [b - a for a, b in pairwise(stops)]
    assert stops[FEW] - stops[0] < 5 * MINUTE, "a few are nothing"
    crowd = running(*(late(f"x{i}", at=NOW - i) for i in range(FEW + 1)))
    decision = takes(view(["n1", "n2", "n3"], crowd))
    assert decision.step is None and decision.at == NOW + MINUTE and not decision.steady
    assert "n3 joins later: again and again a node was no good" in decision.why[0]
    assert isinstance(takes(view(["n1", "n2", "n3"], crowd, NOW + MINUTE)).step, Propose)


def test_those_that_were_lost_once_keep_nobody_from_joining() -> None:
    crowd = [lost(f"x{i}", at=NOW - i) for i in range(9)]
    assert not grows_at(running(*crowd), NOW)
    assert grows_at(running(*(one.model_copy(update={"times": 2}) for one in crowd)), NOW)


def test_those_that_were_late_together_are_late_once() -> None:
    """A large gang of which a part starts slowly."""
    assert not grows_at(running(*(late(f"x{i}") for i in range(40))), NOW)


def test_a_time_that_no_step_wrote_leaves_nobody_out() -> None:
    job = running(late("n3", 5, at=NOW + 10 * HOUR), *(late(f"x{i}", at=NOW + HOUR + i) for i in range(9)))
    assert isinstance(takes(view(["n1", "n2", "n3"], job)).step, Propose)


def test_an_operators_scale_out_does_not_take_it_either_and_a_fault_waits_for_nobody() -> None:
    job = running(late("n3", 2))
    placement = place(view(["n1", "n2", "n3"], job), job)
    assert [c.node for c in placement.chosen] == ["n1", "n2"]
    step = takes(view(["n1", "n2", "n3"], job, lapsed=["n2"])).step
    assert isinstance(step, Propose) and sorted(step.members) == ["n1"]


# --- the view


def test_the_same_records_stay_until_something_changes() -> None:
    cluster = view(["n1", "n2", "n3"], running(late("n3", 3)))
    plain = {n: r if n != "n3" else r.model_copy(update={"left_out": {}}) for n, r in cluster.nodes.items()}
    one = later(cluster, NOW + 1, plain)
    two = later(cluster, NOW + 2, plain)
    assert one.nodes is two.nodes and one.nodes["n1"] is plain["n1"]
    assert later(cluster, NOW + 4 * MINUTE, plain).nodes is plain
    other = make_job(uid="u-b", spec=make_spec(name="b"))
    seen = marked(cluster.notes, plain, {**cluster.jobs, "u-b": other}, NOW + 3)
    assert marked(cluster.notes, plain, cluster.jobs, NOW + 3).nodes is seen.nodes, "it is about no other job"


def test_without_such_nodes_the_view_is_what_was_read() -> None:
    plain = make_cluster(["n1", "n2"], running())
    seen = marked(plain.notes, plain.nodes, plain.jobs, NOW)
    assert seen.nodes is plain.nodes and not seen.until


def test_its_pod_stays_ready_and_doctor_names_it() -> None:
    job = running(late("n3", 2))
    cluster = view(["n1", "n2", "n3"], job)
    assert should_prepare(cluster, job, "n3")
    (found,) = [one for where, one in judge_cluster(cluster, {}, {}) if where == "node/n3"]
    assert found.what == (
        "did not acknowledge a generation in time twice in a row: job a goes on without it, and tries it again in 120 s"
    )
    assert Timing().cooldown < FIRST


def test_doctor_says_what_to_look_at_where_the_memory_was_full() -> None:
    job = running(late("n3", 2).model_copy(update={"kind": "crowded"}))
    (found,) = [one for where, one in judge_cluster(view(["n1", "n2", "n3"], job), {}, {}) if where == "node/n3"]
    assert found.what.startswith("had no memory left for its workers twice in a row: job a goes on without it")
    assert found.fix == "on n3: free -h; ps -eo rss,user,args --sort -rss | head"

"""Who keeps a generation: chosen by rank, filled up with others, replaced by one node only, let go of when needed."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord, Notice
from nodeagent.model.world import Generation
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes.failsafe import better, choose, chooser, must_let_go, silence
from nodeagent.plan.steps import Activate, Propose
from tests.unit.plan.build import (
    NOW,
    SUCCEEDED,
    UID,
    WALL,
    life,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    verdict,
)


def peers(*names: str) -> list[NodeRecord]:
    return [make_node(n, peer=True) for n in names]


def lives(*names: str) -> dict[str, str]:
    return {n: life(n) for n in names}


# --- choosing


def test_members_are_asked_by_rank_and_no_more_than_needed() -> None:
    names = [f"n{i}" for i in range(9, 0, -1)]
    cluster = make_cluster(peers(*names))
    assert choose(cluster, UID, make_generation(names).members.values()) == lives(*names[::2])


def test_they_are_spread_over_ranks_since_neighbours_share_a_rack() -> None:
    """Found by strangers: the first five were all in one, and with its power went all failsafe members."""
    names = [f"n{i}" for i in range(1, 65)]
    cluster = make_cluster(peers(*names))
    assert choose(cluster, UID, make_generation(names).members.values()) == lives("n1", "n16", "n32", "n48", "n64")


def test_they_are_spread_over_the_racks_that_nodes_name() -> None:
    names = [f"n{i}" for i in range(1, 13)]
    racks = {n: "a" if i < 8 else "b" if i < 11 else "c" for i, n in enumerate(names)}
    nodes = [
        node.model_copy(update={"facts": node.facts.model_copy(update={"labels": {"rack": racks[node.id]}})})
        for node in peers(*names)
    ]
    chosen = choose(make_cluster(nodes), UID, make_generation(names).members.values())
    assert chosen == lives("n1", "n2", "n9", "n10", "n12")


def test_where_members_are_few_others_are_asked_as_well() -> None:
    cluster = make_cluster(peers("n1", "n10", "n2", "n3"))
    chosen = choose(cluster, UID, make_generation(["n3"]).members.values())
    assert len(chosen) == 3
    assert chosen.items() >= lives("n3").items()
    assert choose(cluster, UID, make_generation(["n3", "n2", "n1"]).members.values()) == lives("n1", "n2", "n3")


def test_the_others_are_not_the_same_for_all_jobs() -> None:
    """It was the first node for all of them: where that one did not answer, none had failsafe time."""
    names = [f"n{i}" for i in range(1, 21)]
    cluster, members = make_cluster(peers(*names)), [*make_generation(["n7"]).members.values()]
    chosen = [choose(cluster, f"{uid:032x}", members) for uid in range(400)]
    assert all(len(one) == 3 and "n7" in one for one in chosen)
    assert all(10 < sum(n in one for one in chosen) < 90 for n in names if n != "n7"), "two of 19 for each"
    assert chosen[5] == choose(cluster, f"{5:032x}", members)


LATE = Notice(until=WALL + 60, until_served=NOW + 60_000, text="to be taken away")
IDLE = {
    "cordoned": make_node("n1", peer=True, cordon=True),
    "drained": make_node("n1", peer=True, drain=True),
    "unfit": make_node("n1", peer=True, health=[verdict()]),
    "leaving": make_node("n1", peer=True, notice=LATE),
}


@pytest.mark.parametrize("how", [*IDLE, "restarting"])
def test_others_that_may_be_given_no_work_are_passed_over(how: str) -> None:
    """An idle node behind a firewall, cordoned for it, cost every small job its failsafe time."""
    (n1,) = peers("n1")
    node = IDLE.get(how) or n1.model_copy(update={"facts": n1.facts.model_copy(update={"restarting": WALL})})
    members = make_generation(["n2"]).members.values()
    assert choose(make_cluster([node, *peers("n2")]), UID, members) == lives("n2")
    assert choose(make_cluster([node, *peers("n2", "n3", "n4")]), UID, members) == lives("n2", "n3", "n4")


def test_others_that_cannot_be_asked_are_passed_over() -> None:
    nodes = [*peers("n1", "n3", "n4", "n5"), make_node("n2"), make_node("n6", peer=True, lost=True)]
    cluster = make_cluster(nodes, lapsed=["n3"])
    assert choose(cluster, UID, make_generation(["n1"]).members.values()) == lives("n1", "n4", "n5")


def test_a_gang_with_a_member_that_cannot_be_asked_has_no_failsafe_members() -> None:
    """It would be bridged with the others' yes, while that member knows better and nobody hears it."""
    generation = make_generation(["n1", "n2"])
    assert choose(make_cluster([*peers("n1", "n3"), make_node("n2")]), UID, generation.members.values()) == {}
    assert choose(make_cluster(peers("n1", "n2", "n3"), lapsed=["n2"]), UID, generation.members.values()) == {}


# --- replacing


def running(*members: str, failsafe_members: tuple[str, ...]) -> JobRecord:
    return make_job("running", make_generation(members), failsafe_members=failsafe_members)


def test_failsafe_members_that_are_all_there_stay() -> None:
    job = running("n1", "n2", failsafe_members=("n1", "n2", "n3"))
    assert better(make_cluster(peers("n1", "n2", "n3", "n4"), job), job) is None


@pytest.mark.parametrize("how", ["lapsed", "left", "lost", "another life", "unknown"])
def test_a_failsafe_member_that_is_gone_is_replaced(how: str) -> None:
    job = running("n1", "n2", failsafe_members=("n1", "n2", "n3"))
    nodes = peers("n1", "n2", "n4")
    if how != "unknown":
        of_life = "reborn" if how == "another life" else None
        nodes.append(make_node("n3", left=how == "left", lost=how == "lost", of_life=of_life))
    cluster = make_cluster(nodes, job, lapsed=["n3"] if how == "lapsed" else [])
    assert better(cluster, job) == lives("n1", "n2", "n4")


@pytest.mark.parametrize("how", IDLE)
def test_a_failsafe_member_that_may_be_given_no_work_any_more_is_replaced_by_a_member(how: str) -> None:
    job = running("n2", "n3", failsafe_members=("n1", "n2", "n3"))
    alone, more = (make_cluster([IDLE[how], *peers("n2", "n3", *names)], job) for names in ((), ("n4",)))
    assert better(alone, job) == lives("n2", "n3")
    assert better(more, job) == lives("n2", "n3", "n4")
    assert chooser(more, job) == "n2", "its own agent may be what is broken"
    member = running("n1", "n2", "n3", failsafe_members=("n1", "n2", "n3"))
    assert better(make_cluster([IDLE[how], *peers("n2", "n3", "n4")], member), member) is None


def test_too_few_failsafe_members_are_filled_up_once_there_is_company() -> None:
    job = running("n1", failsafe_members=("n1",))
    assert better(make_cluster(peers("n1"), job), job) is None, "nobody else: as good as it gets"
    assert better(make_cluster(peers("n1", "n2"), job), job) == lives("n1", "n2")
    nobody = running("n1", "n2", failsafe_members=())
    assert better(make_cluster(peers("n1", "n2"), nobody), nobody) == lives("n1", "n2")


def test_a_member_that_is_gone_keeps_nothing() -> None:
    job = running("n1", "n2", failsafe_members=("n1", "n2", "n3"))
    cluster = make_cluster(peers("n1", "n2", "n3", "n4"), job, lapsed=["n1"])
    assert better(cluster, job) == lives("n2", "n3", "n4")


def test_failsafe_members_are_kept_rather_than_given_up_for_none() -> None:
    """n2 can be asked no more (an older version): what was chosen is not undone for that."""
    job = running("n1", "n2", failsafe_members=("n1", "n2", "n3"))
    assert better(make_cluster([make_node("n1", peer=True), make_node("n2")], job), job) is None


@pytest.mark.parametrize("state", ["forming", "ended"])
def test_only_an_active_generation_gets_other_failsafe_members(state: str) -> None:
    generation = make_generation(["n1"], state="forming" if state == "forming" else "ended", number=2)
    job = make_job("forming" if state == "forming" else "holding", generation, active=1, failsafe_members=["n1"])
    assert better(make_cluster(peers("n1", "n2"), job), job) is None
    queued = make_job()
    assert better(make_cluster(peers("n1", "n2"), queued), queued) is None


def test_one_node_chooses() -> None:
    job = running("n10", "n2", "n9", failsafe_members=("n10", "n2", "n9"))
    cluster = make_cluster(peers("n10", "n2", "n9"), job)
    assert chooser(cluster, job) == "n2"
    assert chooser(make_cluster(peers("n10", "n2", "n9"), job, lapsed=["n2"]), job) == "n9"
    assert chooser(make_cluster([], job), job) is None
    assert chooser(cluster, make_job()) is None


def test_where_there_are_no_failsafe_members_the_first_live_member_chooses() -> None:
    job = running("n2", "n1", failsafe_members=())
    assert chooser(make_cluster(peers("n1", "n2", "n3"), job), job) == "n2"
    reborn = [make_node("n2", of_life="reborn"), make_node("n1")]
    assert chooser(make_cluster(reborn, job), job) == "n1"


# --- letting go


def forming(
    *members: str, failsafe_members: tuple[str, ...], acks: tuple[str, ...] = (), lends: tuple[str, ...] = ()
) -> JobRecord:
    released = any(n in failsafe_members for n in acks)
    generation = make_generation(members, state="forming", number=2, acks=(*acks, *lends), released=released)
    return make_job("forming", generation, active=1, failsafe_members=failsafe_members)


def all_of(job: JobRecord, lapsed: tuple[str, ...] = ()) -> Cluster:
    return make_cluster(peers("n1", "n2", "n3", "n4"), job, lapsed=lapsed)


def test_nobody_lets_go_of_what_is_active() -> None:
    job = running("n1", failsafe_members=("n1", "n2"))
    assert not any(must_let_go(all_of(job), job, n) for n in ("n1", "n2"))


def test_a_failsafe_member_outside_leaves_it_to_those_who_are_members() -> None:
    job = forming("n1", "n4", failsafe_members=("n1", "n2", "n3"))
    assert [n for n in ("n1", "n2", "n3", "n4") if must_let_go(all_of(job), job, n)] == []


def test_failsafe_members_outside_let_go_where_no_member_keeps() -> None:
    job = forming("n4", failsafe_members=("n2", "n3"))
    assert [n for n in ("n1", "n2", "n3", "n4") if must_let_go(all_of(job), job, n)] == ["n2", "n3"]
    done = forming("n4", failsafe_members=("n2", "n3"), acks=("n3",))
    assert not must_let_go(all_of(done), done, "n2"), "one is enough"


def test_one_that_acknowledged_while_it_lent_says_it_again() -> None:
    job = forming("n1", "n2", failsafe_members=("n1", "n2", "n3"), lends=("n1",))
    assert [n for n in ("n1", "n2", "n3") if must_let_go(all_of(job), job, n)] == ["n1"]
    done = forming("n1", "n2", failsafe_members=("n1", "n2", "n3"), lends=("n1",), acks=("n2",))
    assert not must_let_go(all_of(done), done, "n1")


def test_an_ended_job_is_let_go_of_by_one_unless_another_still_stops_workers() -> None:
    def ended(*holders: str) -> JobRecord:
        generation = make_generation(["n1", "n2"], state="ended", holders=holders)
        return make_job("stopped", generation, active=1, failsafe_members=["n1", "n2", "n3"])

    quiet = ended()
    assert [n for n in ("n1", "n2", "n3") if must_let_go(all_of(quiet), quiet, n)] == ["n1"]
    stopping = ended("n2")
    assert [n for n in ("n1", "n2", "n3") if must_let_go(all_of(stopping), stopping, n)] == []
    silent = all_of(stopping, lapsed=("n2",))
    assert [n for n in ("n1", "n2", "n3") if must_let_go(silent, stopping, n)] == ["n1"], "that one may never come"


# --- the gang's part


def test_a_generation_waits_for_one_failsafe_member_to_let_go() -> None:
    members = ("n1", "n2")
    waits = forming(*members, failsafe_members=("n1", "n2", "n3"), lends=members)
    answer = decide(all_of(waits), waits, WALL)
    assert answer.step is None
    assert answer.why == ("waits for one of n1, n2, n3 to let go of the generation before",)
    free = forming(*members, failsafe_members=("n1", "n2", "n3"), lends=("n1",), acks=("n2",))
    assert isinstance(decide(all_of(free), free, WALL).step, Activate)
    outside = forming(*members, failsafe_members=("n3",), acks=(*members, "n3"))
    assert isinstance(decide(all_of(outside), outside, WALL).step, Activate)


def test_when_no_failsafe_member_answers_nothing_newer_starts() -> None:
    generation = make_generation(["n1", "n2"], number=7)
    job = make_job("running", generation, failsafe_members=["n1", "n2"])
    cluster = all_of(job, lapsed=("n1", "n2"))
    text = silence(cluster, job)
    assert text.startswith(
        "nothing has been received from n1, n2, which may keep generation 7 running without the store"
    )
    assert text.endswith("nodeagentctl forget NODE")
    assert decide(cluster, job, WALL).step is None
    assert decide(cluster, job, WALL).why == (text,)
    one = all_of(job, lapsed=("n1",))
    assert silence(one, job) == ""
    assert isinstance(decide(one, job, WALL).step, Propose)
    forgotten = make_job("running", generation)
    assert isinstance(decide(all_of(forgotten, lapsed=("n1", "n2")), forgotten, WALL).step, Propose)


def test_a_failsafe_member_that_came_back_with_another_life_counts() -> None:
    job = make_job("running", make_generation(["n1"]), failsafe_members=["n1"])
    assert silence(make_cluster([make_node("n1", of_life="reborn")], job), job) == ""


def test_silence_holds_up_neither_an_operator_nor_a_success() -> None:
    def silent(generation: Generation, **more: str) -> str | None:
        job = make_job("running", generation, failsafe_members=["n1"])
        job = job.model_copy(update={"control": job.control.model_copy(update=more)})
        answer = decide(all_of(job, lapsed=("n1",)), job, WALL)
        return getattr(answer.step, "phase", None)

    assert silent(make_generation(["n1"]), desired="stop") == "stopped"
    assert silent(make_generation(["n1"]), desired="pause") in ("pausing", "paused")
    assert silent(make_generation(["n1"], reports={"n1": SUCCEEDED})) == "succeeded"

"""The queue: what is counted is what placement would find, decisions are as if each job were placed by itself, and a
long queue costs little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord, Readiness
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.nodes.candidates import candidates
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.pods.actions import Prepare, Retire
from nodeagent.plan.pods.prepare import UNFIT_KEPT
from nodeagent.plan.queueing import heldback, queue
from nodeagent.plan.queueing.room import Room, room_for
from nodeagent.plan.steps import Decision, Propose
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import (
    NOW,
    PREPARING,
    READY,
    REPEATABLE,
    UID,
    UNFIT,
    WALL,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)
from tests.unit.plan.job.test_gang_properties import clusters
from tests.unit.plan.planning import plan_node

WAITING = ("queued", "holding")


def waiting(cluster: Cluster) -> list[JobRecord]:
    return [j for j in cluster.jobs.values() if j.phase in WAITING and j.control.desired == "run"]


def crowd(count: int, size: int, nodes: int, *, taken: int, priority: int = 0, first: int = 1) -> Cluster:
    """One job runs on the first nodes, the others wait."""
    records = [make_node(f"n{i}", slots=1, ready={}) for i in range(1, nodes + 1)]
    big = make_job(
        "running",
        make_generation([f"n{i}" for i in range(1, taken + 1)]),
        uid="u-big",
        spec=make_spec(size=(1, max(1, taken)), name="big"),
    )
    jobs = [
        make_job(uid=f"u-{i}", spec=make_spec(name=f"j{i}", size=(size, size), priority=priority), order=i)
        for i in range(first, first + count)
    ]
    return make_cluster(records, big, *jobs) if taken else make_cluster(records, *jobs)


# --- what is counted is what placement would find


@REPEATABLE
@given(clusters())
def test_the_room_that_is_counted_is_what_placement_would_find(cluster: Cluster) -> None:
    for job in cluster.jobs.values():
        members = {m.node for m in survivors(cluster, job)}
        found = Counter(
            "fit" if c.standing == "pending" and c.node in members else c.standing for c in candidates(cluster, job)
        )
        room = room_for(cluster, job)
        assert (room.fit, room.pending, room.unfit) == (found["fit"], found["pending"], found["unfit"])
        assert room.live == sum(map(cluster.live, cluster.nodes))


def could_start(cluster: Cluster, job: JobRecord) -> bool:
    placement = place(cluster, job)
    soon = len(placement.pending) if cluster.served < queue.patience(job) else 0
    return placement.fits or len(placement.chosen) + soon >= placement.minimum


@REPEATABLE
@given(clusters())
def test_a_job_goes_first_as_if_each_were_placed_by_itself(cluster: Cluster) -> None:
    in_line = sorted(waiting(cluster), key=queue.line_key)
    for job in in_line:
        before = [j for j in in_line if queue.line_key(j) < queue.line_key(job)]
        able = [j for j in before if cluster.served >= j.not_before and could_start(cluster, j)]
        found = queue.earlier(cluster, heldback.line(cluster), job)
        assert (found.job.uid if found is not None else None) == (able[0].uid if able else None)


@pytest.mark.parametrize("standing", [READY, PREPARING])
def test_one_that_waits_for_word_of_silent_nodes_holds_up_nobody(standing: Readiness) -> None:
    """Before it may start somebody has to say that a node is down: that may take days."""
    silent = ("n1", "n2", "n3")
    left = make_generation(silent, state="ended", holders=silent)
    gang = make_job(
        "holding", left, uid="u-x", spec=make_spec(name="x", size=(3, 3)), active=1, failsafe_members=silent, order=1
    )
    one = make_job(uid="u-y", spec=make_spec(name="y", size=(1, 1)), order=2)
    nodes = [make_node(f"n{i}", ready={"u-x": standing, "u-y": READY}) for i in range(1, 7)]
    view = make_cluster(nodes, gang, one, lapsed=silent)
    assert "nodeagentctl forget" in decide(view, gang, WALL).why[0]
    step = decide(view, one, WALL).step
    assert isinstance(step, Propose)
    assert step.members.keys() == {"n4"}
    assert queue.places(view) == {"u-y": 1}
    answers = replace(view, lapsed=frozenset(silent[1:]), notes=Notes())
    assert queue.places(answers) == {"u-x": 1, "u-y": 2}
    assert isinstance(decide(answers, gang, WALL).step, Propose) == (standing is READY)


@pytest.mark.parametrize("gpus", [None, 0, 1, 2])
@pytest.mark.parametrize("workers", [1, 2, "gpu"])
@pytest.mark.parametrize("uneven", [False, True])
def test_kinds_of_nodes_are_judged_as_nodes_are(gpus: int | None, workers: int | str, uneven: bool) -> None:
    nodes = [make_node(f"n{i}{s}", slots=s, gpus=i, sick=range(i // 2), ready={}) for i in range(5) for s in range(4)]
    job = make_job(spec=make_spec(workers=workers, gpus=gpus, uneven=uneven))
    taken = make_job("running", make_generation(["n12", "n23"], workers=2), uid="u-b", spec=make_spec(name="b"))
    cluster = make_cluster(nodes, job, taken)
    assert room_for(cluster, job).pending == sum(c.standing == "pending" for c in candidates(cluster, job))


# --- what it costs


class Counted(dict[str, NodeRecord]):
    """Nodes that count how often one of them is looked at."""

    looks = 0

    def __getitem__(self, name: str) -> NodeRecord:
        self.looks += 1
        return super().__getitem__(name)

    def get(self, name: str, default: object = None) -> NodeRecord | None:  # type: ignore[override]
        self.looks += 1
        return super().get(name)

    def values(self) -> Iterator[NodeRecord]:  # type: ignore[override]
        self.looks += len(self)
        return iter(super().values())


def test_a_long_queue_is_looked_at_once_for_each_node_and_each_job_not_for_each_pair() -> None:
    cluster = crowd(150, 20, 200, taken=190)
    nodes = Counted(cluster.nodes)
    cluster = replace(cluster, nodes=nodes)
    for job in cluster.jobs.values():
        assert decide(cluster, job, WALL).step is None
    plan_node(cluster, "n200", cluster.nodes["n200"].incarnation, {}, 2)
    assert nodes.looks < 20 * (len(cluster.jobs) + len(nodes)), f"{nodes.looks} looks"


def test_who_waits_is_at_rest_until_its_time() -> None:
    cluster = crowd(3, 20, 24, taken=20)
    for job in waiting(cluster):
        assert (found := decide(cluster, job, WALL)).steady and not found.at
    backoff = make_job("holding", make_generation(["n1"], state="ended"), active=1, not_before=NOW + 500)
    held = make_job("holding", active=1, since=NOW, spec=make_spec(size=(2, 2), hold_timeout=9.0))
    fresh = make_job(spec=make_spec(size=(1, 2)), since=NOW)
    for job, at in ((backoff, NOW + 500), (held, NOW + 9000), (fresh, NOW + 60_000)):
        found = decide(make_cluster(["n1", *([make_node("n2", ready={})] if job is fresh else [])], job), job, WALL)
        assert (found.step, found.steady, found.at) == (None, True, at)


# --- for whom nodes get ready


def next_up(cluster: Cluster, before: queue.NextUp | None = None) -> queue.NextUp:
    return queue.next_up(cluster, heldback.line(cluster), before or queue.NextUp())


def prepared(cluster: Cluster, node: str = "n24") -> list[str]:
    actions = plan_node(cluster, node, cluster.nodes[node].incarnation, {}, 2)
    return [a.uid for a in actions if isinstance(a, Prepare)]


def test_nodes_get_ready_only_for_the_next_jobs_that_have_room() -> None:
    assert prepared(crowd(150, 20, 24, taken=20)) == []
    assert prepared(crowd(150, 4, 24, taken=20)) == [f"u-{i}" for i in range(1, queue.NEXT + 1)]


def test_pods_that_never_get_ready_keep_no_job_from_its_turn_and_the_first_keeps_its_own() -> None:
    cluster, line = replace(crowd(30, 4, 24, taken=20), served=0), queue.NextUp()
    seen: set[str] = set()
    for minute in range(8):
        line = next_up(replace(cluster, served=minute * 60_000), line)
        assert "u-1" in line.up
        assert len(line.up) <= 2 * queue.NEXT
        seen |= line.up
    assert seen == {f"u-{i}" for i in range(1, 31)}
    # Those that were slow come up again when those before them have gone.
    rest = {uid: job for uid, job in cluster.jobs.items() if job.order > 10 or uid == "u-big"}
    assert "u-11" in next_up(replace(cluster, jobs=rest, served=8 * 60_000), line).up


def test_while_pods_of_one_user_never_get_ready_the_next_places_are_others() -> None:
    """One user's dozen kept all others' jobs from getting ready for minutes, on idle nodes, and for nothing."""
    crowded = crowd(3 * queue.NEXT + 1, 4, 24, taken=20)
    last = f"u-{3 * queue.NEXT + 1}"
    other = crowded.jobs[last].model_copy(update={"owner": crowded.jobs[last].owner + 1})
    cluster = replace(crowded, jobs={**crowded.jobs, last: other}, served=0)
    first = next_up(cluster)
    assert last not in first.up, "while they may get ready the order is the queue's"
    later = next_up(replace(cluster, served=60_000), first)
    assert last in later.up
    assert "u-1" in later.up
    gone = {uid: job for uid, job in cluster.jobs.items() if uid not in {f"u-{i}" for i in range(1, queue.NEXT + 1)}}
    assert last in next_up(replace(cluster, jobs=gone, served=90_000), later).up, "nor by taking those back"
    assert not next_up(replace(cluster, served=200_000), next_up(replace(cluster, jobs={}, served=130_000))).gave_way


def test_places_are_given_in_the_order_of_the_queue() -> None:
    """Else a later job would be ready first, and start before an earlier one that has waited for long."""
    line = next_up(crowd(30, 4, 24, taken=20))
    assert line.up == {f"u-{i}" for i in range(1, queue.NEXT + 1)}


@pytest.mark.parametrize("other", [{}, {UID: PREPARING}, {UID: READY}])
def test_others_judge_what_some_nodes_cannot_run_for_a_minute_and_never_again(other: dict[str, Readiness]) -> None:
    """What they say changes nothing of that: else their pods would come and go for as long as the job waits."""
    crowded = crowd(queue.NEXT + 1, 1, 24, taken=20)
    job = make_job(spec=make_spec(size=(9, 9)))
    nodes = {**crowded.nodes, "n23": make_node("n23", ready={UID: UNFIT}), "n24": make_node("n24", ready=other)}
    cluster = replace(crowded, nodes=nodes, jobs={**crowded.jobs, UID: job}, served=0)
    first = next_up(cluster)
    assert first.up == {UID, *(f"u-{i}" for i in range(1, queue.NEXT + 1))}, "it takes nobody's place"
    later = next_up(replace(cluster, served=59_000), first)
    assert UID in later.up
    over = next_up(replace(cluster, served=61_000), later)
    assert UID not in over.up
    assert UID not in next_up(replace(cluster, served=200_000), over).up


def test_who_backs_off_for_long_gives_its_place_to_others() -> None:
    cluster = crowd(queue.NEXT + 1, 4, 24, taken=20)
    long = cluster.jobs["u-1"].model_copy(update={"not_before": NOW + 3_600_000})
    cluster = replace(cluster, jobs={**cluster.jobs, "u-1": long})
    assert next_up(cluster).up == {f"u-{i}" for i in range(2, queue.NEXT + 2)}


def test_a_failed_check_makes_room_for_the_next_and_only_the_first_few_are_looked_at_again() -> None:
    count = UNFIT_KEPT + 3
    cluster = crowd(count + 2, 4, 24, taken=20)
    failed = {f"u-{i}": UNFIT for i in range(1, count + 1)}
    node = make_node("n24", slots=1, ready=failed)
    cluster = replace(cluster, nodes={**cluster.nodes, "n24": node})
    statuses = {uid: PodStatus(uid=uid, phase="unfit") for uid in failed}
    actions = plan_node(cluster, "n24", node.incarnation, statuses, 2)
    retired = [a.uid for a in actions if isinstance(a, Retire)]
    assert retired == [f"u-{i}" for i in range(UNFIT_KEPT + 1, count + 1)]
    # What is left of those is a verdict, for which no pod is started again.
    kept = {uid: status for uid, status in statuses.items() if uid not in retired}
    again = plan_node(cluster, "n24", node.incarnation, kept, 2)
    assert not {a.uid for a in again if isinstance(a, Prepare)} & set(retired)


# --- in words


def test_it_says_which_jobs_hold_what_it_needs() -> None:
    cluster = crowd(1, 20, 24, taken=20)
    (job,) = waiting(cluster)
    assert decide(cluster, job, WALL).why == ("needs 20 nodes, 0 fit, 4 could get ready",)
    first, second, kept = explain(cluster, job, WALL)
    assert first.startswith("needs 20 nodes, 0 fit, 4 could get ready: n1 has 0 free worker slots, 1 needed; ")
    assert second == "job big (priority 0) holds n1, n2, n3 and 17 more"
    assert kept == "n21, n22, n23 and 1 more are reserved for it"


def test_many_holders_are_counted() -> None:
    others = [
        make_job("running", make_generation([f"n{i}"]), uid=f"u-{i}", spec=make_spec(name=f"j{i}"), order=i)
        for i in range(1, 7)
    ]
    job = make_job(spec=make_spec(size=(2, 2)), order=9)
    nodes = [make_node(f"n{i}", slots=1, ready={"u-a": READY}) for i in range(1, 7)]
    assert explain(make_cluster(nodes, job, *others), job, WALL)[1:] == (
        "job j1 (priority 0) holds n1",
        "job j2 (priority 0) holds n2",
        "job j3 (priority 0) holds n3",
        "3 more jobs hold other nodes",
    )


def test_a_job_that_fits_and_one_that_gets_ready() -> None:
    job = make_job(spec=make_spec(size=(1, 1)))
    cluster = make_cluster(["n1"], job)
    assert isinstance(decide(cluster, job, WALL).step, Propose)
    later = make_cluster([make_node("n1", ready={"u-a": PREPARING})], job)
    assert decide(later, job, WALL) == Decision(None, ("needs 1 node, 0 fit, 1 could get ready",), 0)


class Uid(str):
    """Counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Uid.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_many_that_have_had_their_turn_are_not_compared_with_each_other() -> None:
    uids = [Uid(f"u-{i}") for i in range(500)]
    cluster = replace(make_cluster([]), served=200_000)
    room = Room(1, 0, 0, 1, True, True)
    line = [queue.Waiting(make_job(uid=uid).model_copy(update={"uid": uid}), lambda: room) for uid in uids]
    up = queue.next_up(cluster, line, queue.NextUp(since=dict.fromkeys(uids, 0))).up
    assert up == {"u-0", "u-1", "u-2", "u-3"}
    assert Uid.compared < 10 * len(uids)

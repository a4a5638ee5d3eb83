"""How queues share a cluster: whose turn it is, and what none of them may exceed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import NO_QUEUES, Amount, Queue, Queues
from nodeagent.model.usage import Held, UsedTime
from nodeagent.model.world import Member
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.fairshare import queues
from nodeagent.plan.fairshare.queues import ceiling, dominant, entitlements, holdings, in_line, standings
from nodeagent.plan.fairshare.resources import Resources, least, size, together, used, wanted
from nodeagent.plan.fairshare.usage import DAY_MS, Decayed
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.queueing import queue
from nodeagent.plan.queueing.heldback import line as line_of
from nodeagent.plan.queueing.heldback import open_room
from nodeagent.plan.queueing.queue import places
from nodeagent.plan.queueing.room import room_for
from nodeagent.plan.steps import Propose
from tests.unit.plan.build import (
    PREPARING,
    READY,
    REPEATABLE,
    WALL,
    life,
    make_cluster,
    make_generation,
    make_holder,
    make_job,
    make_node,
    make_spec,
)


def job(
    name: str, of: str = "", order: int = 0, *, nodes: int | tuple[int, int] = 1, owner: int = 1, priority: int = 0
) -> JobRecord:
    """A job that waits, each node of which takes one slot."""
    sizes = nodes if isinstance(nodes, tuple) else (nodes, nodes)
    spec = make_spec(name=name, size=sizes, priority=priority).model_copy(update={"queue": of})
    return make_job(uid=f"u-{name}", spec=spec, order=order, owner=owner)


def running(name: str, of: str, on: Iterable[str], owner: int = 1) -> JobRecord:
    """A job that runs on these nodes, on one slot of each."""
    where = list(on)
    spec = make_spec(name=name, size=(1, len(where))).model_copy(update={"queue": of})
    one = make_job("running", make_generation(where), uid=f"u-{name}", spec=spec, owner=owner)
    return with_devices(one, lambda _: ("cpu0",))


def with_devices(one: JobRecord, devices: Callable[[str], tuple[str, ...]]) -> JobRecord:
    """The running job, on these devices of each node."""
    assert one.generation is not None
    members = {n: m.model_copy(update={"devices": devices(n)}) for n, m in one.generation.members.items()}
    return one.model_copy(update={"generation": one.generation.model_copy(update={"members": members})})


def cluster_of(queues: Iterable[Queue], *jobs: JobRecord, nodes: int = 10, slots: int = 1) -> Cluster:
    """Nodes n1, n2, ... that are ready for every job."""
    ready = {one.uid: READY for one in jobs}
    records = [make_node(f"n{i}", slots=slots, ready=ready) for i in range(1, nodes + 1)]
    return replace(make_cluster(records, *jobs), queues=Queues(rev=1, queues=tuple(queues)))


def line(
    cluster: Cluster,
    past: Mapping[str, float] | None = None,
    users: Mapping[tuple[str, int], float] | None = None,
    without_room: Collection[str] = (),
) -> str:
    """Names of the jobs that wait, in order."""
    waiting = [one for one in cluster.jobs.values() if one.phase == "queued"]
    found = in_line(cluster, waiting, Decayed(past or {}, users or {}), without_room=without_room)
    return " ".join(one.name for one in found)


A, B = Queue(name="a"), Queue(name="b")


# --- whose turn it is


def test_one_queue_has_the_order_by_priority_and_age() -> None:
    jobs = [job("late", order=3), job("early", order=1, owner=2), job("urgent", order=4, priority=1)]
    for tree in (NO_QUEUES, Queues(rev=1, queues=(Queue(name="default", weight=3),))):
        found = replace(cluster_of([], *jobs), queues=tree)
        assert [waiting.job.name for waiting in queue.queue(found)] == ["urgent", "early", "late"]


def test_queues_take_turns() -> None:
    found = cluster_of([A, B], *(job(f"a{i}", "a", i) for i in range(3)), *(job(f"b{i}", "b", 3 + i) for i in range(3)))
    assert line(found) == "a0 b0 a1 b1 a2 b2"
    assert list(queue.places(found).values()) == [1, 2, 3, 4, 5, 6]


def test_a_weight_is_a_number_of_turns() -> None:
    heavy = A.model_copy(update={"weight": 2})
    jobs = [*(job(f"a{i}", "a", i) for i in range(4)), *(job(f"b{i}", "b", 4 + i) for i in range(2))]
    assert line(cluster_of([heavy, B], *jobs)) == "a0 a1 b0 a2 a3 b1"


def test_who_uses_less_goes_first() -> None:
    found = cluster_of(
        [A, B], running("big", "a", ["n1", "n2"]), job("a0", "a", 0), job("b0", "b", 1), job("b1", "b", 2)
    )
    assert line(found) == "b0 b1 a0"


def test_a_queue_is_compared_with_its_siblings_first() -> None:
    tree = [A, Queue(name="a1", parent="a"), Queue(name="a2", parent="a"), B]
    found = cluster_of(
        tree, running("big", "a1", ["n1"]), job("in-a1", "a1", 0), job("in-a2", "a2", 1), job("in-b", "b", 2)
    )
    assert line(found) == "in-b in-a2 in-a1", "a as a whole uses more than b, whatever a2 uses"


def test_users_of_a_queue_take_turns() -> None:
    jobs = [job(f"ann{i}", "a", i, owner=1) for i in range(3)] + [job("bob", "a", 3, owner=2)]
    assert line(cluster_of([A], *jobs)) == "ann0 bob ann1 ann2"


def test_priorities_go_before_shares() -> None:
    urgent = B.model_copy(update={"priority": 5})
    big = running("big", "b", [f"n{i}" for i in range(1, 6)])
    jobs = [
        job("a-high", "a", 0, priority=9),
        job("a-low", "a", 1),
        job("b-low", "b", 2),
        job("b-high", "b", 3, priority=1),
    ]
    assert line(cluster_of([A, urgent], big, *jobs)) == "b-high b-low a-high a-low"


def test_what_is_guaranteed_goes_before_priorities() -> None:
    """Of b two nodes: its first two jobs, whatever others' priority; a large one is not among them."""
    owner = Queue(name="b", guarantee=Amount(nodes=2))
    jobs = [
        job("a-high", "a", 0, priority=9),
        job("b-large", "b", 1, nodes=3),
        *(job(f"b{i}", "b", 2 + i) for i in range(3)),
    ]
    assert line(cluster_of([A, owner], *jobs)) == "b0 b1 a-high b-large b2"
    assert line(cluster_of([A, owner], running("big", "b", ["n1"]), *jobs)) == "b0 a-high b-large b1 b2"
    urgent = job("b-high", "b", 9, priority=1)
    assert line(cluster_of([A, owner], running("big", "b", ["n1"]), *jobs, urgent)).startswith("b-high a-high")


def test_the_scarcest_resource_counts() -> None:
    """Three of ten slots are more of the cluster than two of twenty nodes are."""
    slots = with_devices(running("slots", "a", ["n1"]), lambda _: ("cpu0", "cpu1", "cpu2"))
    nodes = with_devices(running("nodes", "b", ["g1", "g2"]), lambda node: (f"GPU-{node}-0",))
    records = [make_node(f"n{i}", slots=5) for i in range(1, 3)] + [
        make_node(f"g{i}", slots=0, gpus=1) for i in range(1, 19)
    ]
    found = replace(
        make_cluster(records, slots, nodes, job("a0", "a", 0), job("b0", "b", 1)), queues=Queues(queues=(A, B))
    )
    assert size(found).total == Resources(18, 20, 10)
    assert standings(found)["a"].share == pytest.approx(0.3)
    assert standings(found)["b"].share == pytest.approx(2 / 18)
    assert line(found) == "b0 a0"


def test_who_used_more_before_waits() -> None:
    jobs = (job("a0", "a", 0), job("a1", "a", 1), job("b0", "b", 2), job("b1", "b", 3))
    found = cluster_of([A, B], *jobs)
    assert line(found) == "a0 b0 a1 b1"
    assert line(found, {"a": 3600.0}) == "b0 b1 a0 a1"
    assert line(found, {"a": 3600.0, "b": 3600.0}) == "a0 b0 a1 b1"


def test_the_order_changes_with_the_hour_though_no_record_does() -> None:
    """Else an agent that has just started has another order than those that keep what they worked out."""
    began = 100 * DAY_MS
    uses = running("a-has", "a", ["n1"]).model_copy(update={"held": Held(at=began, gpus=2)})
    used = running("b-has", "b", ["n2"]).model_copy(update={"used": {"0": UsedTime(gpu_ms=3_600_000)}})
    then = replace(cluster_of([A, B], uses, used, job("b0", "b", 0), job("a0", "a", 1), nodes=2), served=began)
    later = replace(then, served=began + 3_600_000)
    assert places(then) == {"u-a0": 1, "u-b0": 2}
    assert [one.job.name for one in line_of(then)] == ["a0", "b0"]
    assert places(later) == {"u-b0": 1, "u-a0": 2}
    assert [one.job.name for one in line_of(later)] == ["b0", "a0"]


def test_past_use_counts_for_the_parents_too() -> None:
    tree = [A, Queue(name="a1", parent="a"), Queue(name="a2", parent="a"), B]
    found = cluster_of(tree, job("in-a2", "a2", 0), job("in-b", "b", 1))
    assert line(found, {"a1": 60.0}) == "in-b in-a2"


def test_past_use_takes_no_part_away() -> None:
    """Else the line would give to one queue what ``reclaim.py`` takes back for the other."""
    big = running("big", "b", [f"n{i}" for i in range(1, 6)])
    found = cluster_of([A, B], big, job("b0", "b", 0), *(job(f"a{i}", "a", 1 + i) for i in range(6)))
    assert line(found, {"a": 3600.0}) == "a0 a1 a2 a3 a4 b0 a5", "a goes first up to its part, then who used less"
    mine = B.model_copy(update={"guarantee": Amount(nodes=6)})
    found = cluster_of([A, mine], big, job("b0", "b", 0), job("a0", "a", 1))
    assert line(found, {"a": 3600.0}) == "b0 a0", "it has less than it is guaranteed"


def test_who_is_within_its_part_goes_before_who_would_have_more() -> None:
    """Else what is taken back would go to the wrong one first: a part by weight is seldom a whole number of nodes."""
    tree = [A, B, Queue(name="c")]
    held = running("a-has", "a", ["n1", "n2", "n3"]), running("b-has", "b", ["n4", "n5"])
    found = cluster_of(tree, *held, job("a0", "a", 0), job("b0", "b", 1), job("c0", "c", 2))
    assert line(found, {"b": 60.0, "c": 3600.0}) == "b0 c0 a0", "ten nodes, three of them and a third for each"


def test_of_a_queues_users_who_used_more_before_waits() -> None:
    jobs = [job("ann", "a", 0, owner=1), job("bob", "a", 1, owner=2)]
    found = cluster_of([A, B], *jobs)
    assert line(found) == "ann bob"
    assert line(found, {}, {("a", 1): 3600.0, ("b", 2): 7200.0}) == "bob ann", "what bob used of b does not count"


def test_a_job_without_room_counts_for_nothing() -> None:
    jobs = [job("a-large", "a", 0, nodes=6), job("a-small", "a", 1), job("b0", "b", 2)]
    found = cluster_of([A, B], *jobs, running("big", "b", [f"n{i}" for i in range(1, 6)]))
    assert line(found) == "a-large b0 a-small"
    assert line(found, without_room=["u-a-large"]) == "a-large a-small b0"


def test_a_job_of_a_queue_that_is_gone_is_in_line_and_does_not_start() -> None:
    lost = job("lost", "gone", 0)
    found = cluster_of([A], lost, job("a0", "a", 1))
    assert sorted(line(found).split()) == ["a0", "lost"]
    assert decide(found, lost, WALL).step is None
    assert decide(found, lost, WALL).why == ("queue gone does not exist any more: create it again, or delete the job",)
    assert isinstance(decide(found, found.jobs["u-a0"], WALL).step, Propose), "it holds nobody up"


def test_a_job_that_is_resumed_has_its_place_before_it_is_in_line() -> None:
    back = job("back", "a", 0).model_copy(update={"phase": "paused"})
    other = job("other", "b", 1)
    found = cluster_of([A, B], back, other, nodes=1)
    assert isinstance(decide(found, back, WALL).step, Propose)
    found = cluster_of([A, B], running("big", "a", ["n2"]), back, other, nodes=2)
    assert "job other is before it" in decide(found, back, WALL).why[0]


# --- capability: what no queue may exceed


CAPPED = Queue(name="a", capability=Amount(slots=3))


def test_a_job_over_the_capability_waits_and_holds_up_no_other_queue() -> None:
    one, two, three = job("one", "a", 1, nodes=2), job("two", "b", 2, nodes=2), job("three", "a", 3)
    found = cluster_of([CAPPED, B], running("big", "a", ["n1", "n2"]), one, two, three)
    assert decide(found, one, WALL).why == (
        "queue a may use 3 slots and has 2 in use; this needs 2 more (job big holds 2)",
    )
    assert explain(found, one, WALL) == decide(found, one, WALL).why
    assert place(found, one).missing.startswith("needs 2 nodes, 1 fit: queue a may use 3 slots and has 2 in use; this")
    assert isinstance(decide(found, two, WALL).step, Propose)
    assert decide(found, three, WALL).why[0].startswith("queue a reserves 2 slots for job one")


def test_a_capability_above_counts_for_all_below() -> None:
    tree = [CAPPED, Queue(name="a1", parent="a"), Queue(name="a2", parent="a")]
    found = cluster_of(tree, running("big", "a1", ["n1", "n2"]), job("one", "a2", 1, nodes=2))
    assert "queue a may use 3 slots" in decide(found, found.jobs["u-one"], WALL).why[0]


@pytest.mark.parametrize("inner", [8, 3])
@pytest.mark.parametrize("outer", [8, 3])
def test_the_tighter_of_two_capabilities_counts(inner: int, outer: int) -> None:
    tree = [
        Queue(name="a", capability=Amount(slots=outer)),
        Queue(name="a1", parent="a", capability=Amount(slots=inner)),
    ]
    one = job("one", "a1", 1, nodes=(1, 9))
    assert len(place(cluster_of(tree, one), one).chosen) == min(inner, outer)


def test_an_elastic_job_starts_and_grows_up_to_the_capability() -> None:
    small = job("small", "a", 1, nodes=(1, 8))
    step = decide(cluster_of([CAPPED], small), small, WALL).step
    assert isinstance(step, Propose)
    assert (len(step.members), step.claims) == (3, ("a",))
    grown = running("small", "a", ["n1", "n2", "n3"])
    grown = grown.model_copy(update={"control": grown.control.model_copy(update={"target": 3})})
    eight = grown.spec.model_copy(update={"roles": small.spec.roles})
    grown = grown.model_copy(update={"spec": eight, "control": grown.control.model_copy(update={"target": 8})})
    decision = decide(cluster_of([CAPPED], grown), grown, WALL)
    assert decision.step is None
    assert "queue a may use 3 slots and has 3 in use; this needs 1 more" in decision.why[0]


def test_a_job_keeps_what_it_has_where_the_capability_was_lowered() -> None:
    has = running("big", "a", ["n1", "n2", "n3", "n4"])
    assert decide(cluster_of([CAPPED], has), has, WALL).step is None
    assert len(place(cluster_of([CAPPED], has), has).chosen) == 4


def test_where_nodes_differ_it_takes_those_that_fit_under_the_capability() -> None:
    tree = Queues(rev=1, queues=(Queue(name="a", capability=Amount(gpus=4)),))
    spec = make_spec(name="one", size=(2, 2), workers="gpu").model_copy(update={"queue": "a"})
    one = make_job(uid="u-one", spec=spec)
    ready = {"u-one": READY}
    records = [
        make_node("n1", gpus=4, ready=ready),
        make_node("n2", gpus=2, ready=ready),
        make_node("n3", gpus=2, ready=ready),
    ]
    found = replace(make_cluster(records, one), queues=tree)
    assert [c.node for c in place(found, one).chosen] == ["n2", "n3"]
    assert room_for(found, one).enough


def test_only_who_takes_more_claims() -> None:
    has = running("big", "a", ["n1", "n2"])
    spared = has.model_copy(update={"control": has.control.model_copy(update={"restart": 1})})
    step = decide(cluster_of([CAPPED], spared), spared, WALL).step
    assert isinstance(step, Propose) and step.claims == ()
    free = job("one", "b", 1)
    step = decide(cluster_of([CAPPED, B], free), free, WALL).step
    assert isinstance(step, Propose) and step.claims == ()


def test_nodes_do_not_get_ready_for_a_job_over_its_capability() -> None:
    one = job("one", "a", 1, nodes=2)
    found = cluster_of([CAPPED, B], running("big", "a", ["n1", "n2"]), one)
    waiting = {n: r.model_copy(update={"readiness": {"u-one": PREPARING}}) for n, r in found.nodes.items()}
    found = replace(found, nodes=waiting, notes=Notes())
    assert queue.next_up(found, queue.queue(found)).up == frozenset()
    free = replace(found, queues=Queues(queues=(A, B)), notes=Notes())
    assert queue.next_up(free, queue.queue(free)).up == {"u-one"}


def test_what_queues_have_is_summed_up() -> None:
    tree = [Queue(name="a", weight=3), Queue(name="a1", parent="a"), Queue(name="a2", parent="a", weight=3), B]
    found = cluster_of(tree, running("one", "a1", ["n1"]), running("two", "b", ["n2", "n3"]), job("x", "a2", 1))
    seen = {name: (one.use.slots, one.jobs, one.waiting) for name, one in standings(found).items()}
    assert seen == {"a": (1, 2, 1), "a1": (1, 1, 0), "a2": (0, 1, 1), "b": (2, 1, 0), "default": (0, 0, 0)}
    assert [*seen] == ["a", "a1", "a2", "b", "default"]
    entitled = {name: round(one.entitled, 3) for name, one in standings(found).items()}
    assert entitled == {"a": 0.6, "a1": 0.15, "a2": 0.45, "b": 0.2, "default": 0.2}


def test_a_node_where_a_job_is_member_and_holder_counts_once() -> None:
    one = running("one", "a", ["n1", "n2"])
    assert one.generation is not None
    held = {"n1": make_holder("n1", devices=("cpu0", "cpu1"))}
    one = one.model_copy(update={"generation": one.generation.model_copy(update={"state": "forming", "holders": held})})
    assert used(cluster_of([A], one))["u-one"] == Resources(0, 2, 3)


def test_what_a_job_asks_for() -> None:
    gpu = make_spec(size=(2, 4), workers="gpu")
    mixed = make_cluster([make_node("n1", gpus=8), make_node("n2", gpus=4)])
    assert (least(mixed, gpu), wanted(mixed, gpu, 4)) == (Resources(8, 2, 0), Resources(32, 4, 0))
    assert least(make_cluster([]), make_spec(size=(2, 2), workers=3, gpus=0)) == Resources(0, 2, 6)


def test_a_line_is_worked_out_once_for_each_view(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(f"j{i}", "ab"[i % 2], i, owner=i % 5) for i in range(60)]
    found = cluster_of([CAPPED, B], *jobs, running("big", "a", ["n1"]))
    looks = [0]

    def counted(use: Resources, total: Resources) -> float:
        looks[0] += 1
        return dominant(use, total)

    monkeypatch.setattr(queues, "dominant", counted)
    for _ in range(2):
        for one in waiting(found):
            decide(found, one, WALL)
        assert 60 <= looks[0] <= 4 * 60, "some for each job that is put in line, not for each pair of them"


# --- properties


@st.composite
def loads(draw: st.DrawFn) -> Cluster:
    """Up to six queues over three levels, nodes, and jobs that run and wait."""
    names = ["a", "b", "c", "d", "e"][: draw(st.integers(1, 5))]
    queues = []
    for i, name in enumerate(names):
        cap = draw(st.none() | st.integers(0, 6))
        parent = draw(st.sampled_from(["", *names[:i]]))
        weight, priority = draw(st.sampled_from([0.5, 1.0, 3.0])), draw(st.sampled_from([0, 0, 1]))
        kind = draw(st.sampled_from(["slots", "nodes"]))
        queues.append(
            Queue(
                name=name,
                parent=parent,
                weight=weight,
                priority=priority,
                capability=Amount.model_validate({kind: cap}),
            )
        )
    leaves = [q.name for q in queues if not any(o.parent == q.name for o in queues)] + ["", "gone"]
    free = [f"n{i}" for i in range(1, 9)]
    jobs = []
    for i in range(draw(st.integers(1, 8))):
        of, owner, on = draw(st.sampled_from(leaves)), draw(st.integers(1, 2)), draw(st.integers(0, 3))
        if on and len(free) > on and draw(st.booleans()):
            jobs.append(running(f"j{i}", of, [free.pop() for _ in range(on)], owner))
        else:
            low = draw(st.integers(1, 3))
            sizes, priority = (low, low + draw(st.integers(0, 3))), draw(st.sampled_from([0, 0, 5]))
            jobs.append(job(f"j{i}", of, 7 * i % 11, nodes=sizes, owner=owner, priority=priority))
    return cluster_of(queues, *jobs, nodes=8, slots=draw(st.sampled_from([1, 2])))


def waiting(cluster: Cluster) -> list[JobRecord]:
    return [one for one in cluster.jobs.values() if one.phase == "queued"]


@REPEATABLE
@given(loads(), st.integers(0, 1000))
def test_the_order_is_total_and_the_same_whatever_the_order_of_the_view(found: Cluster, seed: int) -> None:
    names = line(found).split()
    assert sorted(names) == sorted(one.name for one in waiting(found))
    mixed = random.Random(seed)
    jobs, nodes, queues = [*found.jobs.items()], [*found.nodes.items()], [*found.queues.queues]
    for entries in (jobs, nodes, queues):
        mixed.shuffle(entries)
    other = replace(
        found, jobs=dict(jobs), nodes=dict(nodes), queues=Queues(rev=1, queues=tuple(queues)), notes=Notes()
    )
    assert line(other).split() == names
    for one in waiting(found):
        assert decide(other, one, WALL) == decide(found, one, WALL)


@REPEATABLE
@given(loads())
def test_nobody_is_overtaken_by_a_younger_job_of_the_same_user_queue_and_priority(found: Cluster) -> None:
    last: dict[tuple[str, int, int], int] = {}
    for one in in_line(found, waiting(found)):
        peers = (one.spec.queue, one.owner, one.spec.priority)
        assert last.get(peers, -1) < one.order
        last[peers] = one.order


@REPEATABLE
@given(loads())
def test_a_cluster_that_uses_no_queues_has_the_same_order_and_the_same_decisions(found: Cluster) -> None:
    """Whoever owns the jobs, and whether or not somebody has written ``default`` down."""
    jobs = {
        uid: one.model_copy(update={"spec": one.spec.model_copy(update={"queue": ""})})
        for uid, one in found.jobs.items()
    }
    bare = replace(found, queues=NO_QUEUES, jobs=jobs, notes=Notes())
    written = replace(bare, queues=Queues(rev=1, queues=(Queue(name="default", weight=3),)), notes=Notes())
    by_age = sorted(waiting(bare), key=lambda one: (-one.spec.priority, one.order))
    assert [one.job.name for one in queue.queue(bare)] == [one.name for one in by_age]
    for one in bare.jobs.values():
        decision = decide(bare, one, WALL)
        assert decision == decide(written, one, WALL)
        assert one.phase == "queued" or decision.step is None, "nobody makes room"
        assert not isinstance(decision.step, Propose) or not decision.step.claims


def turns(found: Cluster, jobs: list[JobRecord], past: Decayed) -> list[JobRecord]:
    """The order of jobs of one class, worked out anew for each: of all branches of the tree the one whose turn it
    is, down to a user. Past use counts by queue only."""
    total, held, due, line = size(found).total, holdings(found), entitlements(found), list[JobRecord]()
    use: dict[str, Resources] = {**held.by_queue}
    use |= {f"{name}/{owner}": one for (name, owner), one in held.by_user.items()}
    before = {name: (past.by_queue.get(name, 0.0), one.parent) for name, one in found.queues.by_name.items()}

    def path(one: JobRecord) -> list[str]:
        name = one.spec.queue or "default"
        return [*reversed([queue.name for queue in found.queues.path(name)]), f"{name}/{one.owner}"]

    def used_before(name: str) -> float:
        below = [one for one in before if name in [queue.name for queue in found.queues.path(one)]]
        return sum(before[one][0] for one in below)

    def rank(name: str, below: list[JobRecord], depth: int) -> tuple[int, float, int]:
        first = following(below, depth)
        then = use.get(name, Resources()).and_(wanted(found, first.spec, first.control.target))
        share_of, part, ahead = max(a / b for a, b in zip(then, total, strict=True) if b), 2, 0.0
        if name in found.queues.by_name:
            siblings = [one for one, (_, parent) in before.items() if parent == before[name][1]]
            all_of = sum(map(used_before, siblings))
            ahead = used_before(name) / all_of / found.queues.by_name[name].weight if all_of else 0.0
            share_of /= found.queues.by_name[name].weight
            has, gets = (
                max((a - b) / c for a, b, c in zip(one, due[name], total, strict=True) if c)
                for one in (use.get(name, Resources()), then)
            )
            part = 2 if has > -1e-9 else 0 if gets <= 1e-9 else 1
        return part, share_of + ahead, first.order

    def following(below: list[JobRecord], depth: int) -> JobRecord:
        """The job of these whose turn it is, below the first ``depth`` branches that they have in common."""
        if depth == len(path(below[0])):
            return min(below, key=lambda one: one.order)
        groups: dict[str, list[JobRecord]] = {}
        for one in below:
            groups.setdefault(path(one)[depth], []).append(one)
        name = min(groups, key=lambda name: (*rank(name, groups[name], depth + 1), name))
        return following(groups[name], depth + 1)

    left = list(jobs)
    while left:
        one = following(left, 0)
        left.remove(one)
        line.append(one)
        for name in path(one):
            use[name] = use.get(name, Resources()).and_(wanted(found, one.spec, one.control.target))
    return line


@REPEATABLE
@given(loads(), st.dictionaries(st.sampled_from(["a", "b", "c", "default"]), st.integers(0, 8), max_size=3))
def test_the_order_is_that_of_one_turn_after_the_other(found: Cluster, past: dict[str, int]) -> None:
    jobs = [one for one in waiting(found) if one.spec.queue in found.queues.by_name or not one.spec.queue]
    jobs = [one.model_copy(update={"spec": one.spec.model_copy(update={"priority": 0})}) for one in jobs]
    tree = Queues(
        rev=1, queues=tuple(q.model_copy(update={"priority": 0, "guarantee": Amount()}) for q in found.queues.queues)
    )
    view = replace(found, queues=tree, jobs={**found.jobs, **{one.uid: one for one in jobs}}, notes=Notes())
    used_before = Decayed({name: amount for name, amount in past.items() if name in tree.by_name}, {})
    assert in_line(view, jobs, used_before) == turns(view, jobs, used_before)


def over(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Queues that use more than they may."""
    found = {}
    for name, use in holdings(cluster).by_queue.items():
        one = cluster.queues.by_name.get(name)
        caps = one.capability.stated if one is not None else {}
        if too_much := tuple(r for r, cap in caps.items() if getattr(use, r) > cap):
            found[name] = too_much
    return found


def started(cluster: Cluster, one: JobRecord, step: Propose) -> Cluster:
    """As it is when the job runs as proposed."""
    generation = make_generation([*step.members]).model_copy(update={"members": step.members})
    after = make_job("running", generation, uid=one.uid, spec=one.spec, owner=one.owner, order=one.order)
    return replace(cluster, jobs={**cluster.jobs, one.uid: after}, notes=Notes())


@REPEATABLE
@given(loads())
def test_no_queue_comes_to_exceed_its_capability(found: Cluster) -> None:
    """Whoever may start does, until nobody may any more."""
    for _ in range(20):
        before = over(found)
        steps = [(one, decide(found, one, WALL).step) for one in waiting(found)]
        proposed = [(one, step) for one, step in steps if isinstance(step, Propose)]
        if not proposed:
            break
        for one, step in proposed:
            assert over(started(found, one, step)).keys() <= before.keys()
            capped = {
                name for q in found.queues.path(one.spec.queue or "default") for name in [q.name] if q.capability.stated
            }
            assert set(step.claims) == capped, "all that have a capability of what it takes"
        found = started(found, *proposed[0])
    else:
        raise AssertionError("it goes on for ever")
    for one in waiting(found):
        room = room_for(found, one)
        if not room.enough and room.fit >= one.spec.nodes.min:
            assert ceiling(found, one).exceeded(least(found, one.spec)), "something it may have is kept from it"


@REPEATABLE
@given(loads())
def test_the_room_under_a_capability_is_what_placement_finds(found: Cluster) -> None:
    for one in waiting(found):
        assert open_room(found, one).enough == place(found, one).fits


@REPEATABLE
@given(loads())
def test_the_sums_are_those_of_the_bookings(found: Cluster) -> None:
    everybody = together(used(found).values())
    tops = found.queues.children[""]
    gone = holdings(found).by_queue.get("gone", Resources())
    assert together([gone, *(holdings(found).by_queue.get(name, Resources()) for name in tops)]) == everybody
    members: list[Member] = [
        m for one in found.jobs.values() if one.generation for m in one.generation.members.values()
    ]
    assert everybody.nodes == len([m for m in members if m.life == life(m.node)])

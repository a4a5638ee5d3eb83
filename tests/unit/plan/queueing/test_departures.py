"""Borrowed nodes in several queues: for whom they come back, from which queue first, and what no queue loses by it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import Amount, Queue, queue_of
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.fairshare.queues import entitlements
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.reservations import reserved
from nodeagent.plan.steps import Propose
from tests.unit.plan.build import REPEATABLE, WALL
from tests.unit.plan.fairshare.ofqueues import QUEUES, WAITING, A, B, C, auto, cluster, in_roles, job, ones
from tests.unit.plan.queueing import test_elastic_placed as placed

KEEPS_ALL = Queue(name="a", guarantee=Amount(nodes=5))
KEEPS = Queue(name="a", reclaimable=False)


def given_by(view: Cluster, name: str) -> int:
    """How many nodes the job gives back."""
    return len(transfers(view).gives.get(f"u-{name}", ()))


def test_what_is_borrowed_comes_back_first_from_the_queue_most_above_its_part() -> None:
    """a has most of it, and is far below its part; b is above its own."""
    tree = [Queue(name="a", weight=9), B, C]
    jobs = auto("a1", range(1, 6)), auto("b1", range(6, 10))
    assert transfers(cluster(9, tree, *jobs, job("c1", 1))).gives == {"u-b1": {"n9": "u-c1"}}
    more = transfers(cluster(9, tree, *jobs, job("c1", 4))).gives
    assert more == {"u-b1": dict.fromkeys(["n9", "n8", "n7"], "u-c1"), "u-a1": {"n5": "u-c1"}}, "whoever is below"
    equal = cluster(8, [A, B, C], auto("a1", range(1, 6)), auto("b1", range(6, 9)), job("c1", 4))
    assert (given_by(equal, "a1"), given_by(equal, "b1")) == (3, 1), "one after the other"


def test_of_one_queue_who_has_most_on_top_of_its_target_gives_first() -> None:
    view = cluster(9, [A, B], auto("a1", [1, 2]), auto("a2", range(3, 8)), *ones("a", [8, 9]), job("b1", 2))
    assert transfers(view).gives == {"u-a2": {"n7": "u-b1", "n6": "u-b1"}}


@pytest.mark.parametrize(
    ("queue", "gives"), [(A, 2), (Queue(name="a", guarantee=Amount(nodes=3)), 2), (KEEPS_ALL, 0), (KEEPS, 0)]
)
def test_what_is_borrowed_comes_back_for_others_only_above_a_guarantee(queue: Queue, gives: int) -> None:
    borrows, light = auto("a1", range(1, 6)), Queue(name="b", weight=0.1)
    view = cluster(5, [queue, light], borrows, job("b1", 2))
    assert given_by(view, "a1") == gives
    assert isinstance(decide(view, borrows, WALL).step, Propose) == (gives > 0)
    assert given_by(cluster(5, [queue, light], borrows, job("a2", 2)), "a1") == 2, "its own queue loses nothing"
    above = [queue.model_copy(update={"name": "p"}), Queue(name="a", parent="p"), Queue(name="c", parent="p"), light]
    assert given_by(cluster(5, above, borrows, job("c1", 2)), "a1") == 2, "nor does p"
    assert given_by(cluster(5, above, borrows, job("b1", 2)), "a1") == gives


def test_one_of_several_roles_and_one_whose_nodes_are_together_take_nothing_that_is_guaranteed() -> None:
    guarded = [Queue(name="a", guarantee=Amount(nodes=4)), Queue(name="b", weight=0.1)]
    for least, gives in ((2, 2), (3, 0)):
        assert given_by(cluster(6, guarded, auto("a1", range(1, 7)), in_roles(job("b1", least))), "a1") == gives
        near = placed.borrower("a1", "n1 n2 n3 n4 n5 n6"), placed.job("b1", least, within="rack")
        assert given_by(placed.cluster({"r1": "n1 n2 n3 n4 n5 n6"}, *near, queues=guarded), "a1") == gives
    two = placed.borrower("a1", "n1 n2"), placed.borrower("c1", "n3 n4 n5", order=1)
    waits = placed.job("b1", 2, within="rack")
    view = placed.cluster({"r1": "n1 n2 n6", "r2": "n3 n4 n5"}, *two, waits, queues=[KEEPS, B, C])
    assert transfers(view).gives == {"u-c1": {"n5": "u-b1", "n4": "u-b1"}}, "though n6 is idle beside n2"


def test_between_queues_borrowed_nodes_are_evened_out_up_to_their_parts() -> None:
    mine, other = auto("a1", range(1, 6)), auto("b1", [6])
    assert given_by(cluster(6, [A, B], mine, other), "a1") == 2
    for keeps in (Queue(name="a", weight=9), KEEPS_ALL, KEEPS):
        assert given_by(cluster(6, [keeps, B], mine, other), "a1") == 0
    assert given_by(cluster(6, [KEEPS_ALL, B], mine, auto("a2", [6])), "a1") == 2, "within one queue as ever"
    three = cluster(9, [A, B, C], auto("a1", range(1, 6)), auto("b1", [6]), *ones("b", [7, 8]), auto("c1", [9]))
    assert transfers(three).gives == {"u-a1": {"n5": "u-c1", "n4": "u-c1"}}, "what was given counts: b has its part"


def test_a_gang_does_not_count_on_what_does_not_come_back() -> None:
    """It needs all nodes. Those that are a's own are free when a1 ends, and nobody can tell when that is."""
    borrows = auto("a1", range(1, 6))
    for queue, start in ((A, 0), (KEEPS_ALL, None), (KEEPS, None)):
        assert [one.start for one in reserved(cluster(6, [queue, B], borrows, job("b1", 5))).found] == [start]
        limited = borrows.model_copy(update={"spec": borrows.spec.model_copy(update={"time_limit": 100.0})})
        view = cluster(6, [queue, B], limited, job("b1", 5))
        assert all(one.start is not None for one in reserved(view).found)
        assert reserved(cluster(6, [queue, B], borrows, job("a2", 5))).found[0].start == 0, "for a job of its own"


@pytest.mark.parametrize(
    ("queue", "takes"), [(A, 2), (Queue(name="a", guarantee=Amount(nodes=1)), 2), (KEEPS_ALL, 0), (KEEPS, 0)]
)
def test_nobody_borrows_a_kept_node_who_would_not_give_it_back(queue: Queue, takes: int) -> None:
    """b2 waits for the node of b1; the two idle ones are reserved for it."""
    borrows, waits = auto("a1", [4]).model_copy(update={"order": 9}), job("b2", 3, order=1)
    view = cluster(4, [queue, B], *ones("b", [1]), borrows, waits)
    assert [one.nodes for one in reserved(view).found] == [{"n1", "n2", "n3"}]
    assert len(transfers(view).takes.get("u-a1", ())) == takes


def test_what_a_queue_only_keeps_for_a_job_is_nothing_that_it_could_give() -> None:
    """a2 needs all four nodes that a may have, which keeps them for it: a has two, and is guaranteed three."""
    tight = Queue(name="a", guarantee=Amount(nodes=3), capability=Amount(nodes=4))
    jobs = auto("a1", [1, 2]), job("a2", 4, order=1), job("b1", 4, order=2)
    assert [one.queue for one in reserved(cluster(5, [tight, B], *jobs)).found][-1] == "a"
    assert given_by(cluster(5, [tight, B], *jobs), "a1") == 0
    shrinks = job("a1", 1, [1, 2]), *jobs[1:]
    heavy = Queue(name="b", weight=3)
    light = Queue(name="a", capability=Amount(nodes=4), weight=2)
    assert given_by(cluster(5, [light, heavy], *shrinks), "a1") == 0, "nor is it above its part by that"


KINDS = st.tuples(st.integers(0, 2), st.integers(1, 5), st.sampled_from(["whole", "elastic", "auto"]))


def drawn(
    queues: list[tuple[float, int, bool]],
    running: list[tuple[int, int, str]],
    waiting: list[tuple[int, int]],
    idle: int,
    inner: bool,
) -> Cluster:
    """Weight, guarantee and reclaimable of queues; queue, size and kind of jobs that run; queue and least of those that
    wait. ``inner``: a and b are below p."""
    tree = [
        Queue(name=name, weight=w, guarantee=Amount(nodes=g), reclaimable=r, parent="p" * (inner and name != "c"))
        for name, (w, g, r) in zip("abc", queues, strict=False)
    ]
    jobs, used = list[JobRecord](), 0
    for at, (which, size, kind) in enumerate(running):
        on = range(used + 1, used + size + 1)
        used += size
        name = f"{tree[which % len(tree)].name}r{at}"
        one = auto(name, on) if kind == "auto" else job(name, 1 if kind == "elastic" else size, on)
        jobs.append(one.model_copy(update={"order": at}))
    jobs += [job(f"{tree[which % len(tree)].name}w{at}", n, order=50 + at) for at, (which, n) in enumerate(waiting)]
    return cluster(used + idle, [*tree, Queue(name="p")], *jobs)


def size(one: JobRecord) -> int:
    """How many nodes it has."""
    return len(one.generation.members) if one.generation is not None else 0


@REPEATABLE
@given(queues=QUEUES, running=st.lists(KINDS, max_size=6), waiting=WAITING, idle=st.integers(0, 3), inner=st.booleans())
def test_what_must_hold_of_every_view(
    queues: list[tuple[float, int, bool]],
    running: list[tuple[int, int, str]],
    waiting: list[tuple[int, int]],
    idle: int,
    inner: bool,
) -> None:
    view = drawn(queues, running, waiting, idle, inner)
    found = transfers(view)
    for queue in view.queues.by_name.values():
        below = {uid for uid, one in view.jobs.items() if queue in [*view.queues.path(one.spec.queue)]}
        lost = 0
        for uid in below:
            gives = found.gives.get(uid, {})
            lost += sum(taker not in below for taker in gives.values())
            lost += (size(view.jobs[uid]) - len(gives)) * (found.stops.get(uid, uid) not in below)
        if lost:
            assert queue.reclaimable, "nothing for others"
            has = sum(size(view.jobs[uid]) for uid in below)
            assert has - lost >= view.queues.guaranteed(queue.name, "nodes"), "nothing that is guaranteed"
    turned = replace(view, jobs=dict(reversed(list(view.jobs.items()))), notes=Notes())
    assert transfers(turned) == found, "whatever order they are read in"


LENDERS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=6)


@REPEATABLE
@given(queues=QUEUES, lenders=LENDERS, needs=st.integers(1, 6))
def test_each_node_comes_from_the_queue_most_above_its_part(
    queues: list[tuple[float, int, bool]], lenders: list[tuple[int, int]], needs: int
) -> None:
    """For one that waits in a. ``lenders``: queue and size of jobs of which one node is their own."""
    view = drawn(queues, [(which, n, "auto") for which, n in lenders], [(0, needs)], 0, inner=False)
    rest = [one for one in view.jobs.values() if one.generation is not None]
    tree, due, names = view.queues.by_name, entitlements(view), "abc"[: len(queues)]
    has = {name: sum(size(one) for one in rest if one.spec.queue == name) for name in names}
    lent = {name: has[name] - sum(one.spec.queue == name for one in rest) for name in names}

    def gives(name: str) -> bool:
        spares = tree[name].reclaimable and has[name] > (tree[name].guarantee.nodes or 0)
        return lent[name] > 0 and (name == "a" or spares)

    expected = Counter[str]()
    while sum(expected.values()) < needs and (able := [name for name in names if gives(name)]):
        above = {name: (has[name] - due[name].nodes) / len(view.nodes) for name in able}
        most = max(able, key=above.__getitem__)
        assume(list(above.values()).count(above[most]) == 1)  # else who borrows most gives first
        expected[most] += 1
        has[most], lent[most] = has[most] - 1, lent[most] - 1
    got = Counter[str]()
    for uid, nodes in transfers(view).gives.items():
        got[queue_of(view.jobs[uid].spec.queue)] += sum(view.jobs[taker].generation is None for taker in nodes.values())
    assert +got == (expected if sum(expected.values()) == needs else Counter()), "and nothing in vain"

"""Queues that have less than their part get it back: from whom, how much, and what nobody loses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.constraints import Constraints, Match
from nodeagent.model.job import BudgetEntry, JobRecord, Scale
from nodeagent.model.queue import Amount, Queue, queue_of
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Notes
from nodeagent.plan.fairshare.queues import Part, entitlements
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.queue import ASSEMBLE, queue
from nodeagent.plan.queueing.transfers import Transfers
from nodeagent.plan.steps import End, Propose
from tests.unit.plan.build import (
    NOW,
    PREPARING,
    READY,
    REPEATABLE,
    WALL,
    make_generation,
    make_job,
    make_node,
    make_spec,
    spend,
)
from tests.unit.plan.fairshare.ofqueues import (
    QUEUES,
    TEAM,
    WAITING,
    A,
    B,
    C,
    auto,
    cluster,
    formed,
    in_roles,
    job,
    ones,
)


def part(nodes: float) -> Part:
    """Of a cluster whose nodes have one slot each."""
    return Part(0, nodes, nodes)


def test_parts_are_by_weight_of_queues_that_have_jobs() -> None:
    tree = [A, Queue(name="b", weight=3), Queue(name="x", parent="b"), Queue(name="y", parent="b"), Queue(name="c")]
    view = cluster(8, tree, job("a1", 1), job("x1", 1), job("y1", 1))
    assert entitlements(view) == {"a": part(2), "b": part(6), "x": part(3), "y": part(3)}
    assert entitlements(cluster(8, tree, job("a1", 1))) == {"a": part(8)}
    ended, paused = job("x1", 1).model_copy(update={"phase": "succeeded"}), job("y1", 1)
    paused = paused.model_copy(update={"control": paused.control.model_copy(update={"desired": "pause"})})
    assert entitlements(cluster(8, tree, job("a1", 1), ended, paused)) == {"a": part(8)}


def test_an_elastic_job_shrinks_first_and_only_to_the_others_part() -> None:
    view = cluster(6, [A, B], job("a1", 1, range(1, 7)), job("b1", 2))
    assert transfers(view).gives == {"u-a1": {"n6": "u-b1", "n5": "u-b1"}}
    step = decide(view, view.jobs["u-a1"], WALL).step
    assert isinstance(step, Propose)
    assert sorted(step.members) == ["n1", "n2", "n3", "n4"]
    assert (step.planned, step.cause.text) == (True, "n5, n6 given back: job b1 needs it")
    assert transfers(cluster(6, [A, B], job("a1", 1, range(1, 7)), job("b1", 4))).gives == {}, "more than its part"
    heavy = [A, Queue(name="b", weight=2)]
    assert len(transfers(cluster(6, heavy, job("a1", 1, range(1, 7)), job("b1", 4))).gives["u-a1"]) == 4


def test_one_that_runs_on_too_few_nodes_gets_its_queues_part_back() -> None:
    few = job("b1", 1, [6], most=4)
    view = cluster(6, [A, B], job("a1", 1, range(1, 6)), few)
    assert transfers(view).gives == {"u-a1": {"n5": "u-b1", "n4": "u-b1"}}, "three of six nodes are its part"
    guaranteed = [A, Queue(name="b", guarantee=Amount(nodes=4))]
    view = cluster(6, guaranteed, job("a1", 1, range(1, 6)), few)
    assert len(transfers(view).gives["u-a1"]) == 3, "and four, where so many are guaranteed"
    assert transfers(cluster(6, [A, B], job("a1", 5, range(1, 6)), few)) == Transfers(), (
        "no whole job is stopped for it"
    )
    mine = job("a1", 1, range(1, 6)), job("a2", 1, [6], most=4)
    assert transfers(cluster(6, [A, B], *mine, job("b1", 9))).gives == {}, "nor does its own queue give to it"
    line = [job(f"b{i}", 9, order=i) for i in range(2, 40)]
    view = cluster(6, [A, B], job("a1", 1, range(1, 6)), few, *line)
    assert len(transfers(view).gives["u-a1"]) == 2, "whatever waits"


@pytest.mark.parametrize(("want", "gives"), [(3, 1), (4, 0)])
def test_nobody_gives_anything_for_a_scale_out_that_cannot_be_met(want: int, gives: int) -> None:
    """All of its newcomers come together or not at all; its queue's part is three nodes."""
    one = job("b1", 1, [5, 6], most=6)
    grows = Scale(request="r", want=want, before=2, deadline=NOW + 60_000, timeout=60)
    control = one.control.model_copy(update={"target": want, "scale": grows})
    view = cluster(6, [A, B], job("a1", 1, range(1, 5)), one.model_copy(update={"control": control}))
    assert len(transfers(view).gives.get("u-a1", {})) == gives


def test_a_gang_that_lost_a_node_meanwhile_gets_back_what_it_had() -> None:
    one = job("b1", 1, [6], most=6)
    grows = Scale(request="r", want=5, before=3, deadline=NOW + 60_000, timeout=60)
    control = one.control.model_copy(update={"target": 5, "scale": grows})
    view = cluster(6, [A, B], job("a1", 1, range(1, 6)), one.model_copy(update={"control": control}))
    assert len(transfers(view).gives["u-a1"]) == 2


def test_a_scale_in_that_cannot_be_carried_out_keeps_nobody_from_its_nodes() -> None:
    """It would need another node for the one that is to leave."""
    leaves = Scale(request="r", want=3, before=3, state="pending", leaving=("n3",))
    one = job("a1", 3, [1, 2, 3])
    one = one.model_copy(update={"control": one.control.model_copy(update={"scale": leaves})})
    view = cluster(3, [A, Queue(name="b", guarantee=Amount(nodes=1))], one, job("b1", 1, order=1))
    step = decide(view, one, WALL).step
    assert isinstance(step, End)
    assert step.reason == "made room: job b1 of queue b is entitled to its nodes"
    alone = decide(cluster(3, [A, B], one), one, WALL)
    assert (alone.step, alone.why[0][:26]) == (None, "not yet n3 scaled in by an")


def stopped(one: JobRecord, at: int, *others: str) -> JobRecord:
    """It made room for these jobs (uids) then, and waits again."""
    assert one.generation is not None
    note = BudgetEntry(at=at, wall=WALL, kind="share", counts=False, room_for=others)
    generation = one.generation.model_copy(update={"state": "ended"})
    return one.model_copy(
        update={"phase": "holding", "generation": generation, "budget": {str(generation.number): note}, "since": at}
    )


def test_who_room_was_made_for_is_first_in_line() -> None:
    """Whatever queues have, and used before: else who made room would start again, and be stopped again."""
    waits, other = job("b1", 2, order=5).model_copy(update={"since": NOW - 100}), job("a3", 1, order=1)
    high = A.model_copy(update={"priority": 9})
    for at, names in ((NOW, "b1 a2 a3"), (NOW - 200, "a2 a3 b1")):
        gave = stopped(job("a2", 3, [4, 5, 6]), at, "u-b1")
        view = cluster(6, [high, B], job("a1", 3, [1, 2, 3]), gave, other, waits)
        assert " ".join(w.job.name for w in queue(view)) == names, "only if it waited already then"


@pytest.mark.parametrize(("made_for", "grows"), [(("u-b1",), False), ((), True)])
def test_nobody_grows_into_what_was_given_up_for_one_that_gets_ready(made_for: tuple[str, ...], grows: bool) -> None:
    """a1 is ready on n2, which a2 has left; b1, for which it did, is not ready there yet."""
    donor = formed(stopped(job("a2", 1, [3], order=1), NOW - 500, *made_for), NOW - 500)
    waits = job("b1", 2, order=5).model_copy(update={"since": NOW - 20_000})
    tree = [A, Queue(name="b", guarantee=Amount(nodes=2))]
    view = cluster(3, tree, formed(job("a1", 1, [1], most=2), 0), donor, waits)
    ready = {"u-a1": READY, "u-a2": READY, "u-b1": PREPARING}
    view = replace(view, nodes={n: make_node(n, slots=1, ready=ready) for n in view.nodes}, notes=Notes())
    decision = decide(view, view.jobs["u-a1"], WALL)
    assert isinstance(decision.step, Propose) == grows, decision
    if not grows:
        assert "reserved for job b1" in decision.why[0]


def test_who_gives_nodes_says_for_whom() -> None:
    whole = cluster(6, [A, B], job("a1", 3, [1, 2, 3]), job("a2", 3, [4, 5, 6], order=1), job("b1", 2, order=2))
    elastic = cluster(6, [A, B], job("a1", 1, range(1, 7)), job("b1", 2))
    for view, donor in ((whole, "u-a2"), (elastic, "u-a1")):
        step = decide(view, view.jobs[donor], WALL).step
        assert isinstance(step, Propose | End)
        assert step.spend is not None
        assert step.spend.room_for == ("u-b1",)


@pytest.mark.parametrize(
    ("queues", "why"),
    [
        ([Queue(name="a", reclaimable=False), B], "it may not be taken from"),
        ([Queue(name="a", guarantee=Amount(nodes=6)), B], "all of it is guaranteed"),
        ([A, Queue(name="b", capability=Amount(nodes=1))], "it may not have more"),
        ([A, Queue(name="b", weight=0.1)], "it is not entitled to that much"),
    ],
)
def test_what_keeps_a_queue_from_taking(queues: list[Queue], why: str) -> None:
    found = transfers(cluster(6, queues, job("a1", 1, range(1, 7)), job("b1", 2)))
    assert (found.gives, found.stops) == ({}, {}), why


def test_what_is_guaranteed_is_had_whatever_the_weight() -> None:
    queues = [A, Queue(name="b", weight=0.01, guarantee=Amount(nodes=2))]
    assert len(transfers(cluster(6, queues, job("a1", 1, range(1, 7)), job("b1", 2))).gives["u-a1"]) == 2


GPUS = Queue(name="b", weight=0.01, guarantee=Amount(gpus=8))


def test_guaranteed_gpus_are_no_right_to_nodes_for_jobs_without_gpus() -> None:
    found = transfers(cluster(6, [A, GPUS], job("a1", 1, range(1, 7)), job("b1", 2)))
    assert (found.gives, found.stops) == ({}, {})
    line = queue(cluster(2, [A, GPUS], job("a1", 1, order=1), job("b1", 1, order=2)))
    assert [waiting.job.name for waiting in line] == ["a1", "b1"], "nor are they first in line for it"


def test_guaranteed_gpus_keep_no_nodes_of_jobs_without_gpus() -> None:
    found = transfers(cluster(6, [A, GPUS], job("b1", 1, range(1, 7)), job("a1", 2)))
    assert len(found.gives["u-b1"]) == 2


def test_no_job_of_a_queue_takes_from_its_own() -> None:
    found = transfers(cluster(6, [A, B], job("a1", 1, range(1, 7)), job("a2", 2)))
    assert (found.gives, found.stops) == ({}, {})


def test_what_cannot_be_divided_by_weight_goes_to_who_has_less_than_its_part() -> None:
    """Of four nodes each of three queues is to have one and a third: 3, 1, 0 becomes 2, 1, 1."""
    jobs = [*ones("a", range(1, 4)), *ones("b", [4])]
    assert transfers(cluster(4, [A, B, C], *jobs, job("c9", 1, order=9))).stops == {"u-a3": "u-c9"}
    assert transfers(cluster(4, [A, B, C], *jobs, job("b9", 1, order=9))).stops == {"u-a3": "u-b9"}
    level = [*ones("a", [1, 2]), *ones("b", [3]), *ones("c", [4])]
    for name in "abc":
        assert transfers(cluster(4, [A, B, C], *level, job(f"{name}9", 1, order=9))).stops == {}, "and it stays so"


def test_of_equal_shares_who_has_less_gets_it() -> None:
    """Of five nodes a is to have 2.9, b 0.7 and c 1.4. Their shares would be equal if b got one of a's four."""
    queues = [Queue(name="a", weight=2), Queue(name="b", weight=0.5), C]
    jobs = [*ones("a", [1, 2, 3, 4]), *ones("c", [5]), job("b9", 1, order=9)]
    assert transfers(cluster(5, queues, *jobs)).stops == {"u-a4": "u-b9"}


def test_who_gives_for_that_keeps_its_part() -> None:
    """Of five nodes each of two queues is to have two and a half: who has three keeps them."""
    jobs = [*ones("a", [1, 2, 3]), *ones("b", [4, 5])]
    assert transfers(cluster(5, [A, B], *jobs, job("b9", 1, order=9))).stops == {}
    heavy = Queue(name="b", weight=4)
    assert transfers(cluster(6, [A, heavy], *ones("a", [1, 2]), *ones("b", [3, 4, 5, 6]), job("b9", 1))).stops == {}


def test_a_gang_gets_no_more_than_part_of_one_node_so() -> None:
    """Of seven nodes each of three queues is to have two and a third."""
    jobs = [*ones("a", range(1, 7)), *ones("b", [7])]
    assert transfers(cluster(7, [A, B, C], *jobs, job("c9", 4, order=9))).stops == {}
    assert len(transfers(cluster(7, [A, B, C], *jobs, job("c9", 3, order=9))).stops) == 3


def test_priority_keeps_no_queue_from_its_part() -> None:
    """a8 is before b9 in line and entitled to nothing. What a4 gives is b9's: it is first of all then."""
    jobs = [*ones("a", range(1, 5)), job("b9", 1, order=9), job("a8", 1, order=8, priority=5)]
    assert transfers(cluster(4, [A, B], *jobs)).stops == {"u-a4": "u-b9"}


def test_a_queue_within_its_part_gives_nothing() -> None:
    """c has b's part and may not be taken from; a has its own, though a job of it could be smaller."""
    keeps = Queue(name="c", reclaimable=False)
    found = transfers(cluster(6, [A, B, keeps], job("a1", 1, [1, 2]), job("c1", 1, range(3, 7)), job("b9", 1, order=9)))
    assert (found.gives, found.stops) == ({}, {})


def test_what_one_job_is_to_get_counts_for_the_next() -> None:
    """a has all six nodes, two of which are b's part: two of b's four jobs get one. c waits for more than there are."""
    jobs = [*ones("a", range(1, 7)), *(job(f"b{i}", 1, order=10 + i) for i in range(4)), job("c1", 9, order=20)]
    assert transfers(cluster(6, [A, B, C], *jobs)).stops == {"u-a6": "u-b0", "u-a5": "u-b1"}


def test_who_is_most_above_its_part_gives_first() -> None:
    jobs = [*ones("a", [1, 2, 3], order=50), *ones("c", range(4, 9)), job("b9", 1, order=9)]
    assert transfers(cluster(8, [A, B, C], *jobs)).stops == {"u-c8": "u-b9"}, "though a's jobs are younger"


def test_of_queues_that_are_equally_above_their_parts_the_less_important_and_younger_job_gives_first() -> None:
    """Each has three nodes, and two are its part: it is decided among the jobs of both, as if of one queue."""
    early, late = ones("a", [1, 2, 3]), ones("c", [4, 5, 6])
    favoured = [one.model_copy(update={"spec": one.spec.model_copy(update={"priority": 5})}) for one in late]
    for running, gives in (
        ([*early, *late], "u-c6"),
        ([*late, *early], "u-c6"),
        ([*ones("a", [1, 2, 3], order=50), *late], "u-a3"),
        ([*early, *favoured], "u-a3"),
        ([*favoured, *early], "u-a3"),
    ):
        assert transfers(cluster(6, [A, B, C], *running, job("b9", 1, order=9))).stops == {gives: "u-b9"}


def test_a_queue_gets_its_part_of_a_parent_that_has_more_than_its_own() -> None:
    """What the queue and its sibling have together is not the sibling's business."""
    tree = [Queue(name="p"), Queue(name="a", parent="p"), Queue(name="b", parent="p"), C]
    jobs = [job("a1", 1, range(1, 6)), job("c1", 1, [6])]
    assert transfers(cluster(6, tree, *jobs, job("b9", 1, order=9))).gives == {"u-a1": {"n5": "u-b9"}}
    assert transfers(cluster(6, tree, *jobs, job("b9", 3, order=9))).gives == {}, "not more than its part"


def test_what_others_of_the_queue_get_from_idle_nodes_counts() -> None:
    """Two of six nodes are b's part: one is idle, and so only one more is taken. c waits for more than there are."""
    jobs = [*ones("a", range(1, 6)), *(job(f"b{i}", 1, order=i) for i in (7, 8, 9)), job("c1", 9, order=20)]
    assert transfers(cluster(6, [A, B, C], *jobs)).stops == {"u-a5": "u-b8"}


def test_what_is_given_back_of_borrowed_nodes_counts() -> None:
    """a1 gives what it has borrowed to b6. Then a has its part, and what b7 needs is c's."""
    spec = make_spec(name="a1", size=(1, 2)).model_copy(update={"queue": "a"})
    nodes = spec.nodes.model_copy(update={"target": 1, "auto": True})
    spec = spec.model_copy(update={"roles": (spec.role.model_copy(update={"nodes": nodes}),)})
    lends = make_job("running", make_generation(["n1", "n2"]), spec=spec, uid="u-a1", target=1)
    jobs = [lends, *ones("a", [3], order=50), job("b8", 1, order=8), job("b9", 1, order=9), *ones("c", [4, 5, 6])]
    found = transfers(cluster(6, [A, B, C], *jobs))
    assert (found.gives, found.stops) == ({"u-a1": {"n2": "u-b8"}}, {"u-c6": "u-b9"})


def test_what_a_job_leaves_is_no_longer_its_queues() -> None:
    """a3 has made room, and its workers still stop. b8 gets its node, and what b9 needs is c's: a has its part."""
    leaves = make_job(
        "holding", make_generation(["n3"], state="ended", holders=["n3"]), spec=job("a3", 1).spec, uid="u-a3"
    )
    jobs = [*ones("a", [1, 2], order=50), leaves, *ones("c", [4, 5, 6]), job("b8", 1, order=8), job("b9", 1, order=9)]
    assert transfers(cluster(6, [A, B, C], *jobs)).stops == {"u-c6": "u-b9"}


def test_nobody_has_part_of_one_node_more_before_all_have_their_parts() -> None:
    """Parts are 3.33, 0.56 and 1.11 of five nodes: b gives one to a and one to c, though two of a are before c."""
    tree = [Queue(name="a", weight=3.0), Queue(name="b", weight=0.5), C]
    waiting = [job("a6", 1, order=6), job("a7", 1, order=7), job("c8", 1, order=8)]
    found = transfers(cluster(5, tree, *ones("a", [1, 2], order=1), *ones("b", [3, 4, 5], order=3), *waiting))
    assert sorted(found.stops.values()) == ["u-a6", "u-c8"]
    assert {uid[:3] for uid in found.stops} == {"u-b"}


def test_who_has_made_room_lets_others_get_ready() -> None:
    """Its own pods are ready there still: it would take its nodes again."""
    entry = spend("share", counts=False)
    stopped = job("a9", 1, order=9).model_copy(
        update={"phase": "holding", "since": NOW - 1000, "last_number": 1, "budget": {"1": entry}}
    )
    long = job("b1", 1).model_copy(update={"since": 0})
    view = cluster(2, [A, B], *ones("a", [2]), long, stopped)
    slow = make_node("n1", slots=1, ready={"u-a9": READY})
    view = replace(view, nodes={**view.nodes, "n1": slow}, notes=Notes())
    decision = decide(view, stopped, WALL)
    assert (decision.step, decision.at) == (None, stopped.since + millis(ASSEMBLE))
    assert decision.why[0].startswith("job b1 is before it in the queue")
    assert isinstance(decide(replace(view, served=decision.at), stopped, WALL).step, Propose), "not for ever"
    lost = stopped.model_copy(update={"budget": {"1": spend("node_lost", counts=False)}})
    other = replace(view, jobs={**view.jobs, "u-a9": lost}, notes=Notes())
    assert isinstance(decide(other, lost, WALL).step, Propose), "b1 has been waited for"


RUNNING = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.booleans()), max_size=5)


@REPEATABLE
@given(queues=QUEUES, running=RUNNING, waiting=WAITING, idle=st.integers(0, 3), roles=st.booleans())
def test_what_must_hold_of_every_view(
    queues: list[tuple[float, int, bool]],
    running: list[tuple[int, int, bool]],
    waiting: list[tuple[int, int]],
    idle: int,
    roles: bool,
) -> None:
    """Weight, guarantee and reclaimable of queues; queue, size and elasticity of jobs that run; queue and least of
    those that wait. ``roles``: jobs that are not elastic have two."""
    tree = [
        Queue(name="abc"[i], weight=w, guarantee=Amount(nodes=g), reclaimable=r) for i, (w, g, r) in enumerate(queues)
    ]
    jobs: list[JobRecord] = []
    used = 0
    for at, (which, size, elastic) in enumerate(running):
        on = range(used + 1, used + size + 1)
        used += size
        jobs.append(job(f"{'abc'[which % len(tree)]}r{at}", 1 if elastic else size, on, order=at))
    jobs += [job(f"{'abc'[which % len(tree)]}w{at}", size, order=50 + at) for at, (which, size) in enumerate(waiting)]
    sizes = {one.uid: one.spec.nodes.min for one in jobs}
    jobs = [in_roles(one) if roles else one for one in jobs]
    total = used + idle
    view = cluster(total, tree, *jobs)
    found = transfers(view)
    by_uid, due = {one.uid: one for one in jobs}, {name: one.nodes for name, one in entitlements(view).items()}

    def of(uid: str) -> str:
        return queue_of(by_uid[uid].spec.queue)

    def has(name: str) -> int:
        generations = [one.generation for one in jobs if one.generation is not None and of(one.uid) == name]
        return sum(len(generation.members) for generation in generations)

    lost: dict[str, int] = {}
    for uid, nodes in found.gives.items():
        generation = by_uid[uid].generation
        assert generation is not None
        assert len(generation.members) - len(nodes) >= sizes[uid]
        lost[of(uid)] = lost.get(of(uid), 0) + len(nodes)
    for uid in found.stops:
        generation = by_uid[uid].generation
        assert generation is not None
        lost[of(uid)] = lost.get(of(uid), 0) + len(generation.members) - len(found.gives.get(uid, ()))
    takers = {one for nodes in found.gives.values() for one in nodes.values()} | set(found.stops.values())
    guaranteed = {queue.name: queue.guarantee.nodes or 0 for queue in tree}
    owned = any(has(of(uid)) + sizes[uid] <= guaranteed[of(uid)] for uid in takers)
    for one in tree:
        if one.name in lost:
            assert one.reclaimable
            assert has(one.name) - lost[one.name] >= (one.guarantee.nodes or 0), "nothing that is guaranteed"
            assert owned or has(one.name) > due[one.name], "only from one that had more than its part"
    for uid in takers:
        name, needs = of(uid), sizes[uid]
        assert has(name) + needs < max(due[name] + 1, guaranteed[name] + 1), "up to its part only, to one node"
        given = [of(donor) for donor, nodes in found.gives.items() for one in nodes.values() if one == uid]
        assert len(given) <= needs, "no more than it needs"
        stopped = {donor: len(by_uid[donor].generation.members) for donor, one in found.stops.items() if one == uid}  # type: ignore[union-attr]
        gained = len(given) + sum(n - len(found.gives.get(donor, ())) for donor, n in stopped.items())
        assert gained >= needs - idle, "never in vain"
        assert all(gained - n < needs for n in stopped.values()), "nobody who is not needed"
    turned = replace(view, jobs=dict(reversed(list(view.jobs.items()))), notes=Notes())
    assert transfers(turned) == found, "whatever order they are read in"


def test_nobody_borrows_over_a_capability() -> None:
    one = auto("a1", [1, 2])
    assert transfers(cluster(6, [Queue(name="a", capability=Amount(nodes=2)), B], one)).takes == {}
    assert transfers(cluster(6, [Queue(name="a", capability=Amount(nodes=4)), B], one)).takes == {"u-a1": ("n3", "n4")}


def test_nobody_borrows_what_one_that_waits_may_have() -> None:
    view = cluster(6, [Queue(name="a", capability=Amount(nodes=4)), B], auto("a1", [1, 2]), job("a2", 1))
    assert transfers(view).takes == {"u-a1": ("n4",)}, "n3 is for a2, and a may have no more than four"


def test_borrowed_nodes_come_back_for_one_that_a_capability_bars() -> None:
    few = [Queue(name="a", capability=Amount(nodes=4)), B]
    for nodes, why in ((6, "others are idle: which come back does not matter"), (4, "it gets those")):
        view = cluster(nodes, few, auto("a1", [1, 2, 3, 4]), job("a2", 2))
        assert transfers(view).gives == {"u-a1": {"n4": "u-a2", "n3": "u-a2"}}, why
    other = cluster(8, few, auto("b1", [5, 6, 7, 8]), job("a1", 4, [1, 2, 3, 4]), job("a2", 2))
    assert transfers(other) == Transfers(), "what another queue borrows would not help"


def test_what_comes_back_need_not_be_what_the_other_can_use() -> None:
    few = [Queue(name="a", capability=Amount(nodes=4)), B]
    waits = job("a2", 2)
    role = waits.spec.role.model_copy(
        update={"placement": Constraints(require=(Match(label="node", values=("n[5-6]",)),))}
    )
    waits = waits.model_copy(update={"spec": waits.spec.model_copy(update={"roles": (role,)})})
    assert transfers(cluster(6, few, auto("a1", [1, 2, 3, 4]), waits)).gives == {"u-a1": {"n4": "u-a2", "n3": "u-a2"}}
    assert transfers(cluster(5, few, auto("a1", [1, 2, 3, 4]), waits)) == Transfers(), "n6 is not there"


def test_borrowed_nodes_come_back_from_other_queues_as_well_as_far_as_they_help() -> None:
    five = [TEAM[0].model_copy(update={"capability": Amount(nodes=5)}), *TEAM[1:], C]
    view = cluster(6, five, auto("a1", [1, 2]), auto("c1", [3, 4, 5, 6]), job("b1", 4))
    assert transfers(view).gives == {"u-a1": {"n2": "u-b1"}, "u-c1": dict.fromkeys(["n6", "n5", "n4"], "u-b1")}


@pytest.mark.parametrize(("made_for", "starts"), [(("u-b1",), False), ((), True)])
def test_who_has_failed_does_not_come_back_into_what_was_given_up(made_for: tuple[str, ...], starts: bool) -> None:
    """a1 has failed, and a2 made room for b1, which still gets ready: p has one node left."""
    given = spend("share", counts=False).model_copy(update={"room_for": made_for, "at": NOW - 500})
    gone = {"phase": "holding", "since": NOW - 1000, "last_number": 1}
    ended = {n: make_generation([n], state="ended", since=NOW - 1000) for n in ("n1", "n2")}
    failed = job("a1", 1).model_copy(update={**gone, "generation": ended["n1"], "budget": {"1": spend("worker")}})
    donor = job("a2", 1, order=1).model_copy(update={**gone, "generation": ended["n2"], "budget": {"1": given}})
    waits = job("b1", 1, order=9).model_copy(update={"since": 0})
    jobs = [failed, donor, waits, *ones("a", [3, 4, 5], order=5)]
    view = cluster(6, TEAM, *jobs)
    slow = {n: make_node(n, slots=1, ready={"u-a1": READY, "u-a2": READY, "u-b1": PREPARING}) for n in view.nodes}
    view = replace(view, nodes=slow, notes=Notes())
    assert isinstance(decide(view, failed, WALL).step, Propose) == starts


def test_nobody_borrows_what_a_queue_keeps() -> None:
    jobs = job("a1", 2, [1, 2]), auto("a2", [3]).model_copy(update={"order": 1})
    assert transfers(cluster(8, TEAM, *jobs)).takes == {"u-a2": ("n4",)}
    assert transfers(cluster(8, TEAM, *jobs, job("b1", 4, order=2))).takes == {}, "four are reserved for b1"


def test_queues_share_what_they_may_have_together() -> None:
    elastic = cluster(8, TEAM, job("a1", 1, range(1, 5)), job("b1", 2))
    assert transfers(elastic).gives == {"u-a1": {"n4": "u-b1", "n3": "u-b1"}}
    assert transfers(cluster(8, TEAM, job("a1", 1, range(1, 5)), job("b1", 3))).gives == {}, "two are its part"
    whole = cluster(8, TEAM, job("a1", 2, [1, 2]), job("a2", 2, [3, 4], order=1), job("b1", 2))
    assert (transfers(whole).stops, transfers(whole).gives) == ({"u-a2": "u-b1"}, {})
    c1 = job("c1", 1, range(5, 9))
    busy = cluster(8, [*TEAM, C], job("a1", 1, range(1, 5)), c1, job("b1", 2))
    assert transfers(busy).gives == {"u-a1": {"n4": "u-b1", "n3": "u-b1"}}, "from whom it helps"
    free = cluster(8, [*TEAM, C], job("a1", 2, [1, 2]), job("c1", 1, range(3, 9)), job("b1", 2))
    assert transfers(free).gives == {"u-c1": {"n8": "u-b1", "n7": "u-b1"}}, "the four are not all in use"


def test_a_guarantee_is_had_under_a_capability() -> None:
    tree = [*TEAM[:2], Queue(name="b", parent="p", weight=0.01, guarantee=Amount(nodes=3))]
    assert len(transfers(cluster(8, tree, job("a1", 1, range(1, 5)), job("b1", 3))).gives["u-a1"]) == 3


def test_nobody_gives_what_a_capability_keeps_from_the_other() -> None:
    tree = [Queue(name="a", capability=Amount(nodes=2)), B]
    short = job("a1", 1, [7, 8], most=4)
    assert transfers(cluster(8, tree, job("b1", 1, range(1, 7)), short)) == Transfers()
    more = [Queue(name="a", capability=Amount(nodes=3)), B]
    assert transfers(cluster(8, more, job("b1", 1, range(1, 7)), short)).gives == {"u-b1": {"n6": "u-a1"}}
    two = cluster(6, tree, job("b1", 1, range(1, 7)), job("a1", 2), job("a2", 2, order=1))
    assert len(transfers(two).gives["u-b1"]) == 2, "for the first of them: the second may not start beside it"


def test_nobody_gives_what_is_less_than_the_other_needs_under_a_capability() -> None:
    """A node that comes back with one slot does not make room for a member that takes two."""
    wide = make_spec(name="a2", size=(1, 2), workers=2).model_copy(update={"queue": "a"})
    short = make_job("running", make_generation(["n3"], workers=2), spec=wide, uid="u-a2", target=2)
    lender = auto("a1", [1, 2])
    for slots, gives in ((4, {}), (5, {"u-a1": {"n2": "u-a2"}})):
        view = cluster(3, [Queue(name="a", capability=Amount(slots=slots)), B], lender, short)
        nodes = {name: make_node(name, slots=2, ready={"u-a1": READY, "u-a2": READY}) for name in view.nodes}
        assert transfers(replace(view, nodes=nodes, notes=Notes())).gives == gives, slots


def test_a_part_is_no_more_than_a_capability_and_others_have_the_rest() -> None:
    jobs = job("a1", 1), job("b1", 1), job("c1", 1)
    assert entitlements(cluster(8, [*TEAM, C], *jobs)) == {"p": part(4), "a": part(2), "b": part(2), "c": part(4)}
    small = Queue(name="p", capability=Amount(nodes=2))
    found = entitlements(cluster(8, [small, *TEAM[1:], C], *jobs))
    assert {name: one.nodes for name, one in found.items()} == {"p": 2, "a": 1, "b": 1, "c": 6}


CAPS = st.tuples(st.integers(1, 6), st.one_of(st.none(), st.integers(1, 6)))


@REPEATABLE
@given(caps=CAPS, running=RUNNING, waiting=WAITING, idle=st.integers(0, 3), roles=st.booleans())
def test_what_must_hold_of_every_view_with_capabilities(
    caps: tuple[int, int | None],
    running: list[tuple[int, int, bool]],
    waiting: list[tuple[int, int]],
    idle: int,
    roles: bool,
) -> None:
    """``caps``: of the parent of a and b, and of a. ``roles``: jobs that are not elastic have two."""
    mine = Queue(name="a", parent="p", capability=Amount(nodes=caps[1]))
    tree = [Queue(name="p", capability=Amount(nodes=caps[0])), mine, Queue(name="b", parent="p"), C]
    jobs, used = list[JobRecord](), 0
    for at, (which, size, elastic) in enumerate(running):
        on = range(used + 1, used + size + 1)
        used += size
        name = f"{'abc'[which]}r{at}"
        one = auto(name, on) if elastic else job(name, size, on)
        jobs.append(one.model_copy(update={"order": at}))
    jobs += [job(f"{'abc'[which]}w{at}", size, order=50 + at) for at, (which, size) in enumerate(waiting)]
    sizes = {one.uid: one.spec.nodes.min for one in jobs}
    jobs = [in_roles(one) if roles else one for one in jobs]
    view = cluster(used + idle, tree, *jobs)
    found, path = transfers(view), {"a": "pa", "b": "pb", "c": "c"}
    has = dict.fromkeys("pabc", 0)
    for one in jobs:
        for name in path[one.spec.queue]:
            has[name] += len(one.generation.members) if one.generation is not None else 0
    after = dict(has)
    takers = {one for nodes in found.gives.values() for one in nodes.values()} | set(found.stops.values())
    for one in jobs:
        members = len(one.generation.members) if one.generation is not None else 0
        less = members if one.uid in found.stops else len(found.gives.get(one.uid, ()))
        gets = sizes[one.uid] if one.uid in takers and one.generation is None else 0
        gets += len(found.takes.get(one.uid, ()))
        for name in path[one.spec.queue]:
            after[name] += gets - less
    for name, cap in (("p", caps[0]), ("a", caps[1])):
        assert cap is None or after[name] <= max(cap, has[name]), f"{name} has no more than it may"
        for uid in takers:
            if cap is not None and name in path[view.jobs[uid].spec.queue]:
                assert after[name] <= cap, "nobody gives anything for one that may not have it"
    turned = replace(view, jobs=dict(reversed(list(view.jobs.items()))), notes=Notes())
    assert transfers(turned) == found, "whatever order they are read in"

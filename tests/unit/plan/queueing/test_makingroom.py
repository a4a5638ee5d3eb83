"""Whole jobs that make room for one of another queue: which, together with which others, and not before their time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.model.job import BudgetEntry
from nodeagent.model.queue import MIN_RUNTIME, Amount, Queue
from nodeagent.model.timing import millis
from nodeagent.model.world import GenerationState, PodReport
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.queue import is_favoured
from nodeagent.plan.steps import End
from tests.unit.plan.build import NOW, WALL, make_generation, make_job
from tests.unit.plan.fairshare.ofqueues import A, B, cluster, formed, job, ones


def test_one_of_fixed_size_is_stopped_whole_and_waits_again() -> None:
    first, second = job("a1", 3, [1, 2, 3]), job("a2", 3, [4, 5, 6], order=1)
    view = cluster(6, [A, B], first, second, job("b1", 2, order=2))
    assert (transfers(view).stops, transfers(view).gives) == ({"u-a2": "u-b1"}, {}), "the younger one"
    step = decide(view, second, WALL).step
    assert isinstance(step, End)
    assert (step.phase, step.planned) == ("holding", True)
    assert step.spend is not None
    assert not step.spend.counts
    assert step.reason == "made room: job b1 of queue b is entitled to its nodes"
    assert decide(view, first, WALL).step is None


@pytest.mark.parametrize("number", [2, 3])
def test_room_stays_made_however_often_the_next_generation_is_formed(number: int) -> None:
    """Its second one never became active; the note is of the last that was."""
    note = BudgetEntry(at=NOW - 1000, wall=WALL, kind="share", counts=False, room_for=("u-b1",))
    states: list[tuple[GenerationState, int]] = [("forming", 1), ("active", number)]
    for state, active in states:
        formed_anew = make_generation(["n1"], number=number, state=state, since=NOW - 500)
        donor = make_job("running", formed_anew, uid="u-a1", active=active, last_number=1, budget={"1": note})
        waits = job("b1", 2).model_copy(update={"since": NOW - 50_000})
        assert is_favoured(cluster(2, [A, B], donor, waits), waits), state


def test_of_one_queue_that_of_less_priority_goes() -> None:
    jobs = job("a1", 3, [1, 2, 3], priority=-5), job("a2", 3, [4, 5, 6], order=1)
    assert transfers(cluster(6, [A, B], *jobs, job("b1", 2))).stops == {"u-a1": "u-b1"}


def test_nobody_is_stopped_before_it_has_run_for_a_while() -> None:
    fresh = formed(job("a1", 6, range(1, 7)), NOW - 1000)
    view = cluster(6, [A, B], fresh, job("b1", 2))
    decision = decide(view, fresh, WALL)
    assert decision.step is None
    assert decision.at == NOW - 1000 + MIN_RUNTIME * 1000
    later = replace(view, served=decision.at)
    assert isinstance(decide(later, fresh, WALL).step, End)


@pytest.mark.parametrize(
    ("queues", "seconds"),
    [
        ([A.model_copy(update={"min_runtime": 600.0}), B], 600),
        ([A.model_copy(update={"min_runtime": 0.0}), B.model_copy(update={"min_runtime": 600.0})], 0),
        ([Queue(name="p", min_runtime=90.0), A.model_copy(update={"parent": "p"}), B], 90),
        ([Queue(name="p", min_runtime=90.0), A.model_copy(update={"parent": "p", "min_runtime": 5.0}), B], 5),
        ([Queue(name="p"), A.model_copy(update={"parent": "p"}), B], 60),
    ],
)
def test_for_how_long_is_its_queues_to_say(queues: list[Queue], seconds: int) -> None:
    """Its own, or what is above it; not the queue's for which it is stopped."""
    one = formed(job("a1", 6, range(1, 7)), NOW)
    view = cluster(6, queues, one, job("b1", 2))
    before = replace(view, served=NOW + 1000 * seconds - 1)
    assert decide(before, one, WALL).step is None
    if seconds:
        assert decide(before, one, WALL).at == NOW + 1000 * seconds
        assert f"makes room when it has run for {seconds} s" in decide(before, one, WALL).why[0]
    assert isinstance(decide(replace(view, served=NOW + 1000 * seconds), one, WALL).step, End)


def test_all_that_are_stopped_for_a_job_are_stopped_together() -> None:
    """It starts with all of their nodes or not at all: who was stopped before the others may be only started again."""
    early = formed(job("a1", 3, range(1, 4)), NOW - 50_000)
    late = formed(job("a2", 3, range(4, 7), order=1), NOW - 1000)
    view = cluster(6, [A, Queue(name="b", weight=4.0)], early, late, job("b1", 4))
    assert set(transfers(view).stops.values()) == {"u-b1"} and len(transfers(view).stops) == 2
    own, both = (one + millis(MIN_RUNTIME) for one in (NOW - 50_000, NOW - 1000))
    for one, until in ((early, "job a2 has run for 60 s"), (late, "it has run for 60 s")):
        waits = decide(replace(view, served=own), one, WALL)
        assert (waits.step, waits.at) == (None, both)
        assert waits.why[0].endswith(f"makes room when {until}")
        assert isinstance(decide(replace(view, served=both), one, WALL).step, End)


def test_a_resize_begins_no_new_while() -> None:
    since = NOW - millis(MIN_RUNTIME)
    resized = formed(job("a1", 6, range(1, 7)), NOW - 1000)
    for began, stops in ((since, True), (since + 1, False), (None, False)):
        one = resized.model_copy(update={"running_since": began})
        decision = decide(cluster(6, [A, B], one, job("b1", 2)), one, WALL)
        assert isinstance(decision.step, End) == stops, began


@pytest.mark.parametrize("least", [1, 6])
def test_a_gang_of_which_some_have_finished_makes_no_room(least: int) -> None:
    """The last of its pods may save the model, and be gone in a moment."""
    one = job("a1", least, range(1, 7))
    assert one.generation is not None
    reports = {f"n{i}": PodReport(state="succeeded") for i in range(2, 7)}
    ended = one.model_copy(update={"generation": one.generation.model_copy(update={"reports": reports})})
    view = cluster(6, [A, B], ended, job("b1", 2))
    assert (transfers(view).gives, transfers(view).stops) == ({}, {})
    assert decide(view, ended, WALL).step is None
    busy = transfers(cluster(6, [A, B], one, job("b1", 2)))
    assert busy.gives or busy.stops


def test_nothing_is_done_where_it_would_not_be_enough() -> None:
    """a may give one of its six nodes, and b9 needs two."""
    guarded = Queue(name="a", guarantee=Amount(nodes=5))
    jobs = [*ones("a", range(1, 7)), *ones("b", [7, 8])]
    assert transfers(cluster(8, [guarded, B], *jobs, job("b9", 2, order=9))).stops == {}
    assert transfers(cluster(8, [guarded, B], *jobs, job("b9", 1, order=9))).stops == {"u-a6": "u-b9"}


def test_nobody_gives_anything_who_is_not_needed() -> None:
    """The job of four nodes makes room: then neither the younger one has to, nor the elastic one to give a node."""
    four, one, heavy = job("a1", 4, range(1, 5)), job("a2", 1, [5], order=2), Queue(name="b", weight=4)
    assert transfers(cluster(5, [A, heavy], four, one, job("b9", 4, order=9))).stops == {"u-a1": "u-b9"}
    found = transfers(cluster(6, [A, heavy], four, job("a2", 1, [5, 6], order=2), job("b9", 4, order=9)))
    assert (found.stops, found.gives) == ({"u-a1": "u-b9"}, {})

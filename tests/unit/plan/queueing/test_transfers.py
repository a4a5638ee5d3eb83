"""Nodes with room for pods of several jobs: a node that a job finds, idle or given up, counts once for it. And what
becomes of a node that was given up, until it is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import Amount, Queue
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.reservations import reserved_for_others
from nodeagent.plan.queueing.transfers import Transfers
from tests.unit.plan.build import NOW, WALL
from tests.unit.plan.carry import carried_out
from tests.unit.plan.queueing.shared import P, Q, cluster, runs, waits


def test_nobody_is_stopped_where_there_is_room_anyway() -> None:
    """Two slots of n1 are free, one of n2: the other node that w needs only qe could leave."""
    small, whole = runs("qd", "n1", order=4), runs("qe", "n3 n4", workers=4, order=1)
    jobs = small, whole, runs("pf", "n2", workers=3, order=2), waits("pw", 2)
    assert transfers(cluster(5, *jobs, queues=[P, Q], cordoned=["n5"])) == Transfers(stops={"u-qe": "u-pw"})
    owns = Queue(name="q", weight=2, guarantee=Amount(nodes=2))
    assert transfers(cluster(5, *jobs, queues=[P, owns], cordoned=["n5"])) == Transfers(), "and that stays"


@pytest.mark.parametrize("auto", [False, True])
def test_nobody_makes_room_for_a_job_whose_time_has_not_come(auto: bool) -> None:
    """Nor stops for it, where there are queues; nor gives back what it has borrowed."""
    donor = runs("qe", "n1 n2", workers=4, most=2 if auto else 0, auto=auto)
    later = waits("qw" if auto else "pw", 1, workers=4).model_copy(update={"not_before": NOW + 5000})
    now = cluster(2, donor, later, queues=[Queue(name="q")] if auto else [P, Q])
    assert transfers(now) == Transfers()
    due = replace(now, served=NOW + 5000)
    assert transfers(due) == (Transfers(gives={"u-qe": {"n2": "u-qw"}}) if auto else Transfers(stops={"u-qe": "u-pw"}))
    assert decide(now, donor, WALL).step is None, "and what was decided then is not kept"
    assert decide(due, donor, WALL).step is not None
    assert decide(now, donor, WALL).step is None


def nodes_of(job: JobRecord) -> str:
    return " ".join(sorted(job.generation.members)) if job.generation is not None else ""


@pytest.mark.parametrize("auto", [True, False])
def test_who_gave_a_node_does_not_take_it_again(auto: bool) -> None:
    """qa has less than its target then, and comes first; pb takes the node after its cool-down."""
    giver = runs("qa", "n1 n2 n3", workers=4, most=4, auto=auto, target=3, order=1)
    taker = runs("pb", "n4 n5 n6", workers=4, most=6, target=6, order=2, since=NOW - 21_000)
    tree = [Queue(name="p", weight=2), Queue(name="q")]
    view = cluster(6, giver, taker, queues=tree)
    giver = carried_out(giver, decide(view, giver, WALL), NOW)
    assert nodes_of(giver) == "n1 n2"
    for later in range(1000, 60_000, 4000):
        view = replace(cluster(6, giver, taker, queues=tree), served=NOW + later)
        assert decide(view, giver, WALL).step is None, later
        found = decide(view, taker, WALL)
        taker = carried_out(taker, found, NOW + later) if found.step is not None else taker
    assert nodes_of(taker) == "n3 n4 n5 n6"


def test_what_was_given_to_one_that_runs_is_kept_from_it_for_nobody() -> None:
    """qw is before pb, and has the next nodes that become free kept: not the one that qa gave pb."""
    giver = runs("qa", "n1 n2 n3", workers=1, most=3, target=3, order=1)
    taker, gang = runs("pb", "n4", workers=4, most=2, target=2, order=3), waits("qw", 2, workers=4, order=2)
    view = cluster(4, giver, taker, gang, queues=[Queue(name="p"), Queue(name="q")])
    given = carried_out(giver, decide(view, giver, WALL), NOW)
    view = replace(cluster(4, given, taker, gang, queues=view.queues.queues), served=NOW + 1)
    assert transfers(view) == Transfers(takes={"u-pb": ("n3",)})
    assert reserved_for_others(view, taker) == frozenset()
    found = carried_out(taker, decide(view, taker, WALL), NOW + 1)
    assert nodes_of(found) == "n3 n4"
    found = found.model_copy(update={"control": found.control.model_copy(update={"target": 3})})
    spare = replace(cluster(5, given, found, gang, queues=view.queues.queues), served=NOW + 2)
    assert reserved_for_others(spare, found) >= {"n5"}, "it has taken what was given"

"""Nodes with room for pods of several jobs: a node that a job finds, idle or given up, counts once for it. And what
becomes of a node that was given up, until it is taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.reservations import reserved_for_others
from nodeagent.plan.queueing.transfers import Transfers
from tests.unit.plan.build import NOW, READY, WALL, make_cluster, make_generation, make_job, make_node, make_spec
from tests.unit.plan.carry import carried_out

P, Q = Queue(name="p", weight=3), Queue(name="q", weight=2)


def runs(
    name: str,
    on: str,
    *,
    workers: int = 2,
    first: int = 0,
    most: int = 0,
    auto: bool = False,
    target: int = 0,
    order: int = 0,
    since: int = 0,
) -> JobRecord:
    """A job of the queue that its name begins with. It runs on these nodes, on their slots from ``first`` on; ``most``:
    it may run on one node and have so many; ``auto``: it may borrow, and has if it has more than its target."""
    nodes = on.split()
    spec = make_spec(name=name, size=(1 if most else len(nodes), most or len(nodes)), workers=workers)
    role = spec.role.model_copy(update={"nodes": spec.role.nodes.model_copy(update={"auto": auto})})
    spec = spec.model_copy(update={"roles": (role,), "queue": name[:1]})
    generation = make_generation(nodes, workers=workers, since=since)
    slots = tuple(f"cpu{first + i}" for i in range(workers))
    members = {n: m.model_copy(update={"devices": slots}) for n, m in generation.members.items()}
    target = target or (1 if auto else len(nodes))
    generation = generation.model_copy(update={"members": members})
    return make_job("running", generation, spec=spec, uid=f"u-{name}", target=target, order=order)


def waits(name: str, least: int, *, workers: int = 2, order: int = 9) -> JobRecord:
    spec = make_spec(name=name, size=(least, least), workers=workers).model_copy(update={"queue": name[:1]})
    return make_job(spec=spec, uid=f"u-{name}", order=order, since=NOW - 1000)


def cluster(
    count: int, *jobs: JobRecord, queues: Iterable[Queue] = (Queue(name="q"),), cordoned: Iterable[str] = ()
) -> Cluster:
    """Nodes n1, n2, ... with four slots each, on which every job is ready."""
    ready, names = {job.uid: READY for job in jobs}, [f"n{i}" for i in range(1, count + 1)]
    nodes = [make_node(n, slots=4, ready=ready, cordon=n in cordoned) for n in names]
    return replace(make_cluster(nodes, *jobs), queues=Queues(rev=1, queues=tuple(queues)))


def test_a_borrowed_node_with_room_anyway_does_not_come_back() -> None:
    """Two slots of n2 are free, n1 is full: with n2 given back there would be one node for w as well."""
    borrower = runs("qa", "n1 n2", most=2, auto=True)
    assert transfers(cluster(2, borrower, runs("qb", "n1", first=2), waits("qw", 2))) == Transfers()
    third = transfers(cluster(3, runs("qa", "n1 n2 n3", most=3, auto=True), waits("qw", 3)))
    assert third == Transfers(), "each of the three has room"


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


def test_nobody_leaves_a_node_that_has_room_anyway() -> None:
    """n1 has room beside qe, n2 and n3 have none: one of these is needed."""
    jobs = runs("qe", "n2 n3 n1", most=3), runs("qf", "n2 n3", first=2), waits("pw", 2)
    assert transfers(cluster(3, *jobs, queues=[P, Q])) == Transfers(gives={"u-qe": {"n3": "u-pw"}})


def test_a_node_that_two_jobs_would_leave_counts_once() -> None:
    """Both have n2 on top of what they need, and n3: w gets both nodes only if one of them is stopped."""
    owns, pf, w = Queue(name="p", weight=3, guarantee=Amount(nodes=4)), runs("pf", "n1", workers=4), waits("pw", 2)
    for auto, giver in ((True, "u-q0"), (False, "u-q1")):
        jobs = [runs(f"q{i}", "n3 n2", first=2 * i, most=2, auto=auto, order=i) for i in range(2)]
        found = transfers(cluster(3, *jobs, pf, w, queues=[owns, Q]))
        assert found == Transfers(gives={giver: {"n2": "u-pw"}}, stops={"u-q1": "u-pw"})
        three = Queue(name="q", guarantee=Amount(nodes=3))
        assert transfers(cluster(3, *jobs, pf, w, queues=[owns, three])) == Transfers(), "neither may be stopped"


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

"""What is kept from view to view changes no decision, and is bounded."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import Amount, Queue
from nodeagent.plan.cluster import ROOM, SMALL, Cluster, Notes, Refusal, in_order
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes.candidates import candidates, staying
from nodeagent.plan.nodes.devices import booked
from nodeagent.plan.nodes.health import worn_nodes
from nodeagent.plan.nodes.members import gone_nodes, holding_nodes, survivors
from nodeagent.plan.placing.placement import choose
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.queueing import reservations, reserving
from nodeagent.plan.steps import Propose
from tests.unit.plan.build import NOW, REPEATABLE, WALL, make_cluster, make_generation, make_job, make_node, make_spec
from tests.unit.plan.fairshare import test_queues as queues
from tests.unit.plan.job.test_gang_properties import NAMES, clusters
from tests.unit.plan.queueing import test_elastic as elastic


def all_of(cluster: Cluster) -> list[object]:
    """What agents make of a view."""
    jobs = cluster.jobs.values()
    prepared = [(j.uid, n, should_prepare(cluster, j, n)) for j in jobs for n in NAMES]
    gangs = [(survivors(cluster, j), gone_nodes(cluster, j), holding_nodes(cluster, j)) for j in jobs]
    held = {node: sorted(bookings) for node, bookings in booked(cluster).items()}
    whole = [staying(cluster, j) for j in jobs], worn_nodes(cluster), in_order(cluster), held
    return [[decide(cluster, j, WALL) for j in jobs], [candidates(cluster, j) for j in jobs], prepared, gangs, whole]


def test_a_booking_that_does_not_change_is_the_very_same_object() -> None:
    job = make_job("running", make_generation(["n1"]))
    first = make_cluster(["n1", "n2"], job)
    again = replace(first, nodes={"n1": first.nodes["n1"], "n2": make_node("n2", slots=2)})
    assert booked(again) is booked(first)
    other = replace(again, jobs={job.uid: make_job("running", make_generation(["n2"]))})
    assert (set(booked(first)), set(booked(other))) == ({"n1"}, {"n2"})


def test_what_time_changes_is_decided_anew_in_each_round() -> None:
    """A gang at rest is looked at once; one that waits for its cool-down joins the newcomer when that is over."""
    job = make_job("running", make_generation(["n1"], since=NOW), target=2)
    nodes: list[NodeRecord | str] = ["n1", make_node("n2", joined=NOW)]
    now = make_cluster(nodes, job)
    waits = decide(now, job, WALL)
    assert waits.step is None and waits.at > NOW
    assert decide(replace(now, served=waits.at - 1), job, WALL) == waits
    assert decide(replace(now, served=waits.at), job, WALL).step is not None
    rest = make_cluster(["n1"], alone := make_job("running", make_generation(["n1"]), target=1))
    assert decide(replace(rest, served=NOW + 1), alone, WALL) is decide(rest, alone, WALL)


def test_a_gang_at_rest_gives_back_what_it_borrowed_once_the_other_job_is_refused_no_more() -> None:
    """Its agents' word on another job may change while no record does."""
    lacks = make_job("running", make_generation(["n3"]), uid="u-b", spec=make_spec(size=(1, 2), name="b"), target=2)
    borrows = elastic.borrower("a", ["n1", "n2"], order=1)
    view = elastic.cluster(3, borrows, lacks)
    refused = replace(view, refused={"u-b": Refusal("early", "its begin is ahead", controlled=False)})
    assert decide(refused, borrows, WALL).step is None
    assert isinstance(decide(view, borrows, WALL).step, Propose)


def test_nodes_get_ready_for_what_a_job_borrows_once_the_time_of_the_other_one_has_come() -> None:
    """Of the time only what it changes counts: who is to have which nodes."""
    borrows = elastic.borrower("a", ["n1"], most=4)
    later = make_job(uid="u-b", spec=make_spec(size=(2, 2), name="b"), order=1, not_before=NOW + 1)
    view = elastic.cluster(4, borrows, later)

    def prepared(served: int, notes: Notes) -> list[str]:
        now = replace(view, served=served, notes=notes)
        return [n for n in now.nodes if should_prepare(now, borrows, n)]

    kept = Notes()
    before, after = prepared(NOW, kept), prepared(NOW + 1, kept)
    assert (before, after) == (prepared(NOW, Notes()), prepared(NOW + 1, Notes()))
    assert before != after


def test_what_queues_keep_is_found_anew_once_the_time_of_the_first_job_has_come() -> None:
    """Until then others of its queue are tried, here as many as are tried in all."""
    first = queues.job("first", "a", 0, nodes=9, priority=2).model_copy(update={"not_before": NOW + 1})
    wide = [queues.job(f"wide{i}", "a", 1 + i, priority=1) for i in range(reserving.TRIED)]
    roles = (wide[0].spec.role.model_copy(update={"workers_per_node": 9}),)
    wide = [one.model_copy(update={"spec": one.spec.model_copy(update={"roles": roles})}) for one in wide]
    jobs = queues.running("a0", "a", ["n1", "n2"]), queues.running("b0", "b", ["n3"]), queues.job("b1", "b", 20)
    tree = Queue(name="a", capability=Amount(slots=10)), Queue(name="b", capability=Amount(slots=1))
    view = queues.cluster_of(tree, *jobs, first, *wide)
    assert [one.name for one in reservations.reserved(view).found if one.queue] == []
    then = replace(view, served=NOW + 1)
    assert [one.name for one in reservations.reserved(then).found if one.queue] == ["first", "b1"]


def test_a_reservation_names_the_jobs_that_leave_last_by_age_whichever_was_known_first() -> None:
    """What jobs hold is kept in the order in which it became known, and agents come and go."""
    old, new = queues.running("old", "a", ["n1"]), queues.running("new", "a", ["n2"]).model_copy(update={"order": 1})
    waits = queues.job("waits", "a", 2, nodes=3)
    for most in (None, 3):
        tree = [Queue(name="a", capability=Amount(nodes=most)), queues.B]
        view = queues.cluster_of(tree, old, new, waits, nodes=3)
        for first in (old, new):
            alone = {first.uid: first, waits.uid: waits}
            reservations.reserved(kept := replace(view, jobs=alone, notes=Notes()))
            (found,) = reservations.reserved(replace(view, notes=kept.notes)).found
            assert (found.queue, found.after) == ("a" if most else "", ("old", "new"))


def test_a_gang_that_was_formed_anew_without_a_lost_node_is_placed_anew() -> None:
    """Its survivors are the same; but nodes near the lost one's place are not near the gang any more."""
    racks = {"n1": "a", "n2": "b", "n3": "a", "n4": "b"}
    nodes = [make_node(n, labels={"rack": rack}, topology=("rack",)) for n, rack in racks.items()]
    job = make_job("running", make_generation(["n1", "n2"]), target=2)
    then = make_cluster(nodes, job, lapsed=["n2"])
    again = job.model_copy(update={"generation": make_generation(["n1"], number=2)})
    now = replace(then, jobs={job.uid: again})
    assert [one.node for one in choose(then, job, 2).chosen] == ["n1", "n4"]
    assert [one.node for one in choose(now, again, 2).chosen] == ["n1", "n3"]


@REPEATABLE
@given(clusters(), clusters(), st.sets(st.sampled_from(NAMES)), st.booleans())
def test_what_was_kept_of_another_view_changes_nothing(
    first: Cluster, second: Cluster, same: set[str], same_jobs: bool
) -> None:
    """Some nodes' records, or all jobs', are the very same in both."""
    nodes = dict(second.nodes) | {n: r for n, r in first.nodes.items() if n in same}
    then = replace(second, nodes=nodes, jobs=first.jobs if same_jobs else second.jobs)
    fresh = all_of(replace(then, notes=Notes()))
    all_of(first)
    assert all_of(replace(then, notes=first.notes)) == fresh
    assert all_of(replace(then, notes=first.notes)) == fresh


def test_a_node_is_judged_again_only_if_something_about_it_changed() -> None:
    job = make_job()
    first = make_cluster([make_node(n) for n in ("n1", "n2")], job)
    before = candidates(first, job)
    assert candidates(replace(first, served=first.served + 1), job) is before
    other = make_node("n2", cordon=True)
    after = candidates(replace(first, nodes={"n1": first.nodes["n1"], "n2": other}), job)
    assert (after[0] is before[0], after[1].standing) == (True, "out")


def test_another_role_is_judged_anew() -> None:
    def of(spec: JobSpec) -> list[int]:
        return [len(c.devices) for c in candidates(cluster, make_job(spec=spec))]

    cluster = make_cluster(["n1"])
    assert (of(make_spec(workers=1)), of(make_spec(workers=3))) == ([1], [3])


def test_the_oldest_results_are_dropped_by_their_sizes() -> None:
    kept, made = Notes(), []
    of = (object(),)

    def ask(what: str, size: int) -> None:
        kept.once(what, of, lambda _before: made.append(what), size)

    ask("large", ROOM - 2 * SMALL)
    ask("a", 1)
    ask("b", 1)
    ask("large", ROOM - 2 * SMALL)
    assert made == ["large", "a", "b"], "all fit"
    ask("c", 1)
    ask("a", 1)
    assert made == ["large", "a", "b", "c"]
    ask("large", ROOM)
    ask("a", 1)
    assert made[4:] == ["large", "a"], "what fills all room drops the others"

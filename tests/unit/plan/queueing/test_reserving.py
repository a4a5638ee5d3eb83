"""Who gets a reservation, of which nodes, or of which part of a capability; and from when it is had."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.model.job import JobRecord, Phase
from nodeagent.model.jobspec import Nodes, Role
from nodeagent.model.node import Readiness
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.model.window import NodeWindow
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing import heldback, reserving
from nodeagent.plan.queueing.queue import GIVE_WAY
from nodeagent.plan.queueing.reservations import reserved
from tests.unit.plan.build import NOW, PREPARING, READY, WALL, make_cluster, make_job, make_node
from tests.unit.plan.build import make_spec as spec_of
from tests.unit.plan.queueing.gangs import (
    GRACE,
    MINUTE,
    at,
    borrower,
    cluster_of,
    decided,
    estimate,
    of_team,
    runs,
    waits,
)


def test_nodes_that_it_does_not_need_are_open_and_as_few_idle_ones_are_reserved_as_can_be() -> None:
    cluster = cluster_of(5, runs("a", ["n1", "n2"], 60), waits("big", 4, 1), waits("small", 1, 2), waits("two", 2, 3))
    (found,) = reserved(cluster).found
    assert found.nodes == {"n1", "n2", "n3", "n4"}
    assert decided(cluster, "small")[0] == {"n5"}
    assert "reserved for job big" in decided(cluster, "two")[1]


def test_its_start_is_when_enough_have_left_not_when_all_have() -> None:
    cluster = cluster_of(5, runs("a", ["n1"], 60), runs("b", ["n2"], 20), runs("c", ["n3"], 40), waits("big", 4, 1))
    (found,) = reserved(cluster).found
    assert (found.start, found.after) == (NOW + 40 * MINUTE + GRACE * 1000, ("c",))
    assert found.nodes == {"n2", "n3", "n4", "n5"}


def test_a_start_that_no_limit_tells_keeps_what_is_free_and_is_not_guessed() -> None:
    svc, small = runs("svc", ["n2", "n3"]), waits("s", 1, 2, minutes=1)
    cluster = cluster_of(5, runs("a", ["n1"], 60), svc, waits("big", 4, 1), small)
    (found,) = reserved(cluster).found
    assert (found.start, found.after) == (None, ("svc",))
    assert decided(cluster, "s") == (
        None, "n4, n5 are reserved for job big, which starts when job svc ends (no time limit says when)"
    )  # fmt: skip
    assert decided(cluster, "big")[1] == "needs 4 nodes, 2 fit"
    assert heldback.start_estimate(cluster, cluster.jobs["u-big"]) is None


def test_a_gang_that_no_end_of_others_helps_holds_up_nobody() -> None:
    cluster = cluster_of(3, runs("a", ["n1"], 60), waits("huge", 4, 1), waits("small", 1, 2))
    assert reserved(cluster).found == ()
    assert decided(cluster, "small")[0] == {"n2"}
    many = [waits(f"huge{i}", 4, i) for i in range(1, reserving.TRIED + 1)]
    big, small = waits("big", 3, 50), waits("small", 1, 51)
    assert [one.name for one in reserved(cluster_of(3, runs("a", ["n1"]), *many, big, small)).found] == ["big"]
    more = waits("more", 4, 49)
    assert reserved(cluster_of(3, runs("a", ["n1"]), *many, more, big, small)).found == ()


def test_one_that_backs_off_or_is_to_begin_later_keeps_nothing_yet() -> None:
    later = waits("big", 4, 1).model_copy(update={"not_before": NOW + 1000})
    cluster = cluster_of(4, runs("a", ["n1"], 60), later, waits("small", 1, 2))
    assert decided(cluster, "small")[0] == {"n2"}
    assert decided(at(cluster, NOW + 1000), "small")[0] is None


def test_one_whose_queue_is_at_its_capability_keeps_nothing() -> None:
    def of(queue: str, job: JobRecord) -> JobRecord:
        return job.model_copy(update={"spec": job.spec.model_copy(update={"queue": queue})})

    a, big, small = (
        of("team", runs("a", ["n1", "n2"], 60)),
        of("team", waits("big", 4, 1)),
        of("other", waits("s", 1, 2)),
    )
    team, other = Queue(name="team", priority=1, capability=Amount(nodes=5)), Queue(name="other")
    full = replace(cluster_of(4, a, big, small), queues=Queues(queues=(team, other)))
    assert decided(full, "s")[0] == {"n3"}
    more = team.model_copy(update={"capability": Amount(nodes=6)})
    assert decided(replace(full, queues=Queues(queues=(more, other)), notes=Notes()), "s")[0] is None


def test_nothing_is_reserved_for_one_that_could_never_start() -> None:
    one, small = runs("a", ["n1", "n2"], 60), waits("small", 1, 2)
    assert decided(of_team(cluster_of(8, one, waits("big", 5, 1), small)), "small")[0] is not None, "more than it may"
    assert decided(of_team(cluster_of(3, one, waits("big", 4, 1), small)), "small")[0] is not None, "no such nodes"


def test_each_full_queue_keeps_something_for_its_first_job_only() -> None:
    jobs = runs("a", ["n1", "n2"]), waits("big", 4, 1), waits("next", 3, 2), waits("x", 8, 3), runs("xa", ["n3"])
    (nodes, hold) = reserved(of_team(cluster_of(8, *jobs))).found
    assert (hold.name, hold.queue, hold.needs.nodes, hold.nodes) == ("big", "team", 4, frozenset())
    assert (nodes.name, nodes.queue) == ("x", "")


def test_nodes_that_will_not_do_are_not_reserved() -> None:
    cluster = cluster_of(6, runs("a", ["n1"], 60), waits("big", 3, 1), waits("small", 1, 2))
    records = dict(cluster.nodes)
    records["n2"] = make_node("n2", slots=1, ready={"u-big": Readiness(state="unfit", reason="no"), "u-small": READY})
    records["n3"] = make_node("n3", slots=1, cordon=True)
    records["n4"] = make_node("n4", slots=1, lost=True)
    cluster = replace(cluster, nodes=records, notes=Notes())
    (found,) = reserved(cluster).found
    assert found.nodes == {"n1", "n5", "n6"}
    assert decided(cluster, "small")[0] == {"n2"}


def test_nodes_that_a_maintenance_window_closes_to_it_are_open_to_others() -> None:
    cluster = cluster_of(5, runs("a", ["n1"], 60), waits("big", 4, 1), waits("s", 1, 2, minutes=1), waits("long", 1, 3))
    soon = NodeWindow(window="w", text="closed", leaves=False, left=10 * MINUTE)
    records = {n: r.model_copy(update={"window": soon if n == "n2" else None}) for n, r in cluster.nodes.items()}
    cluster = replace(cluster, nodes=records, notes=Notes())
    (found,) = reserved(cluster).found
    assert found.nodes == {"n1", "n3", "n4", "n5"}
    assert decided(cluster, "s")[0] == {"n2"}
    assert "n3, n4, n5 are reserved for job big" in decided(cluster, "long")[1]


# --- those that have just become free


def freed(ago: int) -> Cluster:
    """A job has left the node that the gang lacked; on that one it has yet to get ready."""
    gone = runs("a", ["n1"]).model_copy(update={"phase": "succeeded", "since": NOW - ago})
    assert gone.generation is not None
    gone = gone.model_copy(
        update={"generation": gone.generation.model_copy(update={"state": "ended", "since": NOW - ago})}
    )
    cluster = cluster_of(3, gone, waits("big", 3, 1), waits("small", 1, 2))
    node = make_node("n1", slots=1, ready={"u-big": PREPARING, "u-small": READY})
    return replace(cluster, nodes={**cluster.nodes, "n1": node})


def test_nodes_that_have_just_become_free_are_reserved_while_they_get_ready_for_it_and_no_longer() -> None:
    cluster = freed(1000)
    found = decide(cluster, cluster.jobs["u-small"], WALL)
    assert found.step is None
    assert found.why == ("n1, n2, n3 are reserved for job big, for which they get ready",)
    end = NOW - 1000 + int(1000 * (GRACE + GIVE_WAY))
    assert found.at == end
    assert decided(at(cluster, end - 1), "small")[0] is None
    assert decided(at(cluster, end), "small")[0] == {"n1"}


def test_behind_such_a_gang_the_next_one_has_its_reservation_too() -> None:
    cluster = freed(1000)
    jobs = {**cluster.jobs, "u-big": waits("big", 2, 1), "u-next": waits("next", 3, 2), "u-b": runs("b", ["n4"], 60)}
    records = {n: make_node(n, slots=1, ready={"u-small": READY}) for n in ("n1", "n2", "n3", "n4")}
    jobs["u-small"] = waits("small", 1, 3)
    found = reserved(replace(cluster, nodes=records, jobs=jobs, notes=Notes())).found
    assert [(one.name, one.start) for one in found] == [("big", 0), ("next", None)]
    assert len(found[0].nodes) == 2 and found[1].nodes > {"n4"}
    records["n5"] = make_node("n5", slots=1, ready={"u-small": READY})
    found = reserved(replace(cluster, nodes=records, jobs=jobs, notes=Notes())).found
    assert [len(one.nodes) for one in found] == [2, 3]
    assert not found[0].nodes & found[1].nodes


@pytest.mark.parametrize(("phase", "used", "left"), [("running", 0, 60), ("forming", 600_000, 50)])
def test_a_limit_counts_what_was_used_before(phase: Phase, used: int, left: float) -> None:
    a = runs("a", ["n1", "n2"], 60).model_copy(update={"ran": used, "phase": phase})
    assert estimate(cluster_of(4, a, waits("big", 4, 1)), "big") == NOW + int(left * MINUTE) + GRACE * 1000


# --- where nodes have to be together


def test_a_gang_in_one_rack_has_a_rack_reserved_and_others_start_elsewhere() -> None:
    labels = {"n1": "r1", "n2": "r1", "n3": "r2", "n4": "r2", "n5": "r2"}
    jobs = (
        runs("a", ["n1"], 90), runs("b", ["n3"], 60), waits("big", 3, 1, within="rack"), waits("small", 1, 2),
    )  # fmt: skip
    records = [make_node(n, slots=1, labels={"rack": r}, ready={j.uid: READY for j in jobs}) for n, r in labels.items()]
    cluster = make_cluster(records, *jobs)
    (found,) = reserved(cluster).found
    assert found.nodes == {"n3", "n4", "n5"}
    assert found.start == NOW + 60 * MINUTE + GRACE * 1000
    assert decided(cluster, "small")[0] == {"n2"}


def test_a_job_of_several_roles_has_nodes_for_all_its_places_reserved() -> None:
    roles = tuple(
        Role(name=name, command=("x",), nodes=Nodes(min=2, max=2, target=2), workers_per_node=workers)
        for name, workers in (("trainer", 2), ("loader", 1))
    )
    spec = spec_of(name="big").model_copy(update={"roles": roles})
    big = make_job(uid="u-big", spec=spec, order=1)
    jobs = runs("a", ["n1"], 60), big, waits("small", 1, 2), waits("quick", 1, 3, minutes=5)
    records = [make_node(n, slots=3, ready={j.uid: READY for j in jobs}) for n in ("n1", "n2")]
    cluster = make_cluster(records, *jobs)
    (found,) = reserved(cluster).found
    assert (found.nodes, found.after) == (frozenset(cluster.nodes), ("a",))
    assert found.start == NOW + 60 * MINUTE + GRACE * 1000
    assert "are reserved for job big" in decided(cluster, "small")[1]
    assert decided(cluster, "quick")[0] is not None


def test_what_is_borrowed_is_not_free_for_a_job_of_several_roles() -> None:
    """Nothing is given back for it."""
    roles = tuple(Role(name=n, command=("x",), nodes=Nodes(min=1, max=1, target=1), workers_per_node=1) for n in "ab")
    spec = spec_of(name="big").model_copy(update={"roles": roles})
    cluster = cluster_of(2, borrower(["n1", "n2"], 1), make_job(uid="u-big", spec=spec, order=1))
    assert [one.start for one in reserved(cluster).found] == [None]
    cluster = cluster_of(2, borrower(["n1", "n2"], 1), waits("big", 1, 1))
    assert [one.start for one in reserved(cluster).found] == [0]


def test_a_gang_in_segments_has_whole_segments_reserved() -> None:
    racks = {f"n{i}": f"r{(i + 2) // 3}" for i in range(1, 7)}
    jobs = (runs("a", ["n1", "n2"], 60), runs("b", ["n4", "n5"], 90))
    big = waits("big", 2, 1)
    big = big.model_copy(update={"spec": spec_of(size=(2, 2), name="big", segments=2)})
    everybody = dict.fromkeys(("u-big", "u-small"), READY)
    records = [
        make_node(n, slots=1, labels={"rack": rack}, topology=("rack",), ready=everybody) for n, rack in racks.items()
    ]
    cluster = make_cluster(records, *jobs, big, waits("small", 1, 2))
    (found,) = reserved(cluster).found
    assert found.start == NOW + 60 * MINUTE + GRACE * 1000
    assert found.nodes <= {"n1", "n2", "n3"} and len(found.nodes) == 2
    assert decided(cluster, "small")[0] is not None

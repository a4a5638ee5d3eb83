"""Reservations: nodes are reserved for the gang that is first in line and lacks some; who comes after it uses them only
where that does not push it back; and when it starts is said only where time limits say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import JobRecord, Phase, Scale
from nodeagent.model.jobspec import Nodes, Role
from nodeagent.model.node import NodeRecord, Readiness
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.model.window import NodeWindow
from nodeagent.model.world import CauseKind
from nodeagent.plan.cluster import VIEWS_KEPT, Cluster, Notes
from nodeagent.plan.job.gang import decide
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.queueing import departures, heldback, reservations, reserving
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.heldback import line, open_room, with_aside
from nodeagent.plan.queueing.queue import GIVE_WAY
from nodeagent.plan.queueing.reservations import reserved
from nodeagent.plan.steps import Propose
from tests.unit.plan.build import (
    NOW,
    PREPARING,
    READY,
    REPEATABLE,
    WALL,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    spend,
)
from tests.unit.plan.build import make_spec as spec_of

GRACE = 30
"""Seconds, of every job here."""
MINUTE = 60_000


def nodes(count: int, ready: Mapping[str, Readiness]) -> list[NodeRecord]:
    return [make_node(f"n{i}", slots=1, ready=ready) for i in range(1, count + 1)]


def runs(name: str, on: list[str], minutes: float | None = None, order: int = 0, size: int = 0) -> JobRecord:
    """It runs since ``NOW``; ``minutes``: its time limit."""
    limit = None if minutes is None else 60 * minutes
    spec = spec_of(size=(1 if size else len(on), size or len(on)), name=name, time_limit=limit)
    job = make_job("running", make_generation(on), uid=f"u-{name}", spec=spec, order=order, since=NOW)
    return job.model_copy(update={"first_active": NOW})


def waits(
    name: str, size: int, order: int, minutes: float | None = None, *, within: str = "", priority: int = 0
) -> JobRecord:
    limit = None if minutes is None else 60 * minutes
    spec = spec_of(size=(size, size), name=name, time_limit=limit, within=within, priority=priority)
    return make_job(uid=f"u-{name}", spec=spec, order=order, since=0)


def cluster_of(count: int, *jobs: JobRecord, standing: Readiness = READY) -> Cluster:
    """Nodes of one slot, on which every job is ready."""
    return make_cluster(nodes(count, {job.uid: standing for job in jobs}), *jobs)


def decided(cluster: Cluster, name: str) -> tuple[set[str] | None, str]:
    """The nodes that the job starts on, if it does; and why."""
    found = decide(cluster, cluster.jobs[f"u-{name}"], WALL)
    started = set(found.step.members) if isinstance(found.step, Propose) else None
    return started, "; ".join(found.why)


def at(cluster: Cluster, served: int) -> Cluster:
    return replace(cluster, served=served)


# --- the gang that is first in line keeps its nodes


def test_a_small_job_does_not_take_what_the_first_in_line_lacks() -> None:
    cluster = cluster_of(4, runs("a", ["n1", "n2"], 60), waits("big", 4, 1), waits("small", 1, 2))
    assert decided(cluster, "small") == (
        None,
        "n3, n4 are reserved for job big, which starts by about 01:18 UTC (when job a ends at its time limit)",
    )
    assert decided(cluster, "big") == (
        None,
        "needs 4 nodes, 2 fit; starts by about 01:18 UTC (when job a ends at its time limit)",
    )


def test_a_job_that_ends_in_time_starts_there_and_no_later() -> None:
    """Its time limit, the time that it needs to form and to leave."""
    cluster = cluster_of(4, runs("a", ["n1", "n2"], 60), waits("big", 4, 1), waits("small", 1, 2, minutes=30))
    assert decided(cluster, "small")[0] == {"n3"}
    last = NOW + 60 * MINUTE + GRACE * 1000 - 30 * MINUTE - GRACE * 1000 - int(cluster.timing.form_margin * 1000)
    assert decided(at(cluster, last), "small")[0] == {"n3"}
    assert decided(at(cluster, last + 1), "small")[0] is None
    assert decided(at(cluster, last), "small")[0] == {"n3"}, "whatever was asked before"


def test_nodes_that_it_does_not_need_are_open_and_as_few_idle_ones_are_reserved_as_can_be() -> None:
    cluster = cluster_of(5, runs("a", ["n1", "n2"], 60), waits("big", 4, 1), waits("small", 1, 2), waits("two", 2, 3))
    (found,) = reserved(cluster).found
    assert found.nodes == {"n1", "n2", "n3", "n4"}
    assert decided(cluster, "small")[0] == {"n5"}
    assert "reserved for job big" in decided(cluster, "two")[1]


def test_who_is_before_it_in_line_is_not_held_up() -> None:
    cluster = cluster_of(4, runs("a", ["n1", "n2"], 60), waits("small", 1, 1), waits("big", 4, 2))
    assert decided(cluster, "small")[0] == {"n3"}
    urgent = waits("urgent", 2, 3, priority=1)
    assert decided(cluster_of(4, *cluster.jobs.values(), urgent), "urgent")[0] == {"n3", "n4"}


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


# --- what a queue keeps of its capability


TEAM = Queue(name="team", capability=Amount(nodes=4))


def of_team(cluster: Cluster, *queues: Queue) -> Cluster:
    """All jobs are of the queue ``team``, but those whose name begins with ``x``."""
    jobs = {
        uid: j.model_copy(update={"spec": j.spec.model_copy(update={"queue": "other" if j.name[0] == "x" else "team"})})
        for uid, j in cluster.jobs.items()
    }
    return replace(cluster, jobs=jobs, queues=Queues(queues=(*(queues or (TEAM,)), Queue(name="other"))), notes=Notes())


def test_small_jobs_do_not_take_what_a_large_one_of_a_full_queue_needs() -> None:
    one, big, small, x = runs("a", ["n1", "n2"], 60), waits("big", 4, 1), waits("small", 1, 2), waits("x", 1, 3)
    cluster = of_team(cluster_of(8, one, big, small, x))
    why = "queue team reserves 4 nodes for job big, which starts by about 01:18 UTC (when job a ends at its time limit)"
    assert decided(cluster, "small") == (None, why)
    assert decided(cluster, "x")[0] is not None, "another queue"
    assert decided(of_team(cluster_of(8, runs("a", ["n1", "n2"]), big, small)), "small")[1] == (
        "queue team reserves 4 nodes for job big, which starts when job a ends (no time limit says when)"
    )
    first = heldback.start_estimate(cluster, cluster.jobs["u-big"])
    assert first is not None
    assert first.start == NOW + 60 * MINUTE + GRACE * 1000


def test_one_that_ends_before_the_large_one_starts_goes_first() -> None:
    jobs = runs("a", ["n1", "n2"], 60), waits("big", 4, 1), waits("small", 1, 2, minutes=30)
    cluster = of_team(cluster_of(8, *jobs))
    assert decided(cluster, "small")[0] is not None
    last = NOW + 60 * MINUTE + GRACE * 1000 - 30 * MINUTE - GRACE * 1000 - int(cluster.timing.form_margin * 1000)
    assert decided(at(cluster, last + 1), "small")[0] is None


def test_what_the_large_one_does_not_need_is_open() -> None:
    jobs = runs("a", ["n1", "n2"], 60), waits("big", 3, 1), waits("small", 1, 2), waits("two", 2, 3)
    cluster = of_team(cluster_of(8, *jobs))
    assert decided(cluster, "small")[0] is None, "big needs three of four, and a has two: small would not have ended"
    wide = TEAM.model_copy(update={"capability": Amount(nodes=5)})
    cluster = of_team(cluster_of(8, runs("a", ["n1", "n2", "n3"], 60), *jobs[1:]), wide)
    assert decided(cluster, "small")[0] is None
    assert decided(cluster, "two")[0] is None


def test_what_becomes_free_is_reserved_while_nodes_get_ready_for_it() -> None:
    """Else another whose pods are ready would take it."""
    left = make_job(
        "succeeded", make_generation(["n9"], state="ended"), uid="u-l", spec=spec_of(size=(1, 1), name="left")
    )
    first, small = waits("first", 2, 1), waits("small", 1, 2)
    cluster = of_team(cluster_of(8, runs("a", ["n2", "n3"]), left, first, small))
    slow = {n: one.model_copy(update={"readiness": {"u-small": READY}}) for n, one in cluster.nodes.items()}
    generation = cluster.jobs["u-l"].generation
    assert generation is not None
    recent = cluster.jobs["u-l"].model_copy(
        update={"generation": generation.model_copy(update={"since": NOW - 40_000})}
    )
    cluster = replace(cluster, nodes=slow, jobs={**cluster.jobs, "u-l": recent}, notes=Notes())
    assert decided(cluster, "small") == (None, "queue team reserves 2 nodes for job first, which gets ready")
    lapsed = at(cluster, NOW - 40_000 + GRACE * 1000 + int(GIVE_WAY * 1000))
    assert decided(lapsed, "small")[0] is not None, "not for ever"


def test_nothing_is_reserved_for_one_that_could_never_start() -> None:
    one, small = runs("a", ["n1", "n2"], 60), waits("small", 1, 2)
    assert decided(of_team(cluster_of(8, one, waits("big", 5, 1), small)), "small")[0] is not None, "more than it may"
    assert decided(of_team(cluster_of(3, one, waits("big", 4, 1), small)), "small")[0] is not None, "no such nodes"


def test_one_that_runs_does_not_grow_into_what_is_reserved() -> None:
    grows, big = runs("a", ["n1"], order=2, size=3), waits("big", 4, 1)
    assert reserved(of_team(cluster_of(8, grows, big))).for_others["u-a"].aside
    assert decided(of_team(cluster_of(8, grows, big)), "a")[0] is None
    assert decided(of_team(cluster_of(8, grows)), "a")[0] == {"n1", "n2", "n3"}


def test_views_in_which_something_is_reserved_forget_what_is_long_past() -> None:
    """What they had worked out for jobs that are gone kept the views of that time."""

    def view(number: int, notes: Notes) -> Cluster:
        grows = runs(f"a{number}", ["n1"], order=2, size=3)
        cluster = replace(of_team(cluster_of(8, grows, waits("big", 4, 1))), notes=notes)
        assert decided(cluster, f"a{number}")[0] is None
        notes.turn()
        return cluster

    def kept_after(views: int) -> int:
        notes = Notes()
        for number in range(views):
            cluster = view(number, notes)
        return len(with_aside(cluster, cluster.jobs[f"u-a{number}"]).notes)

    always = kept_after(1)
    assert (each := kept_after(2) - always) > 0
    assert kept_after(3 * VIEWS_KEPT) <= always + each * 2 * VIEWS_KEPT


def test_one_that_runs_replaces_what_it_loses_whatever_is_reserved() -> None:
    runs_on, big = runs("a", ["n1", "n2", "n3"], order=2), waits("big", 4, 1)
    cluster = of_team(cluster_of(8, runs_on, big))
    assert reserved(cluster).for_others["u-a"].aside
    assert decided(replace(cluster, lapsed=frozenset({"n3"}), notes=Notes()), "a")[0] == {"n1", "n2", "n4"}


def test_one_that_runs_does_not_take_what_others_gave_up_for_one_that_waits() -> None:
    """Even if it is the older one."""
    generation = make_generation(["n2"], state="ended").model_copy(update={"since": NOW - 1000})
    gave = make_job("holding", generation, uid="u-g", spec=spec_of(size=(1, 1), name="g"), order=5)
    entry = spend("share", counts=False).model_copy(update={"room_for": ("u-b",)})
    gave = gave.model_copy(update={"budget": {"1": entry}, "last_number": 1})
    older, waiting = runs("a", ["n1"], order=0, size=2), waits("b", 1, 9)
    cluster = of_team(cluster_of(4, older, gave, waiting), TEAM.model_copy(update={"capability": Amount(nodes=2)}))
    slow = {n: one.model_copy(update={"readiness": {"u-a": READY}}) for n, one in cluster.nodes.items()}
    cluster = replace(cluster, nodes=slow, notes=Notes())
    assert decided(cluster, "a")[0] is None
    alone = {uid: one for uid, one in cluster.jobs.items() if uid != "u-b"}
    assert decided(replace(cluster, jobs=alone, notes=Notes()), "a")[0] == {"n1", "n2"}


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


# --- who gets ready, who grows, who borrows


def test_nodes_get_ready_for_those_that_may_start_there() -> None:
    cluster = cluster_of(
        4, runs("a", ["n1", "n2"], 60), waits("big", 4, 1), *(waits(f"w{i}", 1, 2 + i) for i in range(6)),
        waits("quick", 1, 20, minutes=5),
    )  # fmt: skip
    cluster = replace(cluster, nodes={n.id: n for n in nodes(4, {})}, notes=Notes())
    assert [w.job.name for w in heldback.line(cluster) if w.has_room] == ["quick"]
    assert should_prepare(cluster, cluster.jobs["u-quick"], "n3")
    assert not any(should_prepare(cluster, cluster.jobs["u-w0"], n) for n in cluster.nodes)


def test_a_job_that_came_later_does_not_grow_into_them_and_one_that_came_before_does() -> None:
    for order, grows in ((0, True), (5, False)):
        cluster = cluster_of(4, runs("a", ["n1"], order=order, size=4), waits("big", 4, 1))
        cluster = replace(cluster, served=NOW + MINUTE)
        assert (decided(cluster, "a")[0] == {"n1", "n2", "n3", "n4"}) is grows, order


def test_a_lost_node_is_replaced_there_all_the_same() -> None:
    cluster = cluster_of(4, runs("late", ["n1", "n2"], order=5), waits("big", 4, 1))
    assert reserved(cluster).found[0].nodes == set(cluster.nodes)
    lost = replace(cluster, nodes={**cluster.nodes, "n2": make_node("n2", slots=1, lost=True)}, notes=Notes())
    lost = replace(lost, nodes={**lost.nodes, "n5": make_node("n5", slots=1, ready={"u-late": READY})})
    assert "u-late" in reserved(lost).for_others
    assert decided(lost, "late")[0] == {"n1", "n3"} or decided(lost, "late")[0] == {"n1", "n5"}


def test_a_gang_that_failed_starts_again_where_it_was_for_a_minute() -> None:
    def failed(kind: CauseKind, ago: int) -> Cluster:
        late = make_job(
            "holding", make_generation(["n1", "n2"], state="ended", since=NOW - ago), uid="u-late", order=5, active=1,
            spec=spec_of(size=(2, 2), name="late"), budget={"1": spend(kind)}, since=NOW - ago,
        )  # fmt: skip
        return cluster_of(4, runs("svc", ["n3"]), waits("big", 4, 1), late)

    assert decided(failed("worker_failed", 1000), "late")[0] == {"n1", "n2"}
    assert "reserved for job big" in decided(failed("worker_failed", 60_000), "late")[1]
    assert "reserved for job big" in decided(failed("share", 1000), "late")[1], "it made room"
    backs_off = failed("worker_failed", 60_000)
    late = backs_off.jobs["u-late"].model_copy(update={"not_before": NOW})
    assert decided(replace(backs_off, jobs={**backs_off.jobs, "u-late": late}), "late")[0] == {"n1", "n2"}
    again = failed("worker_failed", 1000)
    assert decided(again, "late")[0] == {"n1", "n2"}
    assert decided(at(again, NOW + 59_000), "late")[0] is None, "whatever was asked before"


def test_a_scale_out_says_that_nodes_are_reserved() -> None:
    scale = Scale(request="r", want=4, before=1, deadline=NOW + MINUTE, timeout=60)
    late = runs("late", ["n1"], order=5, size=4)
    control = late.control.model_copy(update={"target": 4, "scale": scale})
    cluster = cluster_of(4, late.model_copy(update={"control": control}), waits("big", 4, 1))
    why = (
        "runs on 1 of 4 nodes: 1 of 4 nodes fit: n2 is reserved for job big; n3 is reserved for job big; "
        "n4 is reserved for job big"
    )
    assert decided(cluster, "late") == (None, why)


def borrower(on: list[str], target: int, order: int = 0) -> JobRecord:
    job = runs("auto", on, order=order, size=8)
    role = job.spec.role.model_copy(update={"nodes": Nodes(min=1, max=8, target=target, auto=True)})
    spec = job.spec.model_copy(update={"roles": (role,)})
    return job.model_copy(update={"spec": spec, "control": job.control.model_copy(update={"target": target})})


def test_idle_nodes_that_are_reserved_are_lent_and_count_as_free() -> None:
    cluster = cluster_of(4, borrower(["n1"], 1, order=9), runs("a", ["n2"], 60), waits("big", 3, 1))
    assert reserved(cluster).found[0].nodes == {"n2", "n3", "n4"}
    assert set(transfers(cluster).takes["u-auto"]) == {"n3", "n4"}
    lent = cluster_of(4, borrower(["n1", "n3", "n4"], 1, order=9), runs("a", ["n2"], 60), waits("big", 3, 1))
    assert reserved(lent).found[0].start == NOW + 60 * MINUTE + GRACE * 1000
    free = cluster_of(4, borrower(["n1", "n3", "n4"], 1, order=9), waits("big", 3, 1))
    assert set(transfers(free).gives["u-auto"]) == {"n3", "n4"}


def test_what_is_borrowed_is_not_given_back_to_one_that_could_not_use_it() -> None:
    cluster = cluster_of(
        4, borrower(["n1", "n3", "n4"], 1), runs("a", ["n2"], 60), waits("big", 3, 1), waits("small", 1, 2)
    )
    assert transfers(cluster).gives == {}
    quick = cluster_of(
        4, borrower(["n1", "n3", "n4"], 1), runs("a", ["n2"], 60), waits("big", 3, 1), waits("small", 1, 2, minutes=5)
    )
    assert set(transfers(quick).gives["u-auto"].values()) == {"u-small"}


# --- the estimate


def estimate(cluster: Cluster, name: str) -> int | None:
    found = heldback.start_estimate(cluster, cluster.jobs[f"u-{name}"])
    return found.start if found is not None else None


def test_the_estimate_is_given_only_to_whom_nobody_goes_before() -> None:
    start = NOW + 60 * MINUTE + GRACE * 1000
    cluster = cluster_of(4, runs("a", ["n1", "n2"], 60), waits("big", 4, 1), waits("next", 4, 2))
    assert (estimate(cluster, "big"), estimate(cluster, "next")) == (start, None)
    backs_off = waits("first", 1, 0).model_copy(update={"not_before": NOW + 1000})
    assert estimate(cluster_of(4, *cluster.jobs.values(), backs_off), "big") is None
    grows = cluster_of(5, runs("e", ["n1"], 60, size=3), runs("a", ["n2"], 60, order=9), waits("big", 5, 1))
    assert estimate(grows, "big") is None


def test_there_is_none_where_a_job_stays_for_longer_than_it_may() -> None:
    start = NOW + 60 * MINUTE + GRACE * 1000
    cluster = cluster_of(4, runs("a", ["n1", "n2"], 60), waits("big", 4, 1), waits("small", 1, 2))
    assert estimate(at(cluster, start - 1), "big") == start
    assert estimate(at(cluster, start), "big") is None
    assert decided(at(cluster, start), "small") == (None, "n3, n4 are reserved for job big, which is about to start")


def test_it_says_when_and_after_whom() -> None:
    days = 24 * 60
    jobs = [runs(name, [f"n{i}"], 3 * days) for i, name in enumerate("abcde", 1)]
    found = reserved(cluster_of(6, *jobs[:2], waits("big", 6, 9))).found
    says = [heldback.starts_by(cluster_of(1), one, WALL) for one in found]
    assert says == ["starts by about 00:18 UTC in 3 days (when jobs a, b end at their time limits)"]
    cluster = cluster_of(6, *jobs, waits("big", 6, 9))
    says = [heldback.starts_by(cluster, one, WALL - 600) for one in reserved(cluster).found]
    assert says == ["starts by about 00:08 UTC in 3 days (when jobs a, b, c and 2 more end at their time limits)"]
    (last,) = reserved(soon := cluster_of(2, runs("a", ["n1"], days - 10), waits("big", 2, 9))).found
    assert heldback.starts_by(soon, last, WALL).startswith("starts by about 00:08 UTC tomorrow (when job a ends")


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


# --- whatever the cluster


MINUTES = st.sampled_from([1, 10, 29, 30, 31, 60, 90])
LIMITS = st.one_of(st.none(), MINUTES)


@st.composite
def crowds(draw: st.DrawFn, *, limited: bool = False) -> tuple[int, list[JobRecord], list[JobRecord]]:
    """Nodes, jobs that run on some of them, jobs that wait, a large one first; all of them of fixed sizes."""
    limits = MINUTES if limited else LIMITS
    count = draw(st.integers(2, 8))
    free = [f"n{i}" for i in range(1, count + 1)]
    running = list[JobRecord]()
    for _ in range(draw(st.integers(0, 4))):
        if not free:
            break
        on = [free.pop() for _ in range(draw(st.integers(1, min(3, len(free)))))]
        running.append(runs(f"r{len(running)}", on, draw(limits), order=len(running)))
    sizes = [draw(st.integers(max(1, count - 1), count)), *draw(st.lists(st.integers(1, 3), max_size=5))]
    waiting = [waits(f"w{i}", min(size, count), 100 + i, draw(limits)) for i, size in enumerate(sizes)]
    return count, running, waiting


def started(cluster: Cluster) -> Cluster:
    """Every job that may start now does, one after the other, as agents would have it."""
    for uid in [w.job.uid for w in heldback.line(cluster)]:
        job = cluster.jobs[uid]
        step = decide(cluster, job, WALL).step
        if isinstance(step, Propose):
            assert len(step.members) == job.spec.nodes.min, "a gang starts whole"
            generation = make_generation(list(step.members), deadline=cluster.served)
            now = {
                "phase": "running",
                "generation": generation,
                "since": cluster.served,
                "first_active": cluster.served,
            }
            cluster = replace(cluster, jobs={**cluster.jobs, uid: job.model_copy(update=now)})
    return cluster


def all_started(cluster: Cluster) -> Cluster:
    while True:
        after = started(cluster)
        if {uid: j.phase for uid, j in after.jobs.items()} == {uid: j.phase for uid, j in cluster.jobs.items()}:
            return after
        cluster = after


@REPEATABLE
@given(crowds(), st.integers(0, 60))
def test_who_comes_later_pushes_nobody_back(drawn: tuple[int, list[JobRecord], list[JobRecord]], minute: int) -> None:
    """The start of the first in line is no later once those behind it have started."""
    count, running, waiting = drawn
    cluster = at(cluster_of(count, *running, *waiting), NOW + minute * MINUTE)
    before = next((one for one in reserved(cluster).found if one.first), None)
    after = all_started(cluster)
    if before is None or after.jobs[before.uid].phase == "running":
        return
    now = reservations.reservation_of(after, after.jobs[before.uid])
    assert now is not None
    latest = before.start if before.start is not None else departures.UNKNOWN
    assert max(now.start if now.start is not None else departures.UNKNOWN, after.served) <= max(latest, after.served)


@REPEATABLE
@given(crowds(), st.integers(0, 60))
def test_all_agents_keep_the_same_whatever_they_saw_before(
    drawn: tuple[int, list[JobRecord], list[JobRecord]], minute: int
) -> None:
    count, running, waiting = drawn
    cluster = cluster_of(count, *running, *waiting)
    reserved(cluster)
    later = at(cluster, NOW + minute * MINUTE)
    assert reserved(later) == reserved(replace(later, notes=Notes()))
    turned = dict(reversed([*later.jobs.items()]))
    assert reserved(replace(later, jobs=turned, notes=Notes())).found == reserved(later).found


def test_each_size_of_job_has_its_own_room_beside_what_is_reserved() -> None:
    """Nobody has looked at any of them yet; two of the four idle nodes are reserved for big."""
    jobs = [waits("big", 5, order=1)] + [waits(f"w{i}", size, order=2 + i) for i, size in enumerate((1, 3, 2, 3, 1))]
    jobs[-1] = jobs[-1].model_copy(update={"spec": jobs[-1].spec.model_copy(update={"spot": True})})
    view = cluster_of(7, runs("long", ["n1", "n2", "n3"], 60), *jobs)
    cold = {n: one.model_copy(update={"readiness": {}}) for n, one in view.nodes.items()}
    view = replace(view, nodes=cold, notes=Notes())
    rooms = {w.job.name: w.room for w in line(view)}
    assert [name for name, room in rooms.items() if room.enough_soon] == ["w0", "w2", "w4"]
    for name, room in rooms.items():
        one = view.jobs[f"u-{name}"]
        assert room == open_room(view, one) == open_room(view, one.model_copy()), "also as a newer record has it"
    spot = {
        n: one.model_copy(update={"facts": one.facts.model_copy(update={"spot": n > "n5"})}) for n, one in cold.items()
    }
    for nodes_then in (spot, cold, {n: one for n, one in cold.items() if n != "n6"}, spot):
        later = replace(view, nodes=nodes_then)
        anew = line(replace(later, notes=Notes()))
        assert [(w.job, w.room) for w in line(later)] == [(w.job, w.room) for w in anew], "whatever was kept before"


def run_on(cluster: Cluster) -> Cluster:
    """To the next end of a job at its time limit."""
    running = [job for job in cluster.jobs.values() if job.phase == "running"]
    ends = {job.uid: job.since + int(60_000 * (job.spec.time_limit or 0) / 60) + 1000 * GRACE for job in running}
    first = min(ends, key=lambda uid: ends[uid])
    jobs = {uid: job for uid, job in cluster.jobs.items() if uid != first}
    return replace(cluster, jobs=jobs, served=max(cluster.served, ends[first]))


@REPEATABLE
@given(crowds(limited=True))
def test_with_time_limits_nobody_waits_for_ever(drawn: tuple[int, list[JobRecord], list[JobRecord]]) -> None:
    """The first in line starts when it was said to, although small jobs come again and again."""
    count, running, waiting = drawn
    everybody = {job.uid: READY for job in (*running, *waiting)} | {f"u-s{i}": READY for i in range(100)}
    cluster = make_cluster(nodes(count, everybody), *running, *waiting)
    promised: dict[str, int] = {}
    for i in range(100):
        small = waits(f"s{i}", 1, 1000 + i, minutes=60)
        cluster = all_started(replace(cluster, jobs={**cluster.jobs, small.uid: small}))
        for job in waiting:
            now = cluster.jobs.get(job.uid)
            found = heldback.start_estimate(cluster, now) if now is not None and now.phase == "queued" else None
            if found is not None and found.start is not None:
                promised.setdefault(job.uid, found.start)
            if now is not None and now.phase == "queued" and job.uid in promised:
                assert cluster.served <= promised[job.uid]
        if not any(job.uid in cluster.jobs and cluster.jobs[job.uid].phase == "queued" for job in waiting):
            return
        cluster = run_on(cluster)
    raise AssertionError([job.name for job in waiting if cluster.jobs[job.uid].phase == "queued"])

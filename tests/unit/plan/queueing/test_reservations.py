"""Reservations: nodes are reserved for the gang that is first in line and lacks some; who comes after it uses them only
where that does not push it back; and when it starts is said only where time limits say so."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import JobRecord, Scale
from nodeagent.model.queue import Amount
from nodeagent.model.world import CauseKind
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing import departures, heldback, reservations, reserving
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.queue import GIVE_WAY
from nodeagent.plan.queueing.reservations import reserved
from nodeagent.plan.steps import Propose
from tests.profiled import counted
from tests.unit.plan.build import (
    NOW,
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
from tests.unit.plan.queueing.gangs import (
    GRACE,
    MINUTE,
    TEAM,
    at,
    borrower,
    cluster_of,
    decided,
    nodes,
    of_team,
    runs,
    waits,
)

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


def test_who_is_before_it_in_line_is_not_held_up() -> None:
    cluster = cluster_of(4, runs("a", ["n1", "n2"], 60), waits("small", 1, 1), waits("big", 4, 2))
    assert decided(cluster, "small")[0] == {"n3"}
    urgent = waits("urgent", 2, 3, priority=1)
    assert decided(cluster_of(4, *cluster.jobs.values(), urgent), "urgent")[0] == {"n3", "n4"}


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


def test_one_that_runs_does_not_grow_into_what_is_reserved() -> None:
    grows, big = runs("a", ["n1"], order=2, size=3), waits("big", 4, 1)
    assert reserved(of_team(cluster_of(8, grows, big))).for_others["u-a"].aside
    assert decided(of_team(cluster_of(8, grows, big)), "a")[0] is None
    assert decided(of_team(cluster_of(8, grows)), "a")[0] == {"n1", "n2", "n3"}


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


def test_where_nobody_waits_nothing_is_looked_for() -> None:
    """An agent asks in each round, and of most views nothing has been worked out before."""
    cluster = cluster_of(3, runs("a", ["n1", "n2"]))
    assert counted(lambda: reserved(cluster))[reserving.of_nodes.__code__] == 0
    assert reserved(cluster) is reservations.NO_RESERVATIONS

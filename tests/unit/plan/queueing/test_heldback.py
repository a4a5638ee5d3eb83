"""What reservations leave to other jobs, and what they are told: which nodes they wait beside, and until when."""

from __future__ import annotations

from dataclasses import replace

from nodeagent.plan.cluster import VIEWS_KEPT, Cluster, Notes
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.queueing import heldback
from nodeagent.plan.queueing.heldback import line, open_room, with_aside
from nodeagent.plan.queueing.reservations import reserved
from tests.unit.plan.build import NOW, WALL
from tests.unit.plan.queueing.gangs import GRACE, MINUTE, at, cluster_of, decided, estimate, nodes, of_team, runs, waits


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


def test_nodes_get_ready_for_those_that_may_start_there() -> None:
    cluster = cluster_of(
        4, runs("a", ["n1", "n2"], 60), waits("big", 4, 1), *(waits(f"w{i}", 1, 2 + i) for i in range(6)),
        waits("quick", 1, 20, minutes=5),
    )  # fmt: skip
    cluster = replace(cluster, nodes={n.id: n for n in nodes(4, {})}, notes=Notes())
    assert [w.job.name for w in heldback.line(cluster) if w.has_room] == ["quick"]
    assert should_prepare(cluster, cluster.jobs["u-quick"], "n3")
    assert not any(should_prepare(cluster, cluster.jobs["u-w0"], n) for n in cluster.nodes)


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

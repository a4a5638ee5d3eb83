"""Borrowing, giving back and making room, where not every node will do for every job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.constraints import Constraints, Match
from nodeagent.model.job import JobRecord
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.queueing.elastic import nodes_wanted, transfers
from nodeagent.plan.steps import Propose
from tests.unit.plan.build import READY, REPEATABLE, WALL, make_cluster, make_generation, make_job, make_node, make_spec

H100 = Constraints(require=(Match(label="gpu", values=("h100",)),))

A, B = Queue(name="a"), Queue(name="b")


def borrower(
    name: str,
    on: str,
    *,
    target: int = 1,
    most: int = 8,
    asked: Constraints | None = None,
    within: str = "",
    segments: int = 0,
    order: int = 0,
) -> JobRecord:
    """It runs on these nodes, and may have up to ``most``."""
    spec = make_spec(name=name, size=(segments or 1, most), placement=asked, within=within, segments=segments)
    nodes = spec.nodes.model_copy(update={"target": spec.nodes.min, "auto": True})
    spec = spec.model_copy(update={"roles": (spec.role.model_copy(update={"nodes": nodes}),)})
    return make_job("running", make_generation(on.split()), spec=spec, uid=f"u-{name}", target=target, order=order)


def job(
    name: str,
    least: int,
    on: str = "",
    *,
    asked: Constraints | None = None,
    within: str = "",
    segments: int = 0,
    order: int = 9,
) -> JobRecord:
    """It waits for so many nodes, or runs on these."""
    nodes = on.split()
    spec = make_spec(name=name, size=(least, max(least, len(nodes))), placement=asked, within=within, segments=segments)
    generation = make_generation(nodes) if nodes else None
    return make_job("running" if nodes else "queued", generation, spec=spec, uid=f"u-{name}", order=order)


def cluster(where: dict[str, str], *jobs: JobRecord, h100: Iterable[str] = (), queues: Iterable[Queue] = ()) -> Cluster:
    """``where``: rack to its nodes, of one slot each. Every job is ready everywhere, and where there are ``queues`` in
    the one that its name begins with."""
    known = tuple(queues)
    if known:
        jobs = tuple(
            one.model_copy(update={"spec": one.spec.model_copy(update={"queue": one.name[:1]})}) for one in jobs
        )
    ready = {one.uid: READY for one in jobs}
    nodes = [
        make_node(n, slots=1, ready=ready, labels={"rack": rack, "gpu": "h100" if n in set(h100) else "a100"})
        for rack, names in where.items()
        for n in names.split()
    ]
    nodes = [n.model_copy(update={"facts": n.facts.model_copy(update={"topology": ("rack",)})}) for n in nodes]
    return replace(make_cluster(nodes, *jobs), queues=Queues(rev=1, queues=known))


def test_a_job_borrows_only_nodes_that_it_may_have() -> None:
    view = cluster({"r1": "n1 n2 n3", "r2": "n4 n5"}, one := borrower("a", "n1", asked=H100), h100=["n1", "n3", "n5"])
    assert transfers(view).takes == {"u-a": ("n3", "n5")}
    assert nodes_wanted(view, one) == 3


def test_nothing_is_given_back_for_a_job_that_may_not_have_it() -> None:
    lent, asks = borrower("a", "n1 n2 n3"), job("b", 1, asked=H100)
    assert transfers(cluster({"r1": "n1 n2 n3"}, lent, asks, h100=["n1"])).gives == {}, "only its own would do"
    assert transfers(cluster({"r1": "n1 n2 n3"}, lent, asks, h100=["n2"])).gives == {"u-a": {"n2": "u-b"}}


def test_a_job_within_one_rack_borrows_of_that_rack() -> None:
    view = cluster({"r1": "n1 n2 n3", "r2": "n4 n5 n6"}, one := borrower("a", "n4 n5", within="rack"))
    assert transfers(view).takes == {"u-a": ("n6",)}
    assert nodes_wanted(view, one) == 3
    assert [c.node for c in place(view, one).chosen] == ["n4", "n5", "n6"]
    poor, rich = borrower("a", "n4", within="rack"), borrower("b", "n1 n2 n3 n5", order=1)
    view = cluster({"r1": "n1 n2 n3", "r2": "n4 n5"}, poor, rich)
    assert transfers(view).gives == {"u-b": {"n5": "u-a"}}, "of those that it could use"


def test_a_job_in_segments_borrows_nothing() -> None:
    one = borrower("a", "n1 n2", target=2, segments=2)
    view = cluster({"r1": "n1 n2 n3", "r2": "n4 n5"}, one)
    assert (transfers(view).takes, nodes_wanted(view, one)) == ({}, 2)


def test_idle_nodes_near_to_a_job_are_borrowed_first_and_get_ready() -> None:
    one = borrower("a", "n4 n5", most=3)
    view = cluster({"r1": "n1 n2 n3", "r2": "n4 n5 n6"}, one)
    assert transfers(view).takes == {"u-a": ("n6",)}
    cold = {n: record.model_copy(update={"readiness": {}}) for n, record in view.nodes.items()}
    view = replace(view, nodes=cold, notes=Notes())
    assert [n for n in ("n1", "n2", "n3", "n6") if should_prepare(view, one, n)] == ["n6"]


def test_a_node_gets_ready_for_the_job_that_is_to_have_it_also_if_a_nearer_one_is_for_another() -> None:
    one, two = borrower("a", "n1", most=2), borrower("b", "n4", most=2, order=1)
    view = cluster({"r1": "n1 n2 n4", "r2": "n5 n6"}, one, two)
    assert transfers(view).takes == {"u-a": ("n2",), "u-b": ("n5",)}
    cold = {n: record.model_copy(update={"readiness": {}}) for n, record in view.nodes.items()}
    assert should_prepare(replace(view, nodes=cold, notes=Notes()), two, "n5")


def test_a_whole_gang_of_one_rack_is_given_back() -> None:
    """The newest alone would be n3 and n2, with n6: two racks."""
    lent, waits = borrower("a", "n1 n4 n5 n2 n3"), job("b", 3, within="rack")
    view = cluster({"r1": "n1 n2 n3", "r2": "n4 n5 n6"}, lent, waits)
    assert transfers(view).gives == {"u-a": {"n4": "u-b", "n5": "u-b"}}
    step = decide(view, lent, WALL).step
    assert isinstance(step, Propose)
    assert sorted(step.members) == ["n1", "n2", "n3"]
    assert transfers(cluster({"r1": "n1 n2", "r2": "n3 n4"}, borrower("a", "n1 n2 n3"), waits)).gives == {}, "in vain"


def test_segments_are_given_back_whole() -> None:
    lent, waits = borrower("a", "n1 n2 n4 n5 n6"), job("b", 4, segments=2)
    view = cluster({"r1": "n1 n2 n3", "r2": "n4 n5 n6"}, lent, waits)
    assert transfers(view).gives == {"u-a": {"n2": "u-b", "n5": "u-b", "n6": "u-b"}}


def test_a_job_that_runs_short_within_one_rack_gets_back_nodes_of_that_rack() -> None:
    short = job("b", 1, "n1 n2", within="rack")
    more = short.spec.nodes.model_copy(update={"max": 4, "target": 3})
    role = short.spec.role.model_copy(update={"nodes": more})
    short = short.model_copy(
        update={
            "spec": short.spec.model_copy(update={"roles": (role,)}),
            "control": short.control.model_copy(update={"target": 3}),
        }
    )
    view = cluster({"r1": "n1 n2 n3", "r2": "n4 n5 n6"}, borrower("a", "n4 n3 n5 n6"), short)
    assert transfers(view).gives == {"u-a": {"n3": "u-b"}}


def test_a_queue_makes_room_in_one_rack_with_the_very_nodes_that_are_asked_of_it() -> None:
    has, waits = job("a1", 1, "n1 n4 n5 n2 n3 n6"), job("b1", 3, within="rack")
    view = cluster({"r1": "n1 n2 n3", "r2": "n4 n5 n6"}, has, waits, queues=[A, B])
    assert (transfers(view).gives, transfers(view).stops) == ({"u-a1": {"n4": "u-b1", "n5": "u-b1", "n6": "u-b1"}}, {})
    now = view.jobs[has.uid]
    assert {c.node for c in place(view, now).chosen} == {"n1", "n2", "n3"}, "whatever it re-forms for"
    step = decide(view, now, WALL).step
    assert isinstance(step, Propose)
    assert sorted(step.members) == ["n1", "n2", "n3"]


def test_where_one_rack_cannot_be_had_another_is_tried() -> None:
    """What queue c has is guaranteed to it, which shows only once it is asked for nodes."""
    tree = [A, Queue(name="b", guarantee=Amount(nodes=3)), Queue(name="c", guarantee=Amount(nodes=4))]
    keeps, has = job("c1", 1, "n8 n1 n2 n3", order=1), job("a1", 1, "n7 n4 n5 n6", order=2)
    where = {"r1": "n1 n2 n3 n8", "r2": "n4 n5 n6", "r3": "n7"}
    view = cluster(where, keeps, has, job("b1", 3, within="rack"), queues=tree)
    assert transfers(view).gives == {"u-a1": {"n4": "u-b1", "n5": "u-b1", "n6": "u-b1"}}


# --- whatever the cluster

RUNNING = st.tuples(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
WAITING = st.tuples(st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())


@REPEATABLE
@given(
    racks=st.lists(st.tuples(st.sampled_from(["r1", "r2", "r3"]), st.booleans()), min_size=2, max_size=12),
    running=st.lists(RUNNING, min_size=1, max_size=3),
    waiting=st.lists(WAITING, max_size=3),
    many=st.booleans(),
)
def test_nobody_gets_a_node_that_will_not_do_and_nothing_is_given_in_vain(
    racks: list[tuple[str, bool]],
    running: list[tuple[int, int, bool, bool]],
    waiting: list[tuple[int, bool, bool, bool]],
    many: bool,
) -> None:
    """A node's rack, and whether it is an H100; size, target, H100s only and within one rack of those that run; least,
    H100s only, within and segments of those that wait."""
    by_rack: dict[str, str] = {}
    rack_of = {f"n{i}": rack for i, (rack, _) in enumerate(racks)}
    h100 = {f"n{i}" for i, (_, good) in enumerate(racks) if good}
    for n, rack in rack_of.items():
        by_rack[rack] = f"{by_rack.get(rack, '')} {n}"
    free, jobs = list(rack_of), list[JobRecord]()
    for at, (size, target, picky, within) in enumerate(running):
        able = [n for n in free if not picky or n in h100]
        if within and able:
            able = [n for n in able if rack_of[n] == rack_of[able[0]]]
        on = able[:size]
        if not on:
            continue
        free = [n for n in free if n not in on]
        asked = H100 if picky else None
        within_one = "rack" * within
        jobs.append(borrower(f"a{at}", " ".join(on), target=target, asked=asked, within=within_one, order=at))
    for at, (least, picky, within, split) in enumerate(waiting):
        segments, within_one, asked = 2 if split else 0, "rack" * within, H100 if picky else None
        needs = least * (segments or 1)
        jobs.append(job(f"b{at}", needs, asked=asked, within=within_one, segments=segments, order=50 + at))
    view = cluster(by_rack, *jobs, h100=h100, queues=[A, B] if many else [])
    found, by_uid = transfers(view), view.jobs
    for uid, nodes in found.takes.items():
        one = by_uid[uid]
        assert one.generation is not None
        assert set(nodes) <= set(free)
        assert one.spec.role.placement is None or h100.issuperset(nodes)
        assert not one.spec.within or len({rack_of[n] for n in (*one.generation.members, *nodes)}) == 1
    for uid in {to for nodes in found.gives.values() for to in nodes.values()}:
        one = by_uid[uid]
        got = {n for nodes in found.gives.values() for n, to in nodes.items() if to == uid}
        assert one.spec.role.placement is None or got <= h100
        if one.generation is None and not found.stops:
            able = [n for n in {*got, *free} if one.spec.role.placement is None or n in h100]
            count = Counter(rack_of[n] for n in able)
            if one.spec.segments:
                count = Counter({rack: has - has % one.spec.segments for rack, has in count.items()})
            assert (max(count.values()) if one.spec.within else count.total()) >= one.spec.nodes.min, "in vain"
    for one in by_uid.values():
        if one.generation is not None and one.uid in found.gives:
            names = {c.node for c in place(view, one).chosen}
            assert not names & found.gives[one.uid].keys()
    turned = replace(view, jobs=dict(reversed(list(view.jobs.items()))), notes=Notes())
    assert transfers(turned) == found, "whatever order they are read in"


def test_no_place_counts_whose_nodes_their_queues_may_not_lose() -> None:
    """Only a few sets of nodes are tried: those of a queue that has less than it is guaranteed are none of them."""
    racks = {f"r{i}": f"n{2 * i - 1} n{2 * i}" for i in range(1, 7)}
    whole = [job(f"c{i}", 2, f"n{2 * i - 1} n{2 * i}", order=i) for i in range(1, 6)]
    needs = Queue(name="b", guarantee=Amount(nodes=2))
    queues = (Queue(name="c", guarantee=Amount(nodes=12)), A, needs)
    jobs = (*whole, job("a1", 2, "n11 n12", order=6), job("b1", 2, within="rack"))
    assert transfers(cluster(racks, *jobs, queues=queues)).stops == {"u-a1": "u-b1"}

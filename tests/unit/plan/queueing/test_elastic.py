"""Borrowed nodes: who takes idle ones, who gives which back for whom, and what nobody may touch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import NodeRecord, Readiness
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.queueing.elastic import borrowed, nodes_wanted, transfers
from nodeagent.plan.queueing.queue import line_key
from nodeagent.plan.queueing.transfers import NO_TRANSFERS
from nodeagent.plan.steps import Propose
from tests.unit.plan.build import (
    READY,
    REPEATABLE,
    UNFIT,
    WALL,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)


def borrower(name: str, nodes: list[str], target: int = 1, most: int = 8, order: int = 0) -> JobRecord:
    """A job with ``nodes: {min: 1, max: most, target: auto}``, scaled to the target, which runs on these."""
    spec = auto(make_spec(size=(1, most), name=name))
    return make_job("running", make_generation(nodes), spec=spec, uid=f"u-{name}", target=target, order=order)


def auto(spec: JobSpec) -> JobSpec:
    nodes = spec.nodes.model_copy(update={"target": spec.nodes.min, "auto": True})
    return spec.model_copy(update={"roles": (spec.role.model_copy(update={"nodes": nodes}),)})


def waiting(name: str, least: int, order: int = 0) -> JobRecord:
    return make_job(spec=make_spec(size=(least, least), name=name), uid=f"u-{name}", order=order)


def cluster(count: int, *jobs: JobRecord, ready: Mapping[str, Readiness] | None = None, slots: int = 1) -> Cluster:
    """Nodes n1, n2, ... with one slot each, on which every job is ready."""
    all_ready = {job.uid: READY for job in jobs} | dict(ready or {})
    nodes: list[NodeRecord | str] = [make_node(f"n{i}", slots=slots, ready=all_ready) for i in range(1, count + 1)]
    return make_cluster(nodes, *jobs)


def test_nobody_who_does_not_borrow_sees_any_of_it() -> None:
    running = make_job("running", make_generation(["n1"]), spec=make_spec(size=(1, 4)), target=1)
    assert transfers(cluster(4, running, waiting("b", 2))) is NO_TRANSFERS


def test_idle_nodes_are_taken_up_to_the_most() -> None:
    job = borrower("a", ["n1"], most=3)
    view = cluster(5, job)
    assert transfers(view).takes == {"u-a": ("n2", "n3")}
    assert (nodes_wanted(view, job), borrowed(view, job)) == (3, 0)
    assert [c.node for c in place(view, job).chosen] == ["n1", "n2", "n3"]
    step = decide(view, job, WALL).step
    assert isinstance(step, Propose)
    assert (step.cause.kind, step.cause.text) == ("share", "n2, n3 borrowed: nobody else needs it")


def test_not_while_a_job_waits_that_can_have_them() -> None:
    job = borrower("a", ["n1"])
    assert transfers(cluster(3, job, waiting("b", 2))).takes == {}
    assert transfers(cluster(3, job, waiting("b", 9))).takes == {"u-a": ("n2", "n3")}, "it holds up nobody"
    view = cluster(4, job, waiting("b", 2))
    assert transfers(view).takes == {"u-a": ("n4",)}
    assert [c.node for c in place(view, job).chosen] == ["n1", "n4"], "and no other"


def test_only_as_many_as_are_needed_go_back_the_newest_first() -> None:
    job = borrower("a", ["n1", "n2", "n3", "n4"], target=2)
    view = cluster(5, job, waiting("b", 2))
    assert transfers(view).gives == {"u-a": {"n4": "u-b"}}
    assert (borrowed(view, job), nodes_wanted(view, job)) == (2, 3)
    step = decide(view, job, WALL).step
    assert isinstance(step, Propose)
    assert sorted(step.members) == ["n1", "n2", "n3"]
    assert step.planned, "no step is lost"
    assert (step.cause.kind, step.cause.text) == ("share", "n4 given back: job b needs it")


def test_what_its_target_says_is_its_own() -> None:
    job = borrower("a", ["n1", "n2", "n3"], target=2)
    assert transfers(cluster(3, job, waiting("b", 2))).gives == {}, "one node would not help"
    assert transfers(cluster(3, job, waiting("b", 1))).gives == {"u-a": {"n3": "u-b"}}


def test_what_leaves_already_is_not_asked_for_again() -> None:
    job = borrower("a", ["n1", "n2", "n3"], target=1)
    forming = make_generation(["n1", "n2"], state="forming", number=2, holders=["n1", "n2", "n3"], planned=True)
    leaves = job.model_copy(update={"generation": forming, "phase": "forming"})
    assert transfers(cluster(3, leaves, waiting("b", 1))).gives == {}


def test_who_has_most_gives_first() -> None:
    one, two = borrower("a", ["n1", "n2", "n3"]), borrower("b", ["n4", "n5", "n6", "n7"])
    assert transfers(cluster(7, one, two, waiting("c", 1))).gives == {"u-b": {"n7": "u-c"}}
    three = transfers(cluster(7, one, two, waiting("c", 3))).gives
    assert three == {"u-b": {"n7": "u-c", "n6": "u-c"}, "u-a": {"n3": "u-c"}}


def test_who_runs_on_fewer_than_its_target_gets_borrowed_ones() -> None:
    job = borrower("a", ["n1", "n2", "n3"])
    short = make_job("running", make_generation(["n4"]), spec=make_spec(size=(1, 2), name="b"), uid="u-b", target=2)
    assert transfers(cluster(4, job, short)).gives == {"u-a": {"n3": "u-b"}}


def test_jobs_that_borrow_have_equally_many() -> None:
    one, two = borrower("a", ["n1", "n2", "n3", "n4", "n5"]), borrower("b", ["n6"])
    assert transfers(cluster(6, one, two)).gives == {"u-a": {"n5": "u-b", "n4": "u-b"}}
    idle = transfers(cluster(9, one, two))
    assert idle.takes == {"u-b": ("n7", "n8", "n9")}
    assert idle.gives == {}, "by one they may differ"


def test_a_node_that_cannot_run_the_job_is_no_help() -> None:
    job, other = borrower("a", ["n1", "n2"]), waiting("b", 1)
    view = cluster(2, job, other)
    unfit = make_node("n2", slots=1, ready={"u-a": READY, "u-b": UNFIT})
    assert transfers(replace(view, nodes={**view.nodes, "n2": unfit}, notes=Notes())).gives == {}


def test_a_lost_node_is_replaced_by_an_idle_one_at_once() -> None:
    job = borrower("a", ["n1", "n2", "n3"], target=1, most=3)
    view = replace(cluster(4, job), lapsed=frozenset({"n3"}), notes=Notes())
    step = decide(view, job, WALL).step
    assert isinstance(step, Propose)
    assert sorted(step.members) == ["n1", "n2", "n4"]


SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=4)


@REPEATABLE
@given(running=SIZES, queue=st.lists(st.integers(1, 6), max_size=5), idle=st.integers(0, 5), flip=st.booleans())
def test_what_must_hold_of_every_view(
    running: list[tuple[int, int, int]], queue: list[int], idle: int, flip: bool
) -> None:
    """Sizes, targets and most of the jobs that borrow; the least of those that wait."""
    jobs: list[JobRecord] = []
    used = 0
    for at, (size, target, most) in enumerate(running):
        names = [f"n{used + i + 1}" for i in range(size)]
        used += size
        jobs.append(borrower(f"a{at}", names, target=target, most=max(size, target, most), order=at))
    jobs += [waiting(f"b{at}", least, order=100 + at) for at, least in enumerate(queue)]
    view = cluster(used + idle, *jobs)
    found = transfers(view)
    taken = [node for nodes in found.takes.values() for node in nodes]
    given_back = [node for nodes in found.gives.values() for node in nodes]
    assert len({*taken, *given_back}) == len(taken) + len(given_back), "each node once"
    assert set(taken) <= {f"n{used + i + 1}" for i in range(idle)}, "only idle ones are taken"
    by_uid = {job.uid: job for job in jobs}
    for uid, nodes in found.gives.items():
        job = by_uid[uid]
        assert job.generation is not None
        assert nodes.keys() <= job.generation.members.keys()
        assert len(job.generation.members) - len(nodes) >= job.control.target, "nothing of its own"
        assert uid not in found.takes or not set(found.takes[uid]) & nodes.keys()
    for uid, more in found.takes.items():
        job = by_uid[uid]
        assert job.generation is not None
        assert len(job.generation.members) + len(more) <= max(job.spec.nodes.max, job.control.target)
    got = Counter(uid for nodes in found.gives.values() for uid in nodes.values())
    own, free, lent = 0, idle, sum(max(0, has(job) - job.control.target) for job in jobs)
    for job in sorted((j for j in jobs if has(j)), key=line_key):
        lack = max(0, job.control.target - has(job))
        from_idle = min(free, lack)
        back = min(lent, lack - from_idle)
        assert len(found.takes.get(job.uid, ())) >= from_idle, "what it lacks of its target is its own"
        assert got[job.uid] >= back
        free, lent, own = free - from_idle, lent - back, own + from_idle
    kept = starts = False
    for job in sorted((j for j in jobs if not has(j)), key=line_key):
        needs = job.spec.nodes.min
        from_idle = min(free, needs)
        if kept or needs - from_idle > lent:
            assert not got[job.uid], "never in vain, and not what is reserved for a gang before it"
            starts = starts or (kept and needs <= free)  # beside the gang before it, which needs other nodes
            kept = kept or needs <= used + idle
            continue
        assert got[job.uid] == needs - from_idle, "as many as it needs, and no more"
        free, lent = free - from_idle, lent - got[job.uid]
    if free > len(taken) - own and not starts:
        for job in (j for j in jobs if has(j) and j.uid not in found.gives):
            assert has(job) + len(found.takes.get(job.uid, ())) == job.spec.nodes.max, "nothing is idle in vain"
    turned = replace(view, jobs=dict(reversed(list(view.jobs.items()))), notes=Notes()) if flip else view
    assert transfers(turned) == found, "whatever order they are read in"


def has(job: JobRecord) -> int:
    """How many nodes it runs on."""
    return len(job.generation.members) if job.generation is not None else 0

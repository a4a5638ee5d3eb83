"""A gang whose nodes have to lie well to each other, in a queue that may not use all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.constraints import Constraints, Match
from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import ceiling
from nodeagent.plan.fairshare.resources import of_devices, together
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.nodes.candidates import Candidate, candidates
from nodeagent.plan.queueing.room import room_for
from tests.unit.plan.build import PREPARING, READY, REPEATABLE, UID, WALL, make_cluster, make_job, make_node, make_spec

H100 = Constraints(require=(Match(label="gpu", values=("h100",)),))


def node(name: str, rack: str, *, gpus: int = 0, **labels: str) -> NodeRecord:
    return make_node(name, slots=1, gpus=gpus, labels={"rack": rack, **labels}, topology=("rack",))


def view(records: Iterable[NodeRecord], spec: JobSpec, **cap: int) -> tuple[Cluster, JobRecord]:
    """One job that waits in a queue of this capability."""
    one = make_job(spec=spec.model_copy(update={"queue": "q"}))
    tree = Queues(rev=1, queues=(Queue(name="q", capability=Amount.model_validate(cap)),))
    return replace(make_cluster(records, one), queues=tree), one


def chosen(cluster: Cluster, job: JobRecord) -> list[str]:
    return [c.node for c in place(cluster, job).chosen]


def racks(**domains: str) -> list[NodeRecord]:
    return [node(name, rack) for rack, names in domains.items() for name in names.split()]


def test_as_many_as_the_queue_may_have_are_in_the_smallest_domain_that_holds_so_many() -> None:
    cluster, job = view(racks(r1="n1 n2 n3 n4 n5", r2="n6 n7 n8"), make_spec(size=(2, 8)), nodes=3)
    assert chosen(cluster, job) == ["n6", "n7", "n8"]
    assert place(cluster, job).short == (
        "3 of 8 nodes fit: queue q may use 3 nodes and has 0 in use; this needs 8 more"
    )
    assert room_for(cluster, job).enough


def test_a_gang_within_one_rack_waits_for_its_queue_and_says_so() -> None:
    cluster, job = view(racks(r1="n1 n2 n3", r2="n4 n5"), make_spec(size=(3, 3), within="rack"), nodes=2)
    why = "queue q may use 2 nodes and has 0 in use; this needs 3 more"
    assert not place(cluster, job).fits
    assert place(cluster, job).missing == f"needs 3 nodes, 2 fit: {why}"
    room = room_for(cluster, job)
    assert (room.enough, room.enough_soon) == (False, False)
    assert decide(cluster, job, WALL).why == (why,)
    assert explain(cluster, job, WALL) == (why,)
    small, job = view(racks(r1="n1 n2"), job.spec, nodes=2)
    assert room_for(small, job).barred is None, "there are too few nodes, whatever its queue may use"
    assert not room_for(small, job).enough_soon


def test_where_the_first_choice_is_too_much_the_rack_that_takes_less_will_do() -> None:
    nodes = [*(node(f"a{i}", "r1", gpus=8) for i in range(3)), *(node(f"b{i}", "r2", gpus=2) for i in range(3))]
    spec = make_spec(size=(2, 3), workers="gpu", within="rack")
    assert chosen(*view(nodes, spec)) == ["a0", "a1", "a2"]
    cluster, job = view(nodes, spec, gpus=8)
    assert chosen(cluster, job) == ["b0", "b1", "b2"]
    assert room_for(cluster, job).enough
    assert chosen(*view(nodes, spec, gpus=5)) == ["b0", "b1"]


def test_segments_are_left_out_whole() -> None:
    nodes = racks(r1="n1 n2 n3 n4", r2="n5 n6 n7 n8")
    spec = make_spec(size=(2, 8), segments=2)
    assert chosen(*view(nodes, spec, nodes=7)) == ["n1", "n2", "n3", "n4", "n5", "n6"]
    assert chosen(*view(nodes, spec, nodes=1)) == []

    nodes = [
        node(f"n{i}", rack, gpus=gpus) for i, (rack, gpus) in enumerate([("r1", 1), ("r1", 4), ("r2", 1), ("r2", 4)])
    ]
    cluster, job = view(nodes, make_spec(size=(2, 2), workers="gpu", segments=2), gpus=4)
    assert place(cluster, job).capped == "queue q may use 4 gpus and has 0 in use; this needs 5 more"
    assert not room_for(cluster, job).enough_soon, "the two small ones are no segment"


def test_jobs_that_ask_for_other_nodes_are_not_alike() -> None:
    nodes = [make_node(n, slots=1, ready={}, labels={"gpu": gpu}) for n, gpu in (("n1", "h100"), ("n2", "a100"))]
    any_two, two_h100 = (
        make_job(uid=f"u-{i}", spec=make_spec(name=f"j{i}", size=(2, 2), placement=asked))
        for i, asked in enumerate((None, H100))
    )
    cluster = make_cluster(nodes, any_two, two_h100)
    assert room_for(cluster, any_two).enough_soon
    assert not room_for(cluster, two_h100).enough_soon


def test_a_choice_is_made_anew_where_only_the_label_of_a_node_has_changed() -> None:
    """Nothing else about the job's candidates has: the same notes say what they were."""
    before, job = view(racks(r1="n1 n2", r2="n3 n4 n5"), make_spec(size=(3, 3)))
    assert chosen(before, job) == ["n3", "n4", "n5"]
    moved = replace(before, nodes={**before.nodes, "n3": node("n3", "r1")})
    assert chosen(moved, job) == ["n1", "n2", "n3"]


# --- whatever the cluster


@st.composite
def capped(draw: st.DrawFn) -> tuple[Cluster, JobRecord]:
    """Nodes of different sizes in racks; one job that waits in a queue that may use so many GPUs."""
    nodes = []
    for i in range(draw(st.integers(1, 8))):
        rack, kind = draw(st.sampled_from(["r1", "r2", "r3"])), draw(st.sampled_from(["h100", "a100"]))
        one = node(f"n{i}", rack, gpus=draw(st.sampled_from([1, 2, 4])), gpu=kind)
        state = draw(st.sampled_from([READY, READY, READY, PREPARING, None]))
        nodes.append(one.model_copy(update={"readiness": {UID: state} if state is not None else {}}))
    segments, within = draw(st.sampled_from([0, 0, 2])), draw(st.sampled_from(["", "rack"]))
    least = draw(st.integers(1, 2)) * (segments or 1)
    size = (least, least + draw(st.integers(0, 2)) * (segments or 1))
    asked = draw(st.sampled_from([None, H100]))
    spec = make_spec(size=size, workers="gpu", placement=asked, within=within, segments=segments)
    return view(nodes, spec, gpus=draw(st.integers(0, 12)))


def together_in(cluster: Cluster, job: JobRecord, nodes: Iterable[str]) -> bool:
    """They are as the job asks."""
    labels = [cluster.nodes[n].facts.labels for n in nodes]
    asked, by_rack = job.spec.role.placement, Counter(one["rack"] for one in labels)
    whole = not job.spec.segments or not any(count % job.spec.segments for count in by_rack.values())
    allowed = asked is None or not any(asked.unmet("", one) for one in labels)
    return allowed and whole and (not job.spec.within or len(by_rack) <= 1)


def some_gang(cluster: Cluster, job: JobRecord, able: Iterable[Candidate]) -> bool:
    """A gang of these could be had: all are tried."""
    limit = ceiling(cluster, job)
    return any(
        together_in(cluster, job, [c.node for c in some]) and limit.holds(together(of_devices(c.devices) for c in some))
        for some in combinations(able, job.spec.nodes.min)
    )


@REPEATABLE
@given(capped())
def test_no_ceiling_is_exceeded_and_no_gang_missed(found: tuple[Cluster, JobRecord]) -> None:
    cluster, job = found
    placed, room = place(cluster, job), room_for(cluster, job)
    assert ceiling(cluster, job).holds(together(of_devices(c.devices) for c in placed.chosen))
    assert together_in(cluster, job, [c.node for c in placed.chosen])
    known = candidates(cluster, job)
    assert room.enough == placed.fits == some_gang(cluster, job, [c for c in known if c.standing == "fit"])
    soon = [c for c in known if c.standing in ("fit", "pending")]
    assert room.enough_soon == some_gang(cluster, job, soon)
    if room.barred is not None:
        assert ceiling(cluster, job).exceeded(room.barred())
        assert not room.enough_soon
    if placed.capped:
        assert len(placed.chosen) < job.control.target

"""Jobs that ask something of their nodes: what they get, what stands in their way, and who gets ready for them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.constraints import Constraints, Match
from nodeagent.model.job import Checkpoint, JobRecord
from nodeagent.model.jobspec import JobSpec, Nodes, Role
from nodeagent.model.node import Cordon, NodeRecord, Readiness
from nodeagent.model.timing import millis
from nodeagent.model.world import Place
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.findings.cluster import judge_cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import left_out, order_nodes, place
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.nodes.candidates import candidates, ranked
from nodeagent.plan.placing.arranging import arrange, may_move
from nodeagent.plan.placing.topology import gang_of, most
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.queueing.queue import ASSEMBLE
from nodeagent.plan.queueing.room import never, room_for
from nodeagent.plan.steps import Propose
from tests.unit.plan.build import (
    NOW,
    PREPARING,
    READY,
    REPEATABLE,
    UID,
    UNFIT,
    WALL,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)
from tests.unit.plan.queueing.test_queue import Counted

H100 = Constraints(require=(Match(label="gpu", values=("h100",)),))
ASKED = (
    None,
    H100,
    Constraints(exclude=H100.require),
    Constraints(prefer=H100.require),
    Constraints(spread="rack"),
    Constraints(pack="zone"),
)
LEVELS = ("zone", "rack")


def node(name: str, rack: str = "", *, ready: Readiness | None = READY, **labels: str) -> NodeRecord:
    """``rack``: ``a1`` is a rack of zone a. Ready for the job, or None: has not heard of it."""
    where = {"zone": rack[:1], "rack": rack} if rack else {}
    states = {UID: ready} if ready is not None else {}
    return make_node(name, slots=1, ready=states, labels={**where, **labels}, topology=LEVELS if rack else ())


def racks(ready: Readiness | None = READY, **domains: str) -> list[NodeRecord]:
    return [node(name, rack, ready=ready) for rack, nodes in domains.items() for name in nodes.split()]


def chosen(cluster: Cluster, job: JobRecord) -> list[str]:
    return [c.node for c in place(cluster, job).chosen]


def starts_on(cluster: Cluster, job: JobRecord) -> list[str]:
    step = decide(cluster, job, WALL).step
    assert isinstance(step, Propose)
    return list(step.members)


def preparing(cluster: Cluster, job: JobRecord) -> list[str]:
    return [n for n in cluster.nodes if should_prepare(cluster, job, n)]


def text(cluster: Cluster, job: JobRecord) -> str:
    (why,) = decide(cluster, job, WALL).why
    return why


# --- labels


def test_a_node_that_lacks_what_is_required_is_out_and_says_so() -> None:
    job = make_job(spec=make_spec(size=(2, 2), placement=H100))
    cluster = make_cluster([node("n1"), node("n2", gpu="a100"), node("n3", gpu="h100"), node("n4", gpu="h100")], job)
    assert chosen(cluster, job) == ["n3", "n4"]
    assert [c.why for c in place(cluster, job).others] == [
        "n1 has no label gpu, needed is gpu=h100",
        "n2 has gpu=a100, needed is gpu=h100",
    ]
    assert left_out(cluster, job, place(cluster, job)) == {}  # nothing is wrong with them


def test_what_can_be_changed_is_reported_first() -> None:
    job = make_job(spec=make_spec(size=(2, 2), placement=H100))
    full = node("n4", gpu="h100").model_copy(update={"cordon": Cordon(reason="disk", by="op", at=0.0)})
    cluster = make_cluster([node("n1"), node("n2", gpu="h100"), full], job)
    assert place(cluster, job).missing == (
        "needs 2 nodes, 1 fit: n4 is cordoned (disk); n1 has no label gpu, needed is gpu=h100"
    )


def test_those_that_are_preferred_come_first_and_those_to_avoid_last() -> None:
    asked = Constraints(prefer=(Match(label="fast"),), avoid=(Match(label="spot"),))
    job = make_job(spec=make_spec(size=(1, 4), placement=asked), target=2)
    nodes = [node("n1", spot="1"), node("n2"), node("n3"), node("n4", fast="1")]
    assert chosen(make_cluster(nodes, job), job) == ["n4", "n2"]
    assert chosen(make_cluster(nodes[:2], job), job) == ["n2", "n1"]


def test_a_first_start_waits_for_the_nodes_that_are_preferred_while_they_get_ready() -> None:
    asked = Constraints(prefer=(Match(label="fast"),))
    job = make_job(spec=make_spec(size=(2, 2), placement=asked), since=NOW)
    nodes = [node("n1"), node("n2"), node("n3", ready=PREPARING, fast="1"), node("n4", fast="1")]
    decision = decide(make_cluster(nodes, job), job, WALL)
    assert (decision.step, decision.why) == (None, ("waits for n3 to get ready",))
    assert decision.at == NOW + millis(ASSEMBLE)
    assert starts_on(make_cluster(nodes, late := job.model_copy(update={"since": NOW - millis(ASSEMBLE)})), late)
    unasked = [*nodes[:2], node("n3", ready=None, fast="1"), nodes[3]]
    assert starts_on(make_cluster(unasked, job), job) == ["n4", "n1"]


def test_a_gang_that_has_run_starts_again_at_once_wherever_it_can() -> None:
    asked = Constraints(prefer=(Match(label="fast"),))
    generation = make_generation(["n4", "n5"], state="ended")
    held = make_job("holding", generation, spec=make_spec(size=(2, 2), placement=asked), since=NOW, active=1)
    nodes = [node("n1"), node("n2"), node("n3", ready=PREPARING, fast="1")]
    assert starts_on(make_cluster(nodes, held), held) == ["n1", "n2"]


def test_a_first_start_waits_for_nodes_that_are_closer_together() -> None:
    job = make_job(spec=make_spec(size=(2, 2)), since=NOW)
    near = [*racks(a1="n1"), *racks(b1="n2"), node("n3", "b1", ready=PREPARING)]
    assert text(make_cluster(near, job), job) == "waits for n3 to get ready"
    apart = [*racks(a1="n1"), *racks(b1="n2"), node("n3", "c1", ready=PREPARING)]
    assert starts_on(make_cluster(apart, job), job) == ["n1", "n2"]


def test_who_runs_is_not_moved_to_a_node_that_is_preferred() -> None:
    asked = Constraints(prefer=(Match(label="fast"),))
    job = make_job("running", make_generation(["n1", "n2"]), spec=make_spec(size=(1, 4), placement=asked), target=2)
    cluster = make_cluster([node("n1"), node("n2"), node("n3", fast="1")], job)
    assert chosen(cluster, job) == ["n1", "n2"]
    assert decide(cluster, job, WALL).step is None
    assert chosen(replace(cluster, lapsed=frozenset({"n1"})), job) == ["n2", "n3"]


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([node("n1"), node("n2")], "needs 2 nodes with gpu=h100: none of the 2 known nodes is such"),
        ([node("n1"), node("n2", gpu="h100")], "needs 2 nodes with gpu=h100: only 1 of the 2 known nodes is"),
        ([node("n1")], "needs 2 nodes with gpu=h100: the only known node is none"),
        ([node("n1", gpu="h100"), node("n2", gpu="h100", ready=None)], "needs 2 nodes, 1 fit, 1 could get ready"),
    ],
)
def test_a_job_that_could_never_run_says_so_at_once(nodes: list[NodeRecord], why: str) -> None:
    job = make_job(spec=make_spec(size=(2, 2), placement=H100))
    assert text(make_cluster(nodes, job), job) == why


SLOTS = [make_node(f"n{i}", slots=2 * i) for i in (1, 2)]
GPUS = [make_node(f"g{i}", gpus=2 * i) for i in (1, 2)]


@pytest.mark.parametrize(
    ("nodes", "size", "asks", "why"),
    [
        (SLOTS, 3, {}, "needs 3 nodes, and only 2 are known"),
        (SLOTS[:1], 2, {}, "needs 2 nodes, and only 1 is known"),
        (SLOTS, 2, {"workers": 3}, "needs 2 nodes with 3 GPUs or worker slots: only 1 of the 2 known nodes is"),
        (SLOTS, 1, {"workers": 5, "gpus": 0}, "needs 1 node with 5 worker slots: none of the 2"),
        (SLOTS, 1, {"workers": "gpu", "gpus": 1}, "needs 1 node with 1 GPU: none of the 2 known nodes is such"),
        (GPUS, 2, {"workers": "gpu", "gpus": 3}, "needs 2 nodes with 3 GPUs: only 1 of the 2 known nodes is"),
        (GPUS, 1, {"workers": 3, "gpus": 2}, "needs 1 node with 6 GPUs: none of the 2 known"),
        (GPUS, 1, {"workers": 2, "gpus": 2}, ""),
        (GPUS, 2, {"workers": "gpu"}, ""),
        (SLOTS, 2, {"workers": "gpu"}, ""),
    ],
)
def test_so_does_one_that_asks_for_more_than_nodes_have(
    nodes: list[NodeRecord], size: int, asks: dict[str, Any], why: str
) -> None:
    """Whatever is free: that another job has all of a node is not the reason."""
    spec = make_spec(size=(size, size), **asks)
    busy = make_job("running", make_generation([nodes[0].id]), spec=make_spec(name="other"), uid="u-other")
    cluster = make_cluster(nodes, busy, job := make_job(spec=spec))
    assert never(cluster, spec).startswith(why) and bool(never(cluster, spec)) == bool(why)
    if why:
        assert explain(cluster, job, WALL)[0].startswith(why)
        assert not any("other" in line for line in explain(cluster, job, WALL))


def test_nodes_get_ready_only_if_they_will_do() -> None:
    job = make_job(spec=make_spec(size=(1, 1), placement=H100))
    nodes = [node("n1", ready=None), *(node(f"n{i}", ready=None, gpu="h100") for i in (2, 3, 4))]
    assert preparing(make_cluster(nodes, job), job) == ["n2", "n3"]
    run = make_job("running", make_generation(["n4"]), spec=make_spec(size=(1, 1), placement=H100))
    assert preparing(make_cluster(nodes, run), run) == ["n2", "n4"]


def test_each_role_has_constraints_of_its_own() -> None:
    def role(name: str, asked: Constraints | None, nodes: int = 0, replicas: int = 0) -> Role:
        size = Nodes(min=nodes or 1, max=nodes or replicas, target=nodes or replicas)
        return Role(
            name=name,
            command=("x",),
            nodes=size,
            replicas=size if replicas else None,
            workers_per_node=1,
            placement=asked,
        )

    def spec(*roles: Role) -> JobSpec:
        return make_spec().model_copy(update={"roles": roles})

    def where(nodes: list[NodeRecord], of: JobSpec) -> dict[str, list[str]]:
        job = make_job(spec=of)
        return {n: [p.name for p in found] for n, found in place(make_cluster(nodes, job), job).places.items()}

    both = spec(role("ps", Constraints(exclude=H100.require), replicas=2), role("t", H100, nodes=1))
    assert where([node("n1", gpu="h100"), node("n2"), node("n3")], both) == {
        "n1": ["t.0"],
        "n2": ["ps.0"],
        "n3": ["ps.1"],
    }
    job = make_job(spec=both)
    cluster = make_cluster([node("n1"), node("n2"), node("n3")], job)
    assert explain(cluster, job, WALL)[0] == "role t needs 1 node with gpu=h100: none of the 3 known nodes is such"
    assert place(cluster, job).lack == "no node with gpu=h100 has room for t (1 worker)"
    six = [make_node(f"n{i}", slots=4, labels={"rack": "a" if i < 4 else "b"}) for i in range(1, 7)]
    fill = role("x", None, nodes=1)
    packed = where(six, spec(role("ps", Constraints(pack="node"), replicas=3), fill))
    assert sorted(packed.values()) == [["ps.0", "ps.1", "ps.2"], ["x.0"]]
    first = spec(role("ps", Constraints(pack="rack"), replicas=1), role("x", None, nodes=2))
    apart = [make_node(f"n{i}", slots=1, labels={"rack": "ab"[i // 3]}) for i in range(1, 6)]
    assert set(where(apart, first)) == {"n1", "n2", "n3"}, "that one role is packed keeps no other in its rack"
    over = where(six, spec(role("ps", Constraints(spread="rack"), replicas=2), fill))
    assert sum(len([p for p in over.get(n, ()) if p[:2] == "ps"]) for n in ("n4", "n5", "n6")) == 1


# --- the topology


def test_a_gang_starts_in_the_smallest_domain_and_its_ranks_follow_the_tree() -> None:
    job = make_job(spec=make_spec(size=(3, 3)))
    cluster = make_cluster(racks(a1="n1 n2", b1="n3 n4 n5"), job)
    assert chosen(cluster, job) == ["n3", "n4", "n5"]
    wide = make_job(spec=make_spec(size=(5, 5)))
    mixed = make_cluster(racks(a1="n1 n9", b1="n2 n3 n8"), wide)
    step = decide(mixed, wide, WALL).step
    assert isinstance(step, Propose)
    assert [m.node for m in sorted(step.members.values(), key=lambda m: m.group_rank)] == ["n2", "n3", "n8", "n1", "n9"]


def test_newcomers_get_the_ranks_beside_their_neighbours() -> None:
    paths = {n: (n[0],) for n in ("a1", "a2", "a3", "b1", "b2", "b3")}
    last = make_generation(["a1", "a2", "b1", "b2"])
    assert order_nodes(last, ["a1", "b1", "b3", "a3"], paths) == ["a1", "a3", "b1", "b3"]
    assert order_nodes(None, ["a1", "b1", "a2", "b2"], paths) == ["a1", "a2", "b1", "b2"]


def test_segments_keep_their_ranks_together() -> None:
    last = make_generation(["a1", "a2", "b1", "b2"])
    assert order_nodes(last, ["b1", "b3", "c1", "c2"], {}, 2) == ["c1", "c2", "b1", "b3"]
    assert order_nodes(last, ["a1", "a3", "b2", "b3"], {}, 2) == ["a1", "a3", "b3", "b2"]
    assert order_nodes(None, ["a1", "a2", "b1", "b2"], {}, 2) == ["a1", "a2", "b1", "b2"]


def test_a_lost_node_is_replaced_from_its_rack() -> None:
    spec = make_spec(size=(1, 3))
    job = make_job("running", make_generation(["n1", "n2", "n3"]), spec=spec, target=3)
    cluster = make_cluster(racks(a1="n1 n2", b1="n3 n9", a2="n4"), job, lapsed=["n3"])
    assert chosen(cluster, job) == ["n1", "n2", "n9"]


def test_a_gang_within_one_rack_waits_moves_or_goes_on_smaller() -> None:
    job = make_job(spec=make_spec(size=(2, 3), within="rack"), target=3)
    nodes = racks(a1="n1 n2", b1="n3", b2="n4")
    assert chosen(make_cluster(nodes, job), job) == ["n1", "n2"]
    fixed = make_job(spec=make_spec(size=(3, 3), within="rack"))
    cluster = make_cluster([*nodes, make_node("n5")], fixed)
    assert not place(cluster, fixed).fits
    assert place(cluster, fixed).lack == "needs 3 nodes in one rack, 4 fit, of which 2 are together"
    assert text(cluster, fixed) == "needs 3 nodes in one rack: of the 5 known nodes 2 are"
    assert "n5 has no label rack, of which the job's nodes have one value" in place(cluster, fixed).missing
    run = make_job("running", make_generation(["n1", "n2"]), spec=make_spec(size=(2, 2), within="rack"))
    busy = make_cluster(racks(a1="n1 n2", b1="n3 n4"), run)
    assert decide(busy, run, WALL).step is None
    assert chosen(replace(busy, lapsed=frozenset({"n1"})), run) == ["n3", "n4"]


def test_a_gang_that_could_be_larger_were_its_nodes_together_says_so() -> None:
    job = make_job("running", make_generation(["n1", "n2"]), spec=make_spec(size=(2, 4), within="rack"))
    cluster = make_cluster(racks(a1="n1 n2", b1="n3 n4 n5 n6"), job)
    assert text(cluster, job) == (
        "runs on 2 of 4 nodes: needs 4 nodes in one rack, 6 fit, of which 4 are together"
    )  # fmt: skip


def test_only_nodes_that_it_would_use_are_waited_for() -> None:
    job = make_job(spec=make_spec(size=(2, 3), within="rack"), target=3, since=NOW - 10_000)
    nodes = [*racks(a1="n1 n2"), node("n3", "a1", ready=PREPARING), node("n4", "b1", ready=PREPARING)]
    assert text(make_cluster(nodes, job), job) == "waits for n3 to get ready"
    few = [*racks(a1="n1 n2"), node("n4", "b1", ready=PREPARING)]
    assert isinstance(decide(make_cluster(few, job), job, WALL).step, Propose)


def test_several_roles_go_together_into_the_smallest_domain_and_stay_near_when_one_is_lost() -> None:
    def spec(within: str = "") -> JobSpec:
        roles = tuple(
            Role(name=name, command=("x",), nodes=Nodes(min=n, max=n, target=n), workers_per_node=1)
            for name, n in (("ps", 1), ("t", 2))
        )
        return make_spec(within=within).model_copy(update={"roles": roles})

    job = make_job(spec=spec())
    nodes = racks(a1="n1 n2", a2="n3", b1="n4 n5 n6 n7")
    assert sorted(chosen(make_cluster(nodes, job), job)) == ["n4", "n5", "n6"]
    assert sorted(chosen(make_cluster(nodes[:5], job), job)) == ["n1", "n2", "n3"]  # a zone
    hard = make_job(spec=spec("rack"))
    lack = place(make_cluster(nodes[:5], hard), hard)
    assert (lack.fits, lack.lack) == (False, "no rack has room for all of its places")
    generation = make_generation(["n4", "n5", "n6"])
    places = {
        n: m.model_copy(update={"places": (Place(role=r, index=i, workers=1, devices=("cpu0",)),)})
        for (n, m), (r, i) in zip(generation.members.items(), (("ps", 0), ("t", 0), ("t", 1)), strict=True)
    }
    run = make_job("running", generation.model_copy(update={"members": places}), spec=spec())
    assert chosen(make_cluster(nodes, run, lapsed=["n5"]), run) == ["n4", "n6", "n7"]


def test_a_label_that_is_no_level_of_the_topology_will_do_for_within() -> None:
    job = make_job(spec=make_spec(size=(2, 2), within="pdu"))
    nodes = [node("n1", pdu="1"), node("n2", pdu="2"), node("n3", pdu="2")]
    assert chosen(make_cluster(nodes, job), job) == ["n2", "n3"]


def test_segments_without_a_topology_are_refused_with_the_reason() -> None:
    job = make_job(spec=make_spec(size=(2, 2), segments=2))
    assert text(make_cluster(["n1", "n2"], job), job) == "needs a topology in the agents' config to have segments"
    job = make_job(spec=make_spec(size=(4, 4), segments=2))
    assert chosen(make_cluster(racks(a1="n1 n2 n3", b1="n4 n5"), job), job) == ["n1", "n2", "n4", "n5"]


def test_pack_and_spread_of_a_job_of_one_role() -> None:
    nodes = [node(n, pdu=pdu) for n, pdu in (("n1", "1"), ("n2", "2"), ("n3", "2"), ("n4", "3"))]
    packed = make_job(spec=make_spec(size=(2, 2), placement=Constraints(pack="pdu")))
    assert chosen(make_cluster(nodes, packed), packed) == ["n2", "n3"]
    spread = make_job(spec=make_spec(size=(3, 3), placement=Constraints(spread="pdu")))
    assert chosen(make_cluster(nodes, spread), spread) == ["n1", "n2", "n4"]
    inside = make_job(spec=make_spec(size=(2, 2), placement=Constraints(spread="pdu"), within="rack"))
    mixed = [node("n1", "a1", pdu="1"), *(node(f"n{i}", "b1", pdu=str(i // 2)) for i in (2, 3, 4))]
    assert chosen(make_cluster(mixed, inside), inside) == ["n2", "n4"]


def test_nodes_get_ready_in_the_domain_that_will_be_used_and_so_does_the_spare() -> None:
    job = make_job(spec=make_spec(size=(2, 2)))
    nodes = racks(None, a1="n1", a2="n2", b1="n3 n4 n5", b2="n6")
    assert preparing(make_cluster(nodes, job), job) == ["n3", "n4", "n5"]
    full = racks(None, a1="n1", a2="n2", b1="n3 n4")
    assert preparing(make_cluster(full, job), job) == ["n3", "n4"]  # a spare elsewhere could be ready first
    run = make_job("running", make_generation(["n3", "n4"]), spec=make_spec(size=(2, 2)))
    assert preparing(make_cluster(nodes, run), run) == ["n3", "n4", "n5"]
    assert preparing(make_cluster(full, run), run) == ["n1", "n3", "n4"]
    bound = make_job("running", make_generation(["n3", "n4"]), spec=make_spec(size=(2, 2), within="rack"))
    assert preparing(make_cluster(full, bound), bound) == ["n3", "n4"]


def test_a_spare_that_is_ready_is_kept_until_the_nearer_one_is() -> None:
    job = make_job("running", make_generation(["n3"]), spec=make_spec(size=(1, 1)))
    far = racks(a1="n1", b1="n3")
    assert preparing(make_cluster([*far, node("n4", "b1", ready=PREPARING)], job), job) == ["n1", "n3", "n4"]
    assert preparing(make_cluster([*far, node("n4", "b1")], job), job) == ["n3", "n4"]


def test_who_differs_in_its_topology_is_named() -> None:
    nodes = [*racks(a1="n1 n2"), make_node("n3"), make_node("n4", topology=LEVELS, labels={"zone": "a"})]
    cluster = make_cluster(nodes)
    found = {where: f.what for where, f in judge_cluster(cluster, {}, {}) if "topology" in f.what or "label" in f.what}
    assert found == {
        "node/n3": "its topology is none, while most nodes have zone, rack",
        "node/n4": "it has no label rack: gangs that are kept together do not use it",
    }


# --- whatever the cluster


@st.composite
def labelled(draw: st.DrawFn) -> Cluster:
    """Nodes with labels, some not ready or cordoned; one job that waits, has lost nodes, or may move."""
    topology = draw(st.sampled_from([(), LEVELS]))
    nodes = []
    for i in range(draw(st.integers(1, 9))):
        rack = draw(st.sampled_from(["a1", "a2", "b1", "b2", ""]))
        labels = {"zone": rack[:1], "rack": rack} if rack else {}
        labels |= {"gpu": gpu} if (gpu := draw(st.sampled_from(["h100", "a100", ""]))) else {}
        state = draw(st.sampled_from([READY, READY, READY, PREPARING, UNFIT, None]))
        ready = {UID: state} if state is not None else {}
        nodes.append(
            make_node(
                f"n{i}", slots=1, ready=ready, labels=labels, topology=topology, cordon=draw(st.integers(0, 5)) == 0
            )
        )
    asked = draw(st.sampled_from(ASKED))
    segments = draw(st.sampled_from([0, 0, 2])) if asked is None or asked.hard else 0
    least = draw(st.integers(1, 3)) * (segments or 1)
    most_nodes = least + draw(st.integers(0, 2)) * (segments or 1)
    within = draw(st.sampled_from(["", "", "rack", "zone"]))
    spec = make_spec(size=(least, most_nodes), placement=asked, within=within, segments=segments)
    members = draw(st.lists(st.sampled_from([n.id for n in nodes]), unique=True, max_size=most_nodes))
    job = make_job("running", make_generation(members), spec=spec) if members else make_job(spec=spec)
    has_stopped: bool = draw(st.booleans())
    if members and has_stopped:
        saved = Checkpoint(name="c-snapshot", step=1, number=1, order=1)
        job = make_job("holding", make_generation(members, state="ended", planned=True), spec=spec, active=1)
        job = job.model_copy(update={"checkpoint": saved})
    return make_cluster(nodes, job, lapsed=draw(st.sets(st.sampled_from([n.id for n in nodes]), max_size=2)))


@REPEATABLE
@given(labelled(), st.randoms(use_true_random=False))
def test_no_hard_constraint_is_broken_and_all_choose_alike(cluster: Cluster, chance: random.Random) -> None:
    (job,) = cluster.jobs.values()
    found = place(cluster, job)
    names, labels = [c.node for c in found.chosen], {n: r.facts.labels for n, r in cluster.nodes.items()}
    assert len(set(names)) == len(names) <= job.control.target
    asked = job.spec.role.placement
    assert asked is None or not any(asked.unmet(n, labels[n]) for n in names)
    if job.spec.within:
        assert len({labels[n][job.spec.within] for n in names}) <= 1
    if job.spec.segments:
        assert not len(names) % job.spec.segments
    shuffled = list(cluster.nodes)
    chance.shuffle(shuffled)
    other = make_cluster([cluster.nodes[n] for n in shuffled], job, lapsed=cluster.lapsed)
    assert place(other, job) == found
    assert decide(other, job, WALL) == decide(cluster, job, WALL)


@REPEATABLE
@given(labelled())
def test_the_room_that_is_counted_is_what_placement_would_find(cluster: Cluster) -> None:
    (job,) = cluster.jobs.values()
    room, found = room_for(cluster, job), place(cluster, job)
    assert room.enough == found.fits
    alive = {c.node for c in candidates(cluster, job) if c.standing == "fit"}
    waiting = {c.node for c in candidates(cluster, job) if c.standing == "pending"}
    able = [n for n in ranked(cluster, job, list(cluster.nodes)) if n in alive | waiting]
    if job.spec.placement is not None:
        assert room.fit + room.pending == most(able, gang_of(cluster, job.spec))
    else:
        assert room.fit + room.pending == len(able)
    soon = arrange(cluster, job, able, job.control.target)
    assert room.enough_soon == (len(soon) >= job.spec.nodes.min)


@REPEATABLE
@given(labelled())
def test_survivors_stay_where_they_may(cluster: Cluster) -> None:
    (job,) = cluster.jobs.values()
    if job.spec.placement is not None or may_move(cluster, job):
        return
    able = {c.node for c in candidates(cluster, job) if c.standing in ("fit", "pending")}
    stay = [
        m.node
        for m in (job.generation.ordered() if job.generation is not None else ())
        if m.node in able and cluster.live(m.node)
    ]
    assert [c.node for c in place(cluster, job).chosen][: len(stay)] == stay[: job.control.target]


def test_constraints_are_looked_at_once_for_all_jobs_that_ask_the_same() -> None:
    records = racks(None, a1=" ".join(f"n{i}" for i in range(100)), b1=" ".join(f"m{i}" for i in range(100)))
    generation = make_generation([r.id for r in records[:190]])
    big = make_job("running", generation, uid="u-big", spec=make_spec(size=(1, 190), name="big"))
    kinds = [(H100, ""), (ASKED[2], "rack"), (None, "zone"), (ASKED[3], "")]
    jobs = [
        make_job(uid=f"u-{i}", order=i, spec=make_spec(name=f"j{i}", size=(20, 20), placement=asked, within=within))
        for i in range(150)
        for asked, within in [kinds[i % len(kinds)]]
    ]
    nodes = Counted({r.id: r for r in records})
    cluster = replace(make_cluster([], big, *jobs), nodes=nodes)
    for job in cluster.jobs.values():
        assert decide(cluster, job, WALL).step is None
    assert nodes.looks < 20 * (len(cluster.jobs) + len(nodes)), f"{nodes.looks} looks"


def test_jobs_on_nodes_that_would_not_do_do_not_hold_what_it_needs() -> None:
    other = make_job("running", make_generation(["n1"]), uid="u-other", spec=make_spec(size=(1, 1), name="other"))
    job = make_job(spec=make_spec(size=(2, 2), placement=H100), order=1)
    cluster = make_cluster([node("n1"), node("n2", gpu="h100"), node("n3", gpu="h100", ready=None)], other, job)
    assert not any("other" in message for message in explain(cluster, job, WALL))
    taken = make_job("running", make_generation(["n3"]), uid="u-other", spec=make_spec(size=(1, 1), name="other"))
    assert any(
        "other" in message for message in explain(replace(cluster, jobs={"u-other": taken, UID: job}), job, WALL)
    )

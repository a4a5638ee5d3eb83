"""Sick hardware: out of running gangs at no cost, never placed again while it is sick, and never many at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.model.health import Claim, RepairState, Verdict
from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec, Policy
from nodeagent.model.node import Cordon, NodeRecord
from nodeagent.model.world import Member, PodReport
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.proposal import place
from nodeagent.plan.nodes.candidates import candidate
from nodeagent.plan.nodes.health import WINDOW, breaker, condition, sick_members, worn
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.steps import Activate, Decision, End, Propose
from tests.unit.plan.build import (
    NOW,
    REPEATABLE,
    WALL,
    life,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
    verdict,
)

GPU_JOB = make_spec(workers="gpu", gpus=1, size=(1, 8))


def gpu(node: str, index: int) -> str:
    return f"GPU-{node}-{index}"


def healthy(names: Iterable[str], gpus: int = 2) -> list[NodeRecord]:
    return [make_node(name, gpus=gpus) for name in names]


def running(*names: str, spec: JobSpec = GPU_JOB, each: int = 2) -> JobRecord:
    """A job on the first GPUs of these nodes."""
    generation = make_generation(names)
    members = {
        name: Member(
            node=name, life=life(name), group_rank=i, first_rank=i * each, workers=each,
            devices=tuple(gpu(name, n) for n in range(each)),
        )
        for i, name in enumerate(names)
    }  # fmt: skip
    return make_job("running", generation.model_copy(update={"members": members}), spec=spec, target=len(names))


def take(nodes: Iterable[NodeRecord], job: JobRecord) -> Decision:
    return decide(make_cluster(list(nodes), job), job, WALL)


def proposed(decision: Decision) -> Propose:
    assert isinstance(decision.step, Propose)
    return decision.step


def lost(node: str, index: int = 0, since: float = WALL) -> Verdict:
    return verdict(device=gpu(node, index), since=since)


def test_a_member_on_a_sick_gpu_goes_gracefully_and_at_no_cost() -> None:
    sick = make_node("n2", gpus=2, health=[lost("n2")])
    step = proposed(take([*healthy(["n1", "n3"]), sick], running("n1", "n2", "n3")))
    assert (sorted(step.members), step.cause.kind, step.planned) == (["n1", "n3"], "hardware", True)
    assert step.cause.text == "GPU 0 of n2 is unfit: it is lost (xid.79)"
    assert step.spend is not None
    assert (step.spend.counts, step.spend.kind) == (False, "hardware")
    assert "GPU 0: Xid 79" in step.outside["n2"]


@pytest.mark.parametrize(("state", "cordon"), [("active", False), ("active", True), ("forming", False)])
def test_nobody_goes_on_a_record_of_the_node_that_may_be_older_than_the_generation(state: str, cordon: bool) -> None:
    """A wake brings a job's record before a beat brings the nodes': n2 may have been trusted again for this very
    generation."""
    n2 = make_node("n2", gpus=2, health=[] if cordon else [lost("n2")])
    if cordon:
        n2 = n2.model_copy(update={"cordon": Cordon(reason="disk", by="ann", at=WALL, drain=True)})
    job = running("n1", "n2", "n3") if state == "active" else forming("n1", "n2", "n3", acks=["n1", "n2", "n3"])
    job = job.model_copy(update={"rev": 8})
    cluster = make_cluster([*healthy(["n1", "n3"]), n2], job)
    waiting = decide(replace(cluster, rev=7), job, WALL)
    assert (waiting.step, waiting.steady) == (None, False)
    assert waiting.at == NOW + 1000 * cluster.timing.heartbeat
    assert "as of a record older than the job's" in waiting.why[0]
    assert sorted(proposed(decide(replace(cluster, rev=8), job, WALL)).members) == ["n1", "n3"]


@pytest.mark.parametrize(("done", "goes"), [("n1", True), ("n2", False)])
def test_a_sick_gpu_matters_no_more_where_the_pod_has_finished(done: str, goes: bool) -> None:
    job = running("n1", "n2", "n3")
    assert job.generation is not None
    generation = job.generation.model_copy(update={"reports": {done: PodReport(state="succeeded")}})
    sick = make_node("n2", gpus=2, health=[lost("n2")])
    decision = take([*healthy(["n1", "n3"]), sick], job.model_copy(update={"generation": generation}))
    assert isinstance(decision.step, Propose) == goes


def test_an_uneven_job_goes_on_with_the_nodes_other_gpu() -> None:
    spec = make_spec(workers="gpu", gpus=1, size=(1, 8), uneven=True)
    sick = make_node("n2", gpus=2, health=[lost("n2")])
    step = proposed(take([*healthy(["n1"]), sick], running("n1", "n2", spec=spec)))
    assert step.members["n2"].devices == (gpu("n2", 1),)
    assert step.members["n1"].workers == 2


def test_a_job_that_needs_one_of_two_gpus_takes_the_other() -> None:
    spec = make_spec(workers=1, gpus=1, size=(2, 2))
    sick = make_node("n2", gpus=2, health=[lost("n2")])
    step = proposed(take([*healthy(["n1"]), sick], running("n1", "n2", spec=spec, each=1)))
    assert step.members["n2"].devices == (gpu("n2", 1),)


def test_a_spare_takes_the_sick_nodes_place() -> None:
    spec = make_spec(workers="gpu", gpus=1, size=(2, 2))
    sick = make_node("n2", gpus=2, health=[lost("n2")])
    step = proposed(take([*healthy(["n1", "n3"]), sick], running("n1", "n2", spec=spec)))
    assert sorted(step.members) == ["n1", "n3"]


def test_without_a_spare_it_holds_and_says_for_what() -> None:
    spec = make_spec(workers="gpu", gpus=1, size=(2, 2))
    step = take([*healthy(["n1"]), make_node("n2", gpus=2, health=[lost("n2")])], running("n1", "n2", spec=spec)).step
    assert isinstance(step, End)
    assert (step.phase, step.planned) == ("holding", True)
    assert "GPU 0 of n2 is unfit: it is lost (xid.79); holds: needs 2 nodes, 1 fit" in step.reason


def test_an_unfit_node_gets_no_work_and_loses_what_it_has() -> None:
    sick = make_node("n2", gpus=2, health=[verdict("probe.nvml.hung")])
    job = running("n1", "n2")
    cluster = make_cluster([*healthy(["n1"]), sick], job)
    one = candidate(cluster, job, cluster.nodes["n2"])
    assert (one.standing, one.why) == ("out", "n2 is unfit: it is lost (probe.nvml.hung)")
    assert proposed(take(cluster.nodes.values(), job)).cause.text == "n2 is unfit: it is lost (probe.nvml.hung)"


def test_a_sick_gpu_that_the_job_does_not_use_changes_nothing() -> None:
    spec = make_spec(workers=1, gpus=1, size=(2, 2))
    sick = make_node("n2", gpus=2, health=[lost("n2", 1)])
    assert take([*healthy(["n1"]), sick], running("n1", "n2", spec=spec, each=1)) == Decision(None)


@pytest.mark.parametrize(
    "harmless",
    [
        verdict(device=gpu("n2", 0), dry_run=True),
        verdict("xid.31", gpu("n2", 0), "app"),
        verdict("xid.app.spread", "", "app"),
        verdict("memory.remap_pending", gpu("n2", 0), "degraded"),
        verdict("probe.nvml.late", "", "unknown"),
    ],
    ids=lambda v: v.rule,
)
def test_only_fatal_verdicts_that_are_meant_stop_anything(harmless: Verdict) -> None:
    sick = make_node("n2", gpus=2, health=[harmless])
    assert take([*healthy(["n1"]), sick], running("n1", "n2")) == Decision(None)


def unsure(name: str) -> NodeRecord:
    """A node of whose GPUs nobody knows whether they are sound."""
    node = make_node(name, gpus=2, health=[verdict("probe.nvml.late", "", "unknown")])
    gone = {"healthy": False, "why": "GPUs unknown"}
    facts = node.facts.model_copy(update={"gpus": tuple(g.model_copy(update=gone) for g in node.facts.gpus)})
    return node.model_copy(update={"facts": facts})


def test_what_runs_keeps_gpus_of_which_nobody_knows_also_when_its_gang_is_formed_anew() -> None:
    """A driver's update that makes all of them late: the first to be given up must not take the others with it."""
    nodes = [make_node("n1", gpus=2, health=[lost("n1")]), unsure("n2"), unsure("n3")]
    job = running("n1", "n2", "n3")
    assert job.generation is not None
    before = {name: member.devices for name, member in job.generation.members.items()}
    found = proposed(take(nodes, job)).members
    assert {name: member.devices for name, member in found.items()} == {name: before[name] for name in ("n2", "n3")}
    new = make_job("queued", spec=GPU_JOB, target=2)
    assert place(make_cluster(nodes, new), new).chosen == (), "and nobody else is given them"


def test_the_policy_for_evicted_pods_is_asked() -> None:
    spec = make_spec(workers="gpu", gpus=1, size=(1, 2), policies=(Policy(on=("PodEvicted",), do="FailJob"),))
    step = take([*healthy(["n1"]), make_node("n2", gpus=2, health=[lost("n2")])], running("n1", "n2", spec=spec)).step
    assert isinstance(step, End)
    assert (step.phase, step.planned) == ("failed", True)


def test_the_breaker_keeps_what_runs_when_many_nodes_become_unfit_at_once() -> None:
    names = ["n1", "n2", "n3", "n4"]
    sick = [make_node(n, gpus=2, health=[lost(n, since=WALL + i)]) for i, n in enumerate(names[:3])]
    decision = take([*sick, *healthy(["n4"])], running(*names))
    assert decision.step is None
    assert decision.why[0] == (
        "breaker open: 3 of 4 nodes became unfit within 10 minutes; what runs is kept "
        "(GPU 0 of n1 is unfit: it is lost (xid.79))"
    )
    assert len(decision.why) == 3


def test_new_work_avoids_sick_devices_while_the_breaker_is_open() -> None:
    sick = [make_node(n, gpus=2, health=[lost(n)]) for n in ("n1", "n2", "n3")]
    job = make_job("queued", spec=GPU_JOB, target=4)
    cluster = make_cluster([*sick, *healthy(["n4"])], job)
    assert [c.node for c in place(cluster, job).chosen] == ["n4"]
    open_at = {n: breaker(cluster, record.facts) for n, record in cluster.nodes.items()}
    assert open_at["n1"] == "open: 3 of 4 nodes became unfit within 10 minutes; what runs is kept"
    assert (open_at["n2"], open_at["n4"]) == (open_at["n1"], "")


def test_a_fault_of_long_ago_does_not_keep_a_new_one_in_the_gang() -> None:
    old = make_node("n1", gpus=2, health=[lost("n1", since=WALL - WINDOW - 1)])
    new = make_node("n2", gpus=2, health=[lost("n2")])
    job = running("n2", "n3")
    cluster = make_cluster([old, new, *healthy(["n3"])], job)
    assert sorted(proposed(take(cluster.nodes.values(), job)).members) == ["n3"]
    assert [breaker(cluster, record.facts) for record in cluster.nodes.values()] == ["", "", ""]


def test_the_breaker_counts_by_served_time_whatever_the_nodes_clocks_show() -> None:
    names = ["n1", "n2", "n3"]
    apart = {n: lost(n).model_copy(update={"since": WALL + 2 * i * WINDOW}) for i, n in enumerate(names)}
    decision = take([make_node(n, gpus=2, health=[v]) for n, v in apart.items()], running(*names))
    assert decision.step is None
    assert decision.why[0].startswith("breaker open: 3 of 3 nodes")


def test_a_verdict_that_has_no_served_time_yet_began_just_now() -> None:
    undated = lost("n1").model_copy(update={"since": 1.0, "since_served": None})
    job = running("n1", "n2", "n3")
    for since, kept in ((NOW, True), (NOW - 1000 * (WINDOW + 1), False)):
        second = lost("n2").model_copy(update={"since_served": int(since)})
        cluster = make_cluster(
            [make_node("n1", gpus=2, health=[undated]), make_node("n2", gpus=2, health=[second]), *healthy(["n3"])], job
        )
        assert (breaker(cluster, cluster.nodes["n1"].facts) != "") == kept


def in_hand(node: NodeRecord, *, drain: bool = True) -> NodeRecord:
    """A person has cordoned it."""
    return node.model_copy(update={"cordon": Cordon(reason="repair", by="ann", at=WALL, drain=drain)})


@pytest.mark.parametrize("drain", [True, False])
def test_a_node_that_a_person_repairs_does_not_keep_others_in_their_gangs(drain: bool) -> None:
    spare = in_hand(make_node("n4", gpus=2, health=[lost("n4")]), drain=drain)
    sick = make_node("n2", gpus=2, health=[lost("n2")])
    job = running("n1", "n2", "n3")
    assert sorted(proposed(take([*healthy(["n1", "n3"]), sick, spare], job)).members) == ["n1", "n3"]


def test_nor_does_what_nodeagent_repairs() -> None:
    claim = Claim(kind="reboot", rule="xid.79", whole=True, phase="runs", since=WALL)
    away = make_node("n4", gpus=2, health=[lost("n4")])
    facts = away.facts.model_copy(update={"repair_state": RepairState(claim=claim)})
    sick = make_node("n2", gpus=2, health=[lost("n2")])
    job = running("n1", "n2", "n3")
    nodes = [*healthy(["n1", "n3"]), sick, away.model_copy(update={"facts": facts})]
    assert sorted(proposed(take(nodes, job)).members) == ["n1", "n3"]


def test_cordoned_nodes_that_still_work_count_for_the_breaker() -> None:
    """Else, with all nodes cordoned for an update, what the update breaks would stop all that runs."""
    names = ["n1", "n2", "n3"]
    nodes = [in_hand(make_node(n, gpus=2, health=[lost(n)]), drain=False) for n in names]
    decision = take(nodes, running(*names))
    assert decision.step is None
    assert decision.why[0].startswith("breaker open: 3 of 3 nodes")


def test_one_node_in_ten_may_become_unfit_at_once() -> None:
    names = [f"n{i}" for i in range(1, 21)]
    for many, opens in ((2, False), (3, True)):
        sick = [make_node(n, gpus=2, health=[lost(n)]) for n in names[:many]]
        job = running(*names, spec=make_spec(workers="gpu", gpus=1, size=(1, 20)))
        cluster = make_cluster([*sick, *healthy(names[many:])], job)
        assert job.generation is not None
        go, kept = sick_members(cluster, job.generation)
        assert (len(go), len(kept)) == ((0, many) if opens else (many, 0))


def test_several_sick_gpus_of_one_node_are_one_unfit_node() -> None:
    sick = make_node("n1", gpus=2, health=[lost("n1", 0), lost("n1", 1)])
    assert sorted(proposed(take([sick, *healthy(["n2"])], running("n1", "n2"))).members) == ["n2"]


@settings(REPEATABLE)
@given(st.lists(st.lists(st.integers(0, 5000).map(float), max_size=4), min_size=1, max_size=12), st.data())
def test_the_breaker_counts_nodes_not_verdicts(times: list[list[float]], data: st.DataObject) -> None:
    sick = [
        make_node(f"n{i}", gpus=4, health=[lost(f"n{i}", k, since=at) for k, at in enumerate(some)])
        for i, some in enumerate(times)
    ]
    every = sorted({at for some in times for at in some})
    if not every:
        return
    at = data.draw(st.sampled_from(every))
    probe = next(n for n, some in zip(sick, times, strict=True) if at in some)
    only = [v for v in probe.facts.health if v.since == at]
    generation = make_generation([probe.id])
    devices = tuple(v.device for v in only)
    generation = generation.model_copy(
        update={"members": {probe.id: generation.members[probe.id].model_copy(update={"devices": devices})}}
    )
    go, kept = sick_members(make_cluster(sick), generation)
    near = sum(any(abs(other - at) <= WINDOW for other in some) for some in times)
    assert bool(go) == (near <= max(1, len(times) // 10))
    assert all(f"{near} of {len(times)} nodes" in text for text in kept)


def test_degraded_nodes_are_taken_last_and_kept_warm_last() -> None:
    tired = make_node("n1", gpus=2, health=[verdict("clocks.slowdown", gpu("n1", 0), "degraded")])
    job = make_job("queued", spec=GPU_JOB, target=2)
    cluster = make_cluster([tired, *healthy(["n2", "n3"])], job)
    assert [c.node for c in place(cluster, job).chosen] == ["n2", "n3"]
    lonely = make_job("queued", spec=GPU_JOB, target=1)
    assert [should_prepare(cluster, lonely, n) for n in ("n1", "n2", "n3")] == [False, True, True]


def test_the_next_placement_after_a_fault_prefers_a_spare_to_a_degraded_member() -> None:
    tired = make_node("n1", gpus=2, health=[verdict("clocks.slowdown", gpu("n1", 0), "degraded")])
    job = running("n1", "n2", spec=make_spec(workers="gpu", gpus=1, size=(1, 2)))
    cluster = make_cluster([tired, *healthy(["n2", "n3"])], job)
    assert sorted(c.node for c in place(cluster, job).chosen) == ["n2", "n3"]


def test_application_errors_on_gpus_of_several_nodes_wear_out_none() -> None:
    repeats = {n: verdict("xid.app.repeats", gpu(n, 0), "degraded") for n in ("n1", "n2")}
    both = make_cluster([make_node(n, gpus=2, health=[v]) for n, v in repeats.items()])
    assert [worn(both, n) for n in ("n1", "n2")] == [False, False]
    one = make_cluster([make_node("n1", gpus=2, health=[repeats["n1"]]), *healthy(["n2"])])
    assert worn(one, "n1")
    apart = repeats["n2"].model_copy(update={"since_served": NOW + 1000 * (WINDOW + 1)})
    later = make_cluster([make_node(n, gpus=2, health=[v]) for n, v in (repeats | {"n2": apart}).items()])
    assert worn(later, "n1")


def forming(*names: str, spec: JobSpec = GPU_JOB, acks: Iterable[str] = ()) -> JobRecord:
    job = running(*names, spec=spec)
    assert job.generation is not None
    generation = make_generation(names, state="forming", number=2, acks=acks).model_copy(
        update={"members": job.generation.members}
    )
    return make_job("forming", generation, spec=spec, target=len(names), active=1)


def test_what_falls_sick_while_a_gang_forms_is_left_out_before_anything_starts_there() -> None:
    sick = make_node("n2", gpus=2, health=[lost("n2")])
    step = proposed(take([*healthy(["n1", "n3"]), sick], forming("n1", "n2", "n3", acks=["n1", "n2", "n3"])))
    assert sorted(step.members) == ["n1", "n3"]
    assert (step.spend, step.cause.text) == (
        None,
        "because of start; GPU 0 of n2 is unfit: it is lost (xid.79)",
    )


def test_a_forming_gang_keeps_the_nodes_other_gpu() -> None:
    spec = make_spec(workers="gpu", gpus=1, size=(1, 8), uneven=True)
    sick = make_node("n2", gpus=2, health=[lost("n2")])
    step = proposed(take([*healthy(["n1"]), sick], forming("n1", "n2", spec=spec)))
    assert step.members["n2"].devices == (gpu("n2", 1),)


def test_a_forming_gang_goes_on_while_the_breaker_is_open_and_with_what_is_degraded() -> None:
    names = ["n1", "n2"]
    all_sick = [make_node(n, gpus=2, health=[lost(n)]) for n in names]
    assert isinstance(take(all_sick, forming(*names, acks=names)).step, Activate)
    tired = [make_node(n, gpus=2, health=[verdict("pcie.width", gpu(n, 0), "degraded")]) for n in names]
    assert isinstance(take(tired, forming(*names, acks=names)).step, Activate)


def test_a_gpu_that_is_well_again_is_taken_by_the_gang_that_runs_beside_it() -> None:
    spec = make_spec(workers="gpu", gpus=1, size=(1, 8), uneven=True)
    job = running("n1", "n2", spec=spec)
    assert job.generation is not None
    less = job.generation.members["n2"].model_copy(update={"workers": 1, "devices": (gpu("n2", 1),)})
    generation = job.generation.model_copy(update={"members": {**job.generation.members, "n2": less}})
    short = job.model_copy(update={"generation": generation})
    step = proposed(take(healthy(["n1", "n2"]), short))
    assert (step.cause.kind, step.cause.text) == ("join", "GPUs of n2 are back")
    assert step.members["n2"].workers == 2
    assert step.spend is not None
    assert not step.spend.counts
    fresh = job.model_copy(update={"generation": generation.model_copy(update={"since": NOW - 1})})
    decision = take(healthy(["n1", "n2"]), fresh)
    assert (decision.step, decision.why[0][:29]) == (None, "n2 has more GPUs than are use")
    assert take(healthy(["n1", "n2"]), job).step is None, "it has them all"
    sick = make_node("n2", gpus=2, health=[lost("n2")])
    assert take([*healthy(["n1"]), sick], short).step is None, "it is not well yet"


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (make_node("n1"), ""),
        (make_node("n1", gpus=2, health=[verdict("thermal", severity="info")]), ""),
        (make_node("n1", gpus=2, health=[verdict(device="GPU-n1-1")]), "GPU 1: it is lost (fatal)"),
        (make_node("n1", health=[verdict(severity="degraded", dry_run=True)]), "it is lost (degraded, dry run)"),
        (
            make_node("n1", health=[verdict().model_copy(update={"stage": "probation"})]),
            "it is lost (fatal, probation)",
        ),
    ],
)
def test_a_nodes_condition_is_its_worst_verdict_that_has_a_consequence(node: NodeRecord, words: str) -> None:
    assert condition(node) == words


def test_devices_that_nobody_is_given_are_a_condition() -> None:
    node = make_node("n1")
    held = node.model_copy(update={"facts": node.facts.model_copy(update={"held": {"cpu0": "u-a", "cpu1": "u-a"}})})
    assert condition(held) == "processes that do not end have 2 of its devices"

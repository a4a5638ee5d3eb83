"""Repairs: only what is configured, nothing that somebody uses, never more nodes at once than the breaker's share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.model.health import Action, Attempt, Claim, ClaimPhase, Kind, RepairState, Severity, Verdict
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Gpu, NodeRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes.health import WINDOW, bar, next_step, sick_members
from nodeagent.plan.pods.actions import Start
from nodeagent.plan.repair import (
    AWAY,
    BUSY_LIMIT,
    DAY,
    HardwareUse,
    Means,
    Next,
    call,
    described,
    onward,
    users,
    wanted_claim,
)
from nodeagent.plan.steps import Propose
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import REPEATABLE, UID, WALL, life, make_cluster, make_node, make_spec, verdict
from tests.unit.plan.nodes.test_health import gpu, healthy, running
from tests.unit.plan.planning import plan_node

ALL = Means({"reset_gpu": False, "reboot": True, "service": False}, per_day=3)
ELASTIC = make_spec(workers="gpu", gpus=1, size=(1, 8))
DEVICES = (gpu("n2", 0), gpu("n2", 1))
IDLE = HardwareUse(expected=DEVICES)


def asks(
    action: Action, device: str = "", severity: Severity = "fatal", rule: str = "xid.79", since: float = WALL
) -> Verdict:
    return verdict(rule, device, severity, since).model_copy(update={"action": action})


def claim(kind: Kind = "reboot", device: str = "", phase: ClaimPhase = "asks", rule: str = "xid.79") -> Claim:
    return Claim(kind=kind, rule=rule, device=device, whole=ALL.whole[kind], phase=phase, since=WALL)


def repair_state(node: NodeRecord, one: Claim | None, why: str = "") -> NodeRecord:
    reported = RepairState(kinds=("reboot", "reset_gpu"), claim=one, why=why)
    return node.model_copy(update={"facts": node.facts.model_copy(update={"repair_state": reported})})


def attempt(kind: Kind = "reboot", at: float = WALL, rule: str = "xid.79", device: str = "") -> Attempt:
    return Attempt(kind=kind, rule=rule, device=device, whole=False, at=at, boot="b", outcome="done", over=True)


def wanted(
    found: Verdict, *, others: Iterable[NodeRecord] = (), job: JobRecord | None = None, means: Means = ALL,
    past: Iterable[Attempt] = (), use: HardwareUse = IDLE, cordon: bool = False,
) -> tuple[Claim | None, str]:  # fmt: skip
    me = make_node("n2", gpus=2, health=[found], cordon=cordon)
    cluster = make_cluster([*healthy(["n1"]), me, *others], *([job] if job is not None else []))
    return wanted_claim(cluster, "n2", [found], means, past, replace(use, expected=DEVICES), WALL)


def go(
    one: Claim, found: Verdict, others: Iterable[NodeRecord] = (), job: JobRecord | None = None, **more: HardwareUse
) -> Next:
    me = repair_state(make_node("n2", gpus=2, health=[found]), one)
    cluster = make_cluster([*healthy(["n1"]), me, *others], *([job] if job is not None else []))
    return onward(cluster, "n2", one, [found], ALL, (), more.get("use", IDLE), WALL)


# --- what is gone for


def test_a_fatal_verdict_asks_for_its_repair() -> None:
    got, why = wanted(asks("reset_gpu", gpu("n2", 1)))
    assert got is not None
    assert (got.kind, got.device, got.whole, got.phase, why) == ("reset_gpu", gpu("n2", 1), False, "asks", "")
    got, _ = wanted(asks("reboot", gpu("n2", 1)))
    assert got is not None
    assert (got.kind, got.whole) == ("reboot", True)


@pytest.mark.parametrize(
    "found",
    [
        asks("service", gpu("n2", 0)),
        asks("diagnose", gpu("n2", 0)),
        asks("reboot", severity="unknown"),
        asks("reboot", severity="info"),
        asks("reboot").model_copy(update={"dry_run": True}),
        asks("reboot").model_copy(update={"stage": "probation"}),
        asks("reboot").model_copy(update={"stage": "repaired"}),
        asks("reset_gpu"),
        asks("reset_gpu", "GPU-n9-6"),
        asks("reboot", "GPU-n9-6"),
    ],
)
def test_what_asks_for_nothing_that_a_command_does(found: Verdict) -> None:
    assert wanted(found) == (None, "")


def test_nothing_is_begun_that_is_not_configured() -> None:
    assert wanted(asks("reboot"), means=Means({"reset_gpu": False}, 3)) == (None, "")


def test_the_heavier_repair_of_the_worse_verdict_comes_first() -> None:
    found = [asks("reset_gpu", gpu("n2", 0)), asks("reboot", gpu("n2", 1)), asks("reboot", severity="degraded")]
    cluster = make_cluster([make_node("n2", gpus=2, health=found)])
    got, _ = wanted_claim(cluster, "n2", found, ALL, (), IDLE, WALL)
    assert got is not None
    assert (got.kind, got.device) == ("reboot", gpu("n2", 1))


def test_a_node_in_a_persons_hands_is_left_alone() -> None:
    assert wanted(asks("reboot"), cordon=True) == (None, "the node is in the hands of op: disk")


def test_the_bound_per_day_holds_for_all_kinds_and_ends_after_a_day() -> None:
    past = [attempt(at=WALL - 10), attempt("reset_gpu", WALL - 20), attempt("reboot", WALL - 30)]
    got, why = wanted(asks("reboot"), past=past)
    assert (got, why) == (None, "3 repairs in 24 h are as many as are allowed; the next in 24.0 h")
    assert wanted(asks("reboot"), past=past[:2])[0] is not None
    assert wanted(asks("reboot"), past=[*past[:2], attempt(at=WALL - DAY)])[0] is not None
    assert wanted(asks("reboot"), past=[*past[:2], attempt("service", WALL - 5)])[0] is not None


def test_an_open_breaker_holds_repairs_too() -> None:
    other = make_node("n3", gpus=2, health=[verdict()])
    assert wanted(asks("reboot"), others=[other])[1].startswith("the breaker is open: 2 of 3 nodes")
    long_ago = make_node("n3", gpus=2, health=[verdict(since=WALL - WINDOW - 1)])
    assert wanted(asks("reboot"), others=[long_ago])[0] is not None


def test_a_run_that_would_stop_without_the_node_keeps_it() -> None:
    fixed = make_spec(workers=1, gpus=1, size=(2, 2))
    found = asks("reboot", gpu("n2", 1))
    job = running("n1", "n2", spec=fixed, each=1)
    got, why = wanted(found, job=job)
    assert got is None
    assert why.startswith("job a would stop without this node (needs 2 nodes, 1 fit")
    assert wanted(found, job=job, others=healthy(["n3"]))[0] is not None
    assert wanted(asks("reset_gpu", gpu("n2", 1)), job=job)[0] is not None


def test_what_is_degraded_is_repaired_when_nothing_uses_it() -> None:
    worn = asks("reset_gpu", gpu("n2", 1), "degraded", "memory.remap_pending")
    assert wanted(worn)[0] is not None
    got, why = wanted(worn, job=running("n1", "n2", spec=ELASTIC))
    assert (got, why) == (None, "it is no reason to stop what runs: job a")
    foreign = HardwareUse(processes={gpu("n2", 1): [77], gpu("n2", 0): [78]})
    assert wanted(worn, use=foreign)[1] == "it is no reason to stop what runs: process 77"


def test_other_peoples_processes_are_waited_for_before_anything_is_drained() -> None:
    found = asks("reboot", gpu("n2", 1))
    theirs = HardwareUse(processes={gpu("n2", 0): [7, 8]}, strangers=frozenset({8}))
    assert wanted(found, use=theirs) == (None, "somebody else uses it: process 8")
    assert wanted(found, use=HardwareUse(processes={gpu("n2", 0): [7]}))[0] is not None, "ours goes when it is drained"
    alone = asks("reset_gpu", gpu("n2", 1))
    assert wanted(alone, use=theirs)[0] is not None, "they are on the other GPU"


# --- whose turn it is


def test_what_does_not_come_free_lets_the_next_one_go() -> None:
    found, theirs = asks("reboot"), HardwareUse(pods=["u"])

    def at(wall: float, use: HardwareUse) -> Next:
        one = claim(phase="holds")
        me = repair_state(make_node("n2", health=[found]), one)
        return onward(make_cluster([me]), "n2", one, [found], ALL, (), use, wall)

    assert at(WALL + BUSY_LIMIT, theirs).phase == "holds"
    given_up = at(WALL + BUSY_LIMIT + 1, theirs)
    assert (given_up.phase, given_up.why) == (None, "given up for now, since it did not come free: job u")
    assert at(WALL + BUSY_LIMIT + 1, IDLE).phase == "runs"
    early = repair_state(make_node("n9"), claim().model_copy(update={"since": WALL - 1}))
    assert go(claim(), found, [early]).phase == "asks", "who asked first goes first"


def test_it_asks_then_holds_then_runs() -> None:
    found = asks("reboot", gpu("n2", 1))
    assert go(claim(device=gpu("n2", 1)), found) == Next("holds")
    assert go(claim(device=gpu("n2", 1), phase="holds"), found) == Next("runs")


def test_one_that_is_away_for_its_repair_keeps_the_next_from_going() -> None:
    found = asks("reboot")
    phases: tuple[ClaimPhase, ...] = ("holds", "runs", "verifies")
    for phase in phases:
        other = repair_state(make_node("n9"), claim(phase=phase))
        assert go(claim(), found, [other]) == Next(
            "asks", "waits for n9: no more than 1 of 3 nodes are repaired at once"
        )
        assert go(claim(phase="holds"), found, [other]).phase == "asks", "who holds too steps back"
    assert go(claim(), found, [repair_state(make_node("n9"), claim())]) == Next("holds"), "n2 comes before n9"
    assert go(claim(), found, [repair_state(make_node("n0"), claim())]).phase == "asks"
    assert go(claim(phase="holds"), found, [repair_state(make_node("n0"), claim())]) == Next("runs")


def test_who_asked_before_and_has_a_silent_agent_keeps_nobody_from_a_repair() -> None:
    found = asks("reboot")
    asked_first = repair_state(make_node("n0", mute=True), claim())
    assert go(claim(), found, [asked_first]) == Next("holds")
    away = repair_state(make_node("n0", mute=True), claim(phase="runs"))
    assert go(claim(), found, [away]).phase == "asks", "it is being repaired"


def test_a_node_that_never_comes_back_from_its_repair_keeps_the_others_for_an_hour() -> None:
    found, gone = asks("reboot"), repair_state(make_node("n9"), claim(phase="runs"))

    def at(wall: float) -> Next:
        nodes = [repair_state(make_node("n2", health=[found]), claim()), gone]
        return onward(make_cluster(nodes, lapsed=["n9"]), "n2", claim(), [found], ALL, (), IDLE, wall)

    assert at(WALL + AWAY - 1).phase == "asks"
    assert at(WALL + AWAY + 1).phase == "holds"


def test_of_many_nodes_one_in_ten_is_away_at_once() -> None:
    found = asks("reboot")
    crowd = [make_node(f"m{i}") for i in range(17)]
    one = repair_state(make_node("n3"), claim(phase="runs"))
    two = repair_state(make_node("n4"), claim(phase="runs"))
    assert go(claim(), found, [*crowd, one]) == Next("holds")
    assert go(claim(), found, [*crowd[1:], one, two]).phase == "asks"


@settings(REPEATABLE, max_examples=400)
@given(st.lists(st.sampled_from(["beat 0", "beat 1", "beat 2", "look 0", "look 1", "look 2"]), max_size=40))
def test_never_two_at_once_whatever_comes_when(steps: list[str]) -> None:
    """Each node changes its own claim on what its last beat showed; a beat writes the claim and reads all at once."""
    names = ["n1", "n2", "n3"]
    own = {name: claim() for name in names}
    store: dict[str, Claim | None] = dict.fromkeys(names)
    views = {name: dict(store) for name in names}
    for step in steps:
        what, _, which = step.partition(" ")
        name = names[int(which)]
        if what == "beat":
            store[name] = own[name]
            views[name] = dict(store)
        elif own[name].phase != "runs" and views[name][name] == own[name]:
            found = asks("reboot")
            nodes = [repair_state(make_node(n, health=[found] if n == name else []), c) for n, c in views[name].items()]
            after = onward(make_cluster(nodes), name, own[name], [found], ALL, (), IDLE, WALL)
            assert after.phase is not None
            own[name] = own[name].model_copy(update={"phase": after.phase})
        assert sum(c.phase == "runs" for c in own.values()) <= 1


def test_a_claim_is_taken_back_when_nothing_asks_for_it_or_a_person_takes_the_node() -> None:
    found = asks("reboot")
    phases: tuple[ClaimPhase, ...] = ("asks", "holds")
    for phase in phases:
        assert go(claim(phase=phase), found.model_copy(update={"stage": "probation"})).phase is None
        assert go(claim(phase=phase), asks("service")).phase is None
        taken = repair_state(make_node("n2", cordon=True, health=[found]), claim(phase=phase))
        assert onward(make_cluster([taken]), "n2", claim(phase=phase), [found], ALL, (), IDLE, WALL).phase is None


def test_of_two_that_begin_at_once_both_step_back() -> None:
    """Neither saw the other ask; each looks again once the store has what it holds."""
    found, other = asks("reboot"), repair_state(make_node("n1"), claim(phase="holds"))
    after = go(claim(phase="holds"), found, [other])
    assert (after.phase, after.why) == ("asks", "waits for n1: no more than 1 of 2 nodes are repaired at once")


# --- what is in the way


def test_it_waits_for_those_who_use_the_hardware() -> None:
    found, job = asks("reboot", gpu("n2", 1)), running("n1", "n2", spec=ELASTIC)
    whole = claim(device=gpu("n2", 1), phase="holds")
    assert go(whole, found, job=job) == Next("holds", "waits until it is free: job a")
    assert go(whole, found, use=HardwareUse(pods=["u-gone"])).why == "waits until it is free: job u-gone"
    assert (
        go(whole, found, use=HardwareUse(processes={gpu("n2", 0): [4, 3]})).why
        == "waits until it is free: process 3, 4"
    )
    one = claim("reset_gpu", gpu("n2", 1), "holds")
    apart = asks("reset_gpu", gpu("n2", 1))
    assert go(one, apart, job=running("n1", "n2", spec=ELASTIC, each=1)) == Next("runs"), "the other GPU is at work"
    assert go(one, apart, job=job).phase == "holds"
    assert go(one, apart, use=HardwareUse(processes={gpu("n2", 0): [4]})) == Next("runs")
    assert go(one, apart, use=HardwareUse(pods=["u"], stuck=["u"])).phase == "holds", "nobody knows what it holds"


def test_a_degraded_device_that_was_taken_meanwhile_is_let_go() -> None:
    worn = asks("reset_gpu", gpu("n2", 1), "degraded")
    one = claim("reset_gpu", gpu("n2", 1), "holds")
    assert go(one, worn, job=running("n1", "n2", spec=ELASTIC)) == Next(
        None, "it is no reason to stop what runs: job a"
    )


def test_workers_that_still_stop_use_their_devices() -> None:
    job = running("n1", "n2", spec=ELASTIC)
    assert job.generation is not None
    ended = job.model_copy(update={"generation": job.generation.model_copy(update={"state": "ended"})})
    one = claim("reset_gpu", gpu("n2", 1), "holds")
    assert users(make_cluster(healthy(["n1", "n2"]), job), "n2", one, IDLE) == "job a"
    assert users(make_cluster(healthy(["n1", "n2"]), ended), "n2", one, IDLE) == ""
    assert users(make_cluster(healthy(["n1", "n2"]), ended), "n2", claim(), HardwareUse(pods=[UID])) == "job a"


# --- what others make of it


def cluster_of(phase: ClaimPhase, kind: Kind = "reboot", **nodes: Mapping[str, str]) -> tuple[Cluster, JobRecord]:
    job = running("n1", "n2", spec=ELASTIC)
    me = repair_state(make_node("n2", gpus=2), claim(kind, gpu("n2", 1), phase))
    return make_cluster([*healthy(["n1", "n3"]), me], job), job


def test_a_node_that_makes_room_is_left_at_no_cost_and_gets_no_work() -> None:
    cluster, job = cluster_of("holds")
    step = decide(cluster, job, WALL).step
    assert isinstance(step, Propose)
    assert "n2" not in step.members
    assert step.spend is not None
    assert (step.spend.counts, step.cause.kind) == (False, "hardware")
    assert step.cause.text == "n2 makes room for a repair: reboot (xid.79)"
    assert bar(cluster.nodes["n2"]) == "is being repaired: reboot (xid.79)"


def test_one_that_only_asks_goes_on() -> None:
    cluster, job = cluster_of("asks")
    assert decide(cluster, job, WALL).step is None
    assert bar(cluster.nodes["n2"]) == ""


def test_a_gpu_that_is_reset_takes_its_member_only() -> None:
    cluster, job = cluster_of("runs", "reset_gpu")
    assert job.generation is not None
    assert [one.node for one in sick_members(cluster, job.generation)[0]] == ["n2"]
    first = running("n1", "n2", spec=ELASTIC, each=1)
    assert first.generation is not None
    assert sick_members(cluster, first.generation) == ((), ())
    assert bar(cluster.nodes["n2"]) == ""


@pytest.mark.parametrize(("phase", "starts"), [("asks", True), ("holds", False), ("runs", False)])
def test_nothing_is_started_on_what_is_set_aside(phase: ClaimPhase, starts: bool) -> None:
    cluster, job = cluster_of(phase)
    assert job.generation is not None
    status = PodStatus(uid=UID, phase="ready", highest=job.generation.token)
    actions = plan_node(cluster, "n2", cluster.nodes["n2"].incarnation, {UID: status}, 1)
    assert any(isinstance(a, Start) for a in actions) == starts
    assert cluster.nodes["n2"].incarnation.life == life("n2")


# --- service, and what is said


def test_service_is_called_once_for_each_verdict() -> None:
    found = asks("service", gpu("n2", 0), rule="xid.64")
    assert call([found], ALL, []) == found
    assert call([found], Means({"reboot": True}, 3), []) is None
    called = attempt("service", WALL + 1, "xid.64", gpu("n2", 0))
    assert call([found], ALL, [called]) is None
    assert call([found], ALL, [attempt("service", WALL - 1, "xid.64", gpu("n2", 0))]) == found
    assert call([asks("reboot"), asks("service", severity="info")], ALL, []) is None


def test_a_person_learns_what_happens_by_itself_and_what_does_not() -> None:
    found = asks("reboot", gpu("n2", 1))
    node = make_node("n2", gpus=2, health=[found])
    assert next_step(found, node) == "reboot the machine, then: nodeagentctl health ack n2"
    reset = next_step(asks("reset_gpu", gpu("n2", 0)), node)
    assert "systemctl stop nodeagent" in reset, "its probe has the driver open, and none is reset that anything holds"
    holding = claim(device=gpu("n2", 1), phase="holds").model_copy(update={"why": "waits until it is free: job a"})
    reported = repair_state(node, holding)
    assert next_step(found, reported) == "nothing: nodeagent repairs it (reboot; waits until it is free: job a)"
    assert described(reported) == "reboot makes room: waits until it is free: job a"
    assert described(repair_state(node, claim("reset_gpu", gpu("n2", 1), "runs"))) == "GPU 1: GPU reset under way"
    stopped = repair_state(node, None, "the breaker is open")
    assert next_step(found, stopped).endswith("health ack n2; nodeagent does not by itself (the breaker is open)")
    assert described(stopped) == "not repaired by itself: the breaker is open"
    assert described(node) == described(repair_state(node, None)) == ""


def test_a_sites_check_a_driver_that_is_not_there_and_another_vendors_device_ask_for_other_steps() -> None:
    node = make_node("n2")
    npu = Gpu(uuid="ascend-a", index=0, variable="ASCEND_RT_VISIBLE_DEVICES")
    node = node.model_copy(update={"facts": node.facts.model_copy(update={"gpus": (npu,), "hostname": "h2"})})
    check = asks("diagnose", rule="check.lustre")
    assert next_step(check, node) == "on h2: run the command of health.checks.lustre in the agent's config"
    none = next_step(asks("diagnose", severity="unknown", rule="probe.nvml.broken"), node)
    assert none.startswith("on h2: nvidia-smi -q, then install or load the driver, or reboot; to do without GPUs: ")
    assert none.endswith("or, if no driver is loaded, nodeagentctl health ack n2")
    unlisted = next_step(asks("diagnose", "0000:5e:00", "unknown", "nvml.unlisted"), node)
    assert unlisted.startswith("on h2: compare nvidia-smi -L with lspci -d 10de:, see why in dmesg (NVRM), then reboot")
    assert unlisted.endswith("nodeagentctl health ack n2 --gpu 0000:5e:00")
    silent = asks("diagnose", "ascend-a", "unknown", "accelerator.silent")
    assert next_step(silent, node) == "on h2: ask the vendor's own tool"

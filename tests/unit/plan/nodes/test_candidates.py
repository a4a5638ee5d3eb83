"""Who may take part: offers of devices, standings with their reasons."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import NodeRecord
from nodeagent.plan.cluster import natural
from nodeagent.plan.nodes.candidates import candidate
from nodeagent.plan.nodes.devices import booked, used_devices
from nodeagent.plan.nodes.members import gone_nodes, holding_nodes
from tests.unit.plan.build import (
    PREPARING,
    UID,
    UNFIT,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)


def test_natural_order_is_total() -> None:
    endless = "n1" + 5000 * "0"
    names = [endless, "n10", "n2", "n1", "n01", "a", "n", "n2b", "n2-10", "n2-9", "1x"]
    expected = ["1x", "a", "n", "n01", "n1", "n2", "n2-9", "n2-10", "n2b", "n10", endless]
    for seed in range(20):
        random.Random(seed).shuffle(names)
        assert sorted(names, key=natural) == expected


@pytest.mark.parametrize(
    ("node", "spec", "devices"),
    [
        (make_node("n1"), make_spec(workers=2), ("cpu0", "cpu1")),
        (make_node("n1"), make_spec(workers="gpu"), ("cpu0",)),
        (make_node("n1", gpus=2), make_spec(workers="gpu"), ("GPU-n1-0", "GPU-n1-1")),
        (make_node("n1", gpus=4), make_spec(workers="gpu", gpus=2), tuple(f"GPU-n1-{i}" for i in range(4))),
        (make_node("n1", gpus=4), make_spec(workers=1, gpus=2), ("GPU-n1-0", "GPU-n1-1")),
        (make_node("n1", gpus=4), make_spec(workers=2, gpus=0), ("cpu0", "cpu1")),
        (make_node("n1", gpus=4, sick=[1]), make_spec(workers=2), ("GPU-n1-0", "GPU-n1-2")),
        (make_node("n1", gpus=3, sick=[1]), make_spec(workers="gpu", uneven=True), ("GPU-n1-0", "GPU-n1-2")),
        (make_node("n1", gpus=4, sick=[1]), make_spec(workers=2, gpus=2, uneven=True), ("GPU-n1-0", "GPU-n1-2")),
    ],
)  # fmt: skip
def test_a_fit_node_offers_devices(node: NodeRecord, spec: JobSpec, devices: tuple[str, ...]) -> None:
    job = make_job(spec=spec)
    one = candidate(make_cluster([node], job), job, node)
    assert (one.standing, one.devices, one.why) == ("fit", devices, "")


@pytest.mark.parametrize(
    ("node", "spec", "standing", "why"),
    [
        (make_node("n1", slots=1), make_spec(workers=2), "out", "n1 has 1 free worker slots, 2 needed"),
        (make_node("n1"), make_spec(workers="gpu", gpus=1), "out", "n1 has 0 free GPUs, 1 needed"),
        (make_node("n1", gpus=2, sick=[1]), make_spec(workers="gpu"), "out",
         "n1 has 1 free GPUs, 2 needed (GPU 1: Xid 79)"),
        (make_node("n1", gpus=1, sick=[0]), make_spec(workers="gpu", uneven=True), "out",
         "n1 has 0 free GPUs, 1 needed (GPU 0: Xid 79)"),
        (make_node("n1", cordon=True), make_spec(), "out", "n1 is cordoned (disk)"),
        (make_node("n1", drain=True), make_spec(), "out", "n1 is draining (disk)"),
        (make_node("n1", left=True), make_spec(), "out", "n1 has left"),
        (make_node("n1", lost=True), make_spec(), "out", "n1 is not live (its lease has lapsed)"),
        (make_node("n1", ready={}), make_spec(), "pending", "n1 has not checked the job yet"),
        (make_node("n1", ready={UID: PREPARING}), make_spec(), "pending", "n1 is getting ready (imports torch)"),
        (make_node("n1", ready={UID: UNFIT}), make_spec(), "unfit", "n1 cannot run it: /shared/x is missing"),
    ],
)  # fmt: skip
def test_a_node_that_may_not_take_part_says_why(node: NodeRecord, spec: JobSpec, standing: str, why: str) -> None:
    job = make_job(spec=spec)
    one = candidate(make_cluster([node], job), job, node)
    assert (one.standing, one.why) == (standing, why)


def test_a_lapsed_node_is_out() -> None:
    job = make_job()
    cluster = make_cluster(["n1"], job, lapsed=["n1"])
    assert candidate(cluster, job, cluster.nodes["n1"]).standing == "out"


def test_devices_of_members_and_holders_are_used_until_they_are_gone() -> None:
    member = make_job("running", make_generation(["n1"], workers=2), uid="u-m")
    holder = make_job("holding", make_generation(["n2"], state="ended", holders=["n2"]), uid="u-h")
    ended = make_job("failed", make_generation(["n3"], state="ended"), uid="u-e")
    cluster = make_cluster(["n1", "n2", "n3"], member, holder, ended)
    assert used_devices(booked(cluster), "n1", "u-x") == {"cpu0", "cpu1"}
    assert used_devices(booked(cluster), "n1", "u-m") == frozenset()
    assert used_devices(booked(cluster), "n2", "u-x") == {"cpu0"}
    assert used_devices(booked(cluster), "n3", "u-x") == frozenset()
    gone = make_cluster([make_node("n1", lost=True), make_node("n2", lost=True)], member, holder)
    assert used_devices(booked(gone), "n1", "u-x") == used_devices(booked(gone), "n2", "u-x") == frozenset()


def test_a_member_that_is_back_in_another_life_is_booked_until_its_job_forms_anew() -> None:
    """As in the store, which would refuse it to each other job: they would ask for it again and again."""
    member = make_job("running", make_generation(["n1"], workers=2), uid="u-m")
    holder = make_job("holding", make_generation(["n2"], state="ended", holders=["n2"]), uid="u-h")
    reborn = [make_node("n1", of_life="new"), make_node("n2", of_life="new")]
    cluster = make_cluster(reborn, member, holder)
    assert used_devices(booked(cluster), "n1", "u-x") == {"cpu0", "cpu1"}
    assert used_devices(booked(cluster), "n1", "u-m") == frozenset()
    assert used_devices(booked(cluster), "n2", "u-x") == frozenset()  # a node joins without what it held


def test_a_member_is_offered_its_own_devices_again() -> None:
    other = make_job("running", make_generation(["n1"], workers=1), uid="u-o", spec=make_spec(name="o"))
    generation = make_generation(["n1"])
    generation = generation.model_copy(
        update={"members": {"n1": generation.members["n1"].model_copy(update={"devices": ("cpu3",)})}}
    )
    job = make_job("running", generation)
    cluster = make_cluster(["n1"], job, other)
    assert candidate(cluster, job, cluster.nodes["n1"]).devices == ("cpu3",)


def test_gone_and_holding_nodes() -> None:
    generation = make_generation(["n10", "n2"], state="forming", holders=["n2", "n3", "n4"])
    job = make_job("forming", generation)
    cluster = make_cluster(["n2", make_node("n3", of_life="new"), "n4"], job, lapsed=["n4"])
    assert gone_nodes(cluster, job) == ("n3", "n4", "n10")
    assert holding_nodes(cluster, job) == ("n2",)


@pytest.mark.parametrize("looked", ["before", "after"])
def test_of_a_generation_that_has_ended_only_holders_are_gone(looked: str) -> None:
    """Who was a member then may have left for good, and nothing in the store shows any more that it has: no step would
    take its loss, and the job could neither go on nor be stopped."""
    generation = make_generation(["n1", "n2"])
    job = make_job("paused", generation.model_copy(update={"state": "ended"}))
    running = make_cluster(["n1"], make_job("running", generation))
    if looked == "before":
        assert gone_nodes(running, running.jobs[UID]) == ("n2",)
    cluster = replace(running, jobs={UID: job})
    assert gone_nodes(cluster, job) == ()
    held = make_job("pausing", make_generation(["n2"], state="ended", holders=["n2", "n3"]))
    assert gone_nodes(make_cluster(["n2"], held), held) == ("n3",)

"""What this machine is expected to have: what readings add to it, what a person takes away, what a start takes over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nodeagent.hardware.expected import Expected, Installed, Seen
from nodeagent.hardware.readings import GpuReading

A, B = "0000:10:00", "0000:20:00"
SLOTS = (A, B)
H200S = dict.fromkeys(SLOTS, "0x2335")
GPU_A, GPU_B = GpuReading("GPU-a", 0, A), GpuReading("GPU-b", 1, B)
NEW, NOWHERE = GpuReading("GPU-new", 1, B), GpuReading("GPU-b", 1)


def new(*every: GpuReading, **installed: Any) -> Expected:
    """A machine that was never seen before; its driver lists these, if any."""
    one = Expected(Installed(**installed))
    return one.read(every) if every else one


def after_a_boot(one: Expected, **installed: Any) -> Expected:
    return Expected.restored(Installed(**installed), one.seen, same_boot=False)


def unlisted(one: Expected, *listed: str, ignored: str = "") -> list[str]:
    return [gpu.uuid for gpu in one.unlisted(listed, {ignored})]


def test_what_was_seen_once_is_expected_after_a_boot() -> None:
    one = after_a_boot(new(GPU_A, GPU_B))
    assert (one.gpus, one.named(B), one.named("0000:30:00")) == (("GPU-a", "GPU-b"), "GPU-b", "0000:30:00")
    assert unlisted(one.read([GPU_A]), "GPU-a") == ["GPU-b"]


def test_gpus_of_other_nodes_are_not_expected_though_their_slots_are_known() -> None:
    one = new(GPU_A, GPU_B, configured=["GPU-b"])
    assert (one.gpus, one.named(A), one.own([GPU_A, GPU_B])) == (("GPU-b",), "GPU-a", (GPU_B,))
    assert one.seen.buses == {"GPU-b": B}


def test_gpus_that_the_config_renounces_are_not_remembered() -> None:
    """The driver was asked all the same, and the node unknown for want of it."""
    none = after_a_boot(new(GPU_A, GPU_B), configured=())
    assert (none.gpus, none.undriven, unlisted(none), none.named(B)) == ((), (), [], B)


def test_a_gpu_that_was_replaced_in_its_slot_is_not_missed() -> None:
    one = after_a_boot(new(GPU_A, GPU_B))
    assert (one.replaced([GPU_A, NEW]), one.replaced([GPU_A])) == (frozenset(["GPU-b"]), frozenset())
    one = one.read([GPU_A, NEW])
    assert (one.gpus, one.named(B)) == (("GPU-a", "GPU-new"), "GPU-new")


def test_nor_is_one_taken_for_replaced_that_moved_to_another_slot() -> None:
    moved = [replace(GPU_A, pci="0000:30:00"), replace(NEW, pci=A)]
    assert new(GPU_A).read(moved).gpus == ("GPU-a", "GPU-new")
    assert new(GPU_A, GPU_B).replaced([replace(GPU_A, pci=B)]) == frozenset(), "nor the one that was there before it"


def test_one_that_the_config_names_stays_expected_whatever_is_in_its_slot() -> None:
    named = after_a_boot(new(GPU_A, GPU_B), configured=["GPU-a", "GPU-b"])
    assert named.replaced([NEW]) == frozenset()
    assert named.read([NEW]).without_gpu("GPU-b").gpus == ("GPU-a", "GPU-b")


def test_once_the_driver_lists_gpus_what_is_in_the_slots_does_not_count() -> None:
    one = new(slots=SLOTS)
    assert (one.undriven, unlisted(one)) == (SLOTS, [*SLOTS])
    one = one.read([GPU_A])
    assert (one.gpus, one.undriven) == (("GPU-a",), ())
    assert unlisted(one, "GPU-a") == [], "the other may be one that this driver knows nothing of"


@pytest.mark.parametrize(
    ("one", "rule"),
    [
        (new(slots=SLOTS), "probe.nvml.broken"),
        (new(GPU_A, models=H200S), "nvml.unlisted"),
        (new(GPU_A, GPU_B).read([GPU_A]), "nvml.missing"),
    ],
)
def test_where_its_rule_is_ignored_nobody_misses_a_gpu(one: Expected, rule: str) -> None:
    assert unlisted(one, "GPU-a")
    assert unlisted(one, "GPU-a", ignored=rule) == []


def test_gpus_that_a_person_gave_up_with_their_driver_are_not_found_again_in_their_slots() -> None:
    one = after_a_boot(new(GPU_A, GPU_B), slots=SLOTS)
    assert unlisted(one) == ["GPU-a", "GPU-b"], "they are known by their names"
    one = one.without_driver()
    assert (one.gpus, unlisted(one), unlisted(after_a_boot(one, slots=SLOTS))) == ((), [], [])
    assert new(GPU_A, models=H200S).without_driver().slots == {}, "it lists none any more"


def test_nor_is_one_that_the_driver_does_not_list_any_more() -> None:
    dead = after_a_boot(new(GPU_A), slots=(A,), models={A: "0x2335"}).read([]).without_gpu("GPU-a")
    assert (dead.gpus, unlisted(dead), dead.seen.renounced) == ((), [], (A,)), "it is still on the bus"
    assert dead.read([GPU_A]).seen.renounced == (), "it is there again"


def test_a_gpu_at_whose_slot_the_driver_lists_none_is_missed_by_its_slot_until_it_has_a_name() -> None:
    one = new(models=H200S)
    assert one.slots == {}, "the driver has not answered"
    one = one.read([GPU_A])
    assert (one.slots, unlisted(one, "GPU-a")) == ({A: True, B: False}, [B])
    assert one.without_slots([B]).slots == {A: True}
    assert one.without_slots([B]).without_slots([A]).slots == {}
    one = one.read([GPU_A, GPU_B])
    assert one.slots == {A: True, B: True}
    one = one.read([GPU_A])
    assert (one.slots, unlisted(one, "GPU-a")) == ({A: True}, ["GPU-b"])


def test_until_the_driver_answers_it_lists_what_it_did_before_a_restart() -> None:
    one = new(GPU_A, models=H200S)
    assert unlisted(after_a_boot(one, models=H200S)) == ["GPU-a", B]
    assert unlisted(after_a_boot(one, models={A: "0x2335"}), "GPU-a") == [], "it was taken out"


@pytest.mark.parametrize(
    ("models", "listed"),
    [(H200S | {B: "0x128b"}, [GPU_A]), (H200S, [GPU_A, NOWHERE]), ({}, [GPU_A])],
    ids=["a card for a display", "the driver does not say where", "a container"],
)
def test_where_nobody_can_say_that_the_driver_should_list_a_gpu(
    models: dict[str, str], listed: list[GpuReading]
) -> None:
    one = new(*listed, models=models)
    assert (one.slots.get(B), unlisted(one, *one.gpus)) == (None, [])


def test_what_is_of_the_whole_node_is_of_no_gpu_whose_slot_is_not_known() -> None:
    assert new(NOWHERE).named("") == ""


def test_a_link_is_expected_only_if_it_was_up_in_this_boot() -> None:
    """A GPU that could have NVLinks, without a bridge, has twelve that are down."""

    def once(one: Expected, up: int | None) -> int | None:
        return one.own([replace(GPU_A, links_up=up)])[0].links_once

    one = new(replace(GPU_A, links_up=0))
    assert once(one, 0) == 0
    for up in (12, 11, None):
        one = one.read([replace(GPU_A, links_up=up)])
    assert (once(one, 11), once(one, None)) == (12, None)
    same = Expected.restored(Installed(), one.seen, same_boot=True)
    assert once(same.read([replace(GPU_A, links_up=11)]), 11) == 12, "an agent's restart forgets nothing"
    assert once(after_a_boot(one).read([replace(GPU_A, links_up=11)]), 11) == 11


def test_a_port_that_was_given_up_is_expected_again_once_it_was_up() -> None:
    down = after_a_boot(new().read_ports(["b/1", "a/1"], ())).read_ports((), ["b/1"])
    assert (down.ports, down.accepted) == (("a/1", "b/1"), frozenset())
    down = down.without_ports(["b/1"]).read_ports((), ["b/1"])
    assert (down.ports, down.accepted) == (("a/1",), frozenset(["b/1"]))
    assert down.without_ports(["a/1"]).accepted == {"a/1", "b/1"}
    up = down.read_ports(["b/1"], ())
    assert (up.ports, up.accepted) == (("a/1", "b/1"), frozenset())


def test_an_interface_is_expected_while_the_config_names_it() -> None:
    """One that it named once was down for ever: another name, or none, made the node fatal."""
    assert after_a_boot(new().read_ports(["eth1", "mlx5_0/1"], ())).ports == ("mlx5_0/1",)


def test_what_is_kept_of_it_comes_back_as_it_was() -> None:
    seen = Seen(("GPU-a",), {"GPU-a": A}, {"GPU-a": 12}, ("mlx5_0/1",), (B,))
    assert Expected.restored(Installed(), seen, same_boot=True).seen == seen

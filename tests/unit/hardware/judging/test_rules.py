"""Each rule on readings: what fires it, what just does not, and that a value nobody knows does neither."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.hardware.judging.rules import GPU_RULES, READING_RULES, DeviceLook, Rule, looks, replay_bound
from nodeagent.hardware.readings import (
    AcceleratorReading,
    GpuReading,
    HostReading,
    ProbeReading,
    Readings,
)
from nodeagent.osutil.commands import CheckReading

GOOD = GpuReading(
    uuid="GPU-a",
    pci="0000:3b:00",
    index=0,
    recovery="none",
    ecc=True,
    ecc_uncorrected=0,
    remap_pending=False,
    remap_failed=False,
    remapped_uncorrectable=0,
    sram_exceeded=False,
    slowdown=frozenset(),
    pcie_generation=5,
    pcie_width=16,
    pcie_width_max=16,
    pcie_replays=100,
    links=18,
    links_up=18,
    links_once=18,
    margin=40,
    pcie_generation_max=5,
    fabric="completed",
    mig=False,
    memory_used=512 << 20,
    processes=((7, 1 << 30),),
)
HOST = HostReading(
    memory_available=0.5, fabric_manager=True, nvswitches=True, imex=True, kernel_log="", memory_pressure=0.0,
    io_pressure=0.0,
    files_used=0.1, processes_used=0.1, clock_synchronised=True,
)  # fmt: skip
NPU = GpuReading(uuid="ascend-a", index=0, temperature=50, variable="ASCEND_RT_VISIBLE_DEVICES", visible="0")
NPUS = AcceleratorReading("ascend", devices=(NPU,), expected=("ascend-a",))
ALL_GOOD = Readings(
    boot="b1", gpus=(GOOD,), expected=("GPU-a",), slots=("0000:3b:00",), host=HOST, accelerators=(NPUS,),
    probes=(ProbeReading("nvml"), ProbeReading("kernel")),
)  # fmt: skip
OURS = frozenset({7})


def gpu(**changes: object) -> Readings:
    return replace(ALL_GOOD, gpus=(replace(GOOD, **changes),))  # type: ignore[arg-type]


def host(**changes: object) -> Readings:
    return replace(ALL_GOOD, host=replace(HOST, **changes))  # type: ignore[arg-type]


def without_fabric(**changes: object) -> Readings:
    """GPUs beside each other on PCIe, of the same image as those with NVSwitches."""
    return replace(host(nvswitches=False, **changes), gpus=(replace(GOOD, fabric=None),))


def without_state(**changes: object) -> Readings:
    """GPUs behind NVSwitches that need the fabric manager as long as anything runs (HGX A100)."""
    return replace(host(**changes), gpus=(replace(GOOD, fabric=None),))


def npus(**changes: object) -> Readings:
    return replace(ALL_GOOD, accelerators=(replace(NPUS, **changes),))  # type: ignore[arg-type]


def fired(now: Readings, before: Readings | None = ALL_GOOD, elapsed: float = 60.0) -> dict[str, DeviceLook]:
    return {look.rule.id: look for look in looks(now, before, elapsed, OURS) if look.fires}


CASES = [
    ("nvml.recovery.reset", gpu(recovery="reset"), gpu(recovery="none")),
    ("nvml.recovery.reset", gpu(recovery="drain_reset"), gpu(recovery=None)),
    ("nvml.recovery.reboot", gpu(recovery="reboot"), gpu(recovery="reset")),
    ("nvml.recovery.p2p", gpu(recovery="drain_p2p"), gpu(recovery="drain_reset")),
    ("nvml.recovery.other", gpu(recovery="6"), gpu(recovery="reboot")),
    ("nvml.lost", gpu(error="GPU_IS_LOST"), gpu(error="TIMEOUT")),
    ("nvml.reset_required", gpu(error="RESET_REQUIRED"), gpu(error="GPU_IS_LOST")),
    ("nvml.unreadable", gpu(error="UNKNOWN"), gpu(error="RESET_REQUIRED")),
    ("memory.remap_failed", gpu(remap_failed=True), gpu(remap_failed=None)),
    ("memory.remapped", gpu(remapped_uncorrectable=512), gpu(remapped_uncorrectable=511)),
    ("memory.sram", gpu(sram_exceeded=True), gpu(sram_exceeded=None)),
    ("memory.remap_pending", gpu(remap_pending=True), gpu(remap_failed=True)),
    ("memory.ecc", gpu(ecc_uncorrected=1), gpu(ecc_uncorrected=0)),
    ("memory.ecc_off", gpu(ecc=False), gpu(ecc=None)),
    ("nvlink.down", gpu(links_up=17), gpu(links_up=0, links_once=0)),
    ("nvlink.down", gpu(links_up=17, mig=None), gpu(links_up=0, mig=True)),  # an A100 with MIG has its links off
    ("nvlink.flaps", gpu(links_up=17), gpu(links_up=0, links_once=None)),
    ("nvlink.flaps", gpu(links_up=17, mig=None), gpu(links_up=0, mig=True)),
    ("gpu.mig", gpu(mig=True), gpu(mig=None)),
    ("pcie.generation", gpu(pcie_generation=4), gpu(pcie_generation=1, processes=())),
    ("gpu.hot", gpu(margin=1), gpu(margin=None)),
    ("fabric.failed", gpu(fabric="in_progress"), gpu(fabric=None)),
    ("clocks.slowdown", gpu(slowdown=frozenset({"hw_thermal"})), gpu(slowdown=None)),
    ("pcie.width", gpu(pcie_width=8), gpu(pcie_width=8, pcie_width_max=8)),
    ("pcie.width", gpu(pcie_width=8, processes=None), gpu(pcie_width=8, processes=())),  # at rest the link saves power
    ("pcie.replays", gpu(pcie_replays=132), gpu(pcie_replays=131)),
    ("nvml.missing", replace(ALL_GOOD, expected=("GPU-a", "GPU-b")), replace(ALL_GOOD, gpus=None, expected=("GPU-b",))),
    ("nvml.unlisted", gpu(pci="0000:5e:00"), replace(ALL_GOOD, gpus=None)),
    ("gpu.foreign", gpu(processes=((8, 1),)), gpu(processes=((7, 1), (8, 1)))),
    ("gpu.shared", gpu(processes=((7, 1), (8, 1))), gpu(processes=((7, 1),))),
    ("gpu.leftover", gpu(processes=(), memory_used=(512 << 20) + 1), gpu(processes=(), memory_used=512 << 20)),
    ("gpu.leftover", gpu(processes=(), memory_used=1 << 30), gpu(processes=(), memory_used=1 << 30, mig=True)),
    (
        "gpu.leftover",
        gpu(processes=(), memory_used=1 << 30, graphics=0),
        gpu(processes=(), memory_used=1 << 30, graphics=2),
    ),
    ("probe.nvml.late", replace(ALL_GOOD, probes=(ProbeReading("nvml", 1),)), ALL_GOOD),
    (
        "probe.nvml.hung",
        replace(ALL_GOOD, probes=(ProbeReading("nvml", 2),)),
        replace(ALL_GOOD, probes=(ProbeReading("nvml", 1),)),
    ),
    (
        "probe.late",
        replace(ALL_GOOD, probes=(ProbeReading("nvml"), ProbeReading("kernel", 1), ProbeReading("host"))),
        replace(ALL_GOOD, probes=(ProbeReading("nvml", 1), ProbeReading("kernel"))),
    ),
    (
        "probe.broken",
        replace(ALL_GOOD, probes=(ProbeReading("kernel", problem="permission denied"),)),
        replace(ALL_GOOD, probes=(ProbeReading("kernel", missed=1, problem="permission denied"),)),
    ),
    (
        "probe.nvml.broken",
        replace(ALL_GOOD, probes=(ProbeReading("nvml", problem="NVML: Driver Not Loaded"),)),
        replace(ALL_GOOD, probes=(ProbeReading("kernel", problem="NVML: Driver Not Loaded"),)),
    ),
    ("probe.kernel_log", host(kernel_log="/dev/kmsg: Permission denied"), host(kernel_log=None)),
    ("port.down", host(ports_down=(("mlx5_0/1", 30.5),)), host(ports_down=(("mlx5_0/1", 30.0),))),
    ("port.flaps", host(port_flaps=(("mlx5_0/1", 3),)), host(port_flaps=(("mlx5_0/1", 2), ("mlx5_1/1", 2)))),
    ("fabric.imex", host(imex=False), host(imex=None)),
    ("fabric.manager", without_state(fabric_manager=False), without_state(fabric_manager=None)),
    ("fabric.manager", without_state(fabric_manager=False), without_fabric(fabric_manager=False)),
    ("fabric.manager", without_state(fabric_manager=False), replace(host(fabric_manager=False), gpus=None)),
    ("fabric.manager", without_state(fabric_manager=False), host(fabric_manager=False)),
    ("fabric.unmanaged", host(fabric_manager=False), host(fabric_manager=None)),
    ("fabric.unmanaged", host(fabric_manager=False, nvswitches=False), without_state(fabric_manager=False)),
    ("disk", host(full_disks=("/scratch: read-only",)), replace(ALL_GOOD, host=None)),
    ("host.pressure", host(memory_pressure=0.21), host(memory_pressure=0.2)),
    ("host.io_pressure", host(io_pressure=0.51), host(io_pressure=None)),
    ("host.handles", host(files_used=0.91), host(files_used=0.9)),
    ("host.handles", host(processes_used=0.91), host(files_used=None, processes_used=None)),
    ("host.clock", host(clock_synchronised=False), host(clock_synchronised=None)),
    ("accelerator.silent", npus(problem="ascend: npu-smi hangs"), npus(devices=None)),
    ("accelerator.problem", npus(problem="ascend: npu-smi hangs"), npus(devices=None)),
    ("accelerator.missing", npus(expected=("ascend-a", "ascend-b")), npus(devices=None, expected=("ascend-b",))),
    ("accelerator.unreadable", npus(devices=(replace(NPU, error="no answer"),)), npus(devices=None)),
    ("host.memory", host(memory_available=0.02), host(memory_available=None)),
]


@pytest.mark.parametrize(("rule", "bad", "miss"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_fires_and_does_not_on_the_near_miss(rule: str, bad: Readings, miss: Readings) -> None:
    assert rule in fired(bad)
    assert fired(bad)[rule].raw, "what was read is told"
    assert rule not in fired(miss)


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == {rule.id for rule in READING_RULES}


def test_a_healthy_machine_fires_nothing() -> None:
    assert fired(ALL_GOOD) == {}


def test_what_is_not_known_is_neither_bad_nor_fine() -> None:
    nothing = Readings(boot="b1", gpus=(GpuReading("GPU-a", 0),))
    reported = {look.rule.id for look in looks(nothing, None, 0, OURS)}
    by_error = {"nvml.lost", "nvml.reset_required", "nvml.unreadable"}
    assert reported == by_error, "only the absence of an error is known"
    assert {one.rule.id for one in GPU_RULES} > by_error


def test_without_the_driver_nothing_is_reported_of_its_gpus() -> None:
    silent = replace(ALL_GOOD, gpus=None, probes=(ProbeReading("nvml", 2),), accelerators=())
    assert [look.rule.id for look in looks(silent, ALL_GOOD, 10, OURS) if look.device] == []


def test_what_runs_on_gpus_that_the_fabric_took_in_goes_on_without_its_manager() -> None:
    """A package's upgrade stops it for a minute: the gang was evicted, and the machine rebooted."""
    look = fired(host(fabric_manager=False))["fabric.unmanaged"]
    assert (look.rule.severity, look.device) == ("unknown", "")
    assert fired(without_state(fabric_manager=False))["fabric.manager"].rule.severity == "fatal"


def test_who_uses_a_gpu_is_named() -> None:
    owners = ((8, "pid 8 (slurm: python a.py)"), (9, ""))
    look = fired(gpu(processes=((8, 1), (9, 1), (10, 1), (11, 1)), owners=owners))["gpu.foreign"]
    assert look.raw == "pid 8 (slurm: python a.py); pid 9; pid 10; and 1 more"


def test_where_the_driver_does_not_list_our_own_workers_nothing_is_reported_of_others() -> None:
    """In a container with pids of its own, say: what is listed may be ours."""
    for hidden in (gpu(processes=((8, 1),)), gpu(processes=(), memory_used=2 << 30)):
        assert fired(hidden)
        assert not fired(replace(hidden, working=True))
    assert "gpu.shared" in fired(replace(gpu(processes=((7, 1), (8, 1))), working=True))


def test_a_fault_is_the_devices_own() -> None:
    two = replace(ALL_GOOD, gpus=(GOOD, replace(GOOD, uuid="GPU-b", index=1, remap_failed=True)))
    assert [(x.rule.id, x.device) for x in looks(two, None, 0, OURS) if x.fires] == [("memory.remap_failed", "GPU-b")]


def test_a_port_that_is_down_for_less_than_the_bound_is_neither_bad_nor_fine() -> None:
    """The time begins anew with each start of its probe: fine would count as repaired."""
    for ports, known in (((("mlx5_0/1", 0.0),), False), ((), True)):
        assert ("port.down" in {look.rule.id for look in looks(host(ports_down=ports), None, 0, OURS)}) is known


def test_a_plug_in_judges_its_own_devices_by_the_rules_it_declared() -> None:
    rule = Rule("ascend.health", "fatal", "service", "reading", "the NPU is sick", "npu-smi")
    now = npus(looks=(("ascend.health", "ascend-a", True, "Health: Alarm"), ("ascend.other", "ascend-a", True, "")))
    found = [x for x in looks(now, None, 0, OURS, {rule.id: rule}) if x.fires]
    assert [(x.rule.id, x.device, x.raw) for x in found] == [("ascend.health", "ascend-a", "Health: Alarm")]


def test_what_all_devices_have_in_common_holds_for_a_plug_ins_too() -> None:
    sick = npus(devices=(replace(NPU, ecc_uncorrected=1, margin=1, processes=((8, 1),), error="sick"),))
    assert set(fired(sick)) == {"memory.ecc", "gpu.hot", "gpu.foreign", "accelerator.unreadable"}
    assert not [
        look
        for look in looks(sick, None, 0, OURS)
        if look.rule.id.startswith("nvml.") and look.device not in ("GPU-a", *ALL_GOOD.slots)
    ]


@pytest.mark.parametrize(("code", "severity"), [(3, "fatal"), (4, "degraded"), (1, "unknown"), (None, "unknown")])
def test_a_sites_own_check_is_judged_by_its_exit_code(code: int | None, severity: str) -> None:
    look = fired(replace(ALL_GOOD, checks=(CheckReading("disk", code, "sda is slow"),)))["check.disk"]
    assert (look.rule.severity, look.device) == (severity, "")
    assert look.raw.endswith("sda is slow")
    assert fired(replace(ALL_GOOD, checks=(CheckReading("disk", 0),))) == {}


def test_a_silent_plug_in_costs_its_own_devices_alone() -> None:
    silent = [x for x in looks(npus(problem="hangs"), None, 0, OURS) if x.fires]
    assert {(x.rule.severity, x.device) for x in silent} == {("unknown", "ascend-a"), ("info", "")}


@pytest.mark.parametrize(("generation", "lanes", "bound"), [(5, 16, 31), (4, 16, 16), (3, 16, 8), (1, 1, 1)])
def test_replay_bound(generation: int, lanes: int, bound: int) -> None:
    """31 a minute for gen 5 x16 is DCGM's own figure."""
    assert replay_bound(generation, lanes) == bound


def test_replays_are_counted_over_a_minute() -> None:
    """Of two readings two seconds apart, one replay was thirty a minute."""
    assert "pcie.replays" not in {look.rule.id for look in looks(gpu(pcie_replays=10_000), ALL_GOOD, 59.0, OURS)}
    assert "pcie.replays" in fired(gpu(pcie_replays=164), elapsed=119.0)
    assert "pcie.replays" not in fired(gpu(pcie_replays=162), elapsed=120.0)

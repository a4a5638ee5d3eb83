"""The rules on readings: which value means what, how long it must hold, and what heals it. One table; pure.

The rules on events are in ``eventrules.py``; what becomes of a rule that fired is ``judge.py``'s business. A value that
is not known neither fires a rule nor heals it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from nodeagent.hardware.readings import (
    AcceleratorReading,
    GpuReading,
    Heals,
    HostReading,
    ProbeReading,
    Readings,
)
from nodeagent.model.health import Action, Severity

if TYPE_CHECKING:  # pure: no asyncio
    from nodeagent.osutil.commands import CheckReading

REPLAY_WINDOW = 60.0
"""Seconds at least over which PCIe replays are counted: a link may have some in a minute, and one in a moment."""
LEFTOVER = 512 << 20
"""Bytes of GPU memory in use without any of our workers that are worth waiting for (NVRx waits for the same)."""
PORT_DOWN = 30.0
"""Seconds after which a network port that was up once is lost."""
FLAPS = 3
LOW_MEMORY = 0.03
MUCH_PRESSURE = 0.2
MUCH_IO_PRESSURE = 0.5
NEARLY_ALL = 0.9
NEAR_SLOWDOWN = 2
"""Degrees Celsius to the slowdown limit: a GPU at full load keeps well away from it where its cooling works."""
UNFIT, USED_LAST = 3, 4
"""Exit codes of a site's own check, beside 0 for one that passed."""
_NAMED = 3
"""Processes of others that are named."""
_MUCH_REMAPPED = 512
"""Remapped rows after which NVIDIA replaces the card (GPU memory error management, RMA policy)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table in force, as ``nodeagentctl health rules`` shows it."""

    id: str
    severity: Severity
    action: Action
    heals: Heals
    text: str
    source: str
    after: float = 0.0
    """Seconds it must hold before it fires: without a break, or altogether within ``window``."""
    window: float = 0.0
    """Seconds within which breaks do not matter."""
    times: int = 0
    """How often within ``window`` it must begin to hold before it fires."""


@dataclass(frozen=True, slots=True)
class GpuRule:
    """A rule on one GPU: true fires, false is fine, None is not known."""

    rule: Rule
    check: Callable[[GpuReading], bool | None]
    show: Callable[[GpuReading], str]


RMA = "NVIDIA GPU memory error management, RMA policy"
RECOVERY = "NVML field GPU_RECOVERY_ACTION, driver 570 and later"
_KNOWN = ("none", "reset", "reboot", "drain_p2p", "drain_reset")


def _is(*wanted: str) -> Callable[[GpuReading], bool | None]:
    return lambda gpu: None if gpu.recovery is None else gpu.recovery in wanted


def _above(value: float | None, bound: float) -> bool | None:
    return None if value is None else value > bound


def _less(value: int | None, whole: int | None) -> bool | None:
    return None if value is None or whole is None else value < whole


def _link_down(gpu: GpuReading) -> bool | None:
    """An A100 whose MIG mode is on has its links off: that is no fault."""
    return None if gpu.mig else _less(gpu.links_up, gpu.links_once)


def replay_bound(generation: int, lanes: int) -> int:
    """PCIe replays a minute that a bit error rate of 1e-12 explains (as DCGM computes it): ``ceil(rate / 1000 * 60 *
    lanes)`` with the lane's rate in Gb/s."""
    rate = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}.get(generation, 64.0)
    return math.ceil(rate / 1000 * 60 * lanes)


GPU_RULES = (
    GpuRule(
        Rule("nvml.recovery.reset", "fatal", "reset_gpu", "reading", "the driver asks for a GPU reset", RECOVERY),
        _is("reset", "drain_reset"), lambda g: f"recovery action {g.recovery}",
    ),
    GpuRule(
        Rule("nvml.recovery.reboot", "fatal", "reboot", "reading", "the driver asks for a reboot", RECOVERY),
        _is("reboot"), lambda g: f"recovery action {g.recovery}",
    ),
    GpuRule(
        Rule("nvml.recovery.p2p", "degraded", "reset_gpu", "reading",
             "the driver asks to end peer-to-peer work", RECOVERY),
        _is("drain_p2p"), lambda g: f"recovery action {g.recovery}",
    ),
    GpuRule(
        Rule("nvml.recovery.other", "fatal", "diagnose", "reading",
             "the driver asks for a recovery that this version does not know", RECOVERY),
        lambda g: None if g.recovery is None else g.recovery not in _KNOWN, lambda g: f"recovery action {g.recovery}",
    ),
    GpuRule(
        Rule("nvml.lost", "fatal", "reboot", "repair", "the GPU is lost", "NVML GPU_IS_LOST"),
        lambda g: g.error == "GPU_IS_LOST", lambda g: f"NVML: {g.error}",
    ),
    GpuRule(
        Rule("nvml.reset_required", "fatal", "reset_gpu", "repair", "the GPU needs a reset", "NVML RESET_REQUIRED"),
        lambda g: g.error == "RESET_REQUIRED", lambda g: f"NVML: {g.error}",
    ),
    GpuRule(
        Rule("nvml.unreadable", "unknown", "diagnose", "reading", "the GPU cannot be read", "NVML error codes"),
        lambda g: g.error not in ("", "GPU_IS_LOST", "RESET_REQUIRED"), lambda g: f"NVML: {g.error}",
    ),
    GpuRule(
        Rule("memory.remap_failed", "fatal", "service", "repair", "a memory row could not be remapped", RMA),
        lambda g: g.remap_failed, lambda g: "row remap failure flag set",
    ),
    GpuRule(
        Rule("memory.remapped", "fatal", "service", "repair", "too many memory rows were remapped", RMA),
        lambda g: _above(g.remapped_uncorrectable, _MUCH_REMAPPED - 1),
        lambda g: f"{g.remapped_uncorrectable} rows remapped for uncorrectable errors",
    ),
    GpuRule(
        Rule("memory.sram", "fatal", "service", "repair", "uncorrectable SRAM errors beyond the threshold", RMA),
        lambda g: g.sram_exceeded, lambda g: "SRAM threshold flag set",
    ),
    GpuRule(
        Rule("memory.remap_pending", "degraded", "reset_gpu", "reading",
             "a row remap waits for the next reset; work may go on until then", RMA),
        lambda g: g.remap_pending, lambda g: "row remap pending",
    ),
    GpuRule(
        Rule("memory.ecc", "degraded", "reset_gpu", "reading", "uncorrectable memory errors since the last reset",
             "NVML volatile ECC counters"),
        lambda g: _above(g.ecc_uncorrected, 0), lambda g: f"{g.ecc_uncorrected} uncorrectable errors",
    ),
    GpuRule(
        Rule("memory.ecc_off", "info", "none", "reading", "ECC is switched off", "NVML ECC mode"),
        lambda g: None if g.ecc is None else not g.ecc, lambda g: "ECC mode: disabled",
    ),
    GpuRule(
        Rule("nvlink.down", "fatal", "reset_gpu", "repair", "an NVLink is down", "NVML link state", after=5.0),
        _link_down, lambda g: f"{g.links_up} links are up, {g.links_once} were",
    ),
    GpuRule(
        Rule("nvlink.flaps", "degraded", "reset_gpu", "quiet", "an NVLink goes down and up", "NVML link state",
             window=3600.0, times=3),
        _link_down, lambda g: f"{g.links_up} links are up, {g.links_once} were",
    ),
    GpuRule(
        Rule("fabric.failed", "fatal", "reboot", "reading", "the NVSwitch fabric did not take the GPU in",
             "NVML fabric state", after=60.0),
        lambda g: None if g.fabric is None else g.fabric != "completed", lambda g: f"fabric state: {g.fabric}",
    ),
    GpuRule(
        Rule("clocks.slowdown", "degraded", "service", "quiet",
             "clocks lowered by the hardware for heat or power", "NVML clock event reasons", after=600.0,
             window=3600.0),
        lambda g: None if g.slowdown is None else bool(g.slowdown),
        lambda g: "clock event reasons: " + ", ".join(sorted(g.slowdown or ())),
    ),
    GpuRule(
        Rule("pcie.width", "degraded", "service", "reading",
             "the GPU has fewer PCIe lanes than it could have, though it is in use",
             "NVML PCIe link width", after=60.0),
        lambda g: None if g.processes == () and _less(g.pcie_width, g.pcie_width_max)
        else _less(g.pcie_width, g.pcie_width_max),
        lambda g: f"{g.pcie_width} of {g.pcie_width_max} lanes",
    ),
    GpuRule(
        Rule("pcie.generation", "info", "none", "reading",
             "the GPU's PCIe link is slower than it could be, though it is in use", "NVML PCIe link generation",
             after=600.0),
        lambda g: _less(g.pcie_generation, g.pcie_generation_max) if g.processes else None,
        lambda g: f"generation {g.pcie_generation} of {g.pcie_generation_max}",
    ),
    GpuRule(
        Rule("gpu.hot", "degraded", "service", "quiet", "the GPU is about to be slowed down for heat",
             "NVML temperature margin", after=120.0, window=3600.0),
        lambda g: _less(g.margin, NEAR_SLOWDOWN), lambda g: f"{g.margin} degrees below slowdown",
    ),
    GpuRule(
        Rule("gpu.mig", "degraded", "none", "reading", "the GPU is cut into MIG slices", "NVML MIG mode"),
        lambda g: g.mig, lambda g: "MIG mode: enabled",
    ),
)  # fmt: skip
"""On each GPU by itself."""
COMMON_RULES = tuple(one for one in GPU_RULES if not one.rule.id.startswith("nvml."))
"""Those that hold for every vendor's devices, as far as their values are known."""

MISSING = Rule("nvml.missing", "fatal", "reboot", "repair", "the GPU is not there any more", "NVML device count",
               after=10.0)  # fmt: skip
UNLISTED = Rule("nvml.unlisted", "unknown", "diagnose", "reading",
                "a GPU is in its slot, and the driver tells nothing of it", "NVML and the PCI bus",
                after=10.0)  # fmt: skip
REPLAYS = Rule("pcie.replays", "degraded", "service", "quiet", "more PCIe replays than a working link has",
               "DCGM: bit error rate 1e-12")  # fmt: skip
FOREIGN = Rule("gpu.foreign", "degraded", "none", "reading", "somebody else's processes use the GPU",
               "NVML processes", after=5.0)  # fmt: skip
SHARED = Rule("gpu.shared", "degraded", "none", "reading", "somebody else's processes use the GPU beside ours",
              "NVML processes", after=5.0)  # fmt: skip
LEFT = Rule("gpu.leftover", "degraded", "reset_gpu", "reading", "memory of the GPU is held though nothing of ours runs",
            "NVML memory", after=5.0)  # fmt: skip
ACCELERATOR_SILENT = Rule(
    "accelerator.silent", "unknown", "diagnose", "reading",
    "nobody knows about the device: its plug-in reports nothing", "own deadline",
)  # fmt: skip
ACCELERATOR_PROBLEM = Rule(
    "accelerator.problem", "info", "none", "reading", "a plug-in reports nothing of its devices", "own check"
)
ACCELERATOR_MISSING = Rule("accelerator.missing", "fatal", "reboot", "repair", "the device is not there any more",
                           "the plug-in's list", after=10.0)  # fmt: skip
ACCELERATOR_UNREADABLE = Rule(
    "accelerator.unreadable", "unknown", "diagnose", "reading", "the device cannot be read", "the plug-in's error"
)
NVML_LATE = Rule(
    "probe.nvml.late", "unknown", "none", "reading", "GPUs unknown: the driver has not answered", "own deadline"
)
NVML_HUNG = Rule(
    "probe.nvml.hung", "fatal", "reboot", "reading", "GPUs unknown: the driver does not answer", "own deadline, twice"
)
NVML_BROKEN = Rule(
    "probe.nvml.broken", "unknown", "diagnose", "reading", "GPUs unknown: no driver reads them", "own check"
)
PROBE_LATE = Rule(
    "probe.late", "degraded", "none", "reading", "the machine has not been looked at in time", "own deadline"
)
PROBE_BROKEN = Rule("probe.broken", "degraded", "diagnose", "reading", "the machine cannot be looked at", "own check")
KERNEL_LOG = Rule(
    "probe.kernel_log", "info", "none", "reading", "the kernel's log cannot be read: Xids come from the driver alone",
    "/dev/kmsg",
)  # fmt: skip
PORT = Rule("port.down", "fatal", "service", "reading", "a network port is down that was up", "sysfs")
FLAP = Rule("port.flaps", "degraded", "service", "quiet", "a network port goes down and up", "sysfs")
FABRIC_MANAGER = Rule("fabric.manager", "fatal", "reboot", "reading",
                      "the fabric manager does not run, without which nothing does on these GPUs", "systemd",
                      after=10.0)  # fmt: skip
UNMANAGED = Rule("fabric.unmanaged", "unknown", "diagnose", "reading",
                 "the fabric manager does not run; what runs on these GPUs goes on",
                 "systemd; fabric manager's guide: ABORT_CUDA_JOBS_ON_FM_EXIT", after=10.0)  # fmt: skip
IMEX = Rule("fabric.imex", "degraded", "none", "reading", "IMEX does not run: no NVLink to other machines",
            "systemd, nodes_config.cfg", after=60.0)  # fmt: skip
DISK = Rule("disk", "degraded", "none", "reading", "a folder that jobs need cannot be written to", "statvfs")
MEMORY = Rule("host.memory", "info", "none", "reading", "the machine is short of memory", "/proc/meminfo", after=30.0)

_PSI = "/proc/pressure, avg60 of full"
PRESSURE = Rule("host.pressure", "degraded", "none", "reading", "the machine stands still for want of memory", _PSI,
                after=60.0)  # fmt: skip
IO_PRESSURE = Rule("host.io_pressure", "info", "none", "reading", "the machine waits for its disks", _PSI, after=60.0)
HANDLES = Rule("host.handles", "degraded", "none", "reading", "the machine runs out of open files or processes",
               "/proc/sys/fs/file-nr, /proc/loadavg", after=30.0)  # fmt: skip
CLOCK = Rule("host.clock", "info", "none", "reading", "nothing keeps the machine's clock right", "adjtimex",
             after=900.0)  # fmt: skip

OF_ONE_START = frozenset({
    UNLISTED.id, NVML_LATE.id, NVML_BROKEN.id, PROBE_LATE.id, PROBE_BROKEN.id, ACCELERATOR_SILENT.id,
    ACCELERATOR_PROBLEM.id,
})  # fmt: skip
"""What they say is of a probe of this start of the agent: the next start has another, and knows nothing of it yet."""

TAKEN = frozenset({FOREIGN.id, LEFT.id})
"""While one of these holds, the GPU is somebody else's: no job is given it."""

READING_RULES: tuple[Rule, ...] = (
    *(one.rule for one in GPU_RULES),
    MISSING, UNLISTED, REPLAYS, FOREIGN, SHARED, LEFT, NVML_LATE, NVML_HUNG, NVML_BROKEN, PROBE_LATE, PROBE_BROKEN,
    KERNEL_LOG, PORT, FLAP, FABRIC_MANAGER, UNMANAGED, IMEX, DISK, MEMORY, PRESSURE, IO_PRESSURE, HANDLES, CLOCK,
    ACCELERATOR_SILENT, ACCELERATOR_PROBLEM, ACCELERATOR_MISSING, ACCELERATOR_UNREADABLE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceLook:
    """What one rule sees of one device now."""

    rule: Rule
    device: str
    fires: bool
    """False: fine. A rule whose value is not known makes no look at all."""
    raw: str = ""


def looks(
    now: Readings,
    before: Readings | None,
    elapsed: float,
    ours: frozenset[int],
    declared: Mapping[str, Rule] = MappingProxyType({}),
) -> Iterable[DeviceLook]:
    """Every rule on readings, for every device. ``before`` was read ``elapsed`` seconds ago; ``ours`` are the processes
    of this node's workers; ``declared`` are the plug-ins' own rules, by id."""
    for probe in now.probes:
        yield from _probe(probe)
    if now.gpus is not None:
        earlier = {} if before is None or before.gpus is None else {g.uuid: g for g in before.gpus}
        blind = now.working and not _lists_ours(now.gpus, ours)
        for gpu in now.gpus:
            yield from _each(GPU_RULES, gpu)
            yield from _replays(gpu, earlier.get(gpu.uuid), elapsed)
            yield from _users(gpu, ours, blind)
        present = {g.uuid for g in now.gpus}
        for uuid in now.expected:
            yield DeviceLook(MISSING, uuid, uuid not in present, f"not among the {len(present)} GPUs that NVML lists")
        listed = {g.pci for g in now.gpus}
        for slot in now.slots:
            raw = f"{slot} is on the PCI bus, and not among the {len(present)} GPUs that NVML lists"
            yield DeviceLook(UNLISTED, slot, slot not in listed, raw)
    for accelerator in now.accelerators:
        yield from _accelerator(accelerator, now.working, ours, declared)
    for check in now.checks:
        yield DeviceLook(check_rule(check.name, check.code), "", check.code != 0, _ended(check))
    if now.host is not None:
        yield from _host(now.host)
        yield from _fabric(now.host, now.gpus)


def check_rule(name: str, code: int | None) -> Rule:
    """The rule of a site's own check, by how it ended. Not by 1 or 2: so a script ends that is broken itself (a
    traceback, a shell's error), which says nothing of the node."""
    severity: Severity = "fatal" if code == UNFIT else "degraded" if code == USED_LAST else "unknown"
    text = {
        "fatal": "the site's check says that the node is unfit",
        "degraded": "the site's check says that something is wrong",
        "unknown": "the site's check could not be made",
    }[severity]
    return Rule(f"check.{name}", severity, "diagnose", "reading", text, "health.checks of the agent's config")


def _ended(check: CheckReading) -> str:
    return check.text if check.code is None else f"exit code {check.code}{f': {check.text}' if check.text else ''}"


def _each(rules: Iterable[GpuRule], gpu: GpuReading) -> Iterable[DeviceLook]:
    for one in rules:
        fires = one.check(gpu)
        if fires is not None:
            yield DeviceLook(one.rule, gpu.uuid, fires, one.show(gpu) if fires else "")


def _lists_ours(gpus: Iterable[GpuReading], ours: frozenset[int]) -> bool:
    return any(pid in ours for gpu in gpus for pid, _ in gpu.processes or ())


def _accelerator(
    reading: AcceleratorReading, working: bool, ours: frozenset[int], declared: Mapping[str, Rule]
) -> Iterable[DeviceLook]:
    """A plug-in's devices: what all devices have in common, and what the plug-in's own rules saw."""
    yield DeviceLook(ACCELERATOR_PROBLEM, "", bool(reading.problem), reading.problem)
    for uuid in reading.expected:
        yield DeviceLook(ACCELERATOR_SILENT, uuid, bool(reading.problem), reading.problem)
    if reading.devices is None:
        return
    blind = working and not _lists_ours(reading.devices, ours)
    for device in reading.devices:
        yield DeviceLook(ACCELERATOR_UNREADABLE, device.uuid, bool(device.error), device.error)
        yield from _each(COMMON_RULES, device)
        yield from _users(device, ours, blind)
    for rule, uuid, fires, raw in reading.looks:
        if rule in declared:
            yield DeviceLook(declared[rule], uuid, fires, raw)
    present = {device.uuid for device in reading.devices}
    for uuid in reading.expected:
        yield DeviceLook(
            ACCELERATOR_MISSING, uuid, uuid not in present, f"not among the {len(present)} devices of {reading.name}"
        )


def _probe(probe: ProbeReading) -> Iterable[DeviceLook]:
    raw = f"{probe.name}: {probe.missed} deadlines without an answer"
    if probe.name == "nvml":
        yield DeviceLook(NVML_LATE, "", probe.missed == 1, raw)
        yield DeviceLook(NVML_HUNG, "", probe.missed >= 2, raw)
    else:
        yield DeviceLook(PROBE_LATE, "", probe.missed >= 1, raw)
    if not probe.missed:
        broken = NVML_BROKEN if probe.name == "nvml" else PROBE_BROKEN
        yield DeviceLook(broken, "", bool(probe.problem), f"{probe.name}: {probe.problem}")


def _replays(gpu: GpuReading, before: GpuReading | None, elapsed: float) -> Iterable[DeviceLook]:
    if before is None or elapsed < REPLAY_WINDOW or gpu.pcie_replays is None or before.pcie_replays is None:
        return
    if gpu.pcie_generation is None or gpu.pcie_width is None:
        return
    rate = (gpu.pcie_replays - before.pcie_replays) * 60 / elapsed
    bound = replay_bound(gpu.pcie_generation, gpu.pcie_width)
    yield DeviceLook(REPLAYS, gpu.uuid, rate > bound, f"{rate:.0f} replays a minute, {bound} are usual")


def _users(gpu: GpuReading, ours: frozenset[int], blind: bool) -> Iterable[DeviceLook]:
    """``blind``: our workers run, and the driver lists none of them, as in a container with pids of its own: what it
    lists, or does not, may be ours."""
    if gpu.processes is None or blind:
        return
    owners = dict(gpu.owners)
    others = [pid for pid, _ in gpu.processes if pid not in ours]
    beside = len(others) < len(gpu.processes)
    raw = "; ".join(owners.get(pid) or f"pid {pid}" for pid in sorted(others)[:_NAMED])
    raw += f"; and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    yield DeviceLook(FOREIGN, gpu.uuid, bool(others) and not beside, raw)
    yield DeviceLook(SHARED, gpu.uuid, bool(others) and beside, raw)
    if gpu.memory_used is not None and not gpu.mig and not gpu.graphics:  # slices have their processes, desktops theirs
        left = not gpu.processes and gpu.memory_used > LEFTOVER
        yield DeviceLook(LEFT, gpu.uuid, left, f"{gpu.memory_used >> 20} MiB in use, no process listed")


def _fabric(host: HostReading, gpus: Collection[GpuReading] | None) -> Iterable[DeviceLook]:
    """The fabric manager is also installed where there are no NVSwitches, by an image for all machines, and rightly
    ends there. GPUs that have a fabric state (Hopper and later) need it only to be taken in, which each says itself;
    others (A100) as long as anything runs."""
    if host.fabric_manager is None or gpus is None:
        return
    stateful = any(gpu.fabric is not None for gpu in gpus)
    if stateful or host.nvswitches:
        for rule, concerned in ((FABRIC_MANAGER, not stateful), (UNMANAGED, stateful)):
            yield DeviceLook(rule, "", concerned and not host.fabric_manager, "its unit is not active")


def _host(host: HostReading) -> Iterable[DeviceLook]:
    down = [f"{port} for {seconds:.0f} s" for port, seconds in host.ports_down if seconds > PORT_DOWN]
    if down or not host.ports_down:  # one that is down for less is neither well nor ill: its time begins anew with us
        yield DeviceLook(PORT, "", bool(down), "down: " + ", ".join(down))
    flaps = [f"{port} {times} times" for port, times in host.port_flaps if times >= FLAPS]
    yield DeviceLook(FLAP, "", bool(flaps), "in the last hour: " + ", ".join(flaps))
    yield DeviceLook(DISK, "", bool(host.full_disks), "; ".join(host.full_disks))
    if host.imex is not None:
        yield DeviceLook(IMEX, "", not host.imex, "nvidia-imex.service is not active, its domain has other machines")
    if host.kernel_log is not None:
        yield DeviceLook(KERNEL_LOG, "", bool(host.kernel_log), host.kernel_log)
    if host.memory_available is not None:
        low = host.memory_available < LOW_MEMORY
        yield DeviceLook(MEMORY, "", low, f"{host.memory_available:.1%} of the memory is available")
    if host.memory_pressure is not None:
        yield _share(PRESSURE, host.memory_pressure, MUCH_PRESSURE, "of the last minute stalled")
    if host.io_pressure is not None:
        yield _share(IO_PRESSURE, host.io_pressure, MUCH_IO_PRESSURE, "of the last minute stalled")
    used = {"open files": host.files_used, "processes and threads": host.processes_used}
    full = [f"{share:.0%} of the {what}" for what, share in used.items() if share is not None and share > NEARLY_ALL]
    if any(share is not None for share in used.values()):
        yield DeviceLook(HANDLES, "", bool(full), "in use: " + ", ".join(full))
    if host.clock_synchronised is not None:
        yield DeviceLook(CLOCK, "", not host.clock_synchronised, "adjtimex: not synchronised")


def _share(rule: Rule, share: float, bound: float, what: str) -> DeviceLook:
    return DeviceLook(rule, "", share > bound, f"{share:.0%} {what}")

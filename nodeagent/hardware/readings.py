"""What probes read: one GPU, one event, the host, and whether each probe answered. Values only; None is "not known".

Must never hold a judgement: ``None`` is not zero, and no reading says that anything is fine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # values only: no asyncio
    from nodeagent.osutil.commands import CheckReading

EventKind = Literal[
    "xid", "off_bus", "init_failed", "api_mismatch", "sxid_fatal", "sxid", "nvlink", "nvlink_nonfatal", "aer", "mce",
    "mce_corrected", "oom", "hung_task", "lockup", "io_error", "overrun", "reported",
]  # fmt: skip


Heals = Literal["reading", "quiet", "repair"]
"""``reading``: a reading that is fine again. ``quiet``: time without it. ``repair``: only its repair, or an operator's
word."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment."""

    uuid: str
    index: int
    pci: str = ""
    """Bus id as the kernel log writes it: ``0000:3b:00``, lower case, without the function."""
    numa: int | None = None
    """The NUMA node that it is near to."""
    name: str = ""
    error: str = ""
    """NVML's error when the GPU itself could not be read (``GPU_IS_LOST``, ``RESET_REQUIRED``, ``UNKNOWN``)."""
    recovery: str | None = None
    """The driver's recovery action: ``none``, ``reset``, ``reboot``, ``drain_p2p``, ``drain_reset``, or a number that
    this version does not know."""
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    """Volatile: since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    remapped_uncorrectable: int | None = None
    sram_exceeded: bool | None = None

    temperature: int | None = None
    """Degrees Celsius."""
    margin: int | None = None
    """Degrees left to the slowdown limit."""
    slowdown: frozenset[str] | None = None
    """Hardware reasons for lowered clocks: ``hw_slowdown``, ``hw_thermal``, ``power_brake``."""
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    links: int | None = None
    """NVLinks that the GPU has and that are switched on."""
    links_up: int | None = None
    links_once: int | None = None
    """The most of them that were up at a time in this boot: without a bridge between two GPUs none ever is."""
    fabric: str | None = None
    """``completed``, ``in_progress``, ``not_started`` or ``failed``; None without an NVSwitch fabric."""
    memory_used: int | None = None
    """Bytes, without the driver's own overhead; None where the machine uses the GPU's memory, too (GH200)."""
    mig: bool | None = None
    """It is cut into MIG slices."""
    processes: tuple[tuple[int, int], ...] | None = None
    """Pid and bytes of every process that uses it."""
    graphics: int | None = None
    """Processes that draw on it (a desktop's): they hold memory, and are not among the others."""
    owners: tuple[tuple[int, str], ...] = ()
    """Of the first few processes: who they are, in words; empty for one that is not to be seen from here."""
    driver: str = ""
    variable: str = ""
    """Of a plug-in's device: the environment variable that hides the others; empty: ``CUDA_VISIBLE_DEVICES``."""
    visible: str = ""
    """What stands for it in there; empty: its uuid."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Something that happened, reported by the kernel's log or by NVML; equal ones are folded into one with a count."""

    kind: EventKind
    at: float
    """Unix time of the newest."""
    device: str = ""
    """UUID of the GPU, else its bus id, else empty: the node."""
    code: int = 0
    """The Xid, or the SXid of a switch."""
    raw: str = ""
    """The first line."""
    count: int = 1
    logged: bool = False
    """Read in the kernel's log alone: the driver has not reported the same."""
    line: bool = False
    """It is in the kernel's log, whether or not others reported it too."""
    due: float = 0.0
    """Unix time at which it is judged, if it waits for what explains it."""
    rule: str = ""
    """Of an event that a plug-in ``reported``: which of its rules it makes fire."""


@dataclass(frozen=True, slots=True)
class HostReading:
    """The machine around the GPUs."""

    memory_available: float | None = None
    """Share of the memory, 0 to 1."""
    full_disks: tuple[str, ...] = ()
    """``path: what is wrong``, for paths that jobs use: nearly full, read-only, missing."""
    ports_down: tuple[tuple[str, float], ...] = ()
    """Network or InfiniBand ports that were up once and are down, and for how many seconds."""
    port_flaps: tuple[tuple[str, int], ...] = ()
    """Ports and how often each went down and up again in the last hour."""
    fabric_manager: bool | None = None
    """Whether its unit is active; None where there is none, or where that is not to be seen."""
    nvswitches: bool = False
    """The driver has NVSwitches, which need a fabric manager."""
    imex: bool | None = None
    """Whether the machine takes part in memory shared over NVLink with others (NVIDIA IMEX); None where it is not
    to."""
    memory_pressure: float | None = None
    """Share of the last minute in which nothing that ran could go on for want of memory, 0 to 1."""
    io_pressure: float | None = None
    """The same of disks."""
    files_used: float | None = None
    """Share of the open files that the kernel allows."""
    processes_used: float | None = None
    """Share of the processes and threads that it allows."""
    clock_synchronised: bool | None = None
    """Whether anything keeps the machine's clock right."""
    kernel_log: str | None = None
    """Why the kernel's log cannot be read; empty: it is."""


@dataclass(frozen=True, slots=True)
class ProbeReading:
    """Whether a probe answers: a reading of its own."""

    name: str
    missed: int = 0
    """Deadlines in a row without an answer."""
    problem: str = ""
    """Why it cannot read at all (no driver library, say); empty: it reads."""


@dataclass(frozen=True, slots=True)
class AcceleratorReading:
    """The devices of one plug-in, beside NVIDIA's."""

    name: str
    devices: tuple[GpuReading, ...] | None = None
    """None: it has not answered."""
    expected: tuple[str, ...] = ()
    """Ids seen once, in this boot or an earlier one."""
    problem: str = ""
    """Why nothing is known of them now; empty: it answers, or may still."""
    looks: tuple[tuple[str, str, bool, str], ...] = ()
    """What its own rules saw: rule, device, whether it fires, and the line or value."""


@dataclass(frozen=True, slots=True)
class Readings:
    """All that is known at one moment. What a probe has not answered yet is missing, not empty."""

    boot: str
    gpus: tuple[GpuReading, ...] | None = None
    """None: the driver has not answered."""
    expected: tuple[str, ...] = ()
    """UUIDs seen once, in this boot or an earlier one, or named in the config."""
    slots: tuple[str, ...] = ()
    """PCI addresses at which there is a GPU that the driver can list."""
    events: tuple[DeviceEvent, ...] = ()
    """Those since the last readings."""
    host: HostReading | None = None
    working: bool = False
    """Workers of this node's pods run, and the driver may know them by other pids than this machine's."""
    probes: tuple[ProbeReading, ...] = field(default=())
    accelerators: tuple[AcceleratorReading, ...] = ()
    checks: tuple[CheckReading, ...] = ()
    """Those that ended at least once since this start."""

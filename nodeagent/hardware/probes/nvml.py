"""NVIDIA's devices, read through NVML, with the Xids that its driver reports: a plug-in as any other.

The standard library and nvidia-ml-py; must never judge, and never report a value that it did not read: what the driver
does not say is left out or None.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from ctypes import byref
from types import ModuleType

from nodeagent.hardware.accelerator import AbsentError, Accelerator, Event, ProblemError, numa_of, who

TYPE_CHECKING = False  # without typing: it costs 0.7 MB
if TYPE_CHECKING:
    from typing import Any


def _without_search() -> None:
    """nvidia-ml-py looks for its library on Windows alone, and what the search brings along (subprocess, tempfile and
    so on) is a fifth of this process."""
    module = ModuleType("ctypes.util")
    module.__dict__["find_library"] = lambda _name: "libnvidia-ml.so.1"
    sys.modules.setdefault("ctypes.util", module)


_without_search()

import pynvml  # noqa: E402 (only now)

FOLD = 0.05
"""Seconds for which events are gathered before they are sent, so that a storm costs little."""
MOST_EVENTS = 100
"""Between two looks. What a storm has beyond them is dropped with its queue, or it would cost what it likes and be
read minutes late: the kernel's log has it, too, and the next look sees what it led to."""
_FIXED = ("uuid", "pci", "numa", "name", "pcie_generation_max", "pcie_width_max")
"""What cannot change while this process holds the GPU: it is read until it has been read whole, and then no more."""
_LINKS = 18
_RECOVERY = {0: "none", 1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_reset", 7: "reboot"}
"""Values of NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; others are sent as their number."""
_FABRIC = {1: "not_started", 2: "in_progress", 3: "completed"}
_ERRORS = {15: "GPU_IS_LOST", 16: "RESET_REQUIRED"}
_UNSUPPORTED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)
"""This GPU, this driver or this user has no such value."""
_ABSENT = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
"""There is no driver on this machine, or it is not loaded."""
_MOST_OWNERS = 8
"""Processes of a GPU whose owner is named."""
_WAIT = 500
"""Milliseconds of one wait for an event."""


class GpuError(Exception):
    """The GPU itself cannot be read."""


def ask(call: Callable[..., Any], *args: Any) -> Any:
    """The answer; None where the GPU or the driver has none. Raises GpuError, named as NVML names it."""
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        if error.value in _UNSUPPORTED:
            return None
        raise GpuError(_ERRORS.get(error.value, f"NVML error {error.value}: {error}")) from error


def read(handle: Any, index: int, fixed: dict[str, Any] | None = None) -> dict[str, Any]:
    """One GPU, as readings.GpuReading has it. What identifies it is read first, or known (``fixed``): the rest may
    fail."""
    gpu: dict[str, Any] = {"index": index}
    try:
        for field in _identity(handle) if fixed is None else (fixed,):
            gpu.update(field)
        for field in _fields(handle):
            gpu.update(field)
    except GpuError as error:
        gpu["error"] = str(error)
    return gpu


def _identity(handle: Any) -> Iterator[dict[str, Any]]:
    """The fields of ``_FIXED``."""
    yield {"uuid": ask(pynvml.nvmlDeviceGetUUID, handle)}
    pci = ask(pynvml.nvmlDeviceGetPciInfo, handle)
    if pci is not None:
        address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"
        yield {"pci": address, "numa": numa_of(address)}
    yield {"name": ask(pynvml.nvmlDeviceGetName, handle)}
    yield {
        "pcie_generation_max": ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_width_max": ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
    }


def _fields(handle: Any) -> Iterator[dict[str, Any]]:
    """All others."""
    yield {"recovery": _recovery(handle)}
    mode = ask(pynvml.nvmlDeviceGetEccMode, handle)
    if mode is not None:
        yield {"ecc": mode[0] == pynvml.NVML_FEATURE_ENABLED}
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    yield {"ecc_uncorrected": ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected)}
    rows = ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None:
        yield {"remapped_uncorrectable": rows[1], "remap_pending": bool(rows[2]), "remap_failed": bool(rows[3])}
    sram = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    if ask(pynvml.nvmlDeviceGetSramEccErrorStatus, handle, byref(sram)) is not None:
        yield {"sram_exceeded": bool(sram.bThresholdExceeded)}
    yield {"temperature": _temperature(handle)}
    yield {"margin": ask(pynvml.nvmlDeviceGetMarginTemperature, handle)}
    yield {"slowdown": _slowdown(handle)}
    yield {
        "pcie_generation": ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "pcie_width": ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "pcie_replays": ask(pynvml.nvmlDeviceGetPcieReplayCounter, handle),
    }
    states = [ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(_LINKS)]
    known = [state for state in states if state is not None]
    if known:
        yield {"links": len(known), "links_up": sum(known)}
    yield {"fabric": _fabric(handle)}
    mode = ask(pynvml.nvmlDeviceGetMigMode, handle)
    yield {"mig": None if mode is None else mode[0] == pynvml.NVML_FEATURE_ENABLED}
    yield _memory_used(handle)
    graphics = ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle)
    yield {"graphics": None if graphics is None else len(graphics)}
    processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if processes is not None:
        yield {"processes": [[p.pid, p.usedGpuMemory or 0] for p in processes]}
        yield {"owners": [[p.pid, _owner(p.pid)] for p in processes[:_MOST_OWNERS]]}


def _memory_used(handle: Any) -> dict[str, Any]:
    """What processes and the driver use. Nothing where the memory is the machine's too (GH200): Linux has its pages
    there."""
    if ask(pynvml.nvmlDeviceGetNumaNodeId, handle) is not None:
        return {}
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is not None:
        return {"memory_used": memory.used}
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    # drivers before 510, which count their own overhead as used
    return {"memory_used_with_overhead": None if memory is None else memory.used}


def without_rest(gpu: dict[str, Any], rest: dict[str, int]) -> None:
    """``memory_used`` of a driver that counts its own overhead, too: what is used beyond the least that was
    seen without a process (``rest``, by UUID). Until that was seen it is not known."""
    used, uuid = gpu.pop("memory_used_with_overhead", None), gpu.get("uuid")
    if used is None or uuid is None:
        return
    if gpu.get("processes") == []:
        rest[uuid] = min(used, rest.get(uuid, used))
    if uuid in rest:
        gpu["memory_used"] = max(0, used - rest[uuid])


_owners: dict[int, str] = {}
"""Of processes seen before: they are asked for once."""


def _owner(pid: int) -> str:
    if pid not in _owners:
        if len(_owners) >= 1024:
            _owners.clear()
        _owners[pid] = who(pid)
    return _owners[pid]


def _recovery(handle: Any) -> str | None:
    """The driver's own word on what the GPU needs. The field has a result of its own: unread it would be "none"."""
    fields = ask(pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if fields is None or fields[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    value = int(fields[0].value.uiVal)
    return _RECOVERY.get(value, str(value))


def _temperature(handle: Any) -> int | None:
    found = ask(pynvml.nvmlDeviceGetTemperatureV, handle, pynvml.NVML_TEMPERATURE_GPU)
    if found is None:  # drivers before 555
        found = ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    return None if found is None else int(found)


def _slowdown(handle: Any) -> list[str] | None:
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:  # drivers before 535
        reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if reasons is None:
        return None
    names = {
        pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
        pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal",
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power_brake",
    }
    return [name for bit, name in names.items() if reasons & bit]


def _fabric(handle: Any) -> str | None:
    info = pynvml.c_nvmlGpuFabricInfo_t()
    if ask(pynvml.nvmlDeviceGetGpuFabricInfo, handle, byref(info)) is None:
        return None
    state = _FABRIC.get(info.state & 0xFF)  # a byte in nvml.h, though nvidia-ml-py reads four
    return "failed" if state == "completed" and info.status != pynvml.NVML_SUCCESS else state


class Nvidia(Accelerator):
    """The GPUs, with the events they are registered for."""

    name = "nvidia"
    variable = "CUDA_VISIBLE_DEVICES"

    def open(self) -> None:
        try:
            pynvml.nvmlInit()
            self.driver = str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            kind = AbsentError if error.value in _ABSENT else ProblemError
            raise kind(f"NVML: {error}") from error
        self._known: dict[str, dict[str, Any]] = {}
        """UUID to what identifies the GPU, as far as it was ever read."""
        self._whole: set[str] = set()
        """Those of which that is all."""
        self._places: dict[int, str] = {}
        """Index to UUID, as last read: the driver numbers anew when a GPU is gone."""
        self._rest: dict[str, int] = {}
        self._set = self._new_set()
        self._registered: set[str] = set()
        self.received = 0
        """Events since it was set to 0."""
        self.failed = 0
        """Waits for events in a row that the driver did not make, as when a GPU of the set is lost."""

    @property
    def due(self) -> bool:
        """The driver could not wait for the first time: a look says which GPU it is. But not again and again."""
        return self.failed == 1

    def devices(self) -> list[dict[str, Any]]:
        found = []
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
                found.append({"uuid": uuid, "index": index, "name": name})
        except pynvml.NVMLError as error:
            raise ProblemError(f"NVML: {error}") from error
        return found

    def look(self) -> list[dict[str, Any]]:
        try:
            found = self._look()
        except pynvml.NVMLError as error:
            raise ProblemError(f"NVML: {error}") from error
        self.received, self.failed = 0, min(self.failed, 1)  # one more try, which asks for no look
        return found

    def _look(self) -> list[dict[str, Any]]:
        """Every GPU; one that cannot be read any more keeps the identity it had."""
        handles: dict[int, Any] = {}
        errors: dict[int, str] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handles[index] = ask(pynvml.nvmlDeviceGetHandleByIndex, index)
            except GpuError as error:
                handles[index], errors[index] = None, str(error)
            if index not in self._places:  # without persistence mode it was brought up only now
                self.progress()
        named = {index: _uuid(handle) for index, handle in handles.items()}
        named |= self._guessed(named)
        found = []
        for index, handle in handles.items():
            uuid = named[index]
            known = self._known.setdefault(uuid, {}) if uuid else {}
            if handle is None:
                gpu: dict[str, Any] = {"index": index} | ({"error": errors[index]} if index in errors else {})
            else:
                gpu = read(handle, index, known if uuid in self._whole else None)
                without_rest(gpu, self._rest)
                known.update({field: gpu[field] for field in _FIXED if gpu.get(field)})
                if uuid not in self._whole:
                    self.progress()
                if "error" not in gpu:
                    self._whole.add(uuid)
                if uuid and uuid not in self._registered:
                    self._register(handle, uuid)
            if uuid:
                found.append(known | gpu | {"uuid": uuid, "driver": self.driver})  # it may have been asked twice
        self._places = {index: uuid for index, uuid in named.items() if uuid}
        return found

    def _guessed(self, named: Mapping[int, str]) -> dict[int, str]:
        """Of GPUs that do not say who they are: who was there before, unless the driver has numbered anew. Then nobody
        knows, and those that are not found are missing."""
        others = {uuid for uuid in named.values() if uuid}
        moved = any(uuid and self._places.get(index, uuid) != uuid for index, uuid in named.items())
        gone = [uuid for uuid in self._known if uuid not in others]
        silent = [index for index, uuid in named.items() if not uuid]
        if moved or len(named) < len(self._places):
            return {silent[0]: gone[0]} if len(silent) == len(gone) == 1 else {}
        return {i: self._places[i] for i in silent if i in self._places and self._places[i] not in others}

    def _new_set(self) -> Any:
        """None where the driver has no events to wait for (virtual GPUs): the kernel's log and the readings remain."""
        try:
            return ask(pynvml.nvmlEventSetCreate)
        except GpuError:
            return None

    def _register(self, handle: Any, uuid: str) -> None:
        if self._set is None:
            return
        try:
            ask(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
        except GpuError:
            return  # a lost one: its reading says so, and the next look tries again
        self._registered.add(uuid)

    def events(self, seconds: float) -> list[Event]:
        """Wait for an Xid for at most so long; those of the next moment are folded in. Beyond ``MOST_EVENTS`` it
        reads no more. Returns at once when the driver cannot wait (``failed``): a look says why."""
        until = time.monotonic() + seconds
        folded: dict[tuple[str, int], Event] = {}
        if self.received >= MOST_EVENTS or self._set is None or self.failed > 1:
            time.sleep(seconds)
        while (left := until - time.monotonic()) > 0:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, min(_WAIT, max(1, int(left * 1000))))
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_TIMEOUT:
                    self.failed = 0
                    continue
                self.failed += 1
                self._drop()
                break
            self.failed = 0
            uuid = self._name(event.device)
            one = folded.setdefault((uuid, event.eventData), Event(uuid, int(event.eventData), 0.0, 0))
            one.at, one.count = time.time(), one.count + 1
            self.received += 1
            if self.received == MOST_EVENTS:
                self._drop()
                break
            if len(folded) == 1 and one.count == 1:
                until = min(until, time.monotonic() + FOLD)
        return list(folded.values())

    def _drop(self) -> None:
        """Events that wait to be read. The next look registers anew."""
        if self._set is not None:
            pynvml.nvmlEventSetFree(self._set)
        self._set = self._new_set()
        self._registered.clear()

    def _name(self, handle: Any) -> str:
        """UUID of an event's device; of a lost one, by asking which of the known it may be: none but it is lost."""
        if uuid := _uuid(handle):
            return uuid
        lost = [known["uuid"] for known in self._look() if known.get("error")]
        return str(lost[0]) if len(lost) == 1 else ""


def _uuid(handle: Any) -> str:
    """Empty for a GPU that does not say."""
    if handle is None:
        return ""
    try:
        return str(ask(pynvml.nvmlDeviceGetUUID, handle) or "")
    except GpuError:
        return ""

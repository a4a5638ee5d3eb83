"""Accelerators beyond NVIDIA: which plug-ins this machine has, and the agent's side of each.

A plug-in's own code runs in its probe's process alone: here is only what it writes, and each line is checked before
anything of it is believed. Must never let a plug-in cost more than its own devices' readings (docs/accelerators.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from nodeagent.hardware.judging.rules import Rule
from nodeagent.hardware.probes.process import Probe, ProbeLimits, packages, parsing, reader_command
from nodeagent.hardware.readings import AcceleratorReading, DeviceEvent, GpuReading
from nodeagent.model.node import Gpu

GROUP = "nodeagent.accelerators"
"""The entry point group."""
NVIDIA = "nodeagent.hardware.probes.nvml:Nvidia"
"""NVIDIA's plug-in; its readings are judged by the rules of ``judging``, beside those that all vendors share."""
PACE = 5.0
"""Seconds between two looks: vendors' tools take seconds of CPU time."""
DEADLINE = 15.0
"""Seconds beyond the pace after which a plug-in is late."""
MOST_LINES = 200
"""Lines within the two."""
MOST_DEVICES = 64
MOST_RULES = 64
MOST_EVENTS = 200
"""Of one line."""
MOST_PROCESSES = 1024
LONGEST = 256
"""Characters of any text, and the length of any list but the processes'."""
LARGEST = 1 << 62
_T = TypeVar("_T", GpuReading, Rule)
_NAME = re.compile(r"[a-z][a-z0-9]{1,31}")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{2,63}")
_VISIBLE = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plug-in, as it is installed."""

    name: str
    target: str
    """``module:class``."""
    signs: tuple[Path, ...] = ()
    """Without any of these there is no such driver; none: only the plug-in knows."""
    packaged: bool = False
    """It comes with nodeagent."""

    @property
    def present(self) -> bool:
        """It may have a driver on this machine."""
        return not self.signs or any(sign.exists() for sign in self.signs)


PACKAGED = (
    Plugin("ascend", "nodeagent.hardware.probes.ascend:Ascend", (Path("/dev/davinci_manager"),), packaged=True),
    Plugin("amd", "nodeagent.hardware.probes.amd:Amd", (Path("/dev/kfd"),), packaged=True),
)
"""Those that come with nodeagent."""
RESERVED = frozenset({
    "accelerator", "check", "clocks", "cpu", "disk", "fabric", "gpu", "host", "kernel", "memory", "mig", "nvidia",
    "nvlink", "nvml", "pcie", "port", "probe", "xid",
})  # fmt: skip
"""Names that would make a plug-in's rules or devices look like others."""


def installed() -> tuple[Plugin, ...]:
    """All plug-ins beyond NVIDIA's: those of this package, and others'. One with a name that is taken, or that cannot
    be one, is left out. Imports none of them."""
    found = {plugin.name: plugin for plugin in PACKAGED}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        if _NAME.fullmatch(point.name) and point.name not in RESERVED:
            found.setdefault(point.name, Plugin(point.name, point.value))
    return tuple(found.values())


class Vendor:
    """One plug-in at work: what its probe last wrote, as far as it can be believed."""

    def __init__(
        self,
        plugin: Plugin,
        environ: Mapping[str, str],
        python: str,
        changed: Callable[[], None],
        expected: Sequence[Gpu] = (),
        offered: bool = False,
    ) -> None:
        """``expected``: the devices that were seen once; ``offered``: in this boot, so that they are there until the
        plug-in says otherwise."""
        self.name, self.present = plugin.name, plugin.present
        self.rules: Mapping[str, Rule] = {}
        """By id, once the plug-in has declared them."""
        self.expected = {gpu.uuid: gpu for gpu in expected}
        self.devices: tuple[GpuReading, ...] | None = None
        """As last read, whether or not the plug-in still answers; None: it has not answered since this start."""
        self._remembered = tuple(map(_remembered, expected)) if offered else ()
        self._variable = ""
        self._looks: tuple[tuple[str, str, bool, str], ...] = ()
        self._events: list[DeviceEvent] = []
        self._changed = changed
        self.probe = Probe(
            plugin.name, lambda: reader_command(python, plugin.target, PACE, plugin.packaged),
            {**environ, "PYTHONPATH": _path(plugin, environ)}, ProbeLimits(PACE, DEADLINE, most_lines=MOST_LINES),
            self.receive, changed, optional=lambda: not self.expected,
        )  # fmt: skip

    @property
    def problem(self) -> str:
        """Why nothing is known of its devices now; empty: it answers, or has not had the time to."""
        reading = self.probe.reading
        late = f"{self.name}: {reading.missed} deadlines without an answer" if reading.missed else ""
        return late or (f"{self.name}: {reading.problem}" if reading.problem else "")

    @property
    def last(self) -> tuple[GpuReading, ...]:
        """Its devices as last read, or as they are remembered of this boot."""
        return self._remembered if self.devices is None else self.devices

    def reading(self) -> AcceleratorReading:
        """All that is known of it now."""
        return AcceleratorReading(
            self.name, None if self.problem else self.devices, tuple(self.expected), self.problem, self._looks
        )

    def take_events(self) -> tuple[DeviceEvent, ...]:
        """Those that came since the last call."""
        taken, self._events = tuple(self._events), []
        return taken

    def forget(self, uuid: str) -> None:
        """A device that is not there is not expected any more."""
        if uuid not in {device.uuid for device in self.devices or ()}:
            self.expected.pop(uuid, None)

    def receive(self, line: dict[str, Any]) -> None:
        """Take in a line. Raises NotUnderstoodError, and takes nothing, if it is none."""
        variable, rules, devices, looks = self._variable, self.rules, self.devices, self._looks
        with parsing():
            if "accelerator" in line:
                variable, rules = self._declared(line["accelerator"])
            if "gpus" in line:
                devices, looks = self._read(line["gpus"], variable, rules)
            offers = {device.uuid: offered(device) for device in devices or ()}
            known = self.expected.keys() | offers.keys()
            events = [self._event(event, rules, known) for event in _some(line.get("events", []), MOST_EVENTS)]
        fresh = offers.keys() - self.expected.keys()
        self._variable, self.rules, self.devices, self._looks = variable, rules, devices, looks
        self.expected |= offers
        self._events = (self._events + events)[-MOST_EVENTS:]
        if fresh or events or "gpus" in line:
            self._changed()

    def _declared(self, what: dict[str, Any]) -> tuple[str, dict[str, Rule]]:
        if what["name"] != self.name:
            raise ValueError(f"it is named {_short(what['name'])}")
        variable = what["variable"]
        if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
            raise ValueError(f"{_short(variable)} is no environment variable")
        rules = {}
        for row in _some(what["rules"], MOST_RULES):
            rule = _bounded(_rule_type().validate_python(row))
            if not re.fullmatch(rf"{self.name}\.[a-z0-9_.]{{1,60}}", rule.id):
                raise ValueError(f"{_short(rule.id)} is no id of a rule of {self.name}")
            rules[rule.id] = rule
        return variable, rules

    def _read(
        self, found: object, variable: str, rules: Mapping[str, Rule]
    ) -> tuple[tuple[GpuReading, ...], tuple[tuple[str, str, bool, str], ...]]:
        devices, looks = [], []
        for one in _some(found, MOST_DEVICES):
            device = _bounded(_device_type().validate_python({**one, "variable": variable}))
            if not _ID.fullmatch(device.uuid) or not device.uuid.startswith(f"{self.name}-") or device.index < 0:
                raise ValueError(f"{_short(device.uuid)} is no id of a device of {self.name}")
            if device.visible and not _VISIBLE.fullmatch(device.visible):
                raise ValueError(f"{_short(device.visible)} is no value for {variable}")
            devices.append(device)
            for rule, fires, raw in _some(one.get("looks", []), MOST_RULES):
                if rule not in rules or not isinstance(fires, bool):
                    raise ValueError(f"there is no rule {_short(rule)}")
                looks.append((str(rule), device.uuid, fires, str(raw)[:LONGEST]))
        if len({device.uuid for device in devices}) < len(devices):
            raise ValueError("two devices have the same id")
        return tuple(devices), tuple(looks)

    def _event(self, what: object, rules: Mapping[str, Rule], known: set[str]) -> DeviceEvent:
        """The time is the agent's own: what is reported happened just now."""
        device, rule, at, count, raw = _some(what, 5)
        if rule not in rules or device not in known:
            raise ValueError(f"there is no rule {_short(rule)}, or no device {_short(device)}")
        if not isinstance(at, int | float) or not isinstance(count, int) or not 0 < count < LARGEST:
            raise ValueError("an event without time and count")
        return DeviceEvent("reported", float(at), str(device), raw=str(raw)[:LONGEST], count=count, rule=str(rule))


def _path(plugin: Plugin, environ: Mapping[str, str]) -> str:
    """Where its process finds nodeagent, and a plug-in of others also what the agent itself finds."""
    own = "" if plugin.packaged else environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (packages(), own)))


def offered(device: GpuReading) -> Gpu:
    """The device as a job may be given it."""
    return Gpu(
        uuid=device.uuid, index=device.index, name=device.name, variable=device.variable, visible=device.visible,
        numa=device.numa,
    )  # fmt: skip


def _remembered(gpu: Gpu) -> GpuReading:
    return GpuReading(
        gpu.uuid, gpu.index, numa=gpu.numa, name=gpu.name, variable=gpu.variable, visible=gpu.visible
    )  # fmt: skip


@cache
def _device_type() -> TypeAdapter[GpuReading]:
    return TypeAdapter(GpuReading)


@cache
def _rule_type() -> TypeAdapter[Rule]:
    return TypeAdapter(Rule)


def _some(found: object, most: int) -> list[Any]:
    """A list of at most so many. Raises ValueError."""
    if not isinstance(found, list) or len(found) > most:
        raise ValueError(f"not a list of at most {most}")
    return found


def _bounded(one: _T) -> _T:
    """It, if none of its values is beyond all measure. Raises ValueError."""
    for field in fields(one):
        _check(getattr(one, field.name), field.name)
    return one


def _check(value: object, name: str) -> None:
    if isinstance(value, tuple | frozenset):
        if len(value) > (MOST_PROCESSES if name == "processes" else LONGEST):
            raise ValueError(f"{name} has {len(value)} entries")
        for each in value:
            _check(each, name)
    if isinstance(value, str) and len(value) > LONGEST:
        raise ValueError(f"{name} has {len(value)} characters")
    if isinstance(value, int | float) and not abs(value) < LARGEST:  # NaN is not, either
        raise ValueError(f"{name} is beyond all measure")


def _short(value: object) -> str:
    return repr(value)[:60]

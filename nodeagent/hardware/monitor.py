"""The agent's health monitor: runs the probes, feeds the judge, keeps its memory on disk, and has the verdicts ready.

Its file holds what the judge remembers: a restart of the agent, or of the node, must not forget a broken GPU. What the
machine should have is ``expected.py``'s business.

Must never hold up the agent: it waits for no probe, and a disk that is slow to take the memory delays only itself. What
is to be done about a verdict is ``plan/``'s business.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from pathlib import Path
from types import UnionType
from typing import Any

import structlog

from nodeagent.hardware.expected import Expected, Installed
from nodeagent.hardware.judging.eventrules import waits_until
from nodeagent.hardware.judging.judge import (
    JudgeMemory,
    JudgePolicy,
    VerdictKey,
    acknowledged,
    escalated,
    forgotten,
    judge,
    published,
    repaired,
    verified,
)
from nodeagent.hardware.judging.rules import (
    ACCELERATOR_MISSING,
    ACCELERATOR_SILENT,
    MISSING,
    NVML_BROKEN,
    OF_ONE_START,
    PORT,
    REPLAY_WINDOW,
    UNFIT,
    UNLISTED,
    Rule,
    check_rule,
)
from nodeagent.hardware.plugins import NVIDIA, Plugin, Vendor
from nodeagent.hardware.probes.process import (
    ROOT,
    Probe,
    ProbeLimits,
    packages,
    parsing,
    reader_command,
)
from nodeagent.hardware.readings import DeviceEvent, GpuReading, HostReading, ProbeReading, Readings
from nodeagent.hardware.saved import FILE, SavedHealth, load_memory, save_memory
from nodeagent.model.health import Action, Verdict
from nodeagent.model.node import Gpu
from nodeagent.osutil.clock import Clock
from nodeagent.osutil.commands import Checks, SiteCheck
from nodeagent.osutil.linux import keep_damaged

NVML_PACE = 2.0
HOST_PACE = 5.0
"""Seconds between two readings of each probe."""
TICK = 5.0
"""Seconds between two judgements when nothing new comes: probations end."""
VERIFY = 10.0
"""Seconds that a repaired device has to be read without a fault before its probation begins."""
NAMED = 3
"""GPUs that are named of those that no driver lists."""
KERNEL = "kernel"
"""Of the two sources of Xids the one that anybody could try to write to."""


@dataclass(frozen=True, slots=True)
class Machine(Installed):
    """What is there to look at, and where; other paths in tests."""

    boot: str
    gpus: bool
    """There is a driver to ask."""
    folders: Sequence[str] = ()
    interfaces: Sequence[str] = ()
    proc: str = "/proc"
    sysfs: str = "/sys"
    kmsg: str = "/dev/kmsg"
    units: str = "/lib/systemd/system"
    etc: str = "/etc"
    python: str = sys.executable
    plugins: Sequence[Plugin] = ()
    """Of accelerators beyond NVIDIA: those without a driver here are asked if they had devices in an earlier boot."""
    checks: Sequence[SiteCheck] = ()
    """The site's own."""


class OwnWork:
    """Which of the machine's processes are this node's own: none, here."""

    @property
    def working(self) -> bool:
        """Some run, and nobody can tell their pids from others'."""
        return False

    def among(self, pids: Collection[int]) -> frozenset[int]:
        """Those of these that are workers' or checks'."""
        return frozenset()


class Monitor:
    """``verdicts`` and ``published`` are always there; ``changed`` is called when ``published`` differs, or a GPU is
    read for the first time."""

    def __init__(
        self,
        machine: Machine,
        state: Path,
        environ: Mapping[str, str],
        clock: Clock,
        *,
        policy: JudgePolicy,
        changed: Callable[[], None],
        own: OwnWork,
        checked: bool = False,
    ) -> None:
        """``checked``: a device that was repaired is verified by work before its probation begins."""
        self._machine, self._file, self._clock, self._policy = machine, state / FILE, clock, policy
        self._changed, self._own, self._checked = changed, own, checked
        self._log = structlog.get_logger("health")
        saved = self._read()
        self._memory = saved.memory
        self._expected = Expected.restored(machine, saved.seen, saved.boot == machine.boot)
        self._record = saved.record if saved.boot == machine.boot else -1 if saved.boot else None
        """The newest record of the kernel's log that this agent, or the one before it, has seen: with another boot
        all are new. Where there was no agent, nobody knows what became of what is older: only the driver's readings
        show it."""
        self.published = published(self._memory.verdicts)
        """The verdicts as other nodes receive them."""
        self._answered = False
        """The driver has named its GPUs since this start."""
        self._xid_counts: Counter[tuple[str, str, int]] = Counter()
        self._saved = SavedHealth()
        self._unwritten = ""
        """Why the memory could not be written the last time; empty: it was."""
        self._gpus: tuple[GpuReading, ...] | None = None
        self._host: HostReading | None = None
        self._events: list[DeviceEvent] = []
        self._before: Readings | None = None
        """Of a while ago: what counters are compared with."""
        self._before_at = 0.0
        self._fine_since: dict[str, float] = {}
        self._our_pids: frozenset[int] = frozenset()
        self._pids_for: tuple[GpuReading, ...] = ()
        """The readings that they were looked for at."""
        self._paused = self._stale = False
        """The driver is left alone; and has not answered since."""
        self.waiting: frozenset[str] = frozenset()
        """With ``checked``: devices that were repaired, read without a fault for a while, and wait for ``passed``."""
        self._due, self._unsaved = asyncio.Event(), asyncio.Event()
        path = {"PYTHONPATH": str(ROOT)}
        bare = {"PATH": environ.get("PATH", "")} | path
        self._host_probe = Probe(
            "host", self._host_command, bare, ProbeLimits(HOST_PACE), self.take_host, self._due.set
        )
        self._gpu_probe = Probe(
            "nvml", lambda: reader_command(machine.python, NVIDIA, NVML_PACE), {**environ, "PYTHONPATH": packages()},
            ProbeLimits(NVML_PACE), self.take_gpus, self._due.set, optional=lambda: not self._wants_a_driver,
        )  # fmt: skip
        self._probes: tuple[Probe, ...] = (
            (self._gpu_probe, self._host_probe) if self._wants_a_driver else (self._host_probe,)
        )
        self._vendors = [
            Vendor(
                plugin,
                environ,
                machine.python,
                self._due.set,
                expected=saved.devices.get(plugin.name, ()),
                offered=saved.boot == machine.boot,
            )
            for plugin in machine.plugins
            if plugin.present or saved.devices.get(plugin.name)
        ]  # fmt: skip
        self._checks = Checks(machine.checks, environ, self._due.set)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return self._memory.verdicts

    @property
    def gpus(self) -> tuple[GpuReading, ...] | None:
        """As last read; None while the driver does not answer."""
        return None if self._stale or self._gpu_probe.reading.missed else self._gpus

    @property
    def _wants_a_driver(self) -> bool:
        """One that did not come up with this boot, where there are or were GPUs, is asked all the same."""
        return self._machine.gpus or bool(self._expected.gpus or self._expected.undriven)

    @property
    def asks_the_driver(self) -> bool:
        return self._gpu_probe in self._probes and not self._gpu_probe.absent

    def probe(self, name: str) -> Probe:
        """The probe of that name (``nvml`` or ``host``). Raises KeyError."""
        return {"nvml": self._gpu_probe, "host": self._host_probe}[name]

    @property
    def ports(self) -> tuple[str, ...]:
        """Network ports that are expected to be up."""
        return self._expected.ports

    @property
    def last_gpus(self) -> tuple[GpuReading, ...]:
        """As last read, whether the driver still answers or not."""
        return (self._gpus or ()) + tuple(device for vendor in self._vendors for device in vendor.last)

    @property
    def devices(self) -> tuple[GpuReading, ...]:
        """Those of every vendor that answers, as last read."""
        answered = (vendor.reading().devices or () for vendor in self._vendors)
        return (self.gpus or ()) + tuple(device for devices in answered for device in devices)

    @property
    def declared(self) -> Mapping[str, Rule]:
        """The rules of plug-ins and of the site's checks (at their worst), by id."""
        checks = [check_rule(check.name, UNFIT) for check in self._machine.checks]
        return {rule.id: rule for rule in (*checks, *(r for vendor in self._vendors for r in vendor.rules.values()))}

    @property
    def xids(self) -> Mapping[tuple[str, int], int]:
        """How many of each Xid came since this agent's start, by GPU. Both sources may report the same one."""
        counts: dict[tuple[str, int], int] = {}
        for (_, device, code), count in self._xid_counts.items():
            counts[device, code] = max(count, counts.get((device, code), 0))
        return counts

    def acknowledge(self, device: str, rule: str | None) -> None:
        """An operator's word that a device (empty: the node) is repaired: its probation begins."""
        memory, expected = acknowledged(self._memory, device, rule, self._clock.wall(), self._policy), self._expected
        meant = {v.rule for v in memory.verdicts if v.device == device and rule in (None, v.rule)}
        if MISSING.id in meant and self.gpus is not None and device not in {gpu.uuid for gpu in self.gpus}:
            expected, memory = expected.without_gpu(device), forgotten(memory, {device})
        if UNLISTED.id in meant:
            expected, memory = expected.without_slots({device}), forgotten(memory, {device})
        if ACCELERATOR_MISSING.id in meant:
            for vendor in self._vendors:
                vendor.forget(device)
            memory = forgotten(memory, {device} - {uuid for vendor in self._vendors for uuid in vendor.expected})
        for vendor in self._vendors if rule in (None, ACCELERATOR_SILENT.id) else ():
            if device in vendor.expected and not vendor.present:
                vendor.forget(device)
                memory = forgotten(memory, {device})
        if not device and rule in (None, NVML_BROKEN.id) and self._gpu_reading.problem:
            if not self._machine.gpus:
                memory, expected, self._gpus = forgotten(memory, expected.gpus), expected.without_driver(), None
                self._gpu_probe.reading = ProbeReading(self._gpu_probe.reading.name)
            elif not self._gpu_probe.reading.problem:  # else the driver, which is there, may answer again
                expected = expected.without_slots(expected.undriven)
        if not device and rule in (None, PORT.id) and self._host is not None:
            expected = expected.without_ports(port for port, _ in self._host.ports_down)
        self._expected = expected
        self._take(memory)
        self._due.set()

    def repaired(self, devices: Collection[str], action: Action) -> None:
        """This repair was done to these devices: what it heals waits to be verified."""
        memory = self._memory
        for device in devices:
            memory = repaired(memory, device, action, self._clock.wall())
            self._fine_since.pop(device, None)
        self._take(memory)
        self._due.set()

    def passed(self, devices: Collection[str]) -> None:
        """They were verified: probation begins."""
        self._take(verified(self._memory, devices, self._clock.wall(), self._policy))
        self._due.set()

    def escalate(self, keys: Collection[VerdictKey], why: str) -> None:
        """The repair of these verdicts did not help: the next heavier one is asked for."""
        self._take(escalated(self._memory, keys, self._clock.wall(), why))
        self._due.set()

    @property
    def expected(self) -> frozenset[str]:
        """The node's devices, with those that are missing now."""
        return frozenset({*self._expected.gpus, *(uuid for vendor in self._vendors for uuid in vendor.expected)})

    @property
    def unlisted(self) -> tuple[Gpu, ...]:
        """Those of them that their drivers do not list now, whose number is not known; but for kinds of which the
        config says that nobody acts on a missing one."""
        listed = {gpu.uuid for gpu in self.last_gpus}
        ignored = self._policy.off | self._policy.dry_run
        vendors = self._vendors if ACCELERATOR_MISSING.id not in ignored else ()
        others = (gpu for vendor in vendors for gpu in vendor.expected.values() if gpu.uuid not in listed)
        return (*self._expected.unlisted(listed, ignored), *others)

    @property
    def processes(self) -> Mapping[str, Sequence[int]] | None:
        """Pids on each GPU, of those that the driver lists them for; None while it does not answer."""
        if self.gpus is None and (self.asks_the_driver or not self._vendors):
            return None
        return {g.uuid: [pid for pid, _ in g.processes] for g in self.devices if g.processes is not None}

    @property
    def strangers(self) -> frozenset[int]:
        """Those of them that were none of this node's workers when they were first judged."""
        return frozenset(pid for pids in (self.processes or {}).values() for pid in pids) - self._our_pids

    async def pause(self) -> None:
        """Leave the driver alone until ``resume``."""
        self._paused = self._stale = True
        await self._gpu_probe.pause()

    def resume(self) -> None:
        """Ask the driver again; until it has answered nothing is known."""
        self._paused = False
        self._gpu_probe.resume()

    def inject(self, event: DeviceEvent) -> None:
        """A drill: judge an event that nobody wrote."""
        self._events.append(event)
        self._due.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for probe in (*self._probes, *(vendor.probe for vendor in self._vendors)):
                tasks.create_task(probe.run())
            for check in self._machine.checks:
                tasks.create_task(self._checks.run(check))
            tasks.create_task(self._save_on())
            while True:
                self._due.clear()
                self.judge()
                self._unsaved.set()
                wait = TICK
                waiting = waits_until(self._memory.past, self._clock.wall())
                if waiting is not None:
                    wait = max(0.01, min(wait, waiting - self._clock.wall()))
                try:
                    async with asyncio.timeout(wait):
                        await self._due.wait()
                except TimeoutError:
                    continue

    async def _save_on(self) -> None:
        """Apart from the judging, which a disk that hangs must not hold up: what is newest then is written."""
        while True:
            await self._unsaved.wait()
            self._unsaved.clear()
            await self.save()

    def judge(self) -> None:
        """Judge what is known now."""
        now, at = self._clock.now(), self._clock.wall()
        events = self._ready_events()
        readings = Readings(
            boot=self._machine.boot, gpus=self.gpus, expected=self._expected.gpus, events=events, host=self._host,
            slots=tuple(self._expected.slots),
            probes=tuple(
                self._gpu_reading if probe is self._gpu_probe else probe.reading
                for probe in self._probes if not probe.absent
            ),
            working=self._own.working,
            accelerators=tuple(vendor.reading() for vendor in self._vendors if not vendor.probe.absent),
            checks=self._checks.readings,
        )  # fmt: skip
        elapsed = now - self._before_at if self._before is not None else 0.0
        self._look_for_ours()
        policy = replace(self._policy, declared=self.declared)
        memory = judge(self._memory, readings, self._before, at, elapsed, self._our_pids, policy)
        if readings.gpus is not None and (self._before is None or elapsed >= REPLAY_WINDOW):
            self._before, self._before_at = readings, now
        self._take(self._verify(memory, now, at))

    @property
    def _gpu_reading(self) -> ProbeReading:
        """Whether the driver answers. One that lists no GPU of those that are installed is as good as none."""
        reading, slots = self._gpu_probe.reading, self._expected.undriven
        why = reading.problem or ("the driver lists none" if self.gpus is not None else "")
        if not slots or not why or reading.missed:
            return reading
        named = ", ".join(slots[:NAMED]) + (f" and {len(slots) - NAMED} more" if len(slots) > NAMED else "")
        return replace(reading, problem=f"NVIDIA GPUs are installed ({named}), but: {why}")

    def _look_for_ours(self) -> None:
        """Which processes are this node's, once for each reading that lists any: with hundreds of them a look takes
        milliseconds, and each event of a storm is judged."""
        listing = tuple(device for device in self.devices if device.processes)
        known = len(listing) == len(self._pids_for) and all(map(is_, listing, self._pids_for))
        if listing and not known:
            listed = {pid for device in listing for pid, _ in device.processes or ()}
            self._our_pids, self._pids_for = self._own.among(listed), listing

    def _ready_events(self) -> tuple[DeviceEvent, ...]:
        """Those whose GPU is known by its UUID, as far as it ever will be; without those of other nodes' GPUs."""
        found = [event for vendor in self._vendors for event in vendor.take_events()]
        waiting = []
        for event in self._events:
            device = self._expected.named(event.device)
            if device and device not in self._expected.gpus and self.asks_the_driver and self._unread():
                waiting.append(event)
            elif not device or self._machine.has(device):
                found.append(replace(event, device=device))
        self._events = waiting
        return tuple(found)

    def _unread(self) -> bool:
        """The driver may still answer for the first time."""
        reading = self._gpu_probe.reading
        return not self._answered and not reading.missed and not reading.problem

    def _verify(self, memory: JudgeMemory, now: float, at: float) -> JudgeMemory:
        """What was repaired has to be read without a fault for a while."""
        waiting = {v.device for v in memory.verdicts if v.stage == "repaired"}
        sick = {v.device for v in memory.verdicts if v.stage == "active" and v.severity in ("fatal", "unknown")}
        readable = {g.uuid for g in self.devices if not g.error} | {""}
        fine = (waiting - sick) & readable
        self._fine_since = {device: self._fine_since.get(device, now) for device in fine}
        done = [device for device, since in self._fine_since.items() if now - since >= VERIFY]
        if self._checked:
            self.waiting, done = frozenset(done), []
        return verified(memory, done, at, self._policy)

    def _take(self, memory: JudgeMemory) -> None:
        before = {(v.rule, v.device): v for v in self._memory.verdicts}
        after = {(v.rule, v.device): v for v in memory.verdicts}
        for key in before.keys() | after.keys():
            old, new = before.get(key), after.get(key)
            if new is None:
                self._log.info("verdict over", rule=key[0], device=key[1])
            elif old is None or (old.stage, old.action) != (new.stage, new.action):
                self._log.warning(
                    "verdict", rule=new.rule, device=new.device, severity=new.severity, stage=new.stage,
                    action=new.action, what=new.text, raw=new.raw,
                )  # fmt: skip
        self._memory = memory
        news = published(memory.verdicts)
        if news != self.published:
            self.published = news
            self._changed()

    def take_event(self, event: DeviceEvent, source: str) -> None:
        """An event of one of the two sources that report Xids."""
        device = self._expected.named(event.device)
        if event.kind == "xid" and self._machine.has(device):
            self._xid_counts[source, device, event.code] += event.count
        self._events.append(replace(event, logged=source == KERNEL))

    def take_gpus(self, line: dict[str, Any]) -> None:
        """Take in one line of the probe of the driver. Raises NotUnderstoodError, and takes nothing, if it is none."""
        with parsing():
            every = tuple(_gpu(fields) for fields in line.get("gpus", ()))
            events = [
                _event({
                    "kind": "xid", "at": at, "device": uuid, "code": code, "count": count,
                    "raw": f"NVML event: Xid {code}",
                })
                for uuid, code, at, count, _ in line.get("events", ())
            ]  # fmt: skip
        if "gpus" in line:
            self._stale = self._paused
            self._answered = True
            read = {gpu.uuid for gpu in self._gpus or ()}
            gone, self._expected = self._expected.replaced(every), self._expected.read(every)
            self._gpus = self._expected.own(every)
            if gone:
                self._take(forgotten(self._memory, gone))
            if any(gpu.uuid not in read for gpu in self._gpus):
                self._changed()
        for event in events:
            self.take_event(event, "nvml")
        self._due.set()

    def take_host(self, line: dict[str, Any]) -> None:
        """Take in one line of the probe of the machine. Raises NotUnderstoodError, and takes nothing, if it is none."""
        expected, host = self._expected, self._host
        with parsing():
            if "host" in line:
                fields = line["host"]
                expected = expected.read_ports(fields["ports"], [port for port, _ in fields["ports_down"]])
                host = _host(fields, expected.accepted)
            events = [_event(fields) for fields in line.get("events", ())]
        self._expected, self._host = expected, host
        if line.get("record") is not None:
            self._record = line["record"]
        for event in events:
            self.take_event(event, KERNEL)
        if "events" in line:
            self._due.set()

    def _host_command(self) -> tuple[str, ...]:
        machine = self._machine
        given = {
            "proc": machine.proc, "sys": machine.sysfs, "kmsg": machine.kmsg, "units": machine.units,
            "etc": machine.etc, "folders": list(machine.folders), "interfaces": list(machine.interfaces),
            "poll": HOST_PACE, "after": self._record, "ports": list(self.ports),
        }  # fmt: skip
        return (machine.python, "-SP", "-m", "nodeagent.hardware.probes.host", json.dumps(given))

    def _read(self) -> SavedHealth:
        try:
            saved = load_memory(self._file)
        except (OSError, ValueError) as error:
            self._log.error(
                "what was known of this node's health is lost: devices that were out of use get work again until their "
                "fault shows itself again", file=str(self._file), why=str(error), damaged_copy=keep_damaged(self._file),
            )  # fmt: skip
            return SavedHealth()
        checks = {f"check.{check.name}" for check in self._machine.checks}
        still = tuple(
            v for v in saved.memory.verdicts
            if v.rule not in OF_ONE_START and (not v.rule.startswith("check.") or v.rule in checks)
        )  # fmt: skip
        return replace(saved, memory=replace(saved.memory, verdicts=still))

    async def save(self) -> None:
        """On disk before anybody acts on it again after a restart; only what an older start could not see anew."""
        devices = {vendor.name: tuple(vendor.expected.values()) for vendor in self._vendors if vendor.expected}
        saved = SavedHealth(self._memory, self._machine.boot, self._expected.seen, devices, self._record)
        if saved.essence == self._saved.essence:
            return
        try:
            await asyncio.to_thread(save_memory, self._file, saved)
        except OSError as error:  # a full disk: verdicts hold until this agent ends; tried again after each judgement
            if str(error) != self._unwritten:
                self._log.error("verdicts cannot be saved", file=str(self._file), why=error.strerror)
            self._unwritten = str(error)
        else:
            self._saved, self._unwritten = saved, ""


def _gpu(fields: dict[str, Any]) -> GpuReading:
    if fields.get("slowdown") is not None:
        fields["slowdown"] = frozenset(fields["slowdown"])
    if fields.get("processes") is not None:
        fields["processes"] = tuple((pid, size) for pid, size in fields["processes"])
    fields["owners"] = tuple((pid, owner) for pid, owner in fields.get("owners", ()))
    _check_kinds(fields, uuid=str, pci=str, links_up=int | None)
    return GpuReading(**fields)


def _event(fields: dict[str, Any]) -> DeviceEvent:
    _check_kinds(fields, device=str, code=int, count=int)
    return DeviceEvent(**fields)


def _check_kinds(fields: dict[str, Any], **kinds: type | UnionType) -> None:
    """What it takes to file a reading or an event away. Raises TypeError."""
    for name, kind in kinds.items():
        if name in fields and not isinstance(fields[name], kind):
            raise TypeError(f"{name} is {str(fields[name])[:60]!r}")


def _host(fields: dict[str, Any], accepted: Collection[str]) -> HostReading:
    return HostReading(
        memory_available=fields["memory_available"],
        full_disks=tuple(fields["full_disks"]),
        ports_down=tuple((port, seconds) for port, seconds in fields["ports_down"] if port not in accepted),
        port_flaps=tuple((port, times) for port, times in fields["port_flaps"]),
        fabric_manager=fields["fabric_manager"],
        nvswitches=fields["nvswitches"],
        imex=fields["imex"],
        kernel_log=fields["kernel_log"],
        memory_pressure=fields["memory_pressure"],
        io_pressure=fields["io_pressure"],
        files_used=fields["files_used"],
        processes_used=fields["processes_used"],
        clock_synchronised=fields["clock_synchronised"],
    )

"""Plug-ins as processes under a real monitor: one that works, and those that hang, crash, lie or flood."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nodeagent.hardware import plugins
from nodeagent.hardware.judging.judge import JudgePolicy
from nodeagent.hardware.monitor import Machine, Monitor, OwnWork
from nodeagent.hardware.plugins import Plugin
from nodeagent.hardware.probes import process
from nodeagent.osutil.clock import SystemClock

BOUND = 30.0
GOOD = """
import time
from nodeagent.hardware.accelerator import Accelerator, AbsentError, DeviceRule, Event, ProblemError

class Acme(Accelerator):
    name = "acme"
    variable = "ACME_VISIBLE_DEVICES"
    rules = (
        DeviceRule("acme.health", "fatal", "service", "reading", "it is sick", "acme-smi",
                   check=lambda d: d["_sick"] and "Health: bad"),
        DeviceRule("acme.link", "fatal", "reset_gpu", "repair", "its link is down", "acme-smi"),
    )
    looks = 0

    def look(self):
        print("a library's own words are no readings")
        self.looks += 1
        return [{"uuid": f"acme-{n}", "index": n, "name": "Acme X1", "visible": str(n), "_sick": SICK == n}
                for n in range(2)]
"""
"""``SICK`` is the device with a fault; the tests add what else the plug-in does."""


@asynccontextmanager
async def watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str = "", sick: int = -1
) -> AsyncIterator[Monitor]:
    """A monitor over the plug-in; its pace and its patience are short."""
    monkeypatch.setattr(plugins, "PACE", 0.2)
    monkeypatch.setattr(plugins, "DEADLINE", 3.0)
    monkeypatch.setattr(process, "AGAIN", 0.2)
    (tmp_path / "acme_plugin.py").write_text(f"SICK = {sick}\n{GOOD}\n{more}")
    proc = tmp_path / "machine"
    proc.mkdir(exist_ok=True)
    machine = Machine(
        boot="b1", gpus=False, kmsg=str(tmp_path / "none"), plugins=(Plugin("acme", "acme_plugin:Acme"),)
    )  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    changed = asyncio.Event()
    monitor = Monitor(
        machine, tmp_path, environ, SystemClock(), policy=JudgePolicy(), changed=changed.set, own=OwnWork(),
    )  # fmt: skip
    async with asyncio.TaskGroup() as group:
        task = group.create_task(monitor.run())
        try:
            yield monitor
        finally:
            task.cancel()


async def until(wanted: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND):
        while not wanted():  # noqa: ASYNC110 (what is waited for is the judge's, which wakes nobody)
            await asyncio.sleep(0.05)


def verdicts(monitor: Monitor) -> set[tuple[str, str, str]]:
    """Those about devices and plug-ins: the machine that runs the test may have others."""
    return {
        (v.rule, v.device, v.severity) for v in monitor.verdicts if v.rule.partition(".")[0] in ("acme", "accelerator")
    }


async def test_devices_rules_and_events_of_a_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = """
    def events(self, seconds):
        time.sleep(min(seconds, 0.1))
        return [Event("acme-0", "acme.link", time.time(), raw="port 3 is down")] if self.looks == 2 else []
"""
    async with watching(tmp_path, monkeypatch, events, sick=1) as monitor:
        await until(lambda: len(verdicts(monitor)) == 2)
        assert verdicts(monitor) == {("acme.health", "acme-1", "fatal"), ("acme.link", "acme-0", "fatal")}
        assert [(gpu.uuid, gpu.variable, gpu.visible) for gpu in monitor.devices] == [
            ("acme-0", "ACME_VISIBLE_DEVICES", "0"),
            ("acme-1", "ACME_VISIBLE_DEVICES", "1"),
        ]
        assert set(monitor.declared) == {"acme.health", "acme.link"}


HANG = """
    def events(self, seconds):
        time.sleep(600)
"""
CRASH = """
    def events(self, seconds):
        import os
        os.abort()
"""
RAISE = """
    def events(self, seconds):
        raise RuntimeError("the library is of another version")
"""
LIE = """
    def events(self, seconds):
        return [Event("GPU-of-another", "xid.79", 0.0)]
"""


@pytest.mark.parametrize(("more", "message"), [
    (HANG, "deadlines without an answer"), (CRASH, "its process ended"), (RAISE, "the library is of another version"),
    (LIE, "does not understand"),
])  # fmt: skip
async def test_a_plug_in_that_fails_costs_its_own_devices_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, message: str
) -> None:
    async with watching(tmp_path, monkeypatch, more) as monitor:
        await until(lambda: monitor.last_gpus)
        seen = set[str]()

        def noted() -> bool:
            seen.update(v.raw for v in monitor.verdicts if v.rule == "accelerator.silent")
            return any(message in raw for raw in seen)

        await until(noted)
        assert {s for r, d, s in verdicts(monitor) if d} <= {"unknown"}
        assert {s for r, d, s in verdicts(monitor) if not d} <= {"info"}
        assert [gpu.uuid for gpu in monitor.last_gpus] == ["acme-0", "acme-1"], "nobody forgets them"


async def test_a_plug_in_that_floods_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = """
    due = property(lambda self: True)
    def events(self, seconds):
        return []
"""
    async with watching(tmp_path, monkeypatch, flood) as monitor:
        await until(lambda: any("lines in a moment" in v.raw for v in monitor.verdicts))


@pytest.mark.parametrize("why", ["raise AbsentError('no driver')", "from no_such_library import nothing"])
async def test_without_a_driver_nothing_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A plug-in whose own library is missing is no error of the machine either, as long as it never had a device."""
    more = f"""
    def open(self):
        {why}
"""
    async with watching(tmp_path, monkeypatch, more) as monitor:
        if "library" in why:
            await until(lambda: any("no_such_library" in v.raw for v in monitor.verdicts))
            assert {s for _, _, s in verdicts(monitor)} == {"info"}
            return
        await until(lambda: monitor._vendors[0].probe.absent)
        assert verdicts(monitor) == set()

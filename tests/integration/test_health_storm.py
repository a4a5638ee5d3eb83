"""A storm of Xids through a real probe into a real monitor: what it costs, what is kept of it, what is seen within it.

The kernel's log is a pipe of packets, one record a read as the kernel has it. What does not fit is dropped, as the
kernel overwrites what nobody has read.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.hardware.judging.judge import JudgePolicy
from nodeagent.hardware.monitor import HOST_PACE, Machine, Monitor, OwnWork
from nodeagent.hardware.saved import load_memory
from nodeagent.osutil.clock import SystemClock
from nodeagent.osutil.linux import own_children

PACE = 2_000
"""Lines a second, at most. The storms that fleets report are of one a second over days (NVSentinel #1710), and a
serial console takes a hundred; a pipe holds 256 of them."""
GALE = 20_000
"""Lines a second at most, more than a pipe holds until it is read again."""
TICK = 0.01
"""Seconds between two gusts."""
GPUS = 8
SICK = "0000:03:00"
MOST = 0.01
"""Share of a core."""
BOUND = 60.0


class Storm:
    """Xid 45 and 13 on eight GPUs, each line of its own text; in the midst of them a disk's error and a GPU's end."""

    def __init__(self, path: Path, lines: int, pace: int) -> None:
        self.lines, self.pace, self.number, self.dropped = lines, pace, 0, 0
        """As many as there shall be, and in a second; records written so far; of which these were lost."""
        self.struck: int | None = None
        """Of the record that tells of the GPU's end."""
        self.seconds = self.cpu = 0.0
        self._log = os.open(path, os.O_WRONLY)
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT)  # a pipe of packets
        fcntl.fcntl(self._log, fcntl.F_SETPIPE_SZ, int(Path("/proc/sys/fs/pipe-max-size").read_text()))

    def blow(self) -> None:
        """To be run in a thread of its own."""
        began, cpu = time.monotonic(), time.thread_time()
        for n in range(self.lines):
            if n % int(self.pace * TICK) == 0:
                time.sleep(TICK)
            code = 13 if n % 4 == 0 else 45
            self._write(f"NVRM: Xid (PCI:0000:{n % GPUS:02x}:00): {code}, pid={n % 900}, Ch {n:08x}")
            if n == self.lines // 2:
                self._press("EXT4-fs error (device sda1): ext4_find_entry")
                self._press(f"NVRM: Xid (PCI:{SICK}): 79, pid=1, GPU has fallen off the bus.")
                self.struck = self.number
        self._press("eth0: link is up")  # what comes after a loss shows it
        self.seconds, self.cpu = time.monotonic() - began, time.thread_time() - cpu
        os.close(self._log)

    def _write(self, text: str) -> None:
        self.number += 1
        try:
            os.write(self._log, self._record(text))
        except BlockingIOError:
            self.dropped += 1

    def _press(self, text: str) -> None:
        """Write it until it is in."""
        self.number += 1
        while True:
            try:
                os.write(self._log, self._record(text))
            except BlockingIOError:
                time.sleep(TICK)
            else:
                return

    def _record(self, text: str) -> bytes:
        return f"3,{self.number},{time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000},-;{text}\n".encode()


class Received(Monitor):
    """Counts what its probe tells."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.came = asyncio.Event()
        self.messages = self.reported_events = 0

    def take_host(self, line: dict[str, Any]) -> None:
        super().take_host(line)
        self.messages += 1
        self.reported_events += len(line.get("events", ()))
        self.came.set()

    async def until_received(self) -> None:
        self.came.clear()
        async with asyncio.timeout(BOUND):
            await self.came.wait()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR)
    yield path
    os.close(keep)


LONG = [pytest.mark.endurance, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("lines", "pace"),
    [
        pytest.param(5_000, PACE, id="short"),
        pytest.param(100_000, PACE, id="storm", marks=LONG),
        pytest.param(100_000, GALE, id="gale", marks=LONG),
    ],
)
async def test_a_storm_costs_little_and_what_is_in_it_is_seen(tmp_path: Path, log: Path, lines: int, pace: int) -> None:
    storm = Storm(log, lines, pace)
    seen: list[int] = []

    def changed() -> None:
        if not seen and any(verdict.bars for verdict in monitor.verdicts):
            seen.append(storm.number)

    machine = Machine(boot="b", gpus=False, folders=[str(tmp_path)], sysfs=str(tmp_path), kmsg=str(log))
    monitor = Received(
        machine, tmp_path, os.environ, SystemClock(), policy=JudgePolicy(), changed=changed, own=OwnWork()
    )
    before = own_children()  # of other tests
    async with asyncio.TaskGroup() as group:
        task = group.create_task(monitor.run())
        await monitor.until_received()
        (probe,) = set(own_children()).difference(before)
        began, probe_cpu, cpu = time.monotonic(), cpu_seconds(probe), time.process_time()
        blown = group.create_task(asyncio.to_thread(storm.blow))
        await blown
        probe_cpu, cpu = cpu_seconds(probe) - probe_cpu, time.process_time() - cpu - storm.cpu
        while accounted(monitor) < lines:
            await monitor.until_received()
        took = time.monotonic() - began
        task.cancel()
    share = (probe_cpu + cpu) / storm.seconds
    print(
        f"{lines} lines in {storm.seconds:.1f} s, {storm.dropped} of them overwritten: {share:.2%} of a core"
        f" (probe {probe_cpu / storm.seconds:.2%}, {probe_cpu / (lines - storm.dropped) * 1e6:.2f} us a line read;"
        f" agent {cpu / storm.seconds:.2%}); {monitor.reported_events} events told in {monitor.messages} messages;"
        f" Xid 79 judged {seen[0] - (storm.struck or 0)} lines after it was written"
    )
    kinds = {("xid", n * 4 % GPUS, 13) for n in range(GPUS)} | {("xid", n, 45) for n in range(GPUS) if n % 4}
    assert accounted(monitor) == lines, "all of them are counted, or told as lost"
    past = load_memory(tmp_path / "health.json").memory.past
    overrun = {("overrun", "", 0)} if storm.dropped else set()
    assert len(past) == len(kinds) + 2 + len(overrun), "one is kept of each distinct event"
    assert monitor.messages <= len(past) + took / HOST_PACE + 2, "each kind at once, its repetitions at the usual pace"
    assert [v.rule for v in monitor.verdicts if v.bars] == ["xid.79"], "only what is fatal bars anything"
    assert storm.struck is not None
    assert seen[0] - storm.struck <= pace, "within a second of the storm"
    if lines > 5_000:  # a short one is mostly the probe's usual work
        assert share < MOST


def accounted(monitor: Monitor) -> int:
    """Lines of the storm that were told, or told as lost."""
    lost = sum(verdict.count for verdict in monitor.verdicts if verdict.rule == "kernel.overrun")
    return lost + sum(count for (_, code), count in monitor.xids.items() if code != 79)


def cpu_seconds(pid: int) -> float:
    """Of all its threads: the kernel's CPU clock of another process."""
    return time.clock_gettime((~pid << 3) | 2)

"""The probes as processes: a fake driver under the real nvidia-ml-py, a kernel log and a machine made of files."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nodeagent.hardware import monitor as health
from nodeagent.hardware.judging.judge import JudgePolicy
from nodeagent.hardware.plugins import NVIDIA
from nodeagent.hardware.probes.process import MOST_STUCK, NotUnderstoodError, Probe, ProbeLimits
from nodeagent.osutil.clock import SystemClock
from nodeagent.osutil.linux import is_running
from tests.fakenvml.build import build, write_state

ROOT = Path(__file__).parents[2]
BOUND = 30.0
Reported = dict[str, Any]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml") / "new")


@pytest.fixture(scope="module")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml") / "old", "-DOLD_DRIVER")


class Machine:
    """The fake driver's state, and what the probe told."""

    def __init__(self, state: Path) -> None:
        self.state, self.reported = state, list[Reported]()
        self.came = asyncio.Event()

    def set(self, *lines: str) -> None:
        write_state(self.state, *lines)

    def received(self, reported: Reported) -> None:
        self.reported.append(reported)
        self.came.set()

    async def until(self, wanted: Callable[[Reported], object]) -> Reported:
        """The first told from now on that is wanted."""
        async with asyncio.timeout(BOUND):
            while True:
                while self.reported:
                    if wanted(reported := self.reported.pop(0)):
                        return reported
                self.came.clear()
                await self.came.wait()

    async def gpus(self) -> list[Reported]:
        """The next look at all GPUs, made after this call."""
        self.reported.clear()
        await self.until(lambda reported: "gpus" in reported)
        found: list[Reported] = (await self.until(lambda reported: "gpus" in reported))["gpus"]
        return found


MOST_EVENTS = 100
"""probes/nvml's, which cannot be imported without a driver's library."""


@asynccontextmanager
async def probing(
    tmp_path: Path, library: Path, *lines: str, deadline: float = 20.0, pace: float = 0.1
) -> AsyncIterator[tuple[Machine, Probe]]:
    machine = Machine(tmp_path / "state")
    machine.set(*lines)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(machine.state), "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", "nodeagent.hardware.probes.reader", NVIDIA, str(pace))
    probe = Probe("nvml", lambda: command, environ, ProbeLimits(0.1, deadline, 0.1), machine.received, machine.came.set)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(probe.run())
        try:
            yield machine, probe
        finally:
            task.cancel()


async def test_an_h100_that_is_well(tmp_path: Path, driver: Path) -> None:
    async with probing(tmp_path, driver, "gpus 2", "model H100") as (machine, _):
        first, second = await machine.gpus()
    assert (first["pci"], first["name"], first["recovery"]) == ("0000:10:00", "NVIDIA H100 80GB HBM3", "none")
    assert (first["ecc"], first["ecc_uncorrected"], first["sram_exceeded"]) == (True, 0, False)
    assert (first["remap_pending"], first["remap_failed"], first["remapped_uncorrectable"]) == (False, False, 0)
    assert (first["links"], first["links_up"], first["fabric"]) == (18, 18, "completed")
    assert (first["temperature"], first["margin"], first["slowdown"]) == (40, 45, [])
    assert (first["pcie_width"], first["pcie_width_max"], first["pcie_generation_max"]) == (16, 16, 5)
    assert (first["processes"], first["memory_used"], first["driver"]) == ([], 0, "570.00.00")
    assert "error" not in first
    assert second["uuid"] != first["uuid"]


async def test_an_l4_has_less_to_tell_and_nothing_is_made_up(tmp_path: Path, driver: Path) -> None:
    async with probing(tmp_path, driver, "gpus 1", "model L4") as (machine, _):
        (gpu,) = await machine.gpus()
    assert gpu["name"] == "NVIDIA L4"
    assert "links" not in gpu
    assert "remap_failed" not in gpu
    assert "sram_exceeded" not in gpu
    assert gpu["fabric"] is None
    assert "error" not in gpu


async def test_an_old_driver_lacks_functions_and_is_read_all_the_same(tmp_path: Path, old_driver: Path) -> None:
    lines = ("gpus 1", "model A100", "0.temperature 61", "0.clock_reasons 0x40", "driver 525.60.13")
    async with probing(tmp_path, old_driver, *lines) as (machine, _):
        (gpu,) = await machine.gpus()
    assert (gpu["temperature"], gpu["slowdown"], gpu["driver"]) == (61, ["hw_thermal"], "525.60.13")
    assert (gpu["recovery"], gpu["margin"], gpu["links"]) == (None, None, 12)
    assert "error" not in gpu


FAULTS = [
    ("0.recovery 1", "recovery", "reset"),
    ("0.recovery 2", "recovery", "reboot"),
    ("0.recovery 3", "recovery", "drain_p2p"),
    ("0.recovery 4", "recovery", "drain_reset"),
    ("0.recovery 6", "recovery", "6"),
    ("0.remap_failed 1", "remap_failed", True),
    ("0.remap_pending 1", "remap_pending", True),
    ("0.remapped 512", "remapped_uncorrectable", 512),
    ("0.sram_exceeded 1", "sram_exceeded", True),
    ("0.ecc_uncorrected 3", "ecc_uncorrected", 3),
    ("0.ecc 0", "ecc", False),
    ("0.links_down 2", "links_up", 16),
    ("0.fabric 2", "fabric", "in_progress"),
    ("0.fabric_status 999", "fabric", "failed"),
    ("0.clock_reasons 0x88", "slowdown", ["hw_slowdown", "power_brake"]),
    ("0.pcie_width 8", "pcie_width", 8),
    ("0.processes 4711:1048576 4712:7", "processes", [[4711, 1048576], [4712, 7]]),
    ("0.lost 1", "error", "GPU_IS_LOST"),
    ("error nvmlDeviceGetTotalEccErrors 16", "error", "RESET_REQUIRED"),
    ("error nvmlDeviceGetTotalEccErrors 999", "error", "NVML error 999: Unknown Error"),
]


async def test_every_fault_is_read(tmp_path: Path, driver: Path) -> None:
    async with probing(tmp_path, driver, "gpus 1") as (machine, _):
        for line, field, value in FAULTS:
            machine.set("gpus 1", line)
            (gpu,) = await machine.gpus()
            assert gpu[field] == value, line
            assert gpu["uuid"], "a GPU that cannot be read keeps its name"


async def test_events_come_at_once_and_folded(tmp_path: Path, driver: Path) -> None:
    async with probing(tmp_path, driver, "gpus 2", "xid 1 0 13") as (machine, _):
        names = [gpu["uuid"] for gpu in await machine.gpus()]
        storm = [f"xid {n} 1 45" for n in range(2, 40)]
        machine.set("gpus 2", "xid 1 0 13", *storm, "xid 50 0 79", "0.lost 1")
        seen: dict[tuple[str, int], int] = {}
        while sum(seen.values()) < 39:
            for uuid, code, _, count, _ in (await machine.until(lambda reported: "events" in reported))["events"]:
                seen[uuid, code] = seen.get((uuid, code), 0) + count
    assert seen == {(names[1], 45): 38, (names[0], 79): 1}, "what was before it is not told again"


async def test_a_storm_of_events_is_cut_off_and_the_next_look_hears_again(tmp_path: Path, driver: Path) -> None:
    """Or it would cost what it likes, and what is true now would be heard when the last of it is."""
    async with probing(tmp_path, driver, "gpus 2", pace=1.0) as (machine, _):
        await machine.gpus()
        storm = [f"xid {n} 1 45" for n in range(1, 4 * MOST_EVENTS)]
        machine.set("gpus 2", *storm)
        counts = [0]  # by look
        while max(counts) < MOST_EVENTS:  # a slow machine looks before it has read so many
            reported = await machine.until(lambda _: True)
            for _, code, _, count, _ in reported.get("events", ()):
                assert code == 45
                counts[-1] += count
            if "gpus" in reported and counts[-1]:
                counts.append(0)
        assert max(counts) == MOST_EVENTS
        await machine.gpus()
        machine.set("gpus 2", *storm, "xid 900 0 79")
        reported = await machine.until(lambda reported: "events" in reported)
        assert [(code, count) for _, code, _, count, _ in reported["events"]] == [(79, 1)], "the rest is gone"


async def test_an_xid_that_repeats_is_reported_with_the_next_look(tmp_path: Path, driver: Path) -> None:
    async with probing(tmp_path, driver, "gpus 1") as (machine, _):
        await machine.gpus()
        repeated = 0
        for n in range(1, 31):
            machine.set("gpus 1", f"xid {n} 0 45")
            reported = await machine.until(lambda reported: "events" in reported)
            repeated += "gpus" in reported
            ((_, code, _, count, _),) = reported["events"]
            assert (code, count) == (45, 1), "each is told, once"
        assert repeated, "not each by itself"


async def test_no_driver(tmp_path: Path, driver: Path) -> None:
    async with probing(tmp_path, driver, "error nvmlInitWithFlags 9") as (machine, probe):
        async with asyncio.timeout(BOUND):
            while not probe.reading.problem:
                machine.came.clear()
                await machine.came.wait()
        assert "NVML" in probe.reading.problem


async def test_a_call_that_never_returns(tmp_path: Path, driver: Path) -> None:
    """Late, then hung, then replaced; and when the driver answers again, all is read again."""
    async with probing(tmp_path, driver, "gpus 1", deadline=1.7) as (machine, probe):
        await machine.gpus()
        machine.set("gpus 1", "hang nvmlDeviceGetMemoryInfo_v2")
        missed: list[int] = []
        async with asyncio.timeout(BOUND):
            while 3 not in missed:
                if probe.reading.missed not in missed:
                    missed.append(probe.reading.missed)
                machine.came.clear()
                await machine.came.wait()
        assert missed in ([0, 1, 2, 3], [1, 2, 3])
        machine.set("gpus 1")
        await machine.gpus()
        assert probe.reading.missed == 0


async def test_gpus_that_are_slow_to_come_up_are_no_hung_driver(tmp_path: Path, driver: Path) -> None:
    """Without persistence mode each takes seconds, and is let go with the process: the next one was as slow,
    for ever, and the node's reboot was asked for."""
    missed = set[int]()
    async with probing(tmp_path, driver, "gpus 8", "cold 800", deadline=2.6) as (machine, probe):
        async with asyncio.timeout(BOUND):
            while not any("gpus" in reported for reported in machine.reported):
                machine.came.clear()
                await machine.came.wait()
                missed.add(probe.reading.missed)
        assert len(machine.reported[-1]["gpus"]) == 8
        assert max(missed) < 2, "never hung"


async def test_progress_without_an_end_is_no_answer() -> None:
    seen = asyncio.Event()
    command = ("/bin/sh", "-c", "while :; do echo '{\"progress\": true}'; done")
    limits = ProbeLimits(0.0, 20.0, 0.1)
    probe = Probe("nvml", lambda: command, os.environ, limits, lambda _: None, seen.set)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(probe.run())
        async with asyncio.timeout(BOUND):
            await seen.wait()
        assert probe.reading.problem == "its first look does not end"
        task.cancel()


async def test_progress_after_a_hang_is_no_answer_yet() -> None:
    """Or what is fatal would be well again at every new start of the process."""
    came = asyncio.Event()
    command = ("/bin/sh", "-c", "echo '{\"progress\": true}'; sleep 600")
    probe = Probe("nvml", lambda: command, os.environ, ProbeLimits(0.0, 0.3, 0.1), lambda _: None, came.set)
    missed = []
    async with asyncio.TaskGroup() as group:
        task = group.create_task(probe.run())
        async with asyncio.timeout(BOUND):
            while probe.reading.missed < 4:
                came.clear()
                await came.wait()
                missed.append(probe.reading.missed)
        task.cancel()
    assert missed == [1, 2, 3, 4]


async def test_processes_that_do_not_die_are_not_piled_up() -> None:
    """As when they are stuck in the driver: SIGKILL without effect."""
    seen, kept = asyncio.Event(), list[subprocess.Popen[bytes]]()
    command = (sys.executable, "-S", "-c", "import time; time.sleep(600)")

    class Undying(Probe):
        def kill(self, process: subprocess.Popen[bytes]) -> None:
            kept.append(process)

    limits = ProbeLimits(0.0, 0.05, 0.1)
    probe = Undying("nvml", lambda: command, os.environ, limits, lambda _: None, seen.set)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(probe.run())
        try:
            async with asyncio.timeout(2 * BOUND):
                while "cannot be killed" not in probe.reading.problem:
                    seen.clear()
                    await seen.wait()
        finally:
            task.cancel()
    try:
        assert len(kept) == MOST_STUCK
        assert all(process.returncode == -9 for process in kept), "Python does not warn of what is left on purpose"
    finally:
        for process in kept:
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, process.pid, 0)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A machine made of files, its kernel log a pipe."""
    for name, text in {
        "meminfo": "MemTotal: 1000 kB\nMemAvailable: 250 kB\n",
        "loadavg": "0.1 0.2 0.3 2/300 4711\n",
        "pressure/memory": "some avg10=9.00 avg60=9.00\nfull avg10=0.00 avg60=12.50 avg300=0.00 total=1\n",
        "sys/fs/file-nr": "50\t0\t1000\n",
        "sys/kernel/pid_max": "1000\n",
        "sys/kernel/threads-max": "2000\n",
    }.items():
        (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / name).write_text(text)
    port = tmp_path / "sys" / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    os.mkfifo(tmp_path / "kmsg")
    keep = os.open(tmp_path / "kmsg", os.O_RDWR)
    yield {
        "proc": str(tmp_path / "proc"), "sys": str(tmp_path / "sys"), "kmsg": str(tmp_path / "kmsg"),
        "folders": [str(tmp_path)], "interfaces": [], "units": str(tmp_path / "units"), "etc": str(tmp_path),
        "poll": 0.1, "after": -1,
        "ports": [],
    }  # fmt: skip
    os.close(keep)


@asynccontextmanager
async def watching(given: dict[str, Any]) -> AsyncIterator[Machine]:
    machine = Machine(Path("/dev/null"))
    command = (sys.executable, "-S", "-m", "nodeagent.hardware.probes.host", json.dumps(given))
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    probe = Probe("host", lambda: command, environ, ProbeLimits(0.1, 20.0), machine.received, machine.came.set)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(probe.run())
        try:
            yield machine
        finally:
            task.cancel()


async def test_the_machine_around_the_gpus(tmp_path: Path, host: dict[str, Any]) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state"
    async with watching(host) as machine:
        reported = (await machine.until(lambda reported: "host" in reported))["host"]
        assert reported.pop("clock_synchronised") in (True, False, None)
        assert reported == {
            "memory_available": 0.25, "full_disks": [], "fabric_manager": None, "imex": None, "ports_down": [],
            "port_flaps": [], "nvswitches": False,
            "kernel_log": "", "memory_pressure": 0.125, "io_pressure": None, "files_used": 0.05,
            "processes_used": 0.3, "ports": ["mlx5_0/1"],
        }  # fmt: skip
        port.write_text("1: DOWN\n")
        down = (await machine.until(lambda reported: "host" in reported and reported["host"]["ports_down"]))["host"]
        assert down["ports_down"][0][0] == "mlx5_0/1"
        port.write_text("4: ACTIVE\n")
        up = (await machine.until(lambda reported: "host" in reported and reported["host"]["port_flaps"]))["host"]
        assert (up["ports_down"], up["port_flaps"]) == ([], [["mlx5_0/1", 1]])
        (tmp_path / "units").mkdir()
        events = tmp_path / "sys/fs/cgroup/system.slice/nvidia-fabricmanager.service/cgroup.events"
        events.parent.parent.mkdir(parents=True)
        (tmp_path / "units" / "nvidia-fabricmanager.service").touch()
        await machine.until(lambda reported: "host" in reported and reported["host"]["fabric_manager"] is False)
        events.parent.mkdir()
        events.write_text("populated 1\nfrozen 0\n")
        await machine.until(lambda reported: "host" in reported and reported["host"]["fabric_manager"] is True)


async def test_a_port_that_is_gone_or_was_never_up_since_the_start_is_reported(
    tmp_path: Path, host: dict[str, Any]
) -> None:
    """An adapter that vanished from sysfs was as good as one that is well."""
    given = host | {"ports": ["mlx5_1/1", "mlx5_0/1"], "interfaces": ["no-such-port"]}
    async with watching(given) as machine:
        down = (await machine.until(lambda reported: "host" in reported))["host"]["ports_down"]
        assert [port for port, _ in down] == ["mlx5_1/1", "no-such-port"]
        shutil.rmtree(tmp_path / "sys/class/infiniband/mlx5_0")
        reported = await machine.until(lambda reported: "host" in reported and len(reported["host"]["ports_down"]) == 3)
    assert {port for port, _ in reported["host"]["ports_down"]} == {"mlx5_0/1", "mlx5_1/1", "no-such-port"}


async def test_the_kernels_log(host: dict[str, Any]) -> None:
    async with watching(host) as machine:
        await machine.until(lambda reported: "host" in reported)
        log = os.open(host["kmsg"], os.O_WRONLY)
        os.write(log, b"3,1,1000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n")
        (event,) = (await machine.until(lambda reported: "events" in reported))["events"]
        os.close(log)
    assert (event["kind"], event["code"], event["device"], event["count"]) == ("xid", 79, "0000:3b:00", 1)


async def test_what_the_kernel_wrote_between_two_agents_is_judged_once(tmp_path: Path, host: dict[str, Any]) -> None:
    """What is older than the first agent is not: nobody knows whether it is still true."""
    place = health.Machine("boot", gpus=False, proc=host["proc"], sysfs=host["sys"], kmsg=host["kmsg"])
    log = os.open(host["kmsg"], os.O_WRONLY)
    fcntl.fcntl(log, fcntl.F_SETFL, os.O_DIRECT)  # a pipe of packets: one record a read
    came = asyncio.Event()

    def write(code: int, number: int) -> None:
        os.write(log, b"3,%d,%d,-;NVRM: Xid (PCI:0000:3b:00): %d, pid=1\n" % (number, 1e6, code))

    def agent() -> health.Monitor:
        return health.Monitor(
            place, tmp_path, os.environ, SystemClock(), policy=JudgePolicy(), changed=came.set, own=health.OwnWork()
        )

    async def judges(monitor: health.Monitor, *codes: int) -> None:
        async with asyncio.TaskGroup() as group, asyncio.timeout(BOUND):
            task = group.create_task(monitor.run())
            while {(v.rule, v.count) for v in monitor.verdicts} != {(f"xid.{code}", 1) for code in codes}:
                came.clear()
                await came.wait()
            await monitor.save()
            task.cancel()

    write(95, 1)
    looked, judged = asyncio.Event(), asyncio.create_task(judges(first := agent(), 79))
    take = first.probe("host")._received

    def received(line: Reported) -> None:
        take(line)
        looked.set()

    first.probe("host")._received = received
    async with asyncio.timeout(BOUND):
        await looked.wait()
    write(79, 2)
    await judged
    write(79, 2)  # it is still there
    write(46, 3)
    await judges(agent(), 79, 46)
    os.close(log)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (9, "Driver Not Loaded"),
        (12, "NVML Shared Library Not Found"),
        (18, "RM has detected an NVML/RM version mismatch."),
    ],
)
async def test_gpus_that_no_driver_ever_listed_are_missed_until_one_does(
    tmp_path: Path, driver: Path, host: dict[str, Any], code: int, why: str
) -> None:
    """The machine was taken for one without GPUs. Each time the reader is started anew it asks again."""
    state, came = tmp_path / "driver", asyncio.Event()
    place = health.Machine(
        "boot", gpus=code == 18, slots=("0000:10:00",), proc=host["proc"], sysfs=host["sys"], kmsg=host["kmsg"]
    )
    environ = {**os.environ, "LD_LIBRARY_PATH": str(driver), "FAKE_NVML": str(state)}
    write_state(state, "gpus 1", f"error nvmlInitWithFlags {code}")
    monitor = health.Monitor(
        place, tmp_path, environ, SystemClock(), policy=JudgePolicy(), changed=came.set, own=health.OwnWork()
    )
    monitor.probe("nvml")._again = 0.1

    async def until(rules: list[str], gpus: list[str]) -> None:
        while ([v.rule for v in monitor.verdicts], [gpu.uuid for gpu in monitor.unlisted]) != (rules, gpus):
            came.clear()
            await came.wait()

    async with asyncio.TaskGroup() as group, asyncio.timeout(BOUND):
        task = group.create_task(monitor.run())
        await until(["probe.nvml.broken"], ["0000:10:00"])
        assert monitor.verdicts[0].raw == f"nvml: NVIDIA GPUs are installed (0000:10:00), but: NVML: {why}"
        write_state(state, "gpus 1")
        await until([], [])
        assert [gpu.pci for gpu in monitor.last_gpus] == ["0000:10:00"]
        task.cancel()


async def test_a_folder_that_is_not_there(tmp_path: Path, host: dict[str, Any]) -> None:
    async with watching(host | {"folders": [str(tmp_path / "none")]}) as machine:
        reported = await machine.until(lambda reported: "host" in reported and reported["host"]["full_disks"])
    assert reported["host"]["full_disks"] == [f"{tmp_path / 'none'}: No such file or directory"]


async def test_a_kernel_log_that_may_not_be_read(tmp_path: Path, host: dict[str, Any]) -> None:
    problem = f"{tmp_path / 'none'}: No such file or directory"
    command = (sys.executable, "-S", "-m", "nodeagent.hardware.probes.host")
    given = json.dumps(host | {"kmsg": str(tmp_path / "none")})
    machine = Machine(tmp_path / "state")
    environ = {"PYTHONPATH": str(ROOT)}
    probe = Probe("host", lambda: (*command, given), environ, ProbeLimits(0.1), machine.received, machine.came.set)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(probe.run())
        for _ in range(3):
            reported = await machine.until(lambda reported: "host" in reported)
            assert (reported["host"]["kernel_log"], probe.reading.problem) == (problem, "")
        task.cancel()


@pytest.mark.parametrize("line", ["no json", '{"from": "the future"}'])
async def test_a_probe_that_writes_what_nobody_understands_is_started_again(line: str) -> None:
    starts = 0

    def received(reported: Reported) -> None:
        raise NotUnderstoodError(next(iter(reported)))

    def command() -> tuple[str, ...]:
        nonlocal starts
        starts += 1
        if starts == 2:
            task.cancel()
        return (sys.executable, "-c", f"print({line!r}, flush=True); import time; time.sleep(60)")

    probe = Probe("host", command, {}, ProbeLimits(1.0, again=0.1), received, lambda: None)
    async with asyncio.timeout(BOUND), asyncio.TaskGroup() as group:
        task = group.create_task(probe.run())
    assert "does not understand" in probe.reading.problem
    assert starts == 2


async def test_a_paused_probe_has_no_process_and_says_nothing_of_it() -> None:
    lines: asyncio.Queue[Reported] = asyncio.Queue()
    command = (
        sys.executable,
        "-S",
        "-c",
        "import os, time; print('{\"pid\": %d}' % os.getpid(), flush=True); time.sleep(60)",
    )
    probe = Probe("nvml", lambda: command, os.environ, ProbeLimits(1.0, again=0.05), lines.put_nowait, lambda: None)
    async with asyncio.timeout(BOUND), asyncio.TaskGroup() as group:
        task = group.create_task(probe.run())
        first = (await lines.get())["pid"]
        await probe.pause()
        assert not is_running(first)
        assert (probe.reading.missed, probe.reading.problem) == (0, "")
        probe.resume()
        assert (await lines.get())["pid"] != first
        task.cancel()


@pytest.mark.parametrize("model", ["H100", "L4"])
async def test_what_the_driver_reserves_for_itself_is_not_used(tmp_path: Path, driver: Path, model: str) -> None:
    """517 MiB on an A10 at rest, up to 1 GiB on an H20: with the older call an idle GPU looked used for ever."""
    async with probing(tmp_path, driver, "gpus 1", f"model {model}", f"0.reserved {1 << 30}") as (machine, _):
        (gpu,) = await machine.gpus()
        assert gpu["memory_used"] == 0
        machine.set("gpus 1", f"model {model}", f"0.reserved {1 << 30}", f"0.memory_used {700 << 20}")
        (gpu,) = await machine.gpus()
        assert gpu["memory_used"] == 700 << 20


async def test_memory_of_a_gpu_that_the_machine_uses_too_is_not_read(tmp_path: Path, driver: Path) -> None:
    """A GH200's is a NUMA node: Linux puts its own pages there, and an idle GPU would look used for ever."""
    async with probing(tmp_path, driver, "gpus 1", "0.numa_node 4", f"0.memory_used {9 << 30}") as (machine, _):
        (gpu,) = await machine.gpus()
        assert (gpu["processes"], gpu.get("memory_used"), gpu.get("error")) == ([], None, None)


async def test_an_old_driver_that_does_not_tell_it_apart_is_measured_at_rest(tmp_path: Path, old_driver: Path) -> None:
    reserved = f"0.reserved {1 << 30}"
    async with probing(tmp_path, old_driver, "gpus 1", reserved, "0.processes 7:1", "0.memory_used 5") as (machine, _):
        (gpu,) = await machine.gpus()
        assert "memory_used" not in gpu, "it was never seen at rest"
        machine.set("gpus 1", reserved)
        (gpu,) = await machine.gpus()
        assert gpu["memory_used"] == 0
        machine.set("gpus 1", reserved, f"0.memory_used {700 << 20}")
        (gpu,) = await machine.gpus()
        assert gpu["memory_used"] == 700 << 20


async def test_a_gpu_that_is_cut_into_slices_or_draws_a_desktop_says_so(tmp_path: Path, driver: Path) -> None:
    async with probing(tmp_path, driver, "gpus 2", "1.mig 1", "1.graphics 2") as (machine, _):
        assert [(gpu["mig"], gpu["graphics"]) for gpu in await machine.gpus()] == [(False, 0), (True, 2)]


async def test_gpus_that_the_driver_numbers_anew_keep_their_names(tmp_path: Path, driver: Path) -> None:
    """The first is gone, and all others move up by one."""
    async with probing(tmp_path, driver, "gpus 3") as (machine, _):
        names = [gpu["uuid"] for gpu in await machine.gpus()]
        machine.set("gpus 3", "order 1 2", "1.ecc_uncorrected 7")
        found = await machine.gpus()
        assert [(gpu["uuid"], gpu["index"], gpu["pci"]) for gpu in found] == [
            (names[1], 0, "0000:11:00"), (names[2], 1, "0000:12:00")
        ]  # fmt: skip
        assert found[0]["ecc_uncorrected"] == 7
        machine.set("gpus 3", "order 2 1", "1.lost 1")
        lost = [gpu["uuid"] for gpu in await machine.gpus() if gpu.get("error")]
        assert names[2] not in lost, "not the GPU that was there before"


async def test_a_wait_that_fails_because_a_gpu_is_lost_is_a_look_at_once_and_no_crash(
    tmp_path: Path, driver: Path
) -> None:
    """The probe died of it, again and again: the loss was told 5.2 s later."""
    pace = 600.0
    async with probing(tmp_path, driver, "gpus 2", pace=pace) as (machine, probe):
        names = [gpu["uuid"] for gpu in (await machine.until(lambda reported: "gpus" in reported))["gpus"]]
        machine.set("gpus 2", "lost_wakes 1", "0.lost 1")
        found = (await machine.until(lambda reported: "gpus" in reported))["gpus"]
        assert [(gpu["uuid"], gpu.get("error", "")) for gpu in found] == [(names[0], "GPU_IS_LOST"), (names[1], "")]
        machine.set("gpus 2", "lost_wakes 1", "0.lost 1", "xid 1 1 13")
        reported = await machine.until(lambda reported: "events" in reported)
        assert [(uuid, code) for uuid, code, _, _, _ in reported["events"]] == [(names[1], 13)], (
            "the others' are still heard"
        )
        assert probe.reading.problem == ""


async def test_events_are_waited_for_again_once_the_driver_can(tmp_path: Path, driver: Path) -> None:
    """After two waits in a row that failed, no Xid of the driver came any more until the agent's next start."""
    async with probing(tmp_path, driver, "gpus 1") as (machine, probe):
        await machine.gpus()
        machine.set("gpus 1", "error nvmlEventSetWait_v2 999")
        for _ in range(3):
            await machine.gpus()
        machine.set("gpus 1")
        await machine.gpus()
        machine.set("gpus 1", "xid 1 0 79")
        reported = await machine.until(lambda reported: "events" in reported)
        assert [(code, count) for _, code, _, count, _ in reported["events"]] == [(79, 1)]
        assert probe.reading.problem == ""


async def test_a_driver_without_events_is_read_all_the_same(tmp_path: Path, driver: Path) -> None:
    async with probing(tmp_path, driver, "gpus 1", "no_events 1") as (machine, probe):
        (gpu,) = await machine.gpus()
        assert "error" not in gpu
        assert probe.reading.problem == ""

"""One run of the checks, from the order to the report. ``nodeagent diag`` uses it, and so does the agent, in a process
of its own: ``python -m nodeagent.diag.order`` reads its order, writes a line for each step, and the report as the last
line.

Must never work on a GPU in use, unless the order allows it; every wait has a bound.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from nodeagent.diag import history
from nodeagent.diag.crew import Announce, CannotRunError, CheckOutcome, work
from nodeagent.diag.history import Result, judge
from nodeagent.hardware.accelerator import who
from nodeagent.hardware.judging.rules import LEFTOVER
from nodeagent.hardware.plugins import NVIDIA
from nodeagent.hardware.probes.process import packages, reader_command
from nodeagent.model.base import Record
from nodeagent.model.health import Figure
from nodeagent.osutil.commands import end

Report = dict[str, Any]
LOCK = "diag.lock"
AGAIN = 0.5
"""Seconds between two checks whether another run has ended."""


class Code(IntEnum):
    """Exit codes of ``nodeagent diag``."""

    PASSED = 0
    FAILED = 1
    COULD_NOT = 2


class CheckOrder(Record):
    """What is checked, and how."""

    python: str
    """The Python that may have torch."""
    state: str
    """The agent's ``state`` folder, which has the history."""
    driver: bool
    """There is a driver to ask; without a driver the CPU is checked."""
    gpus: tuple[str, ...] = ()
    """UUIDs; empty: all that the driver lists."""
    busy: Literal["refuse", "skip", "check"] = "refuse"
    """What to do with GPUs that are in use."""
    bound: float = 30.0
    slower: float = 0.8
    peers: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class _Done:
    results: Sequence[Result]
    notes: Sequence[str]


async def run(order: CheckOrder, environ: Mapping[str, str], announce: Announce) -> tuple[Report, Code]:
    """Runs the checks, stores and returns the results. Never raises for faults of the machine."""
    try:
        folder = Path(order.state)
        async with _alone(folder, order.bound, announce):
            done = await _checked(order, environ, folder / history.FILE, announce)
    except (CannotRunError, OSError, ValueError) as error:
        return report((), (), problem=str(error)), Code.COULD_NOT
    passed = all(result.passed for result in done.results)
    return report(done.results, done.notes), Code.PASSED if passed else Code.FAILED


async def _checked(order: CheckOrder, environ: Mapping[str, str], file: Path, announce: Announce) -> _Done:
    past = history.load(file)
    outcomes: list[CheckOutcome] = []
    devices: list[Device] = []
    notes: list[str] = []
    if order.driver:
        announce("ask the driver")
        devices, outcomes = await look(order.gpus, environ, order.bound)
        devices, notes = _free(devices, order.busy)
        if not devices and not outcomes:
            raise CannotRunError("no GPU can be checked: " + ("; ".join(notes) or "the driver lists none"))
    if devices or not order.driver:
        gpus = [(device.uuid, device.name) for device in devices]
        worked, more = await work(order.python, gpus, environ, order.bound, announce)
        outcomes, notes = outcomes + worked, notes + more
    alone = bool(devices) and not any(device.used for device in devices)
    own = [(p.kind, p.check, p.values) for p in past]
    results = judge(outcomes, own, order.peers, order.slower if alone else 0.0)
    if devices and not alone:
        notes.append("speeds were not judged nor remembered: somebody else used a GPU meanwhile")
    if alone or not devices:
        good = [o for o, result in zip(outcomes, results, strict=True) if result.passed]
        try:
            history.save(file, history.with_results(past, good))
        except OSError as error:
            notes.append(f"the results are not remembered: {file}: {error.strerror}")
    return _Done(results, notes)


def _free(devices: Sequence[Device], busy: str) -> tuple[list[Device], list[str]]:
    """The GPUs that may be checked, and a note on each other GPU."""
    used = [f"{device.name} is used by {device.used}" for device in devices if device.used]
    if not used or busy == "check":
        return list(devices), used
    if busy == "skip":
        return [device for device in devices if not device.used], [f"not checked: {one}" for one in used]
    raise CannotRunError(
        "; ".join(used) + "; wait for its end, choose others with --gpu, or check them nevertheless with --busy"
    )


@asynccontextmanager
async def _alone(folder: Path, bound: float, announce: Announce) -> AsyncIterator[None]:
    """Makes this run the only one on this machine while the context is open. Raises CannotRunError, OSError."""
    fd = _lock_file(folder)
    try:
        loop = asyncio.get_running_loop()
        until = loop.time() + bound
        while not _locked(fd):
            if loop.time() >= until:
                raise CannotRunError("another run of these checks is active here; try again when it has ended")
            announce("wait for another run to end")
            await asyncio.sleep(AGAIN)
        yield
    finally:
        os.close(fd)


def _lock_file(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def report(results: Sequence[Result], notes: Sequence[str], problem: str = "") -> Report:
    """The report that ``--json`` writes."""
    checks = [
        {"name": r.name, "gpu": r.gpu, "passed": r.passed, "value": r.value, "unit": r.unit, "why": r.why}
        for r in results
    ]
    passed = not problem and all(r.passed for r in results)
    return {"passed": passed, "checks": checks, "notes": list(notes), "problem": problem}


def main() -> None:
    """Entry point for the agent."""

    def note(line: Report) -> None:
        print(json.dumps(line), flush=True)

    order = CheckOrder.from_json(sys.stdin.read())
    found, code = asyncio.run(run(order, os.environ, lambda step: note({"step": step})))
    note(found)
    sys.exit(code)


LINE = 4 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, as the driver lists it."""

    uuid: str
    index: int
    used: str = ""
    """Its users, for people; empty: none."""

    @property
    def name(self) -> str:
        return f"GPU {self.index} ({self.uuid})"


async def look(
    wanted: Sequence[str], environ: Mapping[str, str], bound: float
) -> tuple[list[Device], list[CheckOutcome]]:
    """The GPUs (``wanted``: only these), and the faults of those that cannot be checked. ``bound``: seconds for the
    driver's answer. Raises CannotRunError."""
    line, why = await _first_look(environ, bound)
    if why:
        return [], [CheckOutcome("driver", "", why=why)]
    if "problem" in line:
        raise CannotRunError(f"the GPUs cannot be read: {line['problem']}")
    found: list[Device] = []
    wrong: list[CheckOutcome] = []
    for gpu in line["gpus"]:
        if wanted and gpu["uuid"] not in wanted:
            continue
        if gpu.get("error"):
            wrong.append(CheckOutcome("driver", gpu["uuid"], why=f"NVML: {gpu['error']}"))
        else:
            found.append(Device(gpu["uuid"], gpu["index"], used_by(gpu)))
    there = {gpu["uuid"] for gpu in line["gpus"]}
    wrong += [
        CheckOutcome("driver", uuid, why="the driver does not list this GPU") for uuid in wanted if uuid not in there
    ]
    return found, wrong


def used_by(gpu: Mapping[str, Any]) -> str:
    """The users of a GPU, from the probe's data."""
    processes = gpu.get("processes")
    pids = [pid for pid, _ in processes or ()]
    if pids:
        return "; ".join(who(pid) or f"pid {pid}" for pid in pids[:4]) + (
            f" and {len(pids) - 4} more" if len(pids) > 4 else ""
        )
    held = gpu.get("memory_used") or 0
    if processes is not None and not processes and held > LEFTOVER:
        return f"{held >> 20} MiB of its memory are held, by no process that the driver lists"
    return ""


async def _first_look(environ: Mapping[str, str], bound: float) -> tuple[dict[str, Any], str]:
    """The probe's first line that is more than a sign of progress, or why there is none."""
    process = await asyncio.create_subprocess_exec(
        *reader_command(sys.executable, NVIDIA, 60.0), env={**environ, "PYTHONPATH": packages()},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True, limit=LINE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(bound):
            while (text := await process.stdout.readline()) and "progress" in json.loads(text):
                pass
    except TimeoutError:
        return {}, f"hung: the driver did not answer within {bound:g} s"
    finally:
        await end(process)
    if not text:
        return {"problem": "the probe of the driver ended at once"}, ""
    line: dict[str, Any] = json.loads(text)
    return line, ""


if __name__ == "__main__":
    main()

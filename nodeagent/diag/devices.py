"""Lists the GPUs to check, and the users of each: one call of the driver's probe, with a deadline.

Must never wait for a driver that hangs, and never treat a GPU that could not be read as free.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodeagent.diag.crew import CannotRunError, CheckOutcome
from nodeagent.hardware.accelerator import who
from nodeagent.hardware.judging.rules import LEFTOVER
from nodeagent.hardware.plugins import NVIDIA
from nodeagent.hardware.probes.process import packages, reader_command
from nodeagent.osutil.commands import end

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
    line, why = await _first_line(environ, bound)
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


def used_by(gpu: Mapping[str, Any], ours: Collection[int] = ()) -> str:
    """The users of a GPU, from the probe's data."""
    processes = gpu.get("processes")
    others = [pid for pid, _ in processes or () if pid not in ours]
    if others:
        return "; ".join(who(pid) or f"pid {pid}" for pid in others[:4]) + (
            f" and {len(others) - 4} more" if len(others) > 4 else ""
        )
    held = gpu.get("memory_used") or 0
    if processes is not None and not processes and held > LEFTOVER:
        return f"{held >> 20} MiB of its memory are held, by no process that the driver lists"
    return ""


async def _first_line(environ: Mapping[str, str], bound: float) -> tuple[dict[str, Any], str]:
    """The probe's first line, or why there is none."""
    process = await asyncio.create_subprocess_exec(
        *reader_command(sys.executable, NVIDIA, 60.0), env={**environ, "PYTHONPATH": packages()},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True, limit=LINE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(bound):
            text = await process.stdout.readline()
    except TimeoutError:
        return {}, f"hung: the driver did not answer within {bound:g} s"
    finally:
        await end(process)
    if not text:
        return {"problem": "the probe of the driver ended at once"}, ""
    line: dict[str, Any] = json.loads(text)
    return line, ""

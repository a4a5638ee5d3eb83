"""The processes that run the checks, one for each device: starts them, sends them checks, enforces deadlines, kills
them.

A check that hangs is a failure with a name; its process is killed, and nothing waits for it. Must never judge a figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nodeagent.osutil.commands import DIES, end

WORKER = Path(__file__).with_name("worker.py")
SLOW_START = 4.0
"""The start may take this many bounds (importing torch from a file server), and the collective 2: NCCL first inspects
the whole machine."""
GPU_CHECKS = ("matmul", "memory_bandwidth", "host_to_device", "device_to_host")
CPU_CHECKS = ("matmul", "memory_bandwidth")
SIGNALLED = 128
"""From this exit code on, a script around Python says that a signal killed it."""
COLLECTIVE = "collective"
CPU_CREW = 2
"""Processes of the collective if there is no GPU; this only tests the check itself."""

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """One check of one device. Without ``value`` there is no figure, and ``why`` gives the reason."""

    name: str
    gpu: str
    """UUID; empty: the CPU, or all devices together."""
    kind: str = ""
    """The device's name; figures are compared by it."""
    value: float | None = None
    unit: str = ""
    why: str = ""


class CannotRunError(Exception):
    """Nothing could be checked; ``str()`` says why and what to do."""


class _Hand:
    """One process at one device."""

    def __init__(self, gpu: str, name: str) -> None:
        self.gpu, self.name, self.kind, self.torch = gpu, name, "", ""
        self.failed = False
        self._process: asyncio.subprocess.Process | None = None
        self._errors: IO[bytes] | None = None

    async def start(self, command: Sequence[str], environ: Mapping[str, str], bound: float) -> CheckOutcome | None:
        """Waits until it is ready; otherwise returns what failed. Raises CannotRunError, OSError."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in end())
        self._process = await asyncio.create_subprocess_exec(
            *command, env=dict(environ), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        line, why = await self._line(bound)
        if why and 0 <= (code := await self._exit_code()) < SIGNALLED:  # a torch that cannot be loaded, say
            last = self._last_words()
            raise CannotRunError(f"{command[0]} ended with exit code {code}: {last} (health.diag.python)")
        if why := why or str(line.get("wrong", "")):
            self.failed = True
            return CheckOutcome("start", self.gpu, why=why)
        if "problem" in line:
            raise CannotRunError(f"{line['problem']}; name a Python whose torch uses the GPUs in health.diag.python")
        self.kind, self.torch = str(line["kind"]), str(line["torch"])
        return None

    async def _exit_code(self) -> int:
        """Below 0: a signal killed it, or it still runs."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DIES):
                return await self._process.wait()
        return -1

    async def do(self, check: str, bound: float) -> CheckOutcome:
        """Runs one check."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the process has died: the missing answer shows it
            self._process.stdin.write(f"{check}\n".encode())
            await self._process.stdin.drain()
        line, why = await self._line(bound)
        self.failed = bool(why)
        if why or line["wrong"]:
            return CheckOutcome(check, self.gpu, self.kind, why=why or str(line["wrong"]))
        return CheckOutcome(check, self.gpu, self.kind, float(line["value"]), str(line["unit"]))

    async def _line(self, bound: float) -> tuple[dict[str, Any], str]:
        """Its next line, or why there is none."""
        assert self._process is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(bound):
                text = await self._process.stdout.readline()
        except TimeoutError:
            return {}, f"hung: no result within {bound:g} s"
        if not text:
            return {}, f"its process died: {self._last_words()}"
        try:
            line = json.loads(text)
        except ValueError:
            return {}, f"its process wrote what is no result: {text[:80]!r}"
        return line, ""

    def _last_words(self) -> str:
        assert self._errors is not None
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 2000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it wrote nothing"

    async def end(self) -> None:
        """Kills the process; one that is stuck in the driver is left alone."""
        if self._process is not None:
            await end(self._process)
        if self._errors is not None:
            self._errors.close()


async def work(
    python: str, gpus: Sequence[tuple[str, str]], environ: Mapping[str, str], bound: float, announce: Announce
) -> tuple[list[CheckOutcome], list[str]]:
    """Runs every check on all ``gpus`` at the same time (UUID and display name; none: the CPU). Also returns notes on
    what was not checked. ``bound``: seconds for one check. Raises CannotRunError."""
    workers = [_Hand(*gpu) for gpu in gpus] or [_Hand("", f"CPU process {i}") for i in range(CPU_CREW)]
    out: list[CheckOutcome] = []
    try:
        with tempfile.TemporaryDirectory(prefix="nodeagent-diag-") as folder:
            announce(f"start {len(workers)} processes of {python}")
            out += await _start(workers, python, gpus, environ, Path(folder), bound)
            for check in GPU_CHECKS if gpus else CPU_CHECKS:
                busy = [hand for hand in workers if not hand.failed][: None if gpus else 1]
                announce(f"{check} on " + (", ".join(hand.name for hand in busy) if gpus else "the CPU"))
                out += await asyncio.gather(*(hand.do(check, bound) for hand in busy))
            together, note = await _together(workers, bound, announce)
            return out + together, note
    finally:
        await asyncio.gather(*(hand.end() for hand in workers))


async def _start(
    workers: Sequence[_Hand], python: str, gpus: Sequence[tuple[str, str]], environ: Mapping[str, str], folder: Path,
    bound: float,
) -> list[CheckOutcome]:  # fmt: skip
    given = {"count": len(workers), "group": str(folder / "group")}
    env = {**environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(uuid for uuid, _ in gpus)
    starts = [
        hand.start(
            (python, "-I", str(WORKER), json.dumps(given | {"index": i, "gpu": hand.gpu})), env, SLOW_START * bound
        )
        for i, hand in enumerate(workers)
    ]
    ended = await asyncio.gather(*starts, return_exceptions=True)
    for error in ended:
        if isinstance(error, OSError):
            raise CannotRunError(f"{python} cannot be started: {error.strerror} (health.diag.python)")
        if isinstance(error, BaseException):
            raise error
    return [outcome for outcome in ended if isinstance(outcome, CheckOutcome)]


async def _together(workers: Sequence[_Hand], bound: float, announce: Announce) -> tuple[list[CheckOutcome], list[str]]:
    """The collective; without one of the devices there is no result."""
    missing = [hand.name for hand in workers if hand.failed]
    if missing:
        return [], [f"no collective: {', '.join(missing)} takes no part in it"]
    if not all(hand.torch for hand in workers):
        return [], ["no collective: it needs torch (health.diag.python)"]
    announce(f"collective of {len(workers)} processes")
    parts = await asyncio.gather(*(hand.do(COLLECTIVE, 2 * bound) for hand in workers))
    kind = f"{len(workers)} x {workers[0].kind}"
    wrong = [f"{hand.name}: {part.why}" for hand, part in zip(workers, parts, strict=True) if part.why]
    if wrong:
        return [CheckOutcome(COLLECTIVE, "", kind, why="; ".join(wrong[:8]))], []
    slowest = min(part.value or 0.0 for part in parts)
    return [CheckOutcome(COLLECTIVE, "", kind, slowest, parts[0].unit)], []

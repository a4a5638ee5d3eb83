"""Commands of the config, run again and again, each held to its time: the site's own checks, and how one is ended.

Nobody waits for one that even SIGKILL does not end, and no other run of it is started while it lives. What it writes is
read to a bound. Must never judge: what an exit code means is ``hardware/judging/rules.py``'s, or
``agent/notice.py``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

KEPT = 1 << 16
"""Bytes of the output that are kept; what is beyond them is read and dropped."""
SHOWN = 200
"""Characters of its first line that people see."""
DIES = 1.0
"""Seconds in which a killed process is gone, unless the kernel holds it."""


@dataclass(frozen=True, slots=True)
class SiteCheck:
    """One of them: a command, seconds between two runs, and the longest time of one."""

    name: str
    command: Sequence[str]
    every: float
    bound: float


@dataclass(frozen=True, slots=True)
class CheckReading:
    """How the last run of a site's own check ended."""

    name: str
    code: int | None = None
    """Its exit code; None: it has none (it could not be started, was killed, or took too long)."""
    text: str = ""
    """The first line of its output, or why it has no exit code."""


class Checks:
    """How each last ended; ``changed`` is called after each run."""

    def __init__(self, checks: Sequence[SiteCheck], environ: Mapping[str, str], changed: Callable[[], None]) -> None:
        self._environ = {k: v for k, v in environ.items() if not k.startswith("NODEAGENT__REDIS")}  # passwords
        self._changed = changed
        self._order = [check.name for check in checks]
        self._found: dict[str, CheckReading] = {}

    @property
    def readings(self) -> tuple[CheckReading, ...]:
        """Of those that ended at least once."""
        return tuple(self._found[name] for name in self._order if name in self._found)

    async def run(self, check: SiteCheck) -> None:
        """Until cancelled: run it, wait, run it again."""
        while True:
            process = await self._once(check)
            await asyncio.sleep(check.every)
            if process is not None and process.returncode is None:
                self._take(CheckReading(check.name, None, "it hangs and cannot be killed"))
                await process.wait()

    async def _once(self, check: SiteCheck) -> asyncio.subprocess.Process | None:
        """One run. None: it could not be started."""
        reader, writer = os.pipe()  # its own, to be closed whatever the check leaves behind
        output = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(output)
        try:
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(reader, "rb"))
            try:
                process = await asyncio.create_subprocess_exec(
                    *check.command, env=self._environ, cwd="/", stdin=asyncio.subprocess.DEVNULL, stdout=writer,
                    stderr=asyncio.subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                pipe.close()
                why = f"{check.command[0]} cannot be started: {error.strerror}"
                self._take(CheckReading(check.name, None, why))
                return None
            except BaseException:
                pipe.close()
                raise
        finally:
            os.close(writer)
        try:
            await self._watch(check, process, output)
        finally:
            pipe.close()
        return process

    async def _watch(self, check: SiteCheck, process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> None:
        kept = bytearray()
        reading = asyncio.create_task(_keep(output, kept))
        late = False
        try:
            async with asyncio.timeout(check.bound):
                await process.wait()
            await asyncio.wait((reading,), timeout=DIES)
        except TimeoutError:
            late = True
        finally:
            if process.returncode is not None and not reading.done():  # what it left behind holds the pipe
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            reading.cancel()
            await end(process)
        lines = bytes(kept).decode(errors="replace").strip().splitlines()
        text = " ".join(lines[0].split())[:SHOWN] if lines else ""
        quoted = f": {text}" if text else ""
        if late:
            self._take(CheckReading(check.name, None, f"did not end within {check.bound:g} s{quoted}"))
        elif process.returncode is not None and process.returncode < 0:
            self._take(CheckReading(check.name, None, f"killed by signal {-process.returncode}{quoted}"))
        else:
            self._take(CheckReading(check.name, process.returncode, text))

    def _take(self, reading: CheckReading) -> None:
        self._found[reading.name] = reading
        self._changed()


async def _keep(stream: asyncio.StreamReader, output: bytearray) -> None:
    while chunk := await stream.read(KEPT):
        output += chunk[: KEPT - len(output)]


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill it and all of its session, which must be its own; one that does not die is left to itself."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DIES):
            await process.wait()


async def ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ends, and is reaped, within the time."""
    loop, ended, pidfd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
    except TimeoutError:
        return process.poll() is not None
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    process.wait()
    return True

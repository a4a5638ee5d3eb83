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

from nodeagent.osutil.linux import short

KEPT = 1 << 16
"""Bytes of the output that are kept; what is beyond them is read and dropped."""
SHOWN = 200
"""Characters of its first line that people see."""
DIES = 1.0
"""Seconds in which a killed process is gone, unless the kernel holds it."""
LOOK = 0.02
"""Seconds between two looks at a process that nothing announces the end of."""


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
            if process is not None and process.poll() is None:
                self._take(CheckReading(check.name, None, "it hangs and cannot be killed"))
                while process.poll() is None:  # noqa: ASYNC110 (seldom, and it may need no descriptor)
                    await asyncio.sleep(check.every)

    async def _once(self, check: SiteCheck) -> subprocess.Popen[bytes] | None:
        """One run. None: it could not be started."""
        try:
            reader, writer = os.pipe()  # its own, to be closed whatever the check leaves behind
        except OSError as error:
            self._not_started(check, error)
            return None
        output = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(output)
        try:
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(reader, "rb"))
            try:
                # Not asyncio's: cancelled while it starts one, that ends what it started, but not its children.
                process = subprocess.Popen(  # noqa: ASYNC220 (it returns when the program has begun)
                    check.command, env=self._environ, cwd="/", stdin=subprocess.DEVNULL, stdout=writer,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                pipe.close()
                self._not_started(check, error)
                return None
        finally:
            os.close(writer)
        try:
            await self._watch(check, process, output)
        finally:
            pipe.close()
        return process

    async def _watch(self, check: SiteCheck, process: subprocess.Popen[bytes], output: asyncio.StreamReader) -> None:
        kept = bytearray()
        reading = asyncio.create_task(_keep(output, kept))
        over = False
        try:
            if over := await is_over(process, check.bound):
                await asyncio.wait((reading,), timeout=DIES)
        finally:
            if not (over and reading.done()):  # what it left behind holds the pipe
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            reading.cancel()
            await _reap(process)
        lines = bytes(kept).decode(errors="replace").strip().splitlines()
        text = " ".join(lines[0].split())[:SHOWN] if lines else ""
        quoted = f": {text}" if text else ""
        if not over:
            self._take(CheckReading(check.name, None, f"did not end within {check.bound:g} s{quoted}"))
        elif process.returncode is not None and process.returncode < 0:
            self._take(CheckReading(check.name, None, f"killed by signal {-process.returncode}{quoted}"))
        else:
            self._take(CheckReading(check.name, process.returncode, text))

    def _not_started(self, check: SiteCheck, error: OSError) -> None:
        self._take(CheckReading(check.name, None, f"{check.command[0]} cannot be started: {error.strerror}"))

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


async def _reap(process: subprocess.Popen[bytes]) -> None:
    """Of a killed one; one that does not die is left to itself."""
    loop = asyncio.get_running_loop()
    until = loop.time() + DIES
    while process.poll() is None and loop.time() < until:  # noqa: ASYNC110 (for a moment, and it needs no descriptor)
        await asyncio.sleep(LOOK)


async def is_over(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it has ended, or does within the time. It is not reaped, so that its number stays its own."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        if not short(error):
            raise
        until = loop.time() + seconds
        while not (ended := _has_ended(process)) and loop.time() < until:  # noqa: ASYNC110 (nothing announces it)
            await asyncio.sleep(LOOK)
        return ended
    loop.add_reader(pidfd, over.set)
    try:
        async with asyncio.timeout(seconds):
            await over.wait()
    except TimeoutError:
        return _has_ended(process)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return True


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


async def ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ends, and is reaped, within the time."""
    if await is_over(process, seconds):
        process.wait()
        return True
    return False

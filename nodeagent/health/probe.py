"""The agent's side of a probe: a process that writes JSON lines, held to a deadline and replaced when it misses two.

Nobody waits for the process, alive or killed: one that is stuck in the driver does not even die. Must never block the
loop, never judge what was read, and never leave more than ``MOST_STUCK`` of them behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nodeagent.health.readings import ProbeReading

DEADLINE = 5.0
"""Seconds beyond its own pace after which a probe is late."""
AGAIN = 5.0
"""Seconds from a probe's end to its next start."""
MOST_STUCK = 3
"""Killed processes that have not died, after which no more are started: each holds memory and locks of the driver."""
DIES = 1.0
"""Seconds in which a killed process is gone, unless the kernel holds it."""
_LINE = 4 << 20

Heard = Callable[[dict[str, Any]], None]


class Probe:
    """One probe. ``reading`` is always there; ``heard`` gets each line, ``changed`` is called when the reading does."""

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        environ: Mapping[str, str],
        pace: float,
        heard: Heard,
        changed: Callable[[], None],
        deadline: float = DEADLINE,
        again: float = AGAIN,
        kill: Callable[[subprocess.Popen[bytes]], None] = subprocess.Popen.kill,
    ) -> None:
        self._command, self._environ, self._heard, self._changed = command, environ, heard, changed
        self._bound, self._again, self._kill = pace + deadline, again, kill
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = asyncio.Event()
        self._wanted.set()
        self.reading = ProbeReading(name)

    async def run(self) -> None:
        """Until cancelled: start it, hear it, start it again."""
        while True:
            await self._wanted.wait()
            self._stuck = [process for process in self._stuck if process.poll() is None]
            if len(self._stuck) >= MOST_STUCK:
                self._tell(self.reading.missed + 1, f"{len(self._stuck)} of its processes hang and cannot be killed")
                await asyncio.sleep(self._bound)
                continue
            try:
                process = self._start()
            except OSError as error:
                self._tell(self.reading.missed + 1, f"it cannot be started: {error.strerror}")
            else:
                self._process = process
                try:
                    await self._listen(process)
                finally:
                    self._process = None
                    await self._end(process)
                if not self._wanted.is_set():
                    continue
            await asyncio.sleep(self._again)

    async def pause(self) -> None:
        """Have no process until ``resume``: a GPU that anything holds open cannot be reset."""
        self._wanted.clear()
        if self._process is not None:
            await self._end(self._process)

    def resume(self) -> None:
        """Read again."""
        self._wanted.set()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command(), env=dict(self._environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    async def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Hear it until it ends or misses two deadlines in a row."""
        assert process.stdout is not None
        lines = asyncio.StreamReader(_LINE)
        protocol = asyncio.StreamReaderProtocol(lines)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
        missed = 0
        try:
            while missed < 2:
                try:
                    async with asyncio.timeout(self._bound):
                        line = await lines.readline()
                    if not line and not self._wanted.is_set():
                        return
                    if not line:
                        self._tell(self.reading.missed, self.reading.problem or "its process ended")
                        return
                    missed = 0
                    told = json.loads(line)
                    if told.keys() - {"problem"}:
                        self._heard(told)
                except TimeoutError:
                    missed += 1
                    self._tell(self.reading.missed + 1, "")
                    continue
                except (ValueError, TypeError, KeyError) as error:  # of another version than this agent's, say
                    self._tell(self.reading.missed, f"it writes what this agent does not understand: {error}")
                    return
                self._tell(0, str(told.get("problem", "")))
        finally:
            transport.close()

    def _tell(self, missed: int, problem: str) -> None:
        new = ProbeReading(self.reading.name, missed, problem)
        if new != self.reading:
            self.reading = new
            self._changed()

    async def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill it; what has not died in a moment is left to itself."""
        if process.poll() is not None:
            return
        self._kill(process)
        ended = asyncio.Event()
        loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DIES):
                    await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            if process.poll() is None:
                self._stuck.append(process)

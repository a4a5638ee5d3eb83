"""The agent's side of a probe: a process that writes JSON lines, held to a deadline and replaced when it misses two.

Nobody waits for the process, alive or killed: one that is stuck in the driver does not even die. Must never block the
loop, never judge what was read, and never leave more than ``MOST_STUCK`` of them behind. Must never import what a probe
imports: an agent that loaded a driver's library could hang with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nodeagent.hardware.readings import ProbeReading
from nodeagent.osutil.commands import DIES

DEADLINE = 5.0
"""Seconds beyond its own pace after which a probe is late."""
AGAIN = 5.0
"""Seconds from a probe's end to its next start."""
MOST_STUCK = 3
"""Killed processes that have not died, after which no more are started: each holds memory and locks of the driver."""
PROBLEM = 300
"""Characters of what is wrong that are kept."""
MOST_LINES = 200
"""Lines of a plug-in within one pace and deadline. One that writes more is stopped, or it would keep the agent busy."""
MOST_PROGRESS = 256
"""Signs of progress between two readings: a look brings up no more devices than that."""
_LINE = 4 << 20
NOT_UNDERSTOOD = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What the parsing of JSON raises that is not as it must be."""
ROOT = Path(__file__).parents[3]

TakeMessage = Callable[[dict[str, Any]], None]
"""Takes in a message. Raises NotUnderstoodError for one that is not as it must be; what else it raises is an error of
the agent's own."""


class NotUnderstoodError(ValueError):
    """A probe wrote what this agent does not understand; ``str()`` is what is wrong with it."""


@contextlib.contextmanager
def parsing() -> Iterator[None]:
    """Around nothing but the reading of what a probe wrote: raises NotUnderstoodError for what that raises."""
    try:
        yield
    except NOT_UNDERSTOOD as error:  # of another version than this agent's, say
        raise NotUnderstoodError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """How often a probe's process writes, and what it may take and write until it is replaced."""

    pace: float
    """Seconds between two of its readings."""
    deadline: float = DEADLINE
    """Seconds beyond its pace after which it is late."""
    again: float = AGAIN
    """Seconds from its end to its next start."""
    most_lines: int | None = None
    """Within ``pace + deadline`` seconds; None: as many as it likes."""


class Probe:
    """One probe. ``reading`` is always there; ``received`` gets each line, ``changed`` is called when the reading
    differs."""

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        environ: Mapping[str, str],
        limits: ProbeLimits,
        received: TakeMessage,
        changed: Callable[[], None],
        optional: Callable[[], bool] = lambda: False,
    ) -> None:
        """``optional``: when the process says that there is no driver, no other is started, and nothing is wrong."""
        self._command, self._environ, self._received, self._changed = command, environ, received, changed
        self._optional, self._most_lines = optional, limits.most_lines
        self.absent = ""
        """Why there is nothing to read, once that is known."""
        self._bound, self._again = limits.pace + limits.deadline, limits.again
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = asyncio.Event()
        self._wanted.set()
        self.reading = ProbeReading(name)

    async def run(self) -> None:
        """Until cancelled, or until there is nothing to read: start it, read its lines, start it again."""
        try:
            await self._read_on()
        finally:
            for process in self._stuck:
                if process.poll() is None:
                    process.returncode = -signal.SIGKILL  # it is left to itself: not a child that was forgotten

    async def _read_on(self) -> None:
        while True:
            await self._wanted.wait()
            self._stuck = [process for process in self._stuck if process.poll() is None]
            if len(self._stuck) >= MOST_STUCK:
                self._report(self.reading.missed + 1, f"{len(self._stuck)} of its processes hang and cannot be killed")
                await asyncio.sleep(self._bound)
                continue
            try:
                process = self._start()
            except OSError as error:
                self._report(self.reading.missed + 1, f"it cannot be started: {error.strerror}")
            else:
                self._process = process
                try:
                    await self._listen(process)
                finally:
                    self._process = None
                    await self._end(process)
                if self.absent:
                    return
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
        """Read its lines until it ends or misses two deadlines in a row."""
        assert process.stdout is not None
        lines = asyncio.StreamReader(_LINE)
        protocol = asyncio.StreamReaderProtocol(lines)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
        missed = count = progress = 0
        clock = asyncio.get_running_loop().time
        until = clock() + self._bound
        try:
            while missed < 2:
                try:
                    async with asyncio.timeout(self._bound):
                        line = await lines.readline()
                except TimeoutError:
                    missed += 1
                    self._report(self.reading.missed + 1, "")
                    continue
                except ValueError as error:  # a line without an end
                    self._not_understood(error)
                    return
                if not line and not self._wanted.is_set():
                    return
                if not line:
                    self._report(self.reading.missed, self.reading.problem or "its process ended")
                    return
                missed = 0
                count, until = (count + 1, until) if clock() < until else (1, clock() + self._bound)
                if self._most_lines is not None and count > self._most_lines:
                    self._report(self.reading.missed, f"it writes more than {self._most_lines} lines in a moment")
                    return
                try:
                    message, problem = _parsed(line)
                    if message.get("absent") and self._optional():
                        self.absent = problem
                        return
                    if message.keys() - {"problem", "absent", "progress"}:
                        self._received(message)
                except NotUnderstoodError as error:
                    self._not_understood(error)
                    return
                if "progress" in message:  # no answer yet: what was missed before stays so
                    progress += 1
                    if progress <= MOST_PROGRESS:
                        continue
                    self._report(self.reading.missed, "its first look does not end")
                    return
                progress = 0
                self._report(0, problem[:PROBLEM])
        finally:
            transport.close()

    def _not_understood(self, why: ValueError) -> None:
        self._report(self.reading.missed, f"it writes what this agent does not understand: {why}"[:PROBLEM])

    def _report(self, missed: int, problem: str) -> None:
        new = ProbeReading(self.reading.name, missed, problem)
        if new != self.reading:
            self.reading = new
            self._changed()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    async def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill it; what has not died in a moment is left to itself."""
        if process.poll() is not None:
            return
        self.kill(process)
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
            if process.poll() is None and process not in self._stuck:
                self._stuck.append(process)


def _parsed(line: bytes) -> tuple[dict[str, Any], str]:
    """The message in a line, and the problem that it tells of. Raises NotUnderstoodError."""
    with parsing():
        message: dict[str, Any] = json.loads(line)
        return message, str(message.get("problem", ""))


def reader_command(python: str, target: str, pace: float | None, packaged: bool = True) -> tuple[str, ...]:
    """The command that reads an accelerator: every ``pace`` seconds, or (None) lists its devices once. ``packages``
    belongs into its PYTHONPATH. Those that come with nodeagent are started without ``site``, which costs memory and
    time."""
    how = "list" if pace is None else str(pace)
    return (python, "-SP" if packaged else "-P", "-m", "nodeagent.hardware.probes.reader", target, how)


def packages() -> str:
    """Where nodeagent and nvidia-ml-py are."""
    found = find_spec("pynvml")
    folders = [str(ROOT)]
    if found is not None and found.origin is not None:
        folders.append(str(Path(found.origin).parent))
    return os.pathsep.join(dict.fromkeys(folders))

"""The commands that repair and verify: each in a session of its own, held to a deadline, its output kept in a file.
After a verify run, what it reports goes to the judge.

Nobody waits for one that even SIGKILL does not end. A command outlives the agent that started it; the next start finds
it by its pid and start time. Must never decide whether one is run, or what its end means.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from nodeagent.model.health import Action, Attempt, Verdict
from nodeagent.osutil.clock import Clock
from nodeagent.osutil.commands import ends
from nodeagent.osutil.linux import is_running, kill_group, start_time
from nodeagent.osutil.untrusted import UntrustedError, aside
from nodeagent.spec.healthconfig import RepairConfig

DIES = 2.0
"""Seconds in which a killed command is gone, unless the kernel holds it."""
MOST_OUTPUTS = 20
"""Outputs kept; the oldest go first."""
TAIL = 1 << 16
"""Bytes of an output that are looked at."""
SHOWN = 300
"""Characters of it that people see."""
LOOK = 0.5
"""Seconds between two looks at a command that an earlier start of the agent left."""

FAILED = 3
"""The exit code of a verify run that found the hardware broken. Not 1 or 2: with those a script ends that is broken
itself (a traceback, a shell's error), which says nothing of the hardware. `nodeagent diag` ends with 1, and says in its
report which checks failed: that counts, too."""

Started = Callable[[int, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int | None
    """128 + n for a signal; None: it was killed at its deadline."""
    text: str


class CommandRunner(Protocol):
    """What repairs this machine."""

    async def repair(self, attempt: Attempt, started: Started) -> Ended:
        """Run its command; ``started`` gets pid and start time before anything else is waited for."""
        ...

    async def verify(self, devices: Sequence[str]) -> Ended:
        """Check these GPUs (none: the whole node). Code 0: passed, ``FAILED``: the hardware is broken, None: it took
        too long; with any other it is the run itself that is broken."""
        ...

    async def outlived(self, attempt: Attempt, seconds: float) -> None:
        """Wait until a command that an earlier start of the agent left is over; after ``seconds`` kill it."""
        ...


def _runs(attempt: Attempt) -> bool:
    """Its process is there; also while there is no descriptor to look with."""
    try:
        return start_time(attempt.pid) == attempt.start and is_running(attempt.pid)
    except OSError:
        return True


class Commands:
    """Those of the config."""

    def __init__(self, config: RepairConfig, node: str, folder: Path, environ: Mapping[str, str]) -> None:
        self._config, self._node, self._folder = config, node, folder
        own = str(Path(sys.executable).parent)  # where `nodeagent` lies
        kept = {k: v for k, v in environ.items() if not k.startswith("NODEAGENT__REDIS")}  # passwords
        self._environ = kept | {"PATH": f"{environ.get('PATH', os.defpath)}:{own}"}

    async def repair(self, attempt: Attempt, started: Started) -> Ended:
        reported = {
            "NODEAGENT_REPAIR": attempt.kind, "NODEAGENT_NODE": self._node, "NODEAGENT_GPU": attempt.device,
            "NODEAGENT_RULE": attempt.rule, "NODEAGENT_TEXT": attempt.text,
        }  # fmt: skip
        words = {"node": self._node, "rule": attempt.rule}
        argv = filled(self._config.commands()[attempt.kind], [attempt.device], words)
        ended, _ = await self._run(attempt.kind, argv, reported, self._config.deadline, started)
        return ended

    async def verify(self, devices: Sequence[str]) -> Ended:
        reported = {"NODEAGENT_REPAIR": "verify", "NODEAGENT_NODE": self._node, "NODEAGENT_GPU": ",".join(devices)}
        if devices:
            reported["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        argv = filled(self._config.verify or (), devices, {"node": self._node, "rule": ""})
        ended, output = await self._run("verify", argv, reported, self._config.verify_deadline, _nobody)
        failed = failed_checks(output) if ended.code == 1 else ""
        return Ended(FAILED, failed) if failed else ended

    async def outlived(self, attempt: Attempt, seconds: float) -> None:
        if not attempt.pid or not _runs(attempt):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                while _runs(attempt):  # noqa: ASYNC110  # not ours
                    await asyncio.sleep(LOOK)
                return
        with contextlib.suppress(OSError):  # it is gone, or no descriptor to look with
            if start_time(attempt.pid) == attempt.start:
                os.killpg(attempt.pid, signal.SIGKILL)

    async def _run(
        self, kind: str, argv: Sequence[str], reported: Mapping[str, str], deadline: float, started: Started
    ) -> tuple[Ended, str]:
        """And the end of its output, as far as the folder tells it."""
        try:
            process, output = await asyncio.to_thread(self._start, kind, argv, reported)
        except OSError as error:
            return Ended(127, f"{error.filename or argv[0]} cannot be started: {error.strerror}"), ""
        try:
            began = start_time(process.pid) or 0
        except OSError:  # no descriptor to look with
            began = 0
        await started(process.pid, began)
        if await ends(process, deadline):
            code = process.returncode if process.returncode >= 0 else 128 - process.returncode
            text = await _end_of(output)
            return Ended(code, f"exit code {code}{_quoted(text)}"), text
        pidfd = os.pidfd_open(process.pid)
        try:
            kill_group(process.pid, pidfd)
        finally:
            os.close(pidfd)
        gone = await ends(process, DIES)
        text = await _end_of(output)
        why = f"did not end within {deadline:g} s{'' if gone else ', and cannot be killed'}{_quoted(text)}"
        return Ended(None, why), text

    def _start(
        self, kind: str, argv: Sequence[str], reported: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """The command, and where its output goes. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = self._folder.glob("*.log")
        kept = sorted((int(named[1]), file) for file in files if (named := _OUTPUT.fullmatch(file.name)))
        for _, file in kept[: -(MOST_OUTPUTS - 1)]:
            file.unlink(missing_ok=True)
        path = self._folder / f"{kept[-1][0] + 1 if kept else 1}-{kind}.log"
        with path.open("wb") as output:
            return subprocess.Popen(
                argv, env={**self._environ, **reported}, cwd="/", stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            ), path  # fmt: skip


_OUTPUT = re.compile(r"(\d{1,9})-.*\.log", re.ASCII)


async def _end_of(output: Path) -> str:
    """The last bytes of a file; nothing where it cannot be read, or not soon: how the command ended is known anyway."""

    def look() -> str:
        with output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return file.read(TAIL).decode(errors="replace")

    try:
        return await aside(look)
    except (OSError, UntrustedError) as error:
        structlog.get_logger("repair").warning("output of a command cannot be read", why=str(error))
        return ""


def filled(command: Sequence[str], gpus: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """The command with its placeholders filled in. A word with ``{gpu}`` is there once for each GPU."""
    out = []
    for word in command:
        done = word
        for name, value in words.items():
            done = done.replace("{" + name + "}", value)
        out += [done.replace("{gpu}", gpu) for gpu in gpus] if "{gpu}" in done else [done]
    return out


def failed_checks(output: str) -> str:
    """What a verify run says of the checks that failed; empty if it says nothing of the kind."""
    begins = re.search(r"^\{", output, re.MULTILINE)
    if begins is None:
        return ""
    try:
        reported, _ = json.JSONDecoder().raw_decode(output[begins.start() :])
        failed = [f"{check['name']}: {check['why']}" for check in reported["checks"] if not check["passed"]]
    except (ValueError, KeyError, TypeError):
        return ""
    return "; ".join(failed)[:SHOWN]


def _quoted(output: str) -> str:
    last = " ".join(output.split())[-SHOWN:]
    return f": {last}" if last else ""


async def _nobody(_pid: int, _start: int) -> None:
    """Nobody needs to know."""


MOST_TRIES = 3
"""How often a verify run that could not run is tried."""
PAUSE = 60.0
"""Seconds until the second try; doubled for each further one."""


class Ward(Protocol):
    """What is wrong with this node (``hardware/monitor.py``)."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]: ...

    @property
    def waiting(self) -> frozenset[str]: ...

    @property
    def processes(self) -> Mapping[str, Sequence[int]] | None: ...

    @property
    def strangers(self) -> frozenset[int]: ...

    @property
    def expected(self) -> frozenset[str]: ...

    def repaired(self, devices: Collection[str], action: Action) -> None: ...

    def passed(self, devices: Collection[str]) -> None: ...

    def escalate(self, keys: Collection[tuple[str, str]], why: str) -> None: ...

    async def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tries:
    """Verify runs that could not run."""

    count: int
    again: float
    """Unix time of the next one."""
    why: str

    @property
    def over(self) -> bool:
        return self.count >= MOST_TRIES

    @property
    def reported(self) -> str:
        return f"its verify run is broken{', and is not tried again' if self.over else ''}: {self.why}"


class Verifier:
    """One node's verify runs, one at a time."""

    def __init__(self, ward: Ward, runner: CommandRunner, clock: Clock, counted: Callable[[str, str], None]) -> None:
        self._ward, self._runner, self._clock, self._counted = ward, runner, clock, counted
        self._tries: dict[str, Tries] = {}
        """By the first device of each run."""
        self._log = structlog.get_logger("repair")

    def forget(self) -> None:
        """Of those that wait for nothing any more."""
        waiting = {v.device for v in self._ward.verdicts if v.stage == "repaired"}
        self._tries = {device: tries for device, tries in self._tries.items() if device in waiting}

    async def verify(self, devices: Collection[str], whole: bool, note: Callable[[str, str], None]) -> Tries | None:
        """Have them (``whole``: the node) verified; a sentence if that could not be done, or not yet again."""
        key, now = min(devices), self._clock.wall()
        before = self._tries.get(key)
        if before is not None and (before.over or now < before.again):
            return before
        ended = await self._runner.verify([] if whole else sorted(devices))
        what = "the node" if whole else ", ".join(sorted(devices))
        if ended.code not in (0, FAILED, None):
            count = before.count + 1 if before is not None else 1
            tries = Tries(count, self._clock.wall() + PAUSE * 2 ** (count - 1), ended.text)
            self._tries[key] = tries
            self._counted("verify", "interrupted")
            self._log.error("verify run could not run", devices=what, why=ended.text)
            return tries
        self._tries.pop(key, None)
        passed = ended.code == 0
        if passed:
            self._ward.passed(devices)
        else:
            failed = {(v.rule, v.device) for v in self._ward.verdicts if v.device in devices and v.stage == "repaired"}
            self._ward.escalate(failed, f"verify run: {ended.text}")
        note("VerifyPassed" if passed else "VerifyFailed", f"{what}: {ended.text}")
        self._counted("verify", "done" if passed else "failed")
        return None

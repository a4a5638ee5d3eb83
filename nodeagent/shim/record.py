"""How one worker ended, as a record: code or signal, the lines that explain it, and whether the kernel killed it for
want of memory.

Standard library only; reads the worker's error file and the kernel's counts, decides nothing. No count is no proof:
where the shim's control group has no count of its own, the machine's is taken, and the words say so.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeagent.osutil.linux import open_plain

MAX_CHARS = 4000
"""Of a worker's last words."""
WHOLE_ERRORS = 16
"""So many of the workers that ended first are reported with all of their last words, later ones with less of them: the
first are the cause, a pod may have a thousand workers, and all that is reported is one line to the agent."""
_MAX_FILE = 1 << 20


@dataclass(slots=True)
class Farewell:
    """How a worker took a planned stop; fields as of model.world.WorkerExit."""

    left_at: int | None = None
    saved_in: float | None = None
    overdue: float | None = None
    missed: bool = False
    saving: bool = False
    """It has begun to save; not sent to others."""


def exit_record(
    rank: int,
    local_rank: int,
    pid: int,
    status: int,
    stopped: bool,
    order: int,
    error_file: Path,
    tail: str,
    farewell: Farewell,
    why: str = "",
) -> dict[str, Any]:
    """As model.world.WorkerExit. ``tail``: the last lines of standard error, used if the worker wrote no error
    file. ``why``: what else is known of its end."""
    code = os.waitstatus_to_exitcode(status)
    error = "" if code == 0 else (_from_error_file(error_file) or tail)
    if why:
        error = f"{error.rstrip()}\n{why}".lstrip()
    return {
        "rank": rank,
        "local_rank": local_rank,
        "pid": pid,
        "code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "stopped": stopped,
        "order": order,
        "at": time.time(),
        "error": error[-MAX_CHARS:].encode("utf-8", "backslashreplace").decode()[-MAX_CHARS:],
        "left_at": farewell.left_at,
        "saved_in": farewell.saved_in,
        "overdue": farewell.overdue,
        "missed": farewell.missed,
    }


def _from_error_file(path: Path) -> str:
    """The message of a TORCHELASTIC_ERROR_FILE: torch's record, or plain text."""
    try:
        with open_plain(path, os.O_NOFOLLOW) as file:  # a worker may have put a link, a folder or a pipe there
            text = file.read(_MAX_FILE).decode("utf-8", "backslashreplace")
    except OSError:  # it is not there, is no file, or its disk fails
        return ""
    try:
        message = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text.strip()
    try:
        if not isinstance(message, dict):
            return str(message)
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        return str(stack or message.get("message", "")).strip()
    except RecursionError:  # what could be read need not be printable
        return text.strip()


ROOT = Path("/")
WORDS = "nodeagent: out of memory"
"""How the line begins that explains an end; ``plan/failure/blame.py`` looks for it."""


LOOKS = 20
"""Looks at what the pod holds that are remembered: some 5 s. What a worker held is gone before its end is known."""


@dataclass(frozen=True, slots=True)
class MemoryKill:
    """Why the kernel may have killed a worker."""

    text: str
    """Empty: not for want of memory, as far as is known."""
    starved: dict[str, int] | None = None
    """As model.world.Starved; None: a limit of the pod itself was reached, or it is not known what the pod held."""


@dataclass(frozen=True, slots=True)
class _Look:
    kills: int
    limits: int
    """How often the group's own limit, or one below it, was reached."""
    held: int


class MemoryKills:
    """Counts from now on. ``root``: of the files of the kernel and of cgroups."""

    def __init__(self, root: Path) -> None:
        group = _group(root)
        self._root, self._file = root, group if group is not None else root / "proc/vmstat"
        self._certain = group is not None
        self._before = _numbers(self._file).get("oom_kill", 0)
        self._looks = deque[_Look](maxlen=LOOKS)
        self.look()

    def look(self) -> None:
        """Note what the pod holds, now and then: at least as often as memory may fill up."""
        if self._certain:
            counts, stat = _numbers(self._file), _numbers(self._file.parent / "memory.stat")
            swapped = _number(self._file.parent / "memory.swap.current") or 0
            held = stat.get("anon", 0) + stat.get("shmem", 0) + swapped  # what nobody can take from it
            self._looks.append(_Look(counts.get("oom_kill", 0), counts.get("oom", 0), held))

    def explain(self, status: int) -> MemoryKill:
        """Why a worker that nobody here stopped may have ended with this wait status."""
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            return MemoryKill("")
        killed = _numbers(self._file).get("oom_kill", 0) - self._before
        if killed <= 0:
            return MemoryKill("")
        if not self._certain:
            return MemoryKill(
                f"{WORDS}, it seems: since this start the kernel killed {killed} process(es) on this machine"
            )
        text = f"{WORDS}: the kernel killed {killed} process(es) of this pod ({self._file.parent.name})"
        self.look()
        starved = self._starved()
        if starved is not None:
            held, total = (f"{starved[name] / 1e9:.1f} GB" for name in ("held", "total"))
            text += f", which held {held} of {total} for all"
        return MemoryKill(text, starved)

    def _starved(self) -> dict[str, int] | None:
        first, last = self._looks[0], self._looks[-1]
        held, total = max(look.held for look in self._looks), self._total()
        if last.kills <= first.kills or last.limits != first.limits or held <= 0 or total <= 0:
            return None
        return {"held": held, "total": total}

    def _total(self) -> int:
        """Memory and swap for all pods together, or for all that there is; 0: not known."""
        machine = _numbers(self._root / "proc/meminfo")
        groups = [folder for folder in self._file.parent.parents if (folder / "cgroup.procs").exists()]
        limits = [limit for folder in groups if (limit := _number(folder / "memory.max")) is not None]
        memory = min([machine.get("MemTotal:", 0) * 1024, *limits])
        return memory + machine.get("SwapTotal:", 0) * 1024 if memory > 0 else 0


def _group(root: Path) -> Path | None:
    """The count of our own control group, if memory is counted there."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, path = line.partition(":")
        if number == "0":
            file = root / "sys/fs/cgroup" / path.removeprefix(":").lstrip("/") / "memory.events"
            return file if "oom_kill" in _numbers(file) else None
    return None


def _numbers(file: Path) -> dict[str, int]:
    """Of a file of the kernel's with lines of a name and a number."""
    words = (line.split() for line in _read(file).splitlines())
    return {found[0]: int(found[1]) for found in words if len(found) > 1 and found[1].isdecimal()}


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdecimal() else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # a group without that controller, or a kernel that does not tell: nothing is known
        return ""

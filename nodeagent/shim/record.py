"""How one worker ended, as a record: code or signal, the lines that explain it, and whether the kernel killed it for
want of memory.

Standard library only; reads the worker's error file and the kernel's counts, decides nothing. No count is no proof:
where the shim's control group has no count of its own, the machine's is taken, and the words say so.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def _open_plainly(path: str, _flags: int) -> int:
    """A file to read: what a worker put there may be a link, a folder or a pipe. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no file", path)
    return fd


def _from_error_file(path: Path) -> str:
    """The message of a TORCHELASTIC_ERROR_FILE: torch's record, or plain text."""
    try:
        with open(path, "rb", opener=_open_plainly) as file:
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


class MemoryKills:
    """Counts from now on."""

    def __init__(self, root: Path = ROOT) -> None:
        group = _group(root)
        self._file = group if group is not None else root / "proc/vmstat"
        self._certain = group is not None
        self._before = _count(self._file)

    def explain(self, status: int) -> str:
        """Why a worker that nobody here stopped may have ended with this wait status; empty if not for this."""
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            return ""
        killed = _count(self._file) - self._before
        if killed <= 0:
            return ""
        if self._certain:
            return f"{WORDS}: the kernel killed {killed} process(es) of this pod ({self._file.parent.name})"
        return f"{WORDS}, it seems: since this start the kernel killed {killed} process(es) on this machine"


def _group(root: Path) -> Path | None:
    """The count of our own control group, if memory is counted there."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, path = line.partition(":")
        if number == "0":
            file = root / "sys/fs/cgroup" / path.removeprefix(":").lstrip("/") / "memory.events"
            return file if "oom_kill " in _read(file) else None
    return None


def _count(file: Path) -> int:
    return sum(int(line.split()[1]) for line in _read(file).splitlines() if line.startswith("oom_kill "))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # a group without that controller, or a kernel that does not tell: nothing is known
        return ""

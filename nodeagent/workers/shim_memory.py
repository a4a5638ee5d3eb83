"""Whether the kernel killed for want of memory: its counts at a gang's start and at a worker's end.

Standard library only. A kernel that was asked nothing says nothing here, and no count is no proof: where the shim's
control group has no count of its own, the machine's is taken, and the words say so.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

ROOT = Path("/")
WORDS = "nodeagent: out of memory"
"""How the line begins that explains an end; ``plan/blame.py`` looks for it."""


class MemoryKills:
    """Counts from now on."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
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

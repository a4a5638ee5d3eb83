"""Who a process belongs to, for people: its pid, its user, and what it runs. Reads /proc; must never judge."""

from __future__ import annotations

import os
import pwd

from nodeagent.workers.linux import read_proc

LONGEST = 60
"""Characters of the command that are told."""


def who(pid: int) -> str:
    """``pid 4711 (train1: python train.py)``; of one that has gone, or that another container hides, the pid alone."""
    command = " ".join(read_proc(f"/proc/{pid}/cmdline").decode(errors="replace").replace("\0", " ").split())
    command = command or read_proc(f"/proc/{pid}/comm").decode(errors="replace").strip()
    try:
        user = user_of(os.stat(f"/proc/{pid}").st_uid)  # noqa: PTH116 (a third of what pathlib takes)
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} ({user}: {command[:LONGEST]})"


def user_of(uid: int) -> str:
    """The name of a user of this machine, else its number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

"""Who a process belongs to, for people: its pid, its user, and what it runs. Reads /proc; must never judge.
The probe imports it: the standard library's smallest parts only."""

from __future__ import annotations

import os
import pwd

LONGEST = 60
"""Characters of the command that are shown."""


def who(pid: int) -> str:
    """``pid 4711 (train1: python train.py)``, with the job where the process has the name of one in its environment;
    empty for one that has gone, or that is not to be seen from this container."""
    try:
        user = user_of(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return ""
    command = " ".join(read_proc(f"/proc/{pid}/cmdline").decode(errors="replace").replace("\0", " ").split())
    command = command or read_proc(f"/proc/{pid}/comm").decode(errors="replace").strip()
    job = job_of(pid)
    return f"pid {pid} ({user}: {command[:LONGEST]}{f', of job {job}' if job else ''})"


def job_of(pid: int) -> str:
    """The job whose worker it is or was; of Slurm, too. Empty where it has none, or another user hides it."""
    found = dict(pair.split(b"=", 1) for pair in read_proc(f"/proc/{pid}/environ").split(b"\0") if b"=" in pair)
    ours = found.get(b"NODEAGENT_JOB", b"").decode(errors="replace")
    theirs = found.get(b"SLURM_JOB_ID", b"").decode(errors="replace")
    return ours or (f"{theirs} of Slurm" if theirs else "")


def read_proc(path: str) -> bytes:
    """A small file of /proc; empty where it is not to be had."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 1 << 14)
    except OSError:
        return b""
    finally:
        os.close(fd)


def user_of(uid: int) -> str:
    """The name of a user of this machine, else its number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

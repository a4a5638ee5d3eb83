"""Where tests keep their files: in memory, where the machine has room there. And whether a folder is held.

What agents and Redis fsync must not wait for the disk of a shared machine: one that stands for seconds fails a command
("only 0 of 2 nodes had it on disk"), as it should, and no test is about that.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM = 1 << 30
"""Bytes that must be free there: all folders of one run of all tests take less than half of them."""


def in_memory() -> Path | None:
    """The folder there; None if it is missing, small, or no program may be started from it."""
    try:
        room = os.statvfs(MEMORY)
    except OSError:
        return None
    usable = room.f_bavail * room.f_frsize >= ROOM and not room.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK)
    return MEMORY if usable else None


def short() -> Path:
    """Where a folder's path is short, since unix sockets live below it."""
    return in_memory() or Path("/tmp")


def is_held(folder: Path) -> bool:
    """Whether somebody has a lock on it, so that systemd-tmpfiles removes nothing there, however old it is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False

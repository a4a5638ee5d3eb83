"""What runs below a process, whatever sessions, groups and environments it has made for itself; and its end.

A shim is a subreaper, so all that its pod ever started is below it: a process that leaves its session, or whose parent
has ended, becomes the shim's child. Standard library only: the shim's watchdog imports it. Must never hold a policy
(when to kill, and whom to spare, is the caller's decision).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Container, Iterator

from nodeagent.workers.linux import pids, proc_stat, read_proc

MOST = 1 << 16
"""Processes that one look takes in; the next look finds the others."""


def children_of(pid: int) -> list[int]:
    """Children of all of its threads, zombies included."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 (names only, and half the price)
    except OSError:
        return []
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):  # noqa: PTH110 (a kernel without CONFIG_PROC_CHILDREN)
        return [other for other in pids() if parent_of(other) == pid]
    return [int(word) for thread in threads for word in read_proc(f"/proc/{pid}/task/{thread}/children").split()]


def parent_of(pid: int) -> int:
    """Its parent's pid; 0 if there is no such process."""
    stat = proc_stat(f"/proc/{pid}/stat")
    return int(stat[1]) if len(stat) > 1 else 0


def below(root: int, spared: Container[int] = ()) -> Iterator[tuple[int, int]]:
    """(pid, parent) of all below ``root`` but the spared ones and what is below those, parents first."""
    waiting, seen = [root], {root}
    while waiting and len(seen) < MOST:
        parent = waiting.pop(0)
        for pid in children_of(parent):
            if pid not in seen and pid not in spared:
                seen.add(pid)
                waiting.append(pid)
                yield pid, parent


def kill_below(root: int, spared: Container[int] = ()) -> list[int]:
    """SIGKILL what is below ``root`` now; returns what was found alive. Call it until nothing is: what a dying process
    started meanwhile has become a child of the subreaper above it."""
    found = []
    for pid, parent in below(root, spared):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            pidfd = os.pidfd_open(pid)
            try:
                stat = proc_stat(f"/proc/{pid}/stat")  # after the pidfd pinned it: the number may have been reused
                if len(stat) > 1 and stat[0] not in (b"Z", b"X") and int(stat[1]) in (parent, root):
                    found.append(pid)
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
    return found

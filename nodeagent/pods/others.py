"""What root ends of a pod because its shim may not.

A shim is the job's user and may signal this user's processes only. A file with the setuid bit, a user namespace or sudo
gives a process of the pod another user, and then neither the shim's fence nor its watchdog reaches it. Every function
takes up to ``LIMIT`` seconds: call it beside the loop, as root. Must never signal a process that is not in the pod:
what a shim names is no proof, so pids come from the pod's cgroup, or from the tree below the shim.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from nodeagent.osutil.linux import may_signal, pidfd_ended, start_time
from nodeagent.shim.processes import below

LIMIT = 1.0
"""Seconds: less than a shim may be silent for, which is stopped meanwhile."""
EMPTY_LOOKS = 4
"""Looks in a row that find nothing until there is none: a process whose parent ends moves to another one."""
PAUSE = 0.005
"""Seconds between two looks."""

Pids = Callable[[], list[int]]
"""Which processes the pod has now. Raises OSError if there is no descriptor or memory to look."""


class ShimTree(NamedTuple):
    """The shim of a pod without a cgroup: all that the pod has started is below it."""

    pid: int
    start: int | None
    """Its start time: with the pid, its identity."""

    def pids(self) -> list[int]:
        """All below it; none once it has ended."""
        found = [pid for pid, _ in below(self.pid)] if self.lives else []
        return found if self.lives else []  # else its number may have been another's meanwhile

    @property
    def lives(self) -> bool:
        return self.start is not None and start_time(self.pid) == self.start


def end_others(pids: Pids, owner: int) -> list[int]:
    """SIGKILL those that are not this user's to signal; what is still alive. Raises OSError."""
    return _end(pids, lambda pid: not may_signal(pid, owner))


def end_tree(tree: ShimTree) -> list[int]:
    """SIGKILL all below the shim; what is still alive. The shim itself stays stopped when all of it has ended, so that
    it starts nothing anew before it is killed. Raises OSError."""
    _signal_shim(tree, signal.SIGSTOP)
    left = [tree.pid]
    try:
        left = _end(tree.pids, lambda _: True)
    finally:
        if left:
            _signal_shim(tree, signal.SIGCONT)
    return left


def _end(pids: Pids, wanted: Callable[[int], bool]) -> list[int]:
    until, empty = time.monotonic() + LIMIT, 0
    while True:
        found = [pid for pid in pids() if wanted(pid) and _kill(pid, pids, wanted)]
        empty = 0 if found else empty + 1
        if empty >= EMPTY_LOOKS or time.monotonic() >= until:
            return found
        time.sleep(PAUSE)


def _kill(pid: int, pids: Pids, wanted: Callable[[int], bool]) -> bool:
    """Whether it was alive."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # The number may have been reused before the pidfd pinned it.
        if pidfd_ended(pidfd) or not wanted(pid) or pid not in pids():
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True
    finally:
        os.close(pidfd)


def _signal_shim(tree: ShimTree, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(tree.pid)
        try:
            if tree.lives:
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)

"""The shim's own children, orphans that fell to it among them: who is waited for, and who is just cleared away.

Standard library only. Must never reap a child that somebody waits for: its handler does.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from nodeagent.workers.linux import is_running, own_children


class Children:
    """Children by pid; unknown ones are orphans of the pod's processes."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[], None]] = {}

    def expect(self, pid: int, ended: Callable[[], None]) -> None:
        """Call ``ended`` when the child is a zombie; it must reap it and ``forget`` it."""
        self._handlers[pid] = ended

    def forget(self, pid: int) -> None:
        self._handlers.pop(pid, None)

    def collect(self) -> None:
        """After SIGCHLD: hand every zombie to its handler, reap orphans."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            handler = self._handlers.get(found.si_pid)
            if handler is None:
                os.waitpid(found.si_pid, 0)
            else:
                handler()

    def orphans(self) -> list[int]:
        """Living processes that workers left behind."""
        return [pid for pid in own_children() if pid not in self._handlers and is_running(pid)]

    def kill_orphans(self) -> list[int]:
        """SIGKILL what workers left behind; their own children become orphans in turn."""
        found = self.orphans()
        for pid in found:  # our own unreaped children: their numbers cannot be reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return found


def reap(pid: int) -> int:
    """Wait status of a child that has ended."""
    return os.waitpid(pid, 0)[1]

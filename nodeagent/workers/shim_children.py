"""The shim's own children, orphans that fell to it among them: who is waited for, and who is just cleared away.

Standard library only. Must never reap a child that somebody waits for: its handler does.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from nodeagent.workers.linux import is_running, own_children
from nodeagent.workers.tree import kill_below


class Children:
    """Children by pid; unknown ones are orphans of the pod's processes."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[], None]] = {}
        self.changed: Callable[[int, bool], None] | None = None
        """Called with each child that is expected (True), or no longer is (False)."""

    def expected(self) -> list[int]:
        """Those that somebody waits for."""
        return list(self._handlers)

    def expect(self, pid: int, ended: Callable[[], None]) -> None:
        """Call ``ended`` when the child is a zombie; it must reap it and ``forget`` it."""
        self._handlers[pid] = ended
        if self.changed is not None:
            self.changed(pid, True)

    def forget(self, pid: int) -> None:
        if self._handlers.pop(pid, None) is not None and self.changed is not None:
            self.changed(pid, False)

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
        """SIGKILL what workers left behind, and all below it. What these start meanwhile become orphans in turn."""
        return kill_below(os.getpid(), self._handlers)


def reap(pid: int) -> int:
    """Wait status of a child that has ended."""
    return os.waitpid(pid, 0)[1]

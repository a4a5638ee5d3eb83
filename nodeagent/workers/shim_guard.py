"""The fence: kills the workers when the time that the agent granted has passed.

It has its own thread, so that a slow disk under the shim's loop cannot delay it, and the watchdog behind it for when
the whole shim is stopped. Standard library only. Must never wait for anything but its timer and its lock, and the lock
is held for system calls that cannot block.
"""

from __future__ import annotations

import os
import threading

from nodeagent.workers.linux import arm_timer, boottime, boottime_timer, kill_group, pidfd_ended
from nodeagent.workers.shim_watchdog import Watchdog


class Guard:
    """Holds the pidfds of everything that may run only in granted time."""

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable after the fence has acted."""
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self._fenced: set[int] = set()
        self._until = 0.0
        self._seq = -1
        self._timer = boottime_timer()
        self.watchdog = Watchdog()
        threading.Thread(target=self._watch, name="fence", daemon=True).start()

    @property
    def granted(self) -> bool:
        """There is granted time left."""
        return boottime() < self._until

    def grant(self, until: float, seq: int) -> bool:
        """Newer seqs replace the deadline, also with an earlier one; older ones are dropped (False)."""
        with self._lock:
            if seq <= self._seq:
                return False
            self._seq, self._until = seq, until
            arm_timer(self._timer, until)
        self.watchdog.grant(until)
        return True

    def new_controller(self) -> None:
        """Another agent process took over: its seqs start anew. The deadline stays."""
        with self._lock:
            self._seq = -1

    def hold(self, pid: int, pidfd: int) -> bool:
        """Guard this process group; False (and it is killed) if the time has passed already."""
        self.watchdog.hold(pid, pidfd)
        with self._lock:
            self._held[pid] = pidfd
            if self.granted:
                return True
            self._fenced.add(pid)
            kill_group(pid, pidfd)
            return False

    def signal(self, pid: int, number: int) -> None:
        """Signal a guarded process and its group."""
        with self._lock:
            if pid in self._held:
                kill_group(pid, self._held[pid], number)

    def release(self, pid: int) -> bool:
        """The process has ended and is about to be reaped: what is left of its group is killed, its pidfd closed.
        Whether it was the fence, or the watchdog, that ended it.

        Only an unreaped leader pins the group's number, so this comes before the reaping.
        """
        by_watchdog = self.watchdog.release(pid)
        with self._lock:
            pidfd = self._held.pop(pid)
            kill_group(pid, pidfd)
            os.close(pidfd)
            fenced = pid in self._fenced
            self._fenced.discard(pid)
        return fenced or by_watchdog

    def _watch(self) -> None:
        while True:
            os.read(self._timer, 8)
            with self._lock:
                if self.granted:
                    continue
                for pid, pidfd in self._held.items():
                    if not pidfd_ended(pidfd):
                        self._fenced.add(pid)
                        kill_group(pid, pidfd)
            os.eventfd_write(self.wake, 1)

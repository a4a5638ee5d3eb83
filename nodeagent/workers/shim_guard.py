"""The fence: kills the workers when the time that this pod was granted has passed.

It has its own thread, so that a slow disk under the shim's loop cannot delay it, and the watchdog behind it for when
the whole shim is stopped. Nobody tells it of more time: before it kills it reads the pod's record again. Standard
library only. Must never wait for anything but its timer and its lock, and the lock is held for system calls that cannot
block (the record is a few bytes of memory).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

from nodeagent.lease.grants import NOTHING, Grant, GrantReader
from nodeagent.workers.linux import arm_timer, boottime, boottime_timer, kill_group, pidfd_ended
from nodeagent.workers.shim_watchdog import Watchdog


class Guard:
    """Holds the pidfds of everything that may run only in granted time. ``record``: the pod's grant; where there is
    none, there is no time."""

    def __init__(self, record: Path) -> None:
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable after the fence has acted."""
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self._fenced: set[int] = set()
        self._reader = _open(record)
        self._until = 0.0
        self._timer = boottime_timer()
        self.watchdog = Watchdog(self._reader)
        threading.Thread(target=self._watch, name="fence", daemon=True).start()

    def look(self) -> Grant:
        """What is granted now. The fence acts by it: at once, if that is over."""
        with self._lock:
            return self._look()

    def _look(self) -> Grant:
        grant = self._reader.read() if self._reader is not None else NOTHING
        if grant.until != self._until:
            self._until = grant.until
            arm_timer(self._timer, grant.until)
        return grant

    def _is_over(self) -> bool:
        """The time has passed, also by what the record says by now."""
        return boottime() >= self._until and boottime() >= self._look().until

    def hold(self, pid: int, pidfd: int) -> bool:
        """Guard this process group; False (and it is killed) if the time has passed already."""
        self.watchdog.hold(pid, pidfd)
        with self._lock:
            self._held[pid] = pidfd
            if not self._is_over():
                return True
            self._fenced.add(pid)
            kill_group(pid, pidfd)
            return False

    def signal(self, pid: int, number: int, *, alone: bool = False) -> None:
        """Signal a guarded process, and its group unless ``alone``."""
        with self._lock:
            if pid not in self._held:
                return
            if alone:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._held[pid], number)
            else:
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
                if not self._is_over():
                    continue
                for pid, pidfd in self._held.items():
                    if not pidfd_ended(pidfd):
                        self._fenced.add(pid)
                        kill_group(pid, pidfd)
            os.eventfd_write(self.wake, 1)


def _open(record: Path) -> GrantReader | None:
    try:
        return GrantReader(record)
    except OSError as error:
        print(f"no time can be granted: {error}", file=sys.stderr, flush=True)
        return None

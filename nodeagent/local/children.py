"""The supervisor's child processes: started so that they die with it, awaited without threads, and orphans reaped.

Owns starting, awaiting and reaping. Never decides what is to run.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from nodeagent.local.tether import tethered

PR_SET_CHILD_SUBREAPER = 36


class LocalChildren:
    """All children of this process, in the main thread of an event loop.

    This process adopts the orphans among its descendants (shims outlive their agent) and reaps them: in a container
    nobody else might.
    """

    def __init__(self) -> None:
        self._own: set[int] = set()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def start(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command that dies with this process, in a session of its own, as a service has; its output is
        appended to ``log``."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                tethered(command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self.own(process.pid)
        return process

    def own(self, pid: int) -> None:
        """Leave the reaping of this child to whoever started it."""
        self._own.add(pid)

    async def ended(self, pid: int) -> None:
        """Return when this own child has ended; its starter reaps it."""
        loop = asyncio.get_running_loop()
        handle = os.pidfd_open(pid)
        try:
            over = asyncio.Event()
            loop.add_reader(handle, over.set)
            try:
                await over.wait()
            finally:
                loop.remove_reader(handle)
        finally:
            os.close(handle)

    def reaped(self, pid: int) -> None:
        """This own child was reaped: forget it, and look for orphans that had to wait behind it."""
        self._own.discard(pid)
        self._reap()

    def _reap(self) -> None:
        while self._orphan_over():
            pass

    def _orphan_over(self) -> bool:
        """Reap one orphan. An own child that is over hides those behind it until ``reaped``."""
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if found is None or found.si_pid in self._own:
            return False
        os.waitpid(found.si_pid, 0)
        return True

"""The supervisor's child processes: starts them so that they die with it, waits for them without threads, reaps
orphans.

Owns starting, waiting and reaping. Never decides which programs run.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from nodeagent.osutil.tether import tethered

PR_SET_CHILD_SUBREAPER = 36


class LocalChildren:
    """All children of this process, in the main thread of an event loop.

    This process adopts the orphans among its descendants (shims outlive their agent) and reaps them: in a container
    there may be no other process that does.
    """

    def __init__(self) -> None:
        self._own: set[int] = set()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def start(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command that dies with this process, in a session of its own, like a service; its output is appended
        to ``log``."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                tethered(command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self.own(process.pid)
        return process

    def own(self, pid: int) -> None:
        """The code that started this child will reap it."""
        self._own.add(pid)

    async def ended(self, pid: int) -> None:
        """Return when this own child has ended; the caller reaps it."""
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
        """Call after reaping this own child: forgets it, and looks for orphans that had to wait behind it."""
        self._own.discard(pid)
        self._reap()

    def _reap(self) -> None:
        while self._orphan_over():
            pass

    def _orphan_over(self) -> bool:
        """Reap one orphan. An own child that has ended hides those behind it until ``reaped``."""
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if found is None or found.si_pid in self._own:
            return False
        os.waitpid(found.si_pid, 0)
        return True

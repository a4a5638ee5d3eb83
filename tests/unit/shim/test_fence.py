"""What the fence knows of why it acted; that it acts, in tests/integration."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nodeagent.lease.grants import Grant, make_grant, write_grant
from nodeagent.osutil.linux import boottime
from nodeagent.osutil.suspend import Suspension
from nodeagent.shim.fence import ProcessGuard

BOUND = 20.0


class Machine:
    """With a pod that has time for an hour. ``slept``: seconds for which it was suspended since its boot."""

    def __init__(self, folder: Path) -> None:
        self.slept, self._grants = 7.0, folder / "run" / "grants"
        record = make_grant(self._grants, "p1", os.getuid(), os.getgid())
        self.grant(3600.0)
        self.guard = ProcessGuard(record, Suspension(lambda: self.slept))

    def grant(self, seconds: float) -> None:
        write_grant(self._grants, "p1", Grant(boottime() + seconds))

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                assert self.guard.hold(process.pid, os.pidfd_open(process.pid))
                yield process
            finally:
                process.kill()

    def fence(self, process: subprocess.Popen[bytes]) -> None:
        """Its time passes."""
        self.grant(-1.0)
        self.guard.look()
        assert select.select([self.guard.wake], [], [], BOUND)[0]
        os.eventfd_read(self.guard.wake)
        assert process.wait(BOUND) == -signal.SIGKILL
        assert self.guard.release(process.pid), "it was the fence"


def test_it_says_that_its_time_passed_while_the_machine_was_suspended(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.worker() as process:
        machine.slept += 3600.0
        machine.fence(process)
    assert machine.guard.suspended == 3600.0


def test_an_earlier_suspension_is_not_why(tmp_path: Path) -> None:
    """There was time left when the machine woke up."""
    machine = Machine(tmp_path)
    with machine.worker() as process:
        machine.slept += 3600.0
        machine.guard.look()
        machine.fence(process)
    assert machine.guard.suspended == 0.0

"""One ``run`` from its submission to its exit code: output, short status lines, signals, and blame at the end.

Ctrl-C (or SIGTERM, or another signal in ``stop_on``) requests a graceful stop and waits; the second one does not wait.
A lost terminal (SIGHUP) leaves the job running.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from nodeagent.ctl.client import ENDED, Client, job_path
from nodeagent.ctl.jobtext import blame_lines, runs_on
from nodeagent.ctl.logs import Printer, print_logs
from nodeagent.ctl.output import count
from nodeagent.ctl.terminal import RUN_CODES, CtlError, Exit, echo
from nodeagent.ctl.waiting import AGENT_AWAY_LIMIT

Json = dict[str, Any]

POLL = 0.3
"""Seconds between two polls of the job's state."""
STOP_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
"""Signals that request the job's end, unless an option says otherwise."""
LINGER = 2.0
"""Seconds for which output is still printed after a requested end of the job."""
SETTLE = 10.0
"""Seconds for the job's record to show the end after its output has ended."""


class _Leave(BaseException):
    """Stop following now, with this exit code: the way out of a blocked read."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Session:
    """Follows one job."""

    def __init__(self, client: Client, *, stays: bool, stop_on: Collection[int] = STOP_ON) -> None:
        self._client = client
        self._stop_on = stop_on
        """Signals that request the job's end."""
        self._stays = stays
        """The job outlives this command (it does not if its nodes were started for the command)."""
        self._job: Json | None = None
        self._printer = Printer()
        self._asked_to_end = 0
        """The signal that requested the job's end; 0 for none."""
        self._stopping = False
        """The requested stop was accepted, or is not needed."""
        self._stopped_at: float | None = None
        """When (monotonic) the job was first seen to have ended on request."""
        self._over = threading.Event()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handles SIGHUP and the signals that request the end while the context is open: while a job is followed."""
        mine = dict.fromkeys(self._stop_on, self._end) | {int(signal.SIGHUP): self._hang_up}
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: its output is a file
            del mine[signal.SIGHUP]
        before = {number: signal.signal(number, handler) for number, handler in mine.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        if self._asked_to_end:
            raise _Leave(128 + number)
        self._asked_to_end = number

    def _hang_up(self, _number: int, _frame: FrameType | None) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (sys.stdout, sys.stderr):  # a terminal has gone, and the reader of a pipe has had this signal too
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                os.dup2(null, stream.fileno())
        os.close(null)
        if self._stays:
            raise _Leave(128 + signal.SIGHUP)

    def begin(self, job: Json, printer: Printer) -> None:
        """The job was submitted; its output goes to ``printer``. Until ``follow``, signals have their usual effect."""
        self._job, self._printer = job, printer

    def follow(self) -> int:
        """Print until the end; returns the exit code. Raises ``CtlError`` if the job cannot be followed any more."""
        assert self._job is not None
        uid, name = self._job["uid"], self._job["name"]
        watcher = threading.Thread(target=self._watch, args=(uid,), name="status", daemon=True)
        try:
            with self._signals():
                self._client.endure(AGENT_AWAY_LIMIT)
                watcher.start()
                print_logs(self._client, uid, self._printer, follow=True, enough=self._is_enough, first=1)
                job = self._ended(uid)
        except _Leave as leave:
            if self._asked_to_end:
                if self._stays and not self._stopping:
                    self._stop(self._client, uid)
                self._printer.announce(f"not waiting any longer: job {name} is being stopped, with its grace")
            return leave.code
        finally:
            self._over.set()
        watcher.join(POLL * 4)
        return self._result(job)

    def _is_enough(self) -> bool:
        """Returns whether the job has ended on request while a flood of output is still to come."""
        if self._stopped_at is None or time.monotonic() < self._stopped_at + LINGER:
            return False
        assert self._job is not None
        where = f": nodeagentctl logs {self._job['name']}" if self._stays else ""
        self._printer.announce(f"the rest of the output is not printed{where}")
        return True

    def _ended(self, uid: str) -> Json:
        until = time.monotonic() + SETTLE
        while True:
            job = self._client.get(job_path(uid))
            if job["phase"] in ENDED:
                return job
            if time.monotonic() >= until:
                raise CtlError(
                    f"the output of job {job['name']} ended while it is {job['phase']}: {job['reason']}",
                    Exit.FAILED,
                    f"nodeagentctl describe {job['name']}",
                )
            time.sleep(POLL)

    def _watch(self, uid: str) -> None:
        """Runs in a thread of its own: reports changes of state, and sends a requested stop."""
        client = self._client.twin()
        shown = ""
        while not self._over.wait(POLL):
            try:
                if self._asked_to_end and not self._stopping:
                    self._stopping = self._stop(client, uid)
                    if self._stopping:
                        self._report("stopping the job gracefully (again: do not wait for it)")
                job = client.get(job_path(uid))
                if self._asked_to_end and self._stopped_at is None and job["phase"] in ENDED:
                    self._stopped_at = time.monotonic()
            except CtlError as error:
                if shown != error.message:
                    shown = error.message
                    self._report(error.message)
                continue
            line = status_line(job)
            if line != shown and job["phase"] not in ENDED:  # the end is reported at the end
                shown = line
                self._report(line)

    def _report(self, line: str) -> None:
        """Without a reader too the watching thread goes on: it sends the stop."""
        with suppress(OSError):
            self._printer.announce(line)

    @staticmethod
    def _stop(client: Client, uid: str) -> bool:
        """Returns whether the job is being stopped, or has ended in the meantime."""
        try:
            client.change("POST", f"{job_path(uid)}/stop")
        except CtlError as error:
            if error.kind != "state":
                raise
            return client.get(job_path(uid))["phase"] in ENDED
        return True

    def _result(self, job: Json) -> int:
        outcome = job["outcome"]
        if job["phase"] == "succeeded":
            self._printer.announce(f"job {job['name']} succeeded")
            return 0
        if self._asked_to_end:
            self._printer.announce(f"job {job['name']} stopped")
            return 128 + self._asked_to_end
        self._printer.announce(f"job {job['name']} {job['phase']}: {job['reason']}")
        if job["phase"] == "failed":
            for line in blame_lines(job, logs_stay=self._stays):
                echo(line, err=True)
        code = outcome["code"] if outcome else 0
        return code or RUN_CODES[Exit.FAILED]


def status_line(job: Json) -> str:
    """A job's state in one short line; the same line while nothing changes."""
    if job["lent"] is not None and job["lent"]["state"] != "lease":  # a short outage of the store is not worth a line
        return f"the store does not answer; {job['name']} runs on {runs_on(job)}"
    if job["phase"] == "running":
        size = f"{count(job['world_nodes'], 'node')}, {count(job['world_size'], 'worker')}"
        cause = job["cause"]["text"] if job["cause"] else ""
        return f"generation {job['generation']} active: {size}: {cause}"
    if job["phase"] == "forming":
        return f"forming generation {job['generation']}: {job['reason']}"
    return f"{job['phase']}: {job['reason']}"

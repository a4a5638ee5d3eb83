"""Sees the end of each worker of one generation at once, reaps it, and records how it ended (``record.py``).

Standard library only. Must never decide what follows from an end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

from nodeagent.shim.processes import is_reaped_elsewhere, reap
from nodeagent.shim.record import ROOT, WHOLE_ERRORS, MemoryKill, MemoryKills, exit_record
from nodeagent.shim.worker import LOOK_AGAIN, Parts, Worker

LATER_CHARS = 200
"""Of the last words of a worker that was not among the first to end (``record.WHOLE_ERRORS``)."""
LOST = "its exit status was lost: its fork server reaped it and did not tell"
REAP_BOUND = 5.0
"""Seconds until a fork server that does not reap is killed, so that the shim can."""


class Exits:
    """Of one generation's workers. Of each these are called once, in this order. ``ended``: it runs no more code, and
    its pid is still its own. ``reaping``: with its exit code (-n for signal n), before that is recorded. ``reaped``:
    with the exit code and the record."""

    def __init__(
        self,
        parts: Parts,
        ended: Callable[[Worker], None],
        reaping: Callable[[Worker, int], None],
        reaped: Callable[[Worker, int, dict[str, Any]], None],
    ) -> None:
        self._parts, self._ended, self._reaping, self._reaped = parts, ended, reaping, reaped
        self._memory = MemoryKills(ROOT)
        self._deaths = 0

    def look(self) -> None:
        """Now and then, while something may run."""
        self._memory.look()

    def watch(self, w: Worker) -> None:
        """One that was just forked."""
        self._parts.children.expect(w.pid, lambda: self._on_own_zombie(w))
        self._parts.loop.watch(w.pidfd, lambda: self.on_end(w))
        self._parts.guard.hold(w.pid, w.pidfd)

    def on_end(self, w: Worker) -> None:
        """Its pidfd is readable: it runs no more code."""
        if w.ended:
            return
        w.ended, w.order = True, self._deaths
        self._deaths += 1
        self._parts.loop.forget(w.pidfd)
        self._ended(w)
        if w.by_fork_server:
            self._parts.fork_server.reap(w.pid, lambda status: self._on_reaped(w, status))
            self._parts.loop.after(REAP_BOUND, lambda: self._reap_late(w))
        else:
            self._on_reaped(w, reap(w.pid))

    def _reap_late(self, w: Worker) -> None:
        if not w.reaped:
            self._parts.fork_server.kill()
            self._on_reaped(w, -1)

    def _on_own_zombie(self, w: Worker) -> None:
        """It is a zombie child of the shim itself: started cold, or its fork server died."""
        self.on_end(w)
        if not w.reaped:
            self._on_reaped(w, reap(w.pid))

    def _on_reaped(self, w: Worker, status: int) -> None:
        """``status``: -1 if the process that was to reap it has no answer."""
        if w.reaped:
            return
        lost = status < 0
        try:
            if lost and not is_reaped_elsewhere(w.pid):  # it becomes our own zombie when its fork server has died
                return
        except OSError as error:  # no descriptor to look with
            print(f"how rank {w.rank} ended is looked for again: {error.strerror}", file=sys.stderr, flush=True)
            self._parts.loop.after(LOOK_AGAIN, lambda: self._on_reaped(w, -1))
            return
        for capture in w.captures:
            capture.drain()
        if lost:
            status = signal.SIGKILL
        elif (containers := self._parts.containers) is not None:
            w.runtime_failure = containers.failure(status, w.local_rank, w.captures[1].tail())
            status = containers.status(status)
        code = os.waitstatus_to_exitcode(status)
        self._reaping(w, code)
        kill = MemoryKill(LOST if lost else "") if lost or w.stopped else self._memory.explain(status)
        record = exit_record(
            w.rank,
            w.local_rank,
            w.pid,
            status,
            w.stopped,
            w.order,
            w.error_file,
            w.captures[1].tail(),
            w.farewell,
            kill.text,
        )
        self._parts.children.forget(w.pid)
        self._reaped(w, code, record | {"place": w.place, "starved": kill.starved})


def in_order(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    """The records of those that have ended, as model.world.WorkerExit, in the order of their ends; of those that were
    pulled along, only the last words."""
    ended = sorted((w.record for w in workers if w.record is not None), key=lambda r: int(r["order"]))
    later = ended[WHOLE_ERRORS:]
    return ended[:WHOLE_ERRORS] + [record | {"error": record["error"][-LATER_CHARS:]} for record in later]

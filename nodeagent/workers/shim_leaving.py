"""Workers that leave by themselves at a planned stop: who wants to be asked, what they tell when they go, and who waits
in vain when one of them dies.

A worker asks ``leave.wait`` once and is answered when it is to leave, with the seconds that it has; it gets no SIGTERM
then, nor do its children, which it may still need. ``leave.saving`` tells that the last step is done, ``leave.done``
after which step that was, and how long its state took to save (null: nothing was kept).

One that dies before it saves never says its number, nor makes its part of a collective: the others, on whichever node,
would wait for it until the grace is over. Those that save are left to it. Nothing is known of workers that did not ask,
so they have all of their grace. Standard library only. Must never lengthen the grace.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from nodeagent.workers.shim_link import Call, WorkerLink

if TYPE_CHECKING:
    from nodeagent.workers.shim_gang import Gang
    from nodeagent.workers.shim_worker import Worker

CLEAN = (0, 101)
"""Exit codes of those that had no more to do, or have left."""


class Leaving:
    """The three names. ``gang`` is asked for the present generation."""

    def __init__(self, link: WorkerLink, gang: Callable[[], Gang | None]) -> None:
        self._gang = gang
        link.add("leave.wait", self._wait)
        link.add("leave.saving", self._saving)
        link.add("leave.done", self._done)

    def _wait(self, call: Call) -> None:
        gang = self._gang()
        left = gang.grace_left if gang is not None else None
        if left is not None:
            call.answer(grace=left)
        else:
            call.worker.leave = lambda grace: call.answer(grace=grace)

    def _saving(self, call: Call) -> None:
        call.worker.farewell.saving = True
        call.answer()

    def _done(self, call: Call) -> None:
        step, seconds = call.message["step"], call.message["seconds"]
        if type(step) is not int or not 0 <= step < 1 << 63:
            raise ValueError(f"step is {step!r}")
        if seconds is not None and (type(seconds) is not float or not math.isfinite(seconds) or seconds < 0):
            raise ValueError(f"seconds is {seconds!r}")
        call.worker.farewell.left_at = step
        call.worker.farewell.saved_in = None if seconds is None else round(seconds, 3)
        call.answer()
        gang = self._gang()
        if gang is not None and gang.broken:
            abandon(gang)


def ended(gang: Gang, w: Worker, status: int) -> None:
    """A worker has ended: if others wait for it in vain, say so, and end them too."""
    asked = gang.stopping and not gang.doomed and w.leave is not None
    if asked and not w.farewell.saving and os.waitstatus_to_exitcode(status) not in CLEAN:
        w.farewell.missed = True
        abandon(gang)


def abandon(gang: Gang) -> None:
    """One of the gang's ranks, here or elsewhere, is missing: end those that wait for it."""
    gang.broken = True
    for w in gang.living():
        if w.leave is not None and (not w.farewell.saving or w.farewell.left_at is not None):
            gang.parts.guard.signal(w.pid, signal.SIGKILL)

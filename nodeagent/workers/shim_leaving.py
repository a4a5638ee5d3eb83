"""Workers that leave by themselves at a planned stop: who wants to be asked, and what they tell when they go.

A worker asks ``leave.wait`` once and is answered when it is to leave, with the seconds that it has; it gets no SIGTERM
then, nor do its children, which it may still need. ``leave.done`` tells after which step, and how long its state took
to save (null: nothing was kept). Standard library only.
Must never lengthen the grace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from nodeagent.workers.shim_link import Call, WorkerLink

if TYPE_CHECKING:
    from nodeagent.workers.shim_gang import Gang


class Leaving:
    """The two names. ``gang`` is asked for the present generation."""

    def __init__(self, link: WorkerLink, gang: Callable[[], Gang | None]) -> None:
        self._gang = gang
        link.add("leave.wait", self._wait)
        link.add("leave.done", self._done)

    def _wait(self, call: Call) -> None:
        gang = self._gang()
        left = gang.grace_left if gang is not None else None
        if left is not None:
            call.answer(grace=left)
        else:
            call.worker.leave = lambda grace: call.answer(grace=grace)

    def _done(self, call: Call) -> None:
        step, seconds = call.message["step"], call.message["seconds"]
        if type(step) is not int or not 0 <= step < 1 << 63:
            raise ValueError(f"step is {step!r}")
        if seconds is not None and (type(seconds) is not float or not math.isfinite(seconds) or seconds < 0):
            raise ValueError(f"seconds is {seconds!r}")
        call.worker.farewell.left_at = step
        call.worker.farewell.saved_in = None if seconds is None else round(seconds, 3)
        call.answer()

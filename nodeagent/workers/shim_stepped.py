"""When the workers of a generation did their first step, as far as they tell (``nodeagent.train.progress``).

A worker says ``worker.stepped`` once. Standard library only. Must never wake the agent during the first steps: what it
learns is for its account of the recovery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nodeagent.workers.linux import boottime
from nodeagent.workers.shim_link import Call, WorkerLink
from nodeagent.workers.shim_loop import Loop

if TYPE_CHECKING:
    from nodeagent.workers.shim_gang import Gang

TELL_AFTER = 0.5
"""Seconds from the last worker's first step until it is shown."""


class FirstSteps:
    """``gang`` is asked for the present generation, ``changed`` is called when ``stepped`` may be shown."""

    def __init__(
        self, link: WorkerLink, loop: Loop, gang: Callable[[], Gang | None], changed: Callable[[], None]
    ) -> None:
        self._loop, self._gang, self._changed = loop, gang, changed
        link.add("stepped", self._stepped)

    def _stepped(self, call: Call) -> None:
        if call.worker.stepped is None:
            call.worker.stepped = boottime()
            if self.at is not None:
                self._loop.after(TELL_AFTER, self._changed)

    @property
    def at(self) -> float | None:
        """When (CLOCK_BOOTTIME) the last worker of the present generation did its first step; None: not all have."""
        gang = self._gang()
        told = [w.stepped for w in gang.workers] if gang is not None else []
        return max((at for at in told if at is not None), default=None) if None not in told else None

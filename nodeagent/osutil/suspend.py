"""For how long the machine has been suspended. CLOCK_BOOTTIME counts that time, and deadlines are measured by it;
CLOCK_MONOTONIC does not count it.

Standard library only. Must never decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST = 1.0
"""Seconds: a shorter suspension is ignored."""
_MOMENT, _TRIES = 0.01, 20
"""Both clocks are read within so many seconds, unless that fails so often: the machine is too busy."""


def suspended() -> float:
    """Seconds since the boot for which the machine was suspended."""
    found = 0.0
    for _ in range(_TRIES):
        before = time.monotonic()
        found = time.clock_gettime(time.CLOCK_BOOTTIME) - before
        if time.monotonic() - before < _MOMENT:
            break
    return found


class Suspension:
    """What of it is new. ``clock``: as ``suspended``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._known = clock, clock()

    def note(self) -> None:
        """All that there was until now is known."""
        self._known = self._clock()

    def since(self) -> float:
        """Seconds for which the machine has been suspended since the last ``note``; 0: it was not."""
        new = self._clock() - self._known
        return new if new >= LEAST else 0.0

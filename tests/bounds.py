"""How long a test waits before it gives up, on a machine that it shares with others.

A bound is about hangs: it is several times what the thing takes on a machine of its own, and nothing is measured by it
(``benchmarks/`` measures). Seconds in which something on this machine waited for a processor do not count, half of them
at most: a busy machine makes things slow. A stall uses no processor, so it gets no more time than the bound says,
unless others are busy; and never more than twice as much.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")
MOST = 0.5
"""Of the seconds that have passed, the part that may not count."""


def starved() -> float:
    """Seconds since the boot in which some process waited for a processor; 0 where the kernel does not say."""
    try:
        found = re.search(r"^some .*total=(\d+)", PRESSURE.read_text())
    except OSError:
        return 0.0
    return int(found[1]) / 1e6 if found else 0.0


class Bound:
    """``seconds`` that count, from now on."""

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.monotonic, lost: Callable[[], float] = starved
    ) -> None:
        self.seconds = seconds
        self._clock, self._lost = clock, lost
        self._began, self._lost_before = clock(), lost()

    @property
    def passed(self) -> float:
        """Seconds, whether they count or not."""
        return self._clock() - self._began

    @property
    def over(self) -> bool:
        passed = self.passed
        return passed - min(MOST * passed, self._lost() - self._lost_before) > self.seconds

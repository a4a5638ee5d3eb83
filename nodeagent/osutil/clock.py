"""The clock that intervals are measured by: CLOCK_BOOTTIME, which counts suspended time and never steps; and how often
something may be done."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Where the core reads time from; the simulation has its own."""

    def now(self) -> float:
        """Seconds since boot."""
        ...

    def wall(self) -> float:
        """Unix time, for people only."""
        ...


class SystemClock:
    """The machine's."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()


class Allowance:
    """So much at once, and so much a second in the long run. Times are of any clock that does not go back."""

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst, self._rate = burst, per_second
        self._left, self._at = burst, 0.0

    def change(self, burst: float, per_second: float, now: float) -> None:
        """From now on so much; what was spent stays spent."""
        self.spend(0, now)
        self._burst, self._rate = burst, per_second

    def spend(self, amount: float, now: float) -> float:
        """Seconds until there is something left after this; 0: there is."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate) - amount
        self._at = now
        return max(0.0, -self._left / self._rate)

    def may(self, now: float) -> bool:
        """Whether there is one left, which is spent then."""
        if self.spend(0, now) or self._left < 1:
            return False
        self._left -= 1
        return True

    def whole(self, now: float) -> bool:
        """Whether as much may be spent at once as ever."""
        self.spend(0, now)
        return self._left >= self._burst


async def wait_for(event: asyncio.Event, timeout: float | None) -> bool:
    """Until the event or the time; clears the event. Whether it came."""
    if not event.is_set():
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass
    came = event.is_set()
    event.clear()
    return came

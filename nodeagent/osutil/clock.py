"""The clock that intervals are measured by: CLOCK_BOOTTIME, which counts suspended time and never steps."""

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

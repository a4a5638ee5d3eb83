"""The agent's clock: CLOCK_BOOTTIME, which counts suspended time and never steps. And the pace of calls to a store
that failed or came late: not at once, later each time, and not all agents together.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Protocol

from nodeagent.model.timing import Timing


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


SHARE = 0.25
"""Of the time that one late reply leaves until the fence: the first pause at most."""
MOST = 0.5
"""Of a heartbeat: the longest pause at most."""


class WakePace:
    """One agent's. Each pause is between half of what it may be and all of it, by the node's name, so that agents whose
    calls failed together ask again one after the other."""

    def __init__(self, node: str, timing: Timing) -> None:
        slack = max(0.0, timing.fence - timing.heartbeat - 2 * timing.store_timeout)
        self._most = MOST * timing.heartbeat
        self._first = min(SHARE * slack, self._most)
        self._rng = random.Random(node)
        self._failures = 0
        self._until = 0.0

    def failed(self, now: float) -> None:
        """A call was not answered. One that ends while nobody is to ask began before: it makes no pause longer, but it
        is not sent again at once either."""
        pause = self._first
        if now >= self._until:
            pause = min(self._most, self._first * 2.0 ** min(self._failures, 16))
            self._failures += 1
        self._until = max(self._until, now + pause * self._rng.uniform(0.5, 1.0))

    def answered(self) -> None:
        """The store serves."""
        self._failures, self._until = 0, 0.0

    def left(self, now: float) -> float:
        """Seconds for which nobody is to ask."""
        return max(0.0, self._until - now)

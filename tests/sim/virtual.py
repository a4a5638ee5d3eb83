"""Virtual time: an asyncio loop that jumps to the next timer instead of waiting. No real I/O may happen on it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Never blocks: waiting is moving the loop's clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for something that can never happen")
        self.loop.virtual_now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time starts at 1000 s and moves only when every task waits."""

    def __init__(self) -> None:
        selector = _Selector()
        self.virtual_now = 1000.0
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self.virtual_now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class SimClock:
    """A machine's clock: its rate may differ a little from true time."""

    def __init__(self, rate: float = 1.0, boot: float = 0.0) -> None:
        self.rate, self.boot = rate, boot
        self.wall_step = 0.0
        """What the wall clock shows is so many seconds off."""

    def now(self) -> float:
        return self.boot + asyncio.get_running_loop().time() * self.rate

    def wall(self) -> float:
        return 1.7e9 + asyncio.get_running_loop().time() + self.wall_step

    def true_delay(self, until: float) -> float:
        """True seconds until this clock shows ``until``."""
        return max(0.0, (until - self.now()) / self.rate)

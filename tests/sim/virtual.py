"""Virtual time: an asyncio loop that jumps to the next timer instead of waiting. No real I/O may happen on it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Handle(asyncio.Handle):
    """A callback. Nothing is noted for debugging: that would be half of what a handle costs."""

    __slots__ = ()
    _callback: Callable[..., object] | None
    _context: Context
    _loop: asyncio.AbstractEventLoop
    _repr: str | None
    _source_traceback: None

    def __init__(
        self, callback: Callable[..., object], args: Sequence[Any], loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:  # fmt: skip
        self._callback, self._args, self._loop = callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled, self._repr, self._source_traceback = False, None, None

    def cancel(self) -> None:
        self._cancelled, self._callback, self._args = True, None, ()


class _Timer(_Handle, asyncio.TimerHandle):
    """A callback at some time."""

    __slots__ = ()
    _when: float

    def __init__(
        self, when: float, callback: Callable[..., object], args: Sequence[Any], loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:  # fmt: skip
        _Handle.__init__(self, callback, args, loop, context)
        self._when = when


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time starts at 1000 s and moves only when every task waits. Timers of the same moment run in the order in which
    they were set. It asks no selector and keeps its own timers: a schedule sets millions of them."""

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _clock_resolution: float

    def __init__(self) -> None:
        self.virtual_now = 1000.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._set = 0
        super().__init__()

    def time(self) -> float:
        return self.virtual_now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.virtual_now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _Timer(when, callback, args, self, context)
        self._set += 1
        heappush(self._timers, (when, self._set, handle))
        return handle

    def _run_once(self) -> None:
        """All that is due now; if that is nothing, what is due next."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise RuntimeError("every task waits for something that can never happen")
            self.virtual_now = max(self.virtual_now, timers[0][0])
        due = self.virtual_now + self._clock_resolution
        while timers and timers[0][0] < due:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


EPOCH = 1.7e9
"""Unix time at the loop's zero."""


class SimClock:
    """A machine's clock: its rate may differ a little from true time."""

    def __init__(self, rate: float = 1.0, boot: float = 0.0) -> None:
        self.rate, self.boot = rate, boot
        self._loop: asyncio.AbstractEventLoop | None = None
        self.wall_step = 0.0
        """What the wall clock shows is so many seconds off."""

    def now(self) -> float:
        if self._loop is None:  # it outlives no loop
            self._loop = asyncio.get_running_loop()
        return self.boot + self._loop.time() * self.rate

    def wall(self) -> float:
        return EPOCH + asyncio.get_running_loop().time() + self.wall_step

    def true_delay(self, until: float) -> float:
        """True seconds until this clock shows ``until``."""
        return max(0.0, (until - self.now()) / self.rate)

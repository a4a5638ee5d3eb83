"""The shim's event loop: file descriptors and delays, one thread, nothing else.

Standard library only. Handlers must be short: nothing that can block for long belongs here.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable

LoopHandler = Callable[[], object]


class Delay:
    """A pending call; ``cancel`` makes it not happen."""

    __slots__ = ("call",)

    def __init__(self, call: LoopHandler) -> None:
        self.call: LoopHandler | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Selector plus delays plus SIGCHLD."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._delays: list[tuple[float, int, Delay]] = []
        self._order = itertools.count()
        self._running = True

    def watch(self, fd: int, handler: LoopHandler) -> None:
        """Call ``handler`` whenever ``fd`` is readable."""
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def forget(self, fd: int) -> None:
        self._selector.unregister(fd)

    def writable(self, fd: int, handler: LoopHandler, wanted: bool, on_write: LoopHandler) -> None:
        """Also (or no longer) call ``on_write`` when ``fd``, watched with ``handler``, can be written."""

        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        self._selector.modify(fd, events, (handler, on_write) if wanted else handler)

    def after(self, seconds: float, call: LoopHandler) -> Delay:
        """Call once, ``seconds`` from now."""
        delay = Delay(call)
        heapq.heappush(self._delays, (time.monotonic() + seconds, next(self._order), delay))
        return delay

    def on_child(self, handler: LoopHandler) -> None:
        """Call ``handler`` after children ended."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def woken() -> None:
            os.read(read, 4096)
            handler()

        self.watch(read, woken)

    def stop(self) -> None:
        """Return from ``run`` after the present round of handlers."""
        self._running = False

    def run(self) -> None:
        while self._running:
            for key, events in self._selector.select(self._timeout()):
                registered = self._selector.get_map().get(key.fd)
                if registered is not None and registered.data is key.data:  # no handler before it gave the fd up
                    self._dispatch(key.data, events)
            self._run_delays()

    def _dispatch(self, data: LoopHandler | tuple[LoopHandler, LoopHandler], events: int) -> None:
        if isinstance(data, tuple):
            read, write = data
            if events & selectors.EVENT_WRITE:
                write()
            if events & selectors.EVENT_READ:
                read()
        else:
            data()

    def _timeout(self) -> float | None:
        while self._delays and self._delays[0][2].call is None:
            heapq.heappop(self._delays)
        return max(0.0, self._delays[0][0] - time.monotonic()) if self._delays else None

    def _run_delays(self) -> None:
        now = time.monotonic()
        while self._delays and self._delays[0][0] <= now:
            call = heapq.heappop(self._delays)[2].call
            if call is not None:
                call()

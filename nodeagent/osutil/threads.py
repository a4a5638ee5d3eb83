"""Work that may block for ever, beside the loop: a look at a disk that hangs, a question to a user database.

Each runs in a daemon thread, which holds up neither the loop nor the end of the process. Must never wait by itself: its
callers have their own limits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

MOST = 32
"""Threads of a loop's own pool. As many calls may hang before others wait for them."""
WAITING = 64
"""Calls that wait for a thread of a pool; if there are more, those that were given up meanwhile are forgotten, since
nothing else takes them out while all threads hang."""


class DaemonPool(concurrent.futures.ThreadPoolExecutor):
    """What a loop runs ``to_thread`` in, with threads that nobody waits for: Python's own would hold up the end of the
    loop, and then of the process, for as long as a disk hangs. What may hang often has a pool of its own, of ``most``
    threads, and so takes none of the loop's."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self._most = most
        self._work: SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._begun = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """In a thread that has nothing to do, or in a new one while there are fewer than the most. Raises RuntimeError,
        as Python's own does, if there is no thread to be had."""
        if self._work.qsize() > WAITING:
            self._forget_cancelled()
        if not self._idle.acquire(blocking=False) and self._begun < self._most:
            threading.Thread(target=self._run, name=f"pool-{self._begun + 1}", daemon=True).start()
            self._begun += 1
        ended = concurrent.futures.Future[T]()
        self._work.put((ended, partial(fn, *args, **kwargs)))
        return ended

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: its threads end with the process."""

    def _forget_cancelled(self) -> None:
        """The others keep their turn."""
        waiting = []
        with suppress(Empty):
            while True:
                waiting.append(self._work.get_nowait())
        for ended, work in waiting:
            if not ended.cancelled():
                self._work.put((ended, work))

    def _run(self) -> None:
        while True:
            ended, work = self._work.get()
            settle: Callable[[], object] = bool
            if ended.set_running_or_notify_cancel():
                try:
                    settle = partial(ended.set_result, work())
                except Exception as error:  # noqa: BLE001 - raised where the result is waited for
                    settle = partial(ended.set_exception, error)
            self._idle.release()  # before the caller goes on, whose next call may be this thread's
            settle()
            del ended, work, settle  # else the result would stay for as long as this thread has nothing else to do


def in_daemon(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The result of ``work``, or its error. Who stops waiting for it shields it, so that it is seen to be under way.
    Raises OSError if there is no thread to be had."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    done.add_done_callback(lambda future: future.cancelled() or future.exception())  # perhaps nobody waits any more

    def settle(ended: concurrent.futures.Future[T]) -> None:
        if not done.done():
            error = ended.exception()
            done.set_result(ended.result()) if error is None else done.set_exception(error)

    def run() -> None:
        ended = concurrent.futures.Future[T]()
        try:
            ended.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the result is waited for
            ended.set_exception(error)
        with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
            loop.call_soon_threadsafe(settle, ended)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"no thread for it: {error}") from error
    return done


class Newest:
    """Texts that are written one at a time, in a daemon thread. Of those that come while one is being written only the
    newest is written after it. Not waited for: the end of the process may come first."""

    def __init__(self, write: Callable[[str], object], name: str) -> None:
        self._write, self._name = write, name
        self._lock = threading.Lock()
        self._next: str | None = None
        self._busy = False

    def put(self, text: str) -> None:
        """Raises OSError if there is no thread to be had."""
        with self._lock:
            self._next = text
            if self._busy:
                return
            self._busy = True
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._busy = False
            raise OSError(str(error)) from None

    def _run(self) -> None:
        try:
            while (text := self._taken()) is not None:
                self._write(text)
        except BaseException:
            with self._lock:
                self._busy = False
            raise

    def _taken(self) -> str | None:
        with self._lock:
            text, self._next = self._next, None
            self._busy = text is not None
        return text

"""Work that may block for ever, beside the loop: a look at a disk that hangs, a question to a user database.

Each runs in a daemon thread, which holds up neither the loop nor the end of the process. Must never wait by itself: its
callers have their own limits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_daemon(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The result of ``work``, or its error. Who stops waiting for it shields it, so that it is seen to be under way."""
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

    threading.Thread(target=run, name=name, daemon=True).start()
    return done

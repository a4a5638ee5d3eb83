"""The machine's database of users and groups, which may be a server that does not answer (LDAP behind NSS): asked in a
few threads, and remembered for a while.

Owns the threads. Must never make the loop wait: it renews the lease.
"""

from __future__ import annotations

import asyncio
import pwd
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from nodeagent.api.errors import ApiError

T = TypeVar("T")

THREADS = 4
"""Look-ups that are made at once; one that hangs holds one of them."""
WAITING = 256
"""Most look-ups that wait for a thread."""
TIMEOUT = 5.0
"""Seconds that somebody waits for who they are."""
PATIENCE = 2.0
"""Seconds that an answer waits for the names in it; then it has numbers."""
FRESH = 30.0
"""Seconds for which an answer of the database is taken for true."""
KEPT = 4096
"""Most answers that are remembered; the oldest go first."""


def name_of(uid: int) -> str:
    """The user's name, or its number where it has none here. Blocks."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@dataclass(frozen=True, slots=True)
class _Answer:
    value: object
    until: float


class UserDatabase:
    """``look`` gives a uid its name and may block; ``clock`` counts seconds."""

    def __init__(self, look: Callable[[int], str] = name_of, clock: Callable[[], float] = time.monotonic) -> None:
        self._look, self._clock = look, clock
        self._known: dict[Hashable, _Answer] = {}
        self._asked: dict[Hashable, Future[Any]] = {}
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], object]]] = queue.SimpleQueue()
        self._threads = 0

    def shown(self, uid: int) -> str:
        """The user's name as far as it is known, its number until then. Never blocks and looks up nothing."""
        answer = self._known.get(("name", uid))
        return str(uid) if answer is None else str(answer.value)

    async def learn(self, uids: Iterable[int]) -> None:
        """Have ``shown`` know these names, if the database says them soon enough. Raises nothing."""
        wanted = [self._begin(("name", uid), lambda uid=uid: self._look(uid)) for uid in set(uids)]  # type: ignore[misc]
        pending = [asyncio.wrap_future(future) for future in wanted if future is not None and not future.done()]
        if pending:
            await asyncio.wait([asyncio.shield(one) for one in pending], timeout=PATIENCE)

    async def ask(self, key: Hashable, look: Callable[[], T], whom: str, timeout: float = TIMEOUT) -> T:
        """What the database says, remembered by ``key``. Raises ``ApiError`` when it is stuck, and what ``look``
        raises."""
        known = self._fresh(key)
        if known is not None:
            return cast("T", known.value)
        future = self._begin(key, look)
        if future is not None:
            try:
                async with asyncio.timeout(timeout):
                    return cast("T", await asyncio.shield(asyncio.wrap_future(future)))
            except TimeoutError:
                pass
        raise ApiError(
            "permission",
            f"the user database did not answer for {whom} within {timeout:.0f} s",
            "see that `id` answers on this node, then ask again",
        )

    def _fresh(self, key: Hashable) -> _Answer | None:
        known = self._known.get(key)
        return known if known is not None and self._clock() < known.until else None

    def _begin(self, key: Hashable, look: Callable[[], object]) -> Future[Any] | None:
        """The look-up that is under way for this key, or a new one; None if it cannot even wait its turn."""
        known = self._fresh(key)
        if known is not None:
            done: Future[Any] = Future()
            done.set_result(known.value)
            return done
        asked = self._asked.get(key)  # in one step: a thread takes it out when it is answered
        if asked is not None:
            return asked
        if len(self._asked) >= WAITING:
            return None
        future: Future[Any] = Future()
        self._asked[key] = future
        future.add_done_callback(lambda done: self._take(key, done))
        if self._threads < min(THREADS, len(self._asked)):
            self._threads += 1
            # A daemon: a look-up that hangs must not hold up the agent's end.
            threading.Thread(target=self._work, name=f"users-{self._threads}", daemon=True).start()
        self._queue.put((future, look))
        return future

    def _take(self, key: Hashable, done: Future[Any]) -> None:
        """In a thread of ours: each statement is one step of the interpreter's."""
        if done.exception() is None:
            while len(self._known) >= KEPT:
                self._known.pop(next(iter(self._known)), None)
            self._known.pop(key, None)
            self._known[key] = _Answer(done.result(), self._clock() + FRESH)
        self._asked.pop(key, None)

    def _work(self) -> None:
        while True:
            future, look = self._queue.get()
            future.set_running_or_notify_cancel()
            try:
                result = look()
            except (
                OSError,
                LookupError,
                ValueError,
                ApiError,
            ) as error:  # all that a look-up raises; its caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)


DATABASE = UserDatabase()
"""This process's."""

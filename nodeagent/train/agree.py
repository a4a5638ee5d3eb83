"""The step after which all ranks leave: the ranks agree on it once, and until then it costs nothing.

Each rank learns by itself that it must leave (each node stops its own workers), at any moment, even while its main
thread is in a collective. From then on it begins no step until all ranks have published how many steps they have begun;
the highest number is the last step.

**Why every rank leaves after the same step, and none waits for ever.** ``at`` and ``stop`` share a lock. So a rank
publishes the number of steps that it has begun at one moment, b_r, and begins no other step before S = max(b_r) is
known. So no rank ever begins a step beyond S, and each rank ends at the first ``at`` with S or more steps done: after
step S. A rank with a number below S continues up to S; so every rank begins each step up to S, and no collective in it
waits for a rank that will not come. A rank that is inside step k has published b_r >= k from another thread, so S does
not wait for that step to end. The ranks need not be in step: a CUDA host thread may run many steps ahead of its device.

Standard library only. Must never begin to wait for others before it has published its own number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol


class TorchStore(Protocol):
    """The methods of a torch.distributed store that are used here."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class AgreementError(RuntimeError):
    """The ranks could not agree; ``str()`` gives the reason."""


class LastStep:
    """One rank's part. The main thread calls ``at``, another thread ``stop``."""

    def __init__(self, highest: Callable[[int], int], bound: float) -> None:
        """``highest(mine)`` publishes the number to all ranks and waits for the highest."""
        self._highest, self._bound = highest, bound
        self._changed = threading.Condition()
        self._begun: int | None = None
        self._stopping = False
        self._last: int | None = None
        self._failed = ""

    def at(self, done: int) -> bool:
        """Call before each step. True if ``done`` is the last step. Raises AgreementError."""
        with self._changed:
            if self._stopping:
                if self._begun is None:
                    self._begun = done
                    self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._last is not None or self._failed, self._bound):
                    self._failed = f"the other ranks did not report their step within {self._bound:g} s"
                if self._last is None:
                    raise AgreementError(f"asked to leave, but without agreement on the last step: {self._failed}")
                if done >= self._last:
                    return True
            self._begun = done + 1
            return False

    def stop(self) -> None:
        """This rank must leave. Returns when the last step is known, or cannot be known."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            # The script may not have reached its first step yet.
            if not self._changed.wait_for(lambda: self._begun is not None, self._bound) or self._begun is None:
                return
            begun = self._begun
        last, failed = None, ""
        try:
            last = self._highest(begun)
        except Exception as error:  # noqa: BLE001 - the main thread raises it; it waits for an answer of any kind
            failed = f"{type(error).__name__}: {error}"
        with self._changed:
            self._last, self._failed = last, failed
            self._changed.notify_all()


def highest_of_all(store: TorchStore, world: int, mine: int, bound: float) -> int:
    """The highest number that any rank publishes; each of ``world`` ranks calls it once."""
    known = store.compare_set("highest", "", str(mine)).decode()
    while int(known) < mine:
        known = store.compare_set("highest", known, str(mine)).decode()
    come(store, "published", world)
    wait_for(store, "published", bound)
    return int(store.get("highest"))


def come(store: TorchStore, name: str, world: int) -> None:
    """Announce that this rank has reached this point."""
    if store.add(f"{name}/count", 1) == world:
        store.set(f"{name}/all", "1")


def wait_for(store: TorchStore, name: str, bound: float) -> None:
    """Wait until every rank has reached this point."""
    store.wait([f"{name}/all"], timedelta(seconds=bound))

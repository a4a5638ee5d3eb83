"""Leaving gracefully: a last checkpoint at a planned stop, after a step that all ranks agree on, so that no step is
lost.

    leaving = Leaving()                                   # once, where training begins
    while step < steps:
        if leaving.at(step):                              # on every rank after the same step
            leaving.leave(step, lambda: save(step))       # saves, and ends the process
        train_one_step()

Each rank learns by itself that it must leave (each node stops its own workers), at any moment, even while its main
thread is in a collective. From then on it begins no step until all ranks have published how many steps they have begun;
the highest number is the last step.

**Why every rank leaves after the same step, and none waits for ever.** ``at`` and ``stop`` share a lock. So a rank
publishes the number of steps that it has begun at one moment, b_r, and begins no other step before S = max(b_r) is
known. So no rank ever begins a step beyond S, and each rank ends at the first ``at`` with S or more steps done: after
step S. A rank with a number below S continues up to S; so every rank begins each step up to S, and no collective in it
waits for a rank that will not come. A rank that is inside step k has published b_r >= k from another thread, so S does
not wait for that step to end. The ranks need not be in step: a CUDA host thread may run many steps ahead of its device.

Under torchrun, without nodeagent, ``at`` is always False. Needs torch only if the ranks have to agree. Must never begin
to wait for others before this rank has published its own number, and never keep a process beyond its grace: the shim's
SIGKILL ends it in any case.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from nodeagent.train.context import context
from nodeagent.train.link import Link, LinkError

LEFT = 101
"""The exit code. For an agent that did not request the leave it means: form the gang again, and do not count it."""
BOUND = 86400.0
"""Seconds that ranks wait for each other: the longest possible grace. In practice SIGKILL ends the wait."""
ASKED_FOR = 3600.0
"""Seconds that one question to the shim stays open; then it is asked again."""
AGAIN = 0.5
"""Seconds until a shim that did not answer, or refused, is asked again."""


def goodbye(code: int = LEFT) -> NoReturn:
    """Everything is saved: end this process now, with this exit code (0: training is complete).

    The script's own end (``finally``, ``atexit``, threads, torch's process group) may take seconds or hang, and at a
    planned stop all nodes wait for it. Nothing of it runs. Standard output is flushed; the shim ends child processes of
    this one; output that other threads still write is lost.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # even if the output cannot be written


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


class Leaving:
    """One object for each process and generation."""

    def __init__(self, link: Link | None = None) -> None:
        """``link``: by default the environment's link, if there is one."""
        self._link = link or Link.of_environment()
        self._context = context()
        self._store: TorchStore | None = None
        self._last = LastStep(self._agree, BOUND)
        if self._link is not None:
            threading.Thread(target=self._listen, args=(self._link,), name="leaving", daemon=True).start()

    def at(self, step: int) -> bool:
        """Call with ``step`` steps done: returns whether it is time to leave. Every rank calls it at the same steps.
        Raises AgreementError if the ranks were asked to leave and could not agree."""
        return self._last.at(step)

    def leave(self, step: int, save: Callable[[], object]) -> NoReturn:
        """Save, wait until the other ranks have saved, and end the process. Every rank calls it. ``save`` may
        communicate; it returns False if nothing was saved. Nothing else runs any more, no ``finally`` and no
        ``atexit``: put everything that must be done into ``save``.
        """
        began = time.monotonic()
        self._send("leave.saving")
        try:
            kept = save() is not False
        except BaseException:
            self._saved(wait=False)  # the others need not wait for a rank that failed
            raise
        took = time.monotonic() - began if kept else None
        self._send("leave.done", step=int(step), seconds=took)
        self._saved(wait=True)
        goodbye()

    def _send(self, name: str, **fields: Any) -> None:
        """Sends a message to the shim, which records it and reports ranks that wait in vain; leaving works without
        it."""
        if self._link is None:
            return
        try:
            self._link.ask(name, **fields)
        except LinkError as error:
            print(f"nodeagent: leaving, but could not report it ({name}): {error}", file=sys.stderr)

    def _listen(self, link: Link) -> None:
        """Runs in a thread: waits until the shim asks this rank to leave, then until the ranks agree."""
        while True:
            try:
                link.ask("leave.wait", ASKED_FOR)
            except LinkError:
                time.sleep(AGAIN)
                continue
            self._last.stop()
            return

    def _agree(self, begun: int) -> int:
        self._store = gang_store()
        return begun if self._store is None else highest_of_all(self._store, self._context.world_size, begun, BOUND)

    def _saved(self, wait: bool) -> None:
        """Announce that this rank has saved, and wait for the others: they may need this rank to save."""
        if self._store is None:
            return
        try:
            come(self._store, "saved", self._context.world_size)
            if wait:
                wait_for(self._store, "saved", BOUND)
        except RuntimeError as error:  # its host has left, after all others had come; or it is lost with a node
            print(f"nodeagent: leaves without waiting for the others: {error}", file=sys.stderr)


def gang_store() -> TorchStore | None:
    """A connection of its own to the store at which the ranks met; None for a single rank. Raises RuntimeError without
    a process group."""
    here = context()
    if here.world_size == 1:
        return None
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if not dist.is_initialized():
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group() before the training")
    store = _get_default_store()
    # A main thread that waits for another rank's step may hold torch's own connection.
    store = store.clone() if hasattr(store, "clone") else store
    mine: TorchStore = dist.PrefixStore(f"nodeagent/leave/{here.generation}", store)
    return mine

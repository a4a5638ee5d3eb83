"""A planned stop of one generation's workers on this node: role after role they are asked to end, each within its
grace, and are killed when that is over.

Standard library only. Roles are asked in the reverse of the order in which they start, as systemd does it: a trainer
may need its parameter servers to save, and MindSpore's workers their scheduler to leave. Must never lengthen a grace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nodeagent.model.roleorder import comes_after
from nodeagent.osutil.linux import saves_itself
from nodeagent.shim.loop import Delay
from nodeagent.shim.worker import LOOK_AGAIN, Parts, Worker

HALF = 0.5
"""Of the grace: then everybody is asked, so that who is last has some of it."""
EARLY = 0.5
"""Of the grace: then snapshots of workers that still live begin to be written out, if the pod is given up."""
LATE = 0.8
"""Of the grace: then SIGTERM goes to the processes that a worker started too, if it was sent to the worker alone."""
CLEAN = (0, 101)
"""Exit codes of those that had no more to do, or have left."""
NOBODY: Mapping[str, float] = MappingProxyType({})


class Turns:
    """In which order the roles of a pod are asked to stop: who comes after others is asked before them. ``roles``: the
    pod's, by name, each with those that it comes ``after``."""

    def __init__(self, roles: Mapping[str, Mapping[str, Any]]) -> None:
        self._before = comes_after({name: role["after"] for name, role in roles.items()})
        self.elsewhere: frozenset[str] = frozenset()
        """Roles that workers on other nodes still come after."""
        self.over = False
        """Everybody's turn has come."""

    def has_come(self, role: str, living: Iterable[str]) -> bool:
        """Whether workers of this role are to be asked, while workers of these roles live here."""
        needed = role in self.elsewhere or any(role in self._before.get(other, ()) for other in living)
        return self.over or not needed


class Grace:
    """Of one generation. ``workers``: all that it has by now. ``early`` is called when part of the grace is over,
    ``over`` with what was not done when all of it is: it kills."""

    def __init__(
        self, parts: Parts, workers: Sequence[Worker], early: Callable[[], None], over: Callable[[str], None]
    ) -> None:
        self._parts, self._workers = parts, workers
        self._early, self._over = early, over
        self.ends: float | None = None
        """When (monotonic) those are killed that still live; None: they are not asked to stop."""
        self.broken = False
        """Not all of the gang's ranks, on all nodes, lived to leave together."""
        self._seconds = 0.0
        self._turns = Turns(parts.pod["roles"])
        self._shorter: Mapping[str, float] = NOBODY
        self._delays: list[Delay] = []
        self._sooner: dict[str, list[Delay]] = {}
        """Of roles that have less than ``_seconds``, and were asked to stop."""

    @property
    def is_over(self) -> bool:
        """All have been sent SIGKILL, or are about to be."""
        return self.ends is not None and self.ends <= time.monotonic()

    def begin(self, grace: float, sooner: Mapping[str, float], later: Collection[str]) -> None:
        """From now on, unless less of it is left already; those that were asked to stop before have this one, too.
        ``sooner``: of roles that have less, their seconds. ``later``: roles that workers on other nodes come after."""
        self._turns.elsewhere = frozenset(later)
        if self.ends is None or time.monotonic() + grace < self.ends:
            self.cancel()
            self.ends, self._seconds = time.monotonic() + grace, grace
            self._shorter, self._sooner = sooner, {}
            after = self._parts.loop.after
            self._delays = [
                after(grace * HALF, self._ask_everybody),
                after(grace * EARLY, self._early),
                after(grace * LATE, self._signal_groups),
                after(grace, self._is_spent),
            ]
            for w in self._living():
                if w.until is not None:
                    self._time(w)
        self.ask()

    def cancel(self) -> None:
        """Nothing happens any more when it is over."""
        for delay in (*self._delays, *(one for delays in self._sooner.values() for one in delays)):
            delay.cancel()

    def ask(self) -> None:
        """Ask those to stop whose turn has come."""
        waits = [w for w in self._living() if w.until is None]
        if not waits:
            return
        roles = {w.role for w in self._living()}
        for w in waits:
            if self._turns.has_come(w.role, roles):
                left = self._time(w)
                if w.leave is not None:
                    w.leave(left)
                else:
                    self._terminate(w, whole=False)

    def left(self, w: Worker) -> float | None:
        """Seconds until this worker is killed, once a planned stop has begun."""
        ends = self.ends if w.until is None else w.until
        return None if self.ends is None or ends is None else max(0.0, ends - time.monotonic())

    def reaping(self, w: Worker, code: int) -> None:
        """A worker has ended within the grace: if others wait for it in vain, say so, and end them too."""
        if w.leave is not None and not w.farewell.saving and code not in CLEAN:
            w.farewell.missed = True
            self.abandon()

    def abandon(self) -> None:
        """One of the gang's ranks, here or elsewhere, is missing: end those that wait for it."""
        self.broken = True
        for w in self._living():
            if w.leave is not None and (not w.farewell.saving or w.farewell.left_at is not None):
                self._parts.guard.signal(w.pid, signal.SIGKILL)

    def kill(self) -> None:
        """It is over, or there is none."""
        self.ends = time.monotonic()
        for w in self._living():
            self._parts.guard.signal(w.pid, signal.SIGKILL)

    def _living(self) -> list[Worker]:
        return [w for w in self._workers if w.lives]

    def _ask_everybody(self) -> None:
        self._turns.over = True
        self.ask()

    def _is_spent(self) -> None:
        for w in self._living():
            w.farewell.overdue = self._seconds
        self._over(f"was not done when the grace of {self._seconds:g} s was over")

    def _time(self, w: Worker) -> float:
        """Begin the grace of a worker that is asked to stop; returns its seconds."""
        assert self.ends is not None
        left = max(0.0, self.ends - time.monotonic())
        own = min(left, self._shorter.get(w.role, left))
        w.until = time.monotonic() + own
        if w.role in self._shorter and w.role not in self._sooner:
            self._sooner[w.role] = self._after_own_grace(w.role, self._shorter[w.role])
        return own

    def _after_own_grace(self, role: str, grace: float) -> list[Delay]:
        """What befalls workers of a role that has less than the others."""

        def over() -> None:
            for w in self._living():
                if w.role == role:
                    w.farewell.overdue = grace
                    self._parts.guard.signal(w.pid, signal.SIGKILL)

        after = self._parts.loop.after
        return [after(grace * LATE, lambda: self._signal_groups(role)), after(grace, over)]

    def _signal_groups(self, role: str = "") -> None:
        """Those that had the signal alone, of this role or all, are still not done: whatever they started has it too,
        before SIGKILL."""
        for w in self._living():
            if w.leave is None and (not role or w.role == role):
                self._terminate(w, whole=True)

    def _terminate(self, w: Worker, *, whole: bool) -> None:
        """SIGTERM for its group, or unless ``whole`` for it alone if it saves by itself. Never for a runtime whose
        container runs: podman without root ends at once, with 0, and what it leaves behind would be killed as an
        orphan."""
        if w.ended:
            return
        try:
            inside = self._parts.process(w)
            alone = not whole and saves_itself(inside)
        except OSError as error:  # no descriptor to look with
            print(f"rank {w.rank} is asked to stop a little later: {error.strerror}", file=sys.stderr, flush=True)
            self._parts.loop.after(LOOK_AGAIN, lambda: self._terminate(w, whole=whole))
            return
        if inside == w.pid:
            self._parts.guard.signal(w.pid, signal.SIGTERM, alone=alone)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended, or is another one by now
            if alone:
                os.kill(inside, signal.SIGTERM)
            else:
                os.killpg(os.getpgid(inside), signal.SIGTERM)

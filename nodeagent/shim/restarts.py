"""Places of a service whose workers are started again together while the gang goes on: killed first, and started when
all of them are dead. Who starts first would meet one that is about to be killed.

Standard library only. Decides nothing: which worker's end takes its place along is ``gang.py``'s to say.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nodeagent.shim.hook import Supervision
from nodeagent.shim.loop import Delay

if TYPE_CHECKING:
    from nodeagent.shim.gang import Worker

DIES_WITHIN = 10.0
"""Seconds after SIGKILL until a place is given up one of whose workers has not gone."""


@dataclass(frozen=True, slots=True)
class _Restart:
    wait: float
    """Seconds that the place waits when its workers are dead."""
    gives_up: Delay


class PlaceRestarts:
    """Those of one generation. ``start``: a worker that is dead is started again after so many seconds. ``refuse``: a
    place cannot be started again, for this reason."""

    def __init__(
        self,
        parts: Supervision,
        workers: list[Worker],
        start: Callable[[Worker, float], None],
        refuse: Callable[[str], None],
    ) -> None:
        self._parts, self._workers, self._start, self._refuse = parts, workers, start, refuse
        self._places: dict[str, _Restart] = {}

    def begin(self, place: str, wait: float) -> None:
        """One of its workers has failed: the others are killed, if they have not failed along with it. Those that have
        ended well stay ended."""
        if place not in self._places:
            gives_up = self._parts.loop.after(DIES_WITHIN, lambda: self._give_up(place))
            self._places[place] = _Restart(wait, gives_up)
        for w in self._of(place):
            if not (w.held or is_reaped(w)):
                take_along(self._parts, w)
        self.reaped(place)

    def reaped(self, place: str) -> None:
        """One of its workers is dead."""
        restart = self._places.get(place)
        if restart is None or any(w.along and not is_reaped(w) for w in self._of(place)):
            return
        restart.gives_up.cancel()
        del self._places[place]
        for w in self._of(place):
            if w.failed is not None and w.again is None:
                self._start(w, restart.wait)

    def forget(self, place: str) -> None:
        """The place is started again with its whole role."""
        restart = self._places.pop(place, None)
        if restart is not None:
            restart.gives_up.cancel()

    def drop(self) -> None:
        """The gang is stopped: nothing is started again."""
        for restart in self._places.values():
            restart.gives_up.cancel()
        self._places.clear()

    def _of(self, place: str) -> list[Worker]:
        return [w for w in self._workers if w.place == place]

    def _give_up(self, place: str) -> None:
        del self._places[place]
        self._refuse(f"workers of {place} do not end, even with SIGKILL, so it cannot be started again")


def role_of(place: str) -> str:
    """Of ``trainer.0`` the role; empty of no place."""
    return place.rpartition(".")[0]


def take_along(parts: Supervision, w: Worker) -> None:
    """Another one's failure ends this worker, too."""
    w.along = True
    if w.pid:  # else it is being forked, and killed as soon as it has a pid
        parts.guard.signal(w.pid, signal.SIGKILL)


def is_reaped(w: Worker) -> bool:
    """How it ended is known."""
    return w.record is not None or w.failed is not None

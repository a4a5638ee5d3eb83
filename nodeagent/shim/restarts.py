"""Workers that are started again together while the gang goes on: killed first, and started when all of them are dead.
A worker that starts earlier would meet one that is about to be killed.

``PlaceRestarts``: the workers of one place of a service, on this node alone. ``RoleRounds``: the workers of a whole
role, on all nodes that have some of them. They are killed for a *round* of the role; when all are dead here, the shim
reports that, and they wait for the agents, which have the role started when it is down on every node.

Standard library only. Decides neither which worker's end takes its place or role along (``gang.py``) nor when a role is
started (``plan/failure/rounds.py``). Must never start a worker of a round while one of an earlier round is alive here.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nodeagent.shim.hook import Supervision
from nodeagent.shim.loop import Delay

if TYPE_CHECKING:
    from nodeagent.shim.gang import Parts, Worker

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


@dataclass(frozen=True, slots=True)
class _Stop:
    number: int
    """The round for which the role is stopped."""
    gives_up: Delay


class RoleRounds:
    """Those of one generation. ``places``: what starts single places again. ``start``: a worker that is dead is started
    again after so many seconds. ``refuse``: a role cannot be started again, for this reason."""

    def __init__(
        self,
        parts: Parts,
        workers: list[Worker],
        places: PlaceRestarts,
        start: Callable[[Worker, float], None],
        refuse: Callable[[str], None],
    ) -> None:
        self._parts, self._workers, self._places = parts, workers, places
        self._start, self._refuse = start, refuse
        self._stops: dict[str, _Stop] = {}
        self.reached: dict[str, int] = {}
        """Role to the newest round for which all its workers here were dead."""
        self.down: set[str] = set()
        """Roles that have not been started since."""

    def stops(self, role: str) -> bool:
        """None of its workers may be started now."""
        return role in self._stops or role in self.down

    def stop(self, role: str, number: int) -> None:
        """Its workers are killed, and are started again for this round: those that have ended well, too."""
        before = self._stops.get(role)
        if number <= (before.number if before is not None else self.reached.get(role, 0)):
            return
        if before is not None:
            before.gives_up.cancel()
        self.down.discard(role)
        gives_up = self._parts.loop.after(DIES_WITHIN, lambda: self._give_up(role))
        self._stops[role] = _Stop(number, gives_up)
        for place in dict.fromkeys(w.place for w in self._of(role)):
            self._places.forget(place)
            self._parts.unready(place)
        for w in self._of(role):
            if w.again is not None:
                w.again.cancel()
                w.again = None
            if not is_reaped(w):
                take_along(self._parts, w)
        self.reaped(role)

    def reaped(self, role: str) -> None:
        """One of its workers is dead."""
        stop = self._stops.get(role)
        if stop is None or not all(map(is_reaped, self._of(role))):
            return
        stop.gives_up.cancel()
        del self._stops[role]
        for w in self._of(role):
            if w.record is not None and w.record["code"] == 0:
                w.failed, w.record = w.record, None
            if w.failed is not None:
                w.pid, w.pidfd, w.ended = 0, -1, False  # it counts as one that starts
        self.reached[role] = stop.number
        self.down.add(role)
        self._parts.changed()

    def start(self, role: str, number: int, wait: float) -> None:
        """It is down on every node: its workers here are started after so many seconds."""
        if role in self.down and self.reached[role] == number:
            self.down.discard(role)
            for w in self._of(role):
                if w.failed is not None:
                    self._start(w, wait)

    def drop(self) -> None:
        """The gang is stopped: nothing is started again."""
        for stop in self._stops.values():
            stop.gives_up.cancel()
        self._stops.clear()
        self.down.clear()

    def _of(self, role: str) -> list[Worker]:
        return [w for w in self._workers if role_of(w.place) == role and not w.held]

    def _give_up(self, role: str) -> None:
        del self._stops[role]
        self._refuse(f"workers of {role} do not end, even with SIGKILL, so it cannot be started again")


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

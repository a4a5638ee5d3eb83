"""Roles that are started again as a whole, on whichever nodes their workers are, while the gang goes on: here, the
workers of such a role on this node. They are killed for a *round* of the role; when all are dead that is said, and they
wait for the agents, who have the role started when it is down on every node.

Standard library only. Decides neither which worker's end takes its role along (``gang.py``) nor when the role is
started (``plan/failure/rounds.py``). Must never start a worker of a round while one of an earlier round is alive here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nodeagent.shim.loop import Delay
from nodeagent.shim.restarts import DIES_WITHIN, PlaceRestarts, is_reaped, role_of, take_along

if TYPE_CHECKING:
    from nodeagent.shim.gang import Parts, Worker


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

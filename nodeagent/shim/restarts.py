"""Workers of one generation that are started again while the gang goes on.

``Restarts``: which worker's end, and within which budget: alone, with its place, or with its role. Those that go along
are killed first, and started when all of them are dead: a worker that starts earlier would meet one that is about to be
killed. ``PlaceRestarts``: the workers of one place of a service, on this node alone. ``RoleRounds``: the workers of a
whole role, on all nodes that have some of them. They are killed for a *round* of the role; when all are dead here, the
shim reports that, and they wait for the agents, which have the role started when it is down on every node.

Standard library only. Never decides when a role is started (``plan/failure/rounds.py``). Must never start a rank whose
process before has not ended, nor a worker of a round while one of an earlier round is alive here.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nodeagent.model.backoff import backoff
from nodeagent.osutil.linux import boottime
from nodeagent.shim.hook import Supervision
from nodeagent.shim.launch import Launcher
from nodeagent.shim.loop import Delay
from nodeagent.shim.output import note
from nodeagent.shim.worker import Parts, Worker

GANG, WORKER, ROLE = "gang", "worker", "role"
"""What is started again when a worker fails (``model.jobspec.RestartScope``)."""
REFORM = (101, 102)
"""Exit codes that ask for the whole gang to be formed anew (``plan.failure.blame.REFORM_CODES``)."""
RESTARTED_KEPT = 64
"""Ends of workers that were started again alone that are reported: the newest (``model.world.MOST_ALONE``)."""

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
            if not (w.held or w.reaped):
                _take_along(self._parts, w)
        self.reaped(place)

    def reaped(self, place: str) -> None:
        """One of its workers is dead."""
        restart = self._places.get(place)
        if restart is None or any(w.along and not w.reaped for w in self._of(place)):
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
            if not w.reaped:
                _take_along(self._parts, w)
        self.reaped(role)

    def reaped(self, role: str) -> None:
        """One of its workers is dead."""
        stop = self._stops.get(role)
        if stop is None or not all(w.reaped for w in self._of(role)):
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
        return [w for w in self._workers if w.role == role and not w.held]

    def _give_up(self, role: str) -> None:
        del self._stops[role]
        self._refuse(f"workers of {role} do not end, even with SIGKILL, so it cannot be started again")


def _take_along(parts: Supervision, w: Worker) -> None:
    """Another one's failure ends this worker, too."""
    w.along = True
    if w.pid:  # else it is being forked, and killed as soon as it has a pid
        parts.guard.signal(w.pid, signal.SIGKILL)


class Restarts:
    """Of one generation. ``over``: nothing is started again, since the generation ends. ``refuse``: a worker cannot be
    started again, for this reason. ``fence``: nobody grants this pod time any more."""

    def __init__(
        self,
        parts: Parts,
        workers: list[Worker],
        launcher: Launcher,
        over: Callable[[], bool],
        refuse: Callable[[str], None],
        fence: Callable[[], None],
    ) -> None:
        self._parts, self._workers, self._launcher = parts, workers, launcher
        self._over, self._refuse, self._fence = over, refuse, fence
        self._places = PlaceRestarts(parts, workers, self._start_after, refuse)
        self.rounds = RoleRounds(parts, workers, self._places, self._start_after, refuse)
        self.reported: list[dict[str, Any]] = []
        """Ends of workers that were started again alone, or are about to be."""
        self._at: deque[float] = deque()
        """When (monotonic) that was, within the window of the budget."""

    def may_be_alone(self, w: Worker) -> bool:
        """It may be started again while the gang goes on: nobody stopped either, no stranger has one of their ports."""
        rules = self._parts.pod["roles"][w.role]["alone"] if w.place else []
        return not (self._over() or w.stopped) and any(scope != GANG for _, scope in rules)

    def begin(self, w: Worker, code: int, record: dict[str, Any]) -> bool:
        """Begin to start it again, if it is to be after this end. ``code``: -n for signal n."""
        scope = self._scope(w, 128 - code if code < 0 else code)
        if scope == GANG or code in (0, *REFORM) or not self._within_budget():
            return False
        w.failed = record
        self._restart(w, record, scope)
        return True

    def reaped(self, w: Worker) -> None:
        """One that was taken along is dead."""
        self._places.reaped(w.place)
        self.rounds.reaped(w.role)

    def drop(self) -> None:
        """The gang is stopped: nothing is started again."""
        self._places.drop()
        self.rounds.drop()
        for w in self._workers:
            if w.failed is not None:
                if w.again is not None:
                    w.again.cancel()
                w.again, w.record, w.failed, w.ended = None, w.failed | {"stopped": True}, None, True

    def _scope(self, w: Worker, code: int) -> str:
        """What is started again after this exit code, 128+n for signal n (``model.jobspec.RestartScope``)."""
        if not self.may_be_alone(w):
            return GANG
        rules = self._parts.pod["roles"][w.role]["alone"]
        return next(str(scope) for only, scope in rules if only in (None, code))

    def _within_budget(self) -> bool:
        """This pod alone has not spent the job's budget. What all pods have spent, the agents judge."""
        limits, now = self._parts.pod["restarts"], time.monotonic()
        while self._at and now - self._at[0] > limits["window"]:
            self._at.popleft()
        return len(self._at) < int(limits["max"])

    def _restart(self, w: Worker, record: dict[str, Any], scope: str) -> None:
        """After its wait, with the others of its place if ``scope`` says so; until then it counts as one that
        starts."""
        limits = self._parts.pod["restarts"]
        self._at.append(time.monotonic())
        if scope == ROLE:
            record["round"] = self.rounds.reached.get(w.role, 0) + 1
        self.reported = [*self.reported, record][-RESTARTED_KEPT:]
        if scope == ROLE:  # how long it waits, the agents know, who see how often it failed elsewhere
            note(w.log, f"rank {w.rank} ended; it is started again with all of {w.role}, on all nodes")
            self.rounds.stop(w.role, record["round"])
            return
        wait = backoff(len(self._at), limits["backoff_min"], limits["backoff_max"])
        alone = "alone" if scope == WORKER else f"with the others of {w.place}"
        note(w.log, f"rank {w.rank} ended; it is started again {alone}" + (f" in {wait:g} s" if wait else ""))
        self._parts.unready(w.place)
        if scope == WORKER:
            self._start_after(w, wait)
            return
        self._places.begin(w.place, wait)

    def _start_after(self, w: Worker, wait: float) -> None:
        w.pid, w.pidfd, w.ended = 0, -1, False
        for capture in w.captures:
            capture.close()
        w.again = self._parts.loop.after(wait, lambda: self._start(w))

    def _start(self, w: Worker) -> None:
        if boottime() >= self._parts.guard.look().until:
            self._fence()
            return
        try:
            self._parts.anew(w.rank)
            fresh = self._launcher.successor(w)
        except OSError as error:
            w.again, w.record, w.failed, w.ended = None, w.failed, None, True
            self._refuse(f"rank {w.rank} could not be started again: {error.strerror}")
            return
        self._workers[self._workers.index(w)] = fresh
        self._launcher.launch([fresh])

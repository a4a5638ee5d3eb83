"""The workers of one generation on this node, and what is known of each of them: started together, watched, stopped,
accounted for. A worker of a role that restarts alone is started again, within the job's limits.

Standard library only. The generation has settled when every worker is dead and reaped, nothing they left behind is
alive, its snapshots are written out if the pod is given up, and post_stop has run. Must never start a second time, nor
a rank whose process before has not ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nodeagent.model.backoff import backoff
from nodeagent.osutil.linux import boottime, pidfd_ended, saves_itself
from nodeagent.shim.container import Containers
from nodeagent.shim.forkserver.binding import bind
from nodeagent.shim.forkserver.client import ForkServer
from nodeagent.shim.hook import Hook, Program, Supervision
from nodeagent.shim.loop import Delay
from nodeagent.shim.output import Capture, RotatingFile, two_captures
from nodeagent.shim.processes import (
    UNENTERED,
    is_reaped_elsewhere,
    kill_session,
    own_limits,
    reap,
    start_program,
    watched,
)
from nodeagent.shim.record import WHOLE_ERRORS, Farewell, MemoryKill, MemoryKills, exit_record
from nodeagent.shim.restarts import PlaceRestarts, RoleRounds, is_reaped, role_of
from nodeagent.shim.snapshots import WriteOut
from nodeagent.shim.turns import HALF, Turns

CLEAN = (0, 101)
"""Exit codes of those that had no more to do, or have left."""


@dataclass(slots=True)
class Worker:
    """One rank of one generation on this node. Without a ``pid`` it has not been forked yet."""

    rank: int
    local_rank: int
    error_file: Path
    log: RotatingFile
    captures: tuple[Capture, Capture]
    pid: int = 0
    pidfd: int = -1
    by_fork_server: bool = False
    place: str = ""
    """``trainer.0``; empty in a job of one role."""
    held: bool = False
    """Other roles have to be ready before it starts."""
    ended: bool = False
    stopped: bool = False
    fenced: bool = False
    order: int = 0
    until: float | None = None
    """When (monotonic) its grace ends, once it was asked to stop."""
    leave: Callable[[float], None] | None = None
    """Asks it to leave by itself within so many seconds, which it wants to be instead of a SIGTERM."""
    farewell: Farewell = field(default_factory=Farewell)
    record: dict[str, Any] | None = None
    again: Delay | None = None
    """It is started again alone when this is over."""
    failed: dict[str, Any] | None = None
    """How it ended, if it is to be started again."""
    along: bool = False
    """Another worker of its place, or of its role on some node, has failed: it is killed, if it has not ended by
    itself, and started again with that one."""
    step: int | None = None
    doing: str = ""
    """Its progress as last reported."""
    stepped: float | None = None
    """When (CLOCK_BOOTTIME) it reported its first step."""


STUCK_AFTER = 10.0
"""Seconds after SIGKILL until what has not gone is reported as stuck."""
EARLY = 0.5
"""Of the grace: then snapshots of workers that still live begin to be written out, if the pod is given up."""
LATE = 0.8
"""Of the grace: then SIGTERM goes to the processes that a worker started too, if it was sent to the worker alone."""
REFORM = (101, 102)
"""Exit codes that ask for the whole gang to be formed anew (``plan.blame.REFORM_CODES``)."""
NOBODY: Mapping[str, float] = MappingProxyType({})
GANG, WORKER, ROLE = "gang", "worker", "role"
"""What is started again when a worker fails (``model.jobspec.Alone``)."""
RESTARTED_KEPT = 64
"""Ends of workers that were started again alone that are reported: the newest (``model.world.MOST_ALONE``)."""
LATER_CHARS = 200
"""Of the last words of a worker that was not among the first to end (``record.WHOLE_ERRORS``)."""
LOST = "its exit status was lost: its fork server reaped it and did not tell"
LOOK_AGAIN = 0.2
"""Seconds until the next look at a worker that could not be looked at."""
REAP_BOUND = 5.0
"""Seconds until a fork server that does not reap is killed, so that the shim can."""


@dataclass(frozen=True, slots=True)
class Parts(Supervision):
    """What every generation of one pod shares."""

    fork_server: ForkServer
    containers: Containers | None
    """None: the workers see the node's own file system."""
    pod: Mapping[str, Any]
    state: Path
    logs: Path
    changed: Callable[[], None]
    launched: Callable[[], None]
    """A worker's pid is known, or will never be."""
    file: Callable[[Path], RotatingFile]
    write_out: Callable[[Callable[[], None]], WriteOut]
    """A new one; it calls this when it is over."""
    unready: Callable[[str], None]
    """A worker of this place is started again: the place is not ready before it is looked at again."""
    taken: Callable[[], str]
    """Which port that its workers were to bind somebody else has, in words (``rendezvous.taken``)."""
    anew: Callable[[int], None]
    """A worker of this rank is started again: what the one before reported of itself is not the new one's.
    Raises OSError."""


class LocalGang:
    """One generation, from its order to its end. ``places``: of a job of several roles the name of each worker's."""

    def __init__(
        self,
        parts: Parts,
        token: dict[str, Any],
        environments: Sequence[dict[str, str]],
        ranks: Sequence[int],
        places: Sequence[str] = (),
    ) -> None:
        self.parts, self.token = parts, token
        self.environments, self.ranks, self.places = environments, ranks, places
        self.refused = ""
        self.taken = ""
        """Which of its ports somebody else had when a worker failed, or all were killed; empty: none."""
        self.fenced = self.stopping = self.settled = False
        self.broken = False
        """Not all of its ranks, on all nodes, lived to leave together."""
        self.stuck: list[int] = []
        self.workers: list[Worker] = []
        self.restarted: list[dict[str, Any]] = []
        """Ends of workers that were started again alone, or are about to be."""
        self._places = PlaceRestarts(parts, self.workers, self._start_after, self._refuse_again)
        self.rounds = RoleRounds(parts, self.workers, self._places, self._start_after, self._refuse_again)
        self._restarts: deque[float] = deque()
        """When (monotonic) that was, within the window of the budget."""
        self._memory = MemoryKills()
        self._hook: Hook | None = None
        self._post_stop_done = False
        self._forking = self._deaths = 0
        self._kill_at: float | None = None
        self._grace = 0.0
        self._kill: Delay | None = None
        self._early: Delay | None = None
        self._late: Delay | None = None
        self._everybody: Delay | None = None
        self._turns = Turns(parts.pod["roles"])
        self._shorter: Mapping[str, float] = NOBODY
        self._sooner: dict[str, tuple[Delay, Delay]] = {}
        """Of roles that have less than ``_grace``, and were asked to stop."""
        self._stuck_check: Delay | None = None
        self._given_up: Mapping[str, Any] | None = None
        self._write_out: WriteOut | None = None

    def look(self) -> None:
        """Now and then, while something may run."""
        if not self.settled:
            self._memory.look()

    @property
    def phase(self) -> str:
        if self.settled:
            return "exited"
        if self.stuck:
            return "stuck"
        if self.stopping or self.fenced or self.refused:
            return "stopping"
        if not self.workers or self._forking:
            return "starting"
        return "running" if any(not w.ended for w in self.workers) else "stopping"

    @property
    def forking(self) -> bool:
        """Some of its workers may run already, with pids that are not known yet."""
        return self._forking > 0

    @property
    def doomed(self) -> bool:
        """Nothing of it runs, or all of it has been sent SIGKILL."""
        killed = self.stopping and self._kill_at is not None and self._kill_at <= time.monotonic()
        return self.settled or self.fenced or killed

    def states(self) -> list[dict[str, Any]]:
        """As model.pod.WorkerState."""
        states = []
        for w in self.workers:
            r = w.record
            code = None if r is None else r["code"] if r["code"] is not None else 128 + r["signal"]
            state = "exited" if r is not None else "running" if w.pid else "starting"
            reported = {"rank": w.rank, "local_rank": w.local_rank, "pid": w.pid or None}
            states.append(reported | {"state": state, "exit": code, "step": w.step, "doing": w.doing})
        return states

    @property
    def unentered(self) -> bool:
        """A worker could not enter its working folder."""
        records = [w.record for w in self.workers if w.record is not None]
        return any(r["code"] == 126 and r["error"].startswith(UNENTERED) for r in records)

    def exits(self) -> list[dict[str, Any]]:
        """As model.world.WorkerExit, in the order they ended; of those that were pulled along, only the last words."""
        ended = sorted((w.record for w in self.workers if w.record is not None), key=lambda r: int(r["order"]))
        later = ended[WHOLE_ERRORS:]
        return ended[:WHOLE_ERRORS] + [record | {"error": record["error"][-LATER_CHARS:]} for record in later]

    def start(self) -> None:
        """pre_start, then the workers."""
        if not self._run_hook("pre_start", self._start_workers):
            self._start_workers("")

    @property
    def waiting(self) -> list[str]:
        """Roles whose workers wait for others to be ready."""
        return sorted({role_of(w.place) for w in self.workers if w.held})

    def release(self, roles: Sequence[str]) -> None:
        """Start the workers of these roles, if they wait."""
        free = [role for role in roles if not self.rounds.stops(role)]
        chosen = [w for w in self.workers if w.held and role_of(w.place) in free]
        if not chosen or self.stopping or self.fenced or self.refused:
            return
        for w in chosen:
            w.held = False
        self._launch_all(chosen)

    def stop_role(self, role: str, number: int) -> None:
        """Kill its workers here, which are to be started again with those on other nodes."""
        if not (self.stopping or self.fenced or self.refused or self.taken or self._post_stop_done):
            self.rounds.stop(role, number)

    def _drop_held(self) -> None:
        """What waits is not started any more, nor started again."""
        self._places.drop()
        self.rounds.drop()
        for w in self.workers:
            if w.failed is not None:
                if w.again is not None:
                    w.again.cancel()
                w.again, w.record, w.failed, w.ended = None, w.failed | {"stopped": True}, None, True
        held = [w for w in self.workers if w.held]
        for w in held:
            self.workers.remove(w)
            for capture in w.captures:
                capture.started()
                capture.close()
            w.log.close()
        if held and not self.workers:
            self.refused = self.refused or "stopped before its workers started"

    def stop(
        self,
        grace: float | None,
        given_up: Mapping[str, Any] | None = None,
        broken: bool = False,
        sooner: Mapping[str, float] = NOBODY,
        later: Collection[str] = (),
    ) -> None:
        """See base.PodHost.stop."""
        if self.settled:
            if not self.stopping:  # it ended by itself: what is kept for those elsewhere goes now
                self.stopping = True
                self.parts.changed()
            return
        if grace is None and not self.stopping and self.living():  # others may have failed for it
            self.taken = self.taken or self.parts.taken()
        self._given_up = given_up if grace is not None else None
        if self._write_out is not None and self._given_up is not None:
            self._write_out.asked_again(self._given_up)
        for w in self.living():
            if pidfd_ended(w.pidfd):
                self._on_end(w)
        self.stopping = True
        self._drop_held()
        for w in self.living():
            w.stopped = True
        if self._hook is not None and not self._post_stop_done:
            self._hook.kill("was stopped")
        if grace is None:
            self._kill_all()
        else:
            self._turns.elsewhere = frozenset(later)
            if self._kill_at is None or time.monotonic() + grace < self._kill_at:
                self._begin_grace(grace, sooner)
            self._ask()
            if broken:
                self.abandon()
        self.parts.changed()
        self.settle()

    def _begin_grace(self, grace: float, sooner: Mapping[str, float]) -> None:
        """From now on; those that were asked to stop before have this one, too."""
        self._cancel_delays()
        self._kill_at, self._grace, self._shorter, self._sooner = time.monotonic() + grace, grace, sooner, {}
        after = self.parts.loop.after
        self._everybody = after(grace * HALF, self._ask_everybody)
        self._early = after(grace * EARLY, self._write_early)
        self._late = after(grace * LATE, self._signal_groups)
        self._kill = after(grace, self._grace_over)
        for w in self.living():
            if w.until is not None:
                self._time(w)

    def _cancel_delays(self) -> None:
        delays = (self._everybody, self._early, self._late, self._kill)
        for delay in (*filter(None, delays), *(one for pair in self._sooner.values() for one in pair)):
            delay.cancel()

    def _ask_everybody(self) -> None:
        self._turns.over = True
        self._ask()

    def _ask(self) -> None:
        """Ask those to stop whose turn has come."""
        waits = [w for w in self.living() if w.until is None]
        if not waits:
            return
        roles = {role_of(w.place) for w in self.living()}
        for w in waits:
            if self._turns.has_come(role_of(w.place), roles):
                left = self._time(w)
                if w.leave is not None:
                    w.leave(left)
                else:
                    self._terminate(w, whole=False)

    def _time(self, w: Worker) -> float:
        """Begin the grace of a worker that is asked to stop; returns its seconds."""
        assert self._kill_at is not None
        role, left = role_of(w.place), max(0.0, self._kill_at - time.monotonic())
        own = min(left, self._shorter.get(role, left))
        w.until = time.monotonic() + own
        if role in self._shorter and role not in self._sooner:
            self._sooner[role] = self._after_own_grace(role, self._shorter[role])
        return own

    def abandon(self) -> None:
        """One of the gang's ranks, here or elsewhere, is missing: end those that wait for it."""
        self.broken = True
        for w in self.living():
            if w.leave is not None and (not w.farewell.saving or w.farewell.left_at is not None):
                self.parts.guard.signal(w.pid, signal.SIGKILL)

    def speaker(self, pid: int) -> Worker | None:
        """The living worker whose session this process is in. Raises OSError if there is no descriptor or memory to
        look."""
        session = _session(pid)
        lives = [w for w in self.workers if w.pid and not w.ended]
        if self.parts.containers is None:
            return next((w for w in lives if w.pid == session), None)
        return next((w for w in lives if session and _session(self.process(w)) == session), None)

    def process(self, w: Worker) -> int:
        """Of a worker that has been started: the process of its own command, in its container if it has one. Raises
        OSError if there is no descriptor or memory to look."""
        return w.pid if self.parts.containers is None else self.parts.containers.process(w.pid, w.local_rank)

    @property
    def written(self) -> str:
        """What became of its snapshots when the pod was given up."""
        return self._write_out.text if self._write_out is not None else ""

    def grace_left(self, w: Worker) -> float | None:
        """Seconds until this worker is killed, once a planned stop has begun."""
        ends = self._kill_at if w.until is None else w.until
        return None if self._kill_at is None or ends is None else max(0.0, ends - time.monotonic())

    def on_fence(self) -> None:
        """The guard has killed: the workers' ends follow."""
        if not self.settled:
            self.fenced = self.fenced or any(w.failed is not None for w in self.workers)
            self._drop_held()
            self._watch_for_stuck()
            self.settle()

    def settle(self) -> None:
        """See whether everything is over; called after each death."""
        if self.settled or self._forking or self._hook is not None or (not self.workers and not self.refused):
            return
        if self._kill_at is not None and not self.doomed:
            self._ask()
        if any(w.record is None for w in self.workers):
            return
        try:
            left = bool(self.parts.children.kill_orphans())
        except OSError as error:  # no descriptor to look with
            print(f"what workers left behind is looked for again: {error.strerror}", file=sys.stderr, flush=True)
            left = True
        if left:
            self._watch_for_stuck()
            return
        if not self._is_written_out():
            return
        if not self._post_stop_done:
            self._post_stop_done = True
            if self.workers and not self.fenced and self._run_hook("post_stop", self._after_post_stop):
                self.parts.changed()
                return
        self._cancel_delays()
        if self._stuck_check is not None:
            self._stuck_check.cancel()
        for w in self.workers:
            for capture in w.captures:
                capture.close()
            w.log.close()
        self.settled, self.stuck = True, []
        self.parts.changed()

    def _after_own_grace(self, role: str, grace: float) -> tuple[Delay, Delay]:
        """What befalls workers of a role that has less than the others."""

        def over() -> None:
            for w in self.living():
                if role_of(w.place) == role:
                    w.farewell.overdue = grace
                    self.parts.guard.signal(w.pid, signal.SIGKILL)

        after = self.parts.loop.after
        return after(grace * LATE, lambda: self._signal_groups(role)), after(grace, over)

    def _signal_groups(self, role: str = "") -> None:
        """Those that had the signal alone, of this role or all, are still not done: whatever they started has it too,
        before SIGKILL."""
        for w in self.living():
            if w.leave is None and (not role or role_of(w.place) == role):
                self._terminate(w, whole=True)

    def _terminate(self, w: Worker, *, whole: bool) -> None:
        """SIGTERM for its group, or unless ``whole`` for it alone if it saves by itself. Never for a runtime whose
        container runs: podman without root ends at once, with 0, and what it leaves behind would be killed as an
        orphan."""
        if w.ended:
            return
        try:
            inside = self.process(w)
            alone = not whole and saves_itself(inside)
        except OSError as error:  # no descriptor to look with
            print(f"rank {w.rank} is asked to stop a little later: {error.strerror}", file=sys.stderr, flush=True)
            self.parts.loop.after(LOOK_AGAIN, lambda: self._terminate(w, whole=whole))
            return
        if inside == w.pid:
            self.parts.guard.signal(w.pid, signal.SIGTERM, alone=alone)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended, or is another one by now
            if alone:
                os.kill(inside, signal.SIGTERM)
            else:
                os.killpg(os.getpgid(inside), signal.SIGTERM)

    def _write_early(self) -> None:
        """Workers that take all of the grace, stuck in a collective perhaps, leave no time for it after their end."""
        if self._hook is None and any(w.leave is None for w in self.living()):
            self._begin_write_out()

    def _is_written_out(self) -> bool:
        """Nothing is left to do for the snapshots. Those who saved a checkpoint as they left need none."""
        if not (self.workers and all(w.farewell.saved_in is not None for w in self.workers)):
            self._begin_write_out()
        if self._write_out is not None:
            self._write_out.workers_ended()
        return self._write_out is None or self._write_out.over

    def _begin_write_out(self) -> None:
        given_up, until = self._given_up, self._kill_at
        if self._write_out is not None or given_up is None or until is None or self.fenced or not self.environments:
            return
        self._write_out = self.parts.write_out(self.settle)
        self._write_out.begin(self.parts.pod, self.token, self.environments[0], self.ranks, given_up, until)

    def _start_workers(self, problem: str) -> None:
        self._hook = None
        if problem or self.stopping:
            self.refused = problem or "stopped before its workers started"
            self.parts.changed()
            self.settle()
            return
        number = self.token["number"]
        folder = self.parts.logs / f"g{number}"
        errors = self.parts.state / "errors"
        for local_rank, rank in enumerate(self.ranks):
            file = self.parts.file(folder / f"rank{rank}.log")
            error_file = errors / f"g{number}-r{rank}.json"
            place = self.places[local_rank] if self.places else ""
            try:
                w = self._new_worker(rank, local_rank, error_file, file, place)
            except OSError as error:  # no descriptors, say: all of its ranks start, or none
                self._refuse_unstarted(f"rank {rank} could not be started: {error.strerror}")
                return
            w.held = bool(place and self.parts.pod["roles"][role_of(w.place)]["after"])
            self.workers.append(w)
        self._launch_all([w for w in self.workers if not w.held])

    def _new_worker(self, rank: int, local_rank: int, error_file: Path, log: RotatingFile, place: str) -> Worker:
        """One that has not been forked yet. Raises OSError."""
        error_file.unlink(missing_ok=True)
        return Worker(rank, local_rank, error_file, log, two_captures(self.parts.loop, log), place=place)

    def _launch_all(self, workers: Sequence[Worker]) -> None:
        self._forking += len(workers)
        for w in workers:
            self._launch(w, self.environments[w.local_rank] | {"TORCHELASTIC_ERROR_FILE": str(w.error_file)})
            for capture in w.captures:
                capture.started()
        self.parts.changed()

    def _refuse_unstarted(self, why: str) -> None:
        """No worker has been forked yet."""
        for w in self.workers:
            for capture in w.captures:
                capture.started()
                capture.close()
        self.workers.clear()
        self.refused = why
        self.parts.changed()
        self.settle()

    def _launch(self, w: Worker, env: dict[str, str]) -> None:
        pod, cwd = self.parts.pod, self.parts.pod["working_dir"]
        command = pod["roles"][role_of(w.place)]["command"] if w.place else pod["command"]
        out, err = w.captures
        limits: Sequence[tuple[int, int]] = own_limits(self.parts.pod["limits"])
        if self.parts.containers is not None:
            try:
                command, env = self.parts.containers.start(command, env, w.local_rank)
            except OSError as error:  # something that cannot be removed has its pidfile's name
                self._launched(w, 0, f"container: {error}")
                return
            limits = self.parts.containers.limits(limits)
        elif self.parts.fork_server.takes(command, env):
            w.by_fork_server = True
            self.parts.fork_server.fork(
                command,
                env,
                cwd,
                limits,
                (out.write_end, err.write_end),
                lambda pid, error: self._launched(w, pid, error),
            )
            return
        try:
            pid = start_program(command, env, cwd, out.write_end, err.write_end, limits=limits, first=lambda: bind(env))
        except OSError as error:
            self._launched(w, 0, f"fork: {error.strerror}")
        else:
            self._launched(w, pid, "")

    def _launched(self, w: Worker, pid: int, error: str) -> None:
        self._forking -= 1
        if pid:
            try:
                w.pidfd = watched(pid)
            except OSError as problem:
                pid, error = 0, f"it cannot be watched: {problem.strerror}"
        if pid:
            w.pid = pid
            self.parts.children.expect(pid, lambda: self._on_own_zombie(w))
            self.parts.loop.watch(w.pidfd, lambda: self._on_end(w))
            self.parts.guard.hold(pid, w.pidfd)
            if w.along:
                self.parts.guard.signal(pid, signal.SIGKILL)
        else:
            self.refused = f"rank {w.rank} could not be started: {error}"
            self.workers.remove(w)
            for capture in w.captures:
                capture.close()
        if self.refused or self.doomed:
            self._drop_held()
            for other in self.living():
                other.stopped = True
            self._kill_all()
        elif self.stopping:  # the others have their grace
            w.stopped = True
            self.parts.guard.signal(w.pid, signal.SIGKILL)
        self.parts.launched()
        if not self._forking:
            self.parts.changed()
            self.settle()

    def _on_end(self, w: Worker) -> None:
        """Its pidfd is readable: it runs no more code."""
        if w.ended:
            return
        w.ended, w.order = True, self._deaths
        self._deaths += 1
        self.parts.loop.forget(w.pidfd)
        if self._may_be_alone(w):  # before its number is free; what has left its session is killed with the gang
            with contextlib.suppress(OSError):  # no descriptor to look with: it is killed with the gang
                kill_session(w.pid)
        if self.parts.guard.release(w.pid):
            w.stopped = w.fenced = self.fenced = True
        if w.by_fork_server:
            self.parts.fork_server.reap(w.pid, lambda status: self._on_reaped(w, status))
            self.parts.loop.after(REAP_BOUND, lambda: self._reap_late(w))
        else:
            self._on_reaped(w, reap(w.pid))

    def _reap_late(self, w: Worker) -> None:
        if w in self.workers and not is_reaped(w):
            self.parts.fork_server.kill()
            self._on_reaped(w, -1)

    def _on_own_zombie(self, w: Worker) -> None:
        """It is a zombie child of the shim itself: started cold, or its fork server died."""
        self._on_end(w)
        if not is_reaped(w):
            self._on_reaped(w, reap(w.pid))

    def _is_missed(self, w: Worker, status: int) -> None:
        """A worker has ended: if others wait for it in vain, say so, and end them too."""
        asked = self.stopping and not self.doomed and w.leave is not None
        if asked and not w.farewell.saving and os.waitstatus_to_exitcode(status) not in CLEAN:
            w.farewell.missed = True
            self.abandon()

    def _on_reaped(self, w: Worker, status: int) -> None:
        """``status``: -1 if the process that was to reap it has no answer."""
        if is_reaped(w):
            return
        lost = status < 0
        try:
            if lost and not is_reaped_elsewhere(w.pid):  # it becomes our own zombie when its fork server has died
                return
        except OSError as error:  # no descriptor to look with
            print(f"how rank {w.rank} ended is looked for again: {error.strerror}", file=sys.stderr, flush=True)
            self.parts.loop.after(LOOK_AGAIN, lambda: self._on_reaped(w, -1))
            return
        for capture in w.captures:
            capture.drain()
        if lost:
            status = signal.SIGKILL
        elif self.parts.containers is not None:
            status = self.parts.containers.status(status)
        self._is_missed(w, status)
        kill = MemoryKill(LOST if lost else "") if lost or w.stopped else self._memory.explain(status)
        record = exit_record(
            w.rank,
            w.local_rank,
            w.pid,
            status,
            w.stopped,
            w.order,
            w.error_file,
            w.captures[1].tail(),
            w.farewell,
            kill.text,
        )
        record |= {"place": w.place, "starved": kill.starved}
        self.parts.children.forget(w.pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not w.stopped:
            self.taken = self.taken or self.parts.taken()
            if self.taken:  # who started again would meet it again: the gang is formed anew, with other ports
                self._drop_held()
        scope = self._scope(w, 128 - code if code < 0 else code)
        if w.along and self.taken and code:
            w.record = record | {"stopped": True}
        elif w.along and not (self.stopping or self.fenced or self.refused):
            if code == 0:  # before it was killed
                w.record = record
            else:
                w.failed = record
            self._places.reaped(w.place)
            self.rounds.reaped(role_of(w.place))
        elif scope != GANG and code not in (0, *REFORM) and self._may_restart():
            w.failed = record
            self._restart(w, record, scope)
        else:
            w.record = record
        self.parts.changed()
        self.settle()

    def _may_be_alone(self, w: Worker) -> bool:
        """It may be started again while the gang goes on: nobody stopped either, no stranger has one of their ports."""
        rules = self.parts.pod["roles"][role_of(w.place)]["alone"] if w.place else []
        over = self.stopping or self.fenced or self.refused or self.taken or w.stopped
        return not over and any(scope != GANG for _, scope in rules)

    def _scope(self, w: Worker, code: int) -> str:
        """What is started again after this exit code, 128+n for signal n (``model.jobspec.Alone``)."""
        if not self._may_be_alone(w):
            return GANG
        rules = self.parts.pod["roles"][role_of(w.place)]["alone"]
        return next(str(scope) for only, scope in rules if only in (None, code))

    def _may_restart(self) -> bool:
        """This pod alone has not spent the job's budget. What all pods have spent, the agents judge."""
        limits, now = self.parts.pod["restarts"], time.monotonic()
        while self._restarts and now - self._restarts[0] > limits["window"]:
            self._restarts.popleft()
        return len(self._restarts) < int(limits["max"])

    def _restart(self, w: Worker, record: dict[str, Any], scope: str) -> None:
        """After its wait, with the others of its place if ``scope`` says so; until then it counts as one that
        starts."""
        limits = self.parts.pod["restarts"]
        self._restarts.append(time.monotonic())
        if scope == ROLE:
            record["round"] = self.rounds.reached.get(role_of(w.place), 0) + 1
        self.restarted = [*self.restarted, record][-RESTARTED_KEPT:]
        if scope == ROLE:  # how long it waits, the agents know, who see how often it failed elsewhere
            note(w.log, f"rank {w.rank} ended; it is started again with all of {role_of(w.place)}, on all nodes")
            self.stop_role(role_of(w.place), record["round"])
            return
        wait = backoff(len(self._restarts), limits["backoff_min"], limits["backoff_max"])
        alone = "alone" if scope == WORKER else f"with the others of {w.place}"
        note(w.log, f"rank {w.rank} ended; it is started again {alone}" + (f" in {wait:g} s" if wait else ""))
        self.parts.unready(w.place)
        if scope == WORKER:
            self._start_after(w, wait)
            return
        self._places.begin(w.place, wait)

    def _start_after(self, w: Worker, wait: float) -> None:
        w.pid, w.pidfd, w.ended = 0, -1, False
        for capture in w.captures:
            capture.close()
        w.again = self.parts.loop.after(wait, lambda: self._start_again(w))

    def _start_again(self, w: Worker) -> None:
        if boottime() >= self.parts.guard.look().until:
            self.on_fence()
            return
        try:
            self.parts.anew(w.rank)
            fresh = self._new_worker(w.rank, w.local_rank, w.error_file, w.log, w.place)
        except OSError as error:
            w.again, w.record, w.failed, w.ended = None, w.failed, None, True
            self._refuse_again(f"rank {w.rank} could not be started again: {error.strerror}")
            return
        self.workers[self.workers.index(w)] = fresh
        self._launch_all([fresh])

    def _refuse_again(self, why: str) -> None:
        """Others run: they are ended."""
        self.refused = why
        self._drop_held()
        for other in self.living():
            other.stopped = True
        self._kill_all()
        self.parts.changed()
        self.settle()

    def living(self) -> list[Worker]:
        return [w for w in self.workers if w.pid and not w.ended]

    def _grace_over(self) -> None:
        for w in self.living():
            w.farewell.overdue = self._grace
        self._kill_all(f"was not done when the grace of {self._grace:g} s was over")

    def _kill_all(self, why: str = "was stopped") -> None:
        self._kill_at = time.monotonic()
        if self._write_out is not None:
            self._write_out.kill(f"the helper {why}")
        for w in self.living():
            self.parts.guard.signal(w.pid, signal.SIGKILL)
        self._watch_for_stuck()

    def _watch_for_stuck(self) -> None:
        if self._stuck_check is None:
            self._stuck_check = self.parts.loop.after(STUCK_AFTER, self._report_stuck)

    def _report_stuck(self) -> None:
        self._stuck_check = None
        self.settle()  # the last look may have failed
        if self.settled:
            return
        with contextlib.suppress(OSError):  # no descriptor to look with: as seen last
            self.stuck = [w.pid for w in self.living()] + self.parts.children.orphans()
        self.parts.changed()
        self._watch_for_stuck()

    def _run_hook(self, name: str, done: Callable[[str], None]) -> bool:
        argv = self.parts.pod["hooks"][name]
        if not argv:
            return False
        log = self.parts.file(self.parts.logs / "pod.log")
        pod = self.parts.pod
        program = Program(argv, self.environments[0], pod["working_dir"], limits=own_limits(pod["limits"]))
        try:
            self._hook = Hook(f"hook {name}", program, pod["hooks"]["timeout"], log, self.parts, done)
        except OSError as error:  # a full process table, say
            done(f"hook {name} could not be started ({error.strerror})")  # no colon: behind one is output
        return True

    def _after_post_stop(self, problem: str) -> None:
        self._hook = None
        if problem:
            note(self.parts.file(self.parts.logs / "pod.log"), problem)
        self.settle()


def _session(pid: int) -> int:
    """0 if there is no such process."""
    try:
        return os.getsid(pid) if pid else 0
    except OSError:  # it has ended
        return 0


def note(log: RotatingFile, text: str) -> None:
    """One line of the shim's own in the pod's log."""
    from nodeagent.shim.output import stamp

    log.write(f"{stamp(time.time())} stderr F nodeagent: {text}\n".encode())
    log.close()

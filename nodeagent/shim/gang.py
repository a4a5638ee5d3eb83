"""The workers of one generation on this node, from its order to its end: started together, stopped, accounted for.

Standard library only. The generation has settled when every worker is dead and reaped, nothing they left behind is
alive, its snapshots are written out if the pod is given up, and post_stop has run. Must never start a second time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nodeagent.osutil.linux import pidfd_ended
from nodeagent.shim.exits import Exits, in_order
from nodeagent.shim.grace import NOBODY, Grace
from nodeagent.shim.hook import Hook, Program
from nodeagent.shim.launch import Launcher
from nodeagent.shim.loop import Delay
from nodeagent.shim.output import note
from nodeagent.shim.processes import UNENTERED, kill_session, own_limits
from nodeagent.shim.restarts import Restarts
from nodeagent.shim.snapshots import WriteOut
from nodeagent.shim.worker import Parts, Worker

STUCK_AFTER = 10.0
"""Seconds after SIGKILL until what has not gone is reported as stuck."""


class LocalGang:
    """One generation. ``write_out`` makes what writes its snapshots out, which calls its argument when it is over.
    ``places``: of a job of several roles the name of each worker's."""

    def __init__(
        self,
        parts: Parts,
        write_out: Callable[[Callable[[], None]], WriteOut],
        token: dict[str, Any],
        environments: Sequence[dict[str, str]],
        ranks: Sequence[int],
        places: Sequence[str] = (),
    ) -> None:
        self.parts, self.token = parts, token
        self.environments, self.ranks, self.places = environments, ranks, places
        self.refused = ""
        self.runtime_failed = False
        """``refused``, since a container could not be started."""
        self.taken = ""
        """Which of its ports somebody else had when a worker failed, or all were killed; empty: none."""
        self.fenced = self.stopping = self.settled = False
        self.stuck: list[int] = []
        self.workers: list[Worker] = []
        self._launcher = Launcher(parts, token["number"], environments, self._launched)
        self._exits = Exits(parts, self._ended, self._reaping, self._reaped)
        self.grace = Grace(parts, self.workers, self._write_early, self._kill_all)
        self.restarts = Restarts(
            parts, self.workers, self._launcher, lambda: self._is_ending, self._refuse_while_others_run, self.on_fence
        )
        self._hook: Hook | None = None
        self._post_stop_done = False
        self._stuck_check: Delay | None = None
        self._unseen = False
        """What workers left behind could not be looked for the last time, so nothing of it was killed."""
        self._given_up: Mapping[str, Any] | None = None
        self._make_write_out = write_out
        self._write_out: WriteOut | None = None

    def look(self) -> None:
        """Now and then, while something may run."""
        if not self.settled:
            self._exits.look()

    # -- what is known of it

    @property
    def phase(self) -> str:
        if self.settled:
            return "exited"
        if self.stuck:
            return "stuck"
        if self.stopping or self.fenced or self.refused:
            return "stopping"
        if not self.workers or self.forking:
            return "starting"
        return "running" if any(not w.ended for w in self.workers) else "stopping"

    @property
    def forking(self) -> bool:
        """Some of its workers may run already, with pids that are not known yet."""
        return self._launcher.forking

    @property
    def doomed(self) -> bool:
        """Nothing of it runs, or all of it has been sent SIGKILL."""
        return self.settled or self.fenced or (self.stopping and self.grace.is_over)

    @property
    def _is_ending(self) -> bool:
        """It does not go on as it is."""
        return bool(self.stopping or self.fenced or self.refused or self.taken)

    def states(self) -> list[dict[str, Any]]:
        """As model.pod.WorkerState."""
        return [w.state() for w in self.workers]

    @property
    def unentered(self) -> bool:
        """A worker could not enter its working folder."""
        records = [w.record for w in self.workers if w.record is not None]
        return any(r["code"] == 126 and r["error"].startswith(UNENTERED) for r in records)

    def exits(self) -> list[dict[str, Any]]:
        """As model.world.WorkerExit, in the order they ended."""
        return in_order(self.workers)

    @property
    def waiting(self) -> list[str]:
        """Roles whose workers wait for others to be ready."""
        return sorted({w.role for w in self.workers if w.held})

    @property
    def written(self) -> str:
        """What became of its snapshots when the pod was given up."""
        return self._write_out.text if self._write_out is not None else ""

    def speaker(self, pid: int) -> Worker | None:
        """The living worker whose session this process is in. Raises OSError if there is no descriptor or memory to
        look."""
        session = _session(pid)
        lives = self._living()
        if self.parts.containers is None:
            return next((w for w in lives if w.pid == session), None)
        return next((w for w in lives if session and _session(self.parts.process(w)) == session), None)

    def _living(self) -> list[Worker]:
        return [w for w in self.workers if w.lives]

    # -- start

    def start(self) -> None:
        """pre_start, then the workers."""
        if not self._run_hook("pre_start", self._start_workers):
            self._start_workers("")

    def _start_workers(self, problem: str) -> None:
        self._hook = None
        if problem or self.stopping:
            self.refused = problem or "stopped before its workers started"
            self.parts.changed()
            self.settle()
            return
        for local_rank, rank in enumerate(self.ranks):
            place = self.places[local_rank] if self.places else ""
            try:
                w = self._launcher.create(rank, local_rank, place)
            except OSError as error:  # no descriptors, say: all of its ranks start, or none
                self._refuse_unstarted(f"rank {rank} could not be started: {error.strerror}")
                return
            w.held = bool(place and self.parts.pod["roles"][w.role]["after"])
            self.workers.append(w)
        self._launcher.launch([w for w in self.workers if not w.held])

    def release(self, roles: Sequence[str]) -> None:
        """Start the workers of these roles, if they wait."""
        free = [role for role in roles if not self.restarts.rounds.stops(role)]
        chosen = [w for w in self.workers if w.held and w.role in free]
        if not chosen or self.stopping or self.fenced or self.refused:
            return
        for w in chosen:
            w.held = False
        self._launcher.launch(chosen)

    def _launched(self, w: Worker, error: str) -> None:
        if w.pid:
            self._exits.watch(w)
            if w.along:
                self.parts.guard.signal(w.pid, signal.SIGKILL)
        else:
            self.refused = f"rank {w.rank} could not be started: {error}"
            self.workers.remove(w)
            for capture in w.captures:
                capture.close()
        if self.refused or self.doomed:
            self._end_others()
        elif self.stopping:  # the others have their grace
            w.stopped = True
            self.parts.guard.signal(w.pid, signal.SIGKILL)
        self.parts.launched()
        if not self.forking:
            self.parts.changed()
            self.settle()

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

    def _refuse_while_others_run(self, why: str) -> None:
        """A worker cannot be started. Others run: they are ended."""
        self.refused = why
        self._end_others()
        self.parts.changed()
        self.settle()

    def _end_others(self) -> None:
        self._drop_held()
        for other in self._living():
            other.stopped = True
        self._kill_all()

    # -- ends

    def _ended(self, w: Worker) -> None:
        if self.restarts.may_be_alone(
            w
        ):  # before its number is free; what has left its session is killed with the gang
            with contextlib.suppress(OSError):  # no descriptor to look with: it is killed with the gang
                kill_session(w.pid)
        if self.parts.guard.release(w.pid):
            w.stopped = w.fenced = self.fenced = True

    def _reaping(self, w: Worker, code: int) -> None:
        if self.stopping and not self.doomed:
            self.grace.reaping(w, code)

    def _reaped(self, w: Worker, code: int, record: dict[str, Any]) -> None:
        if w.runtime_failure and not (w.stopped or self._is_ending):
            w.record, self.runtime_failed = record, True
            self._refuse_while_others_run(w.runtime_failure)
            return
        if code and not w.stopped:
            self.taken = self.taken or self.parts.taken()
            if self.taken:  # who started again would meet it again: the gang is formed anew, with other ports
                self._drop_held()
        if w.along and self.taken and code:
            w.record = record | {"stopped": True}
        elif w.along and not (self.stopping or self.fenced or self.refused):
            if code == 0:  # before it was killed
                w.record = record
            else:
                w.failed = record
            self.restarts.reaped(w)
        elif not self.restarts.begin(w, code, record):
            w.record = record
        self.parts.changed()
        self.settle()

    def settle(self) -> None:
        """See whether everything is over; called after each death."""
        if self.settled or self.forking or self._hook is not None or (not self.workers and not self.refused):
            return
        if self.grace.ends is not None and not self.doomed:
            self.grace.ask()
        if any(w.record is None for w in self.workers):
            return
        try:
            left = bool(self.parts.children.kill_orphans())
            if self._unseen and self._stuck_check is not None:  # what it has only now killed has its time to end
                self._stuck_check.cancel()
                self._stuck_check = None
            self._unseen = False
        except OSError as error:  # no descriptor to look with
            print(f"what workers left behind is looked for again: {error.strerror}", file=sys.stderr, flush=True)
            left = self._unseen = True
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
        self.grace.cancel()
        if self._stuck_check is not None:
            self._stuck_check.cancel()
        for w in self.workers:
            w.close()
        self.settled, self.stuck = True, []
        self.parts.changed()

    # -- stop

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
        if grace is None and not self.stopping and self._living():  # others may have failed for it
            self.taken = self.taken or self.parts.taken()
        self._given_up = given_up if grace is not None else None
        if self._write_out is not None and self._given_up is not None:
            self._write_out.asked_again(self._given_up)
        for w in self._living():
            if pidfd_ended(w.pidfd):
                self._exits.on_end(w)
        self.stopping = True
        self._drop_held()
        for w in self._living():
            w.stopped = True
        if self._hook is not None and not self._post_stop_done:
            self._hook.kill("was stopped")
        if grace is None:
            self._kill_all()
        else:
            self.grace.begin(grace, sooner, later)
            if broken:
                self.grace.abandon()
        self.parts.changed()
        self.settle()

    def stop_role(self, role: str, number: int) -> None:
        """Kill its workers here, which are to be started again with those on other nodes."""
        if not (self._is_ending or self._post_stop_done):
            self.restarts.rounds.stop(role, number)

    def on_fence(self) -> None:
        """The guard has killed: the workers' ends follow."""
        if not self.settled:
            self.fenced = self.fenced or any(w.failed is not None for w in self.workers)
            self._drop_held()
            self._watch_for_stuck()
            self.settle()

    def _drop_held(self) -> None:
        """What waits is not started any more, nor started again."""
        self.restarts.drop()
        held = [w for w in self.workers if w.held]
        for w in held:
            self.workers.remove(w)
            for capture in w.captures:
                capture.started()
            w.close()
        if held and not self.workers:
            self.refused = self.refused or "stopped before its workers started"

    def _kill_all(self, why: str = "was stopped") -> None:
        self.grace.kill()
        if self._write_out is not None:
            self._write_out.kill(f"the helper {why}")
        self._watch_for_stuck()

    def _watch_for_stuck(self) -> None:
        if self._stuck_check is None:
            self._stuck_check = self.parts.loop.after(STUCK_AFTER, self._report_stuck)

    def _report_stuck(self) -> None:
        check = self._stuck_check
        self.settle()  # the last look may have failed
        if self.settled or self._stuck_check is not check:
            return
        with contextlib.suppress(OSError):  # no descriptor to look with: as seen last
            self.stuck = [w.pid for w in self._living()] + self.parts.children.orphans()
        self.parts.changed()
        self._stuck_check = None
        self._watch_for_stuck()

    # -- what runs beside the workers

    def _write_early(self) -> None:
        """Workers that take all of the grace, stuck in a collective perhaps, leave no time for it after their end."""
        if self._hook is None and any(w.leave is None for w in self._living()):
            self._begin_write_out()

    def _is_written_out(self) -> bool:
        """Nothing is left to do for the snapshots. Those who saved a checkpoint as they left need none."""
        if not (self.workers and all(w.farewell.saved_in is not None for w in self.workers)):
            self._begin_write_out()
        if self._write_out is not None:
            self._write_out.workers_ended()
        return self._write_out is None or self._write_out.over

    def _begin_write_out(self) -> None:
        given_up, until = self._given_up, self.grace.ends
        if self._write_out is not None or given_up is None or until is None or self.fenced or not self.environments:
            return
        self._write_out = self._make_write_out(self.settle)
        self._write_out.begin(self.parts.pod, self.token, self.environments[0], self.ranks, given_up, until)

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

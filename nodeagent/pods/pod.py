"""The host's hold on one pod: its shim process, the connection to it, what was asked of it.

Owned by ``host.ShimHost``; never decides what a pod should do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nodeagent.model.pod import PodPhase
from nodeagent.model.world import Token, signal_words
from nodeagent.osutil.clock import Allowance
from nodeagent.osutil.linux import pidfd_ended, start_time
from nodeagent.osutil.untrusted import AsideByOwner, NotSeenError, UntrustedError, UntrustedFolder, is_there
from nodeagent.pods.base import PodStatus, StartOrder
from nodeagent.pods.become import NOT_ALLOWED
from nodeagent.pods.bounds import ShimReport, most_entries
from nodeagent.pods.cgroup import PodCgroup
from nodeagent.pods.folder import PodRecord
from nodeagent.pods.others import ShimTree, end_others, end_tree
from nodeagent.pods.shimlink import SILENT, SILENT_AT_FIRST, ShimLink, socket_of
from nodeagent.pods.speech import SpeechByOwner, is_progress
from nodeagent.pods.sweep import Sweeper

logger = logging.getLogger(__name__)

RECONNECT_AFTER = 0.2
"""Seconds between attempts to reach a living shim that dropped the connection."""
SWEEP_EVERY = (0.002, 0.05)
"""Seconds between two looks for what a dead shim left behind: at first, and at most."""
LOOK_AGAIN = 5.0
"""Seconds until what this node could not even try (no such user, no shim) is tried again on request."""
CHANGES_AT_ONCE, CHANGES_PER_SECOND = 64.0, 5.0
"""The same of changes of a status that the agent acts on, which the whole cluster may hear of: those beyond them it
sees together."""
WAITING_MAX = 1000
"""Commands for a shim that is not connected; some minutes of pings."""
STUCK_AFTER = 10.0
"""Seconds until what a dead shim left behind is reported as stuck."""
STUCK_EVERY = 5.0
"""Seconds between two looks for it from then on."""
SWEEP_LIMIT = 5.0
"""Seconds for one such look until it is reported as stuck, too; it is waited for."""
UNSEEN = "what it left behind cannot be looked at: {}"
NOT_ENDED = "its shim could not end all that it had started, and was killed with it"
NOT_ENDED_YET = "its shim could not end all that it had started"
NO_ROOT = "this agent is not root, so nobody ends what runs as another user, or hangs in the kernel"
ENDING_LIMIT = 5.0
"""Seconds for root's part in ending a pod whose shim does not manage it."""
RETIRE_LIMIT = 30.0
"""Seconds that a shim may take to end once it was asked to and nothing of its pod runs; then it is killed."""
LONGEST_END = 3600.0 + RETIRE_LIMIT
"""The same whatever runs: post_stop, for one, takes an hour at most."""
SHIM_LOG = "shim.log"
"""In the pod's log folder: what the shim itself writes."""
LEFT_LIMIT = 5.0
"""Seconds for a look at what a dead shim has left in its user's folders."""
LAST_LINE_MAX = 1000
"""Characters of a shim's words in the agent's log."""


class NotStartedError(Exception):
    """A shim that somebody else was to start, or had started, is not there; ``str()`` says why."""


class FoundShim(NamedTuple):
    """A living shim."""

    pid: int
    pidfd: int
    cgroup: PodCgroup | None
    """None: it has none of its own."""


@dataclass(frozen=True, slots=True)
class SharedByPods:
    """What all pods of a host use."""

    sweeper: Sweeper
    looks: AsideByOwner
    """At what is the pods' users'."""
    speech: SpeechByOwner
    endings: AsideByOwner = field(default_factory=AsideByOwner)
    """Root's part in ending pods: it waits for nothing of a user's, as looks may."""


class PodHandle:
    """One shim. ``changed`` is called at each change of ``status``; ``swept`` when it is dead and nothing it ran is
    left; ``ended``, after that, if the pod was retired. Whether a shim is new or outlived an earlier agent, which may
    have workers, ``phase`` says until its status comes.
    """

    def __init__(
        self,
        record: PodRecord,
        folder: Path,
        phase: PodPhase,
        *,
        changed: Callable[[], None],
        swept: Callable[[], None],
        ended: Callable[[PodHandle], None],
        keep: Callable[[PodRecord], None],
        shared: SharedByPods,
    ) -> None:
        """``folder``: its run folder. ``keep``: writes its record anew."""
        self.uid, self.folder, self._record = record.uid, folder, record
        self._changed, self._swept, self._ended = changed, swept, ended
        self._loop = asyncio.get_running_loop()
        self._waiting: list[dict[str, Any]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._may_pass = True
        """Another start may do what this one could not."""
        self._pidfd = -1
        self._pid = 0
        self._timer: asyncio.TimerHandle | None = None
        self._start: asyncio.Task[None] | None = None
        self._not_dead: asyncio.TimerHandle | None = None
        """Set when it was killed: its end is waited for."""
        self._retired: asyncio.TimerHandle | None = None
        """Set when it was asked to end: it is waited for."""
        self._asked: dict[str, Any] | None = None
        """Of the stop that its shim is carrying out."""
        self._cgroup = PodCgroup(record.cgroup) if record.cgroup is not None else None
        """Known before a shim is found, and where none is."""
        self._why_killed, self._killed_at = "", 0.0
        """Of a shim that this host gave up, and the loop's time of it."""
        self._signal = 0
        """That ended the shim, where it was our child."""
        self._helping = set[asyncio.Task[None]]()
        """Root's part in ending what a living shim may not, or cannot."""
        self._fenced: Token | None = None
        """The generation in whose fence that was done last."""
        self._sweeper, self._looks, self._endings, self._keep = shared.sweeper, shared.looks, shared.endings, keep
        self._speech = shared.speech.of(record.owner)
        self._link = ShimLink(self._speech, receive=self._receive, lost=self._lost, give_up=self.give_up)
        self._sweeping: asyncio.Task[None] | None = None
        self._started_here = self._spoke = False
        self._numbered = 0
        """The newest ping that was asked for."""
        self._changes = Allowance(CHANGES_AT_ONCE, CHANGES_PER_SECOND)
        self._telling: asyncio.TimerHandle | None = None
        """Until the agent hears of a change."""
        self._ordered: tuple[Token, int] | None = None
        """Of an order to start that may still be on its way: its generation, and the newest ping before it."""
        self.retiring = False
        self.retry_at = 0.0
        """Loop time before which a shim that could not even start is not started again."""
        self._reported = PodStatus(uid=record.uid, phase="stuck" if record.stuck else phase)
        self.status = self._with_held(self._reported)

    # -- the shim process

    def started(self, process: subprocess.Popen[bytes]) -> None:
        """It is our child, and starts nothing before ``attach``: all that is below it will be in its cgroup."""
        self._process, self._started_here = process, True
        if self._cgroup is not None:
            self._cgroup = PodCgroup.make(self._cgroup.path, process.pid)
        self._watch(process.pid, os.pidfd_open(process.pid), None)

    def starts(self, start: Coroutine[None, None, FoundShim]) -> None:
        """Somebody else starts it, and this tells which process it is: then it listens. Raises ``NotStartedError``."""
        self._started_here = True
        self.finds(start)

    def finds(self, look: Coroutine[None, None, FoundShim], useless: str = "") -> asyncio.Task[None]:
        """As ``starts``, of one that an earlier agent started. ``useless``: why it is given up once it is found."""

        async def begin() -> None:
            try:
                found = await look
            except NotStartedError as error:
                self._start = None
                self._set(reason=str(error))
                self.sweep()
            else:
                self._start = None
                self._watch(found.pid, found.pidfd, found.cgroup)
                if useless:
                    self.give_up(useless)
                else:
                    self._reconnect()

        self._start = self._loop.create_task(begin())
        return self._start

    def _watch(self, pid: int, pidfd: int, cgroup: PodCgroup | None) -> None:
        """Learn of its death."""
        self._pid, self._pidfd = pid, pidfd
        if self._cgroup is None or not self._cgroup.exists:  # what we know of it comes first: a user may make some
            self._cgroup = cgroup
        self._loop.add_reader(pidfd, self._died)

    @property
    def may_restart(self) -> bool:
        """The shim is dead, what it left is swept, and another one may be started now."""
        swept = self.status.phase in ("gone", "unfit") and self.gone and self._sweeping is None
        return swept and self._loop.time() >= self.retry_at

    @property
    def gone(self) -> bool:
        """The shim is dead."""
        return self._pidfd < 0 and self._start is None

    def not_started_again(self, why: str, passing: bool) -> None:
        """There is no other shim in the place of the dead one."""
        self.retry_at = self._loop.time() + LOOK_AGAIN
        self._set(phase="unfit", reason=why, passing=passing)

    def _died(self) -> None:
        self._unwatch()
        if self._process is not None:
            code = self._process.wait()  # a readable pidfd: it does not block
            self._may_pass, self._signal = self._spoke or code != NOT_ALLOWED, max(0, -code)
            self._process = None
        self._link.close()
        self.sweep()

    def _unwatch(self) -> None:
        if self._retired is not None:
            self._retired.cancel()
            self._retired = None
        if self._not_dead is not None:
            self._not_dead.cancel()
            self._not_dead = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def retire(self) -> None:
        """Have the shim end what runs, and itself. What it does not end in time is killed with it."""
        if self.retiring:
            return
        self.retiring = True
        if self.gone:
            self.sweep()
        else:
            self.command("retire")
            self._wait_for_end(self._loop.time() + LONGEST_END)

    def _wait_for_end(self, latest: float) -> None:
        self._retired = self._loop.call_later(RETIRE_LIMIT, self._end_retired, latest)

    def _end_retired(self, latest: float) -> None:
        self._retired = None
        if self._why_killed:  # its end is waited for already
            return
        if self._start is not None:  # nobody could say yet which process it is
            self._start.cancel()
            self._start, self._why_killed = None, "its shim was not found in time to be asked to end"
            self.sweep()
        elif self._loop.time() < latest and not self.status.quiet:
            self._wait_for_end(latest)
        else:
            self.give_up("its shim did not end when it was asked to, and was killed")

    def sweep(self) -> None:
        """The shim is dead, or does not end: kill what is left, until nothing is."""
        if self._sweeping is None:
            with suppress(OSError):  # it is looked at again
                self._kill_cgroup()  # at once
            self._sweeping = self._loop.create_task(self._sweep())

    async def _sweep(self) -> None:
        try:
            await self._kill_all()
            if self._cgroup is not None:
                self._cgroup.remove()
                self._cgroup = None
            self._swept()
            not_started = await self._why_not_started() if self._started_here and not self._spoke else ""
            removed = not self.retiring and await self._left_by_itself()
        finally:
            self._sweeping = None
        if self.retiring or removed:
            self._ended(self)
        elif not_started:
            self.retry_at = self._loop.time() + LOOK_AGAIN
            self._set(phase="unfit", reason=f"the shim could not start: {not_started}", passing=self._may_pass)
        else:
            self._set(
                phase="gone", reason=self._why_dead, folder="", fork_server_pid=None, preforked={}, warming=False,
                rendezvous=None,
            )  # fmt: skip

    async def _kill_all(self) -> None:
        began, wait = self._killed_at or self._loop.time(), SWEEP_EVERY[0]
        while left := await self._kill_left():
            if self._loop.time() - began > STUCK_AFTER:
                self._stuck(left)
                wait = STUCK_EVERY
            await asyncio.sleep(wait)
            wait = min(wait * 2, SWEEP_EVERY[1])

    async def _kill_left(self) -> str:
        """What there was to be killed; nothing if there was nothing."""
        try:
            killed = self._kill_cgroup()
        except OSError as error:
            return UNSEEN.format(error)
        if not killed:
            look = self._sweeper.kill(self._record.mark, self._record.owner)
            try:
                if not (await asyncio.wait([look], timeout=SWEEP_LIMIT))[0]:
                    self._stuck(
                        UNSEEN.format(f"the look at this machine's processes takes more than {SWEEP_LIMIT:g} s")
                    )
                killed = await look
            except OSError as error:
                return UNSEEN.format(error)
            finally:
                look.cancel()
        if killed:
            return f"processes {', '.join(map(str, killed))} do not end, even with SIGKILL"
        # Its memory may be gone, and its mark with it, before a disk that hangs lets it end.
        lives = self._pidfd >= 0 and not pidfd_ended(self._pidfd)
        return "the shim does not end, even with SIGKILL" if lives else ""

    def _kill_cgroup(self) -> list[int]:
        return self._cgroup.kill() if self._cgroup is not None else []

    def _stuck(self, left: str) -> None:
        self._set(phase="stuck", reason=f"{self._why_dead}, and {left}")

    @property
    def _why_dead(self) -> str:
        by = f"its shim was killed by {signal_words(self._signal)}, not by nodeagent" if self._signal else ""
        return self._why_killed or by or "the shim died"

    async def _why_not_started(self) -> str:
        """Not empty."""
        if self._reported.reason:
            return self._reported.reason
        file = self._record.logs / SHIM_LOG
        try:
            look = partial(last_line, file, self._record.owner)
            return await self._looks.run(self._record.owner, f"log of {self.uid}", look, LEFT_LIMIT)
        except NotSeenError as error:
            return f"its own words in {file} cannot be read: {error}"

    async def _left_by_itself(self) -> bool:
        """An idle shim that ends on its own removes its folder. What lies, or is mounted, in its place is the user's
        doing."""
        look = partial(is_there, self.folder.parent, self.folder.name)
        try:
            return not await self._looks.run(self._record.owner, f"folder of {self.uid}", look, LEFT_LIMIT)
        except UntrustedError as error:
            logger.warning("whether %s is there is not known: %s", self.folder, error)
            return False

    # -- the connection

    def attach(self, connected: socket.socket) -> None:
        """Use this socket; what was asked meanwhile is sent."""
        self._asked = None
        self._link.attach(connected)
        self._link.send({"op": "attach"})
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            self._link.send(command)

    @property
    def connected(self) -> bool:
        return self._link.connected

    def _lost(self) -> None:
        """The pidfd reports the shim's death; a shim that only dropped us is connected to again."""
        if not self.gone:
            self._timer = self._loop.call_later(RECONNECT_AFTER, self._reconnect)

    def _reconnect(self) -> None:
        self._timer = None
        if self.gone or self._link.connected:
            return
        try:
            connected = socket_of(self.folder, self._record.owner, self._pidfd)
        except UntrustedError as error:
            if isinstance(error, NotSeenError) or self._spoke or self._started_here:
                self._timer = self._loop.call_later(RECONNECT_AFTER, self._reconnect)
            else:  # it listened before its file said so, and its user, who may change its folder, has taken its socket
                self.give_up(f"its shim is not reached: {error}")
            return
        self.attach(connected)

    def start(self, order: StartOrder) -> None:
        """Until it is carried out, or a later ping is answered, the pod is not quiet: its shim may be busy for long."""
        self._asked = None
        self._asks(len(order.environments))
        if order.devices != self._record.devices:
            self._keep_record(devices=order.devices)
        self.command("start", **order.model_dump(exclude={"devices"}))
        if not self.gone:
            self._ordered = order.token, self._numbered
            self.status = self._reported.starting(order.token)

    def promise(self, ports: int, **arguments: Any) -> None:
        self._asks(ports)
        self.command("promise", ports=ports, **arguments)

    def _asks(self, count: int) -> None:
        """So many workers, or ports, of which it will tell."""
        if count > self._record.asked:
            self._keep_record(asked=count)

    def stop(self, **arguments: Any) -> None:
        """Asked again and again while workers die. Their shim gets the order once, and again where they are others or
        shall be stopped otherwise: hearing it costs time that the next workers wait for."""
        if not self._link.connected or self._asked != arguments:
            self._asked = arguments
            self.command("stop", **arguments)

    def command(self, op: str, **arguments: Any) -> None:
        """Send, or keep until connected; a dead shim hears nothing any more."""
        if self._link.connected:
            self._link.send({"op": op, **arguments})
        elif not self.gone:
            if len(self._waiting) >= WAITING_MAX:
                self._waiting.clear()
                self.give_up("its shim is not reached")
                return
            self._waiting.append({"op": op, **arguments})

    def ping(self, number: int) -> None:
        """Numbers grow. A shim that does not answer in time has hung, and is killed."""
        self._numbered = number
        self.command("ping", number=number)
        self._link.expect_echo(number, SILENT if self._spoke else SILENT_AT_FIRST)

    def _echoed(self, number: int) -> None:
        if self._ordered is not None and number > self._ordered[1]:  # its shim has not done what it was ordered
            self._ordered = None
            self._show()
        self._link.echoed(number)

    def _receive(self, line: bytes) -> None:
        try:
            received = ShimReport.read(line, most_entries(self._record.asked))
        except ValueError as error:
            logger.error("shim of %s sent what is no status: %s", self.uid, error)
            self.give_up("its shim sent what is no status")
            return
        if received.echo is not None:
            self._echoed(received.echo)
            return
        status = received.status
        if status is None:
            logger.warning("shim of %s: %s", self.uid, received.error[:LAST_LINE_MAX])
            self._asked = None  # it may be the stop that it could not do
            return
        if status.uid != self.uid:
            self.give_up("its shim sent the status of another pod")
            return
        self._spoke = True
        if status.phase == "stuck":
            status = self._end_all(status)
        elif status.fenced and status.generation != self._fenced and not self._helping:
            self._fenced = status.generation
            self._help(self._end_others())
        before, self._reported = self._reported, status
        ordered = self._ordered is not None and status.generation == self._ordered[0]
        if ordered:
            self._ordered = None
        self._show(in_turn=True, progress=not ordered and is_progress(status, before))

    # -- what a shim may not end

    def _end_all(self, status: PodStatus) -> PodStatus:
        """Its shim cannot end all that it has started: then root does, and the shim ends with it. What is said of the
        pod until then: only what survives root's SIGKILL is stuck, and of that a shim's word is no proof."""
        if self._has_cgroup:
            self.give_up(NOT_ENDED)
        elif os.geteuid() != 0:
            return status.model_copy(update={"reason": f"{status.reason}; {NO_ROOT}"})
        elif not self._helping:
            self._help(self._end_tree())
        found = self._reported.phase == "stuck"  # by root, the last time
        return status.model_copy(update={"phase": "stuck" if found else "stopping", "reason": self._reported.reason})

    @property
    def _has_cgroup(self) -> bool:
        return self._cgroup is not None and self._cgroup.exists

    def _help(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._helping.add(task)
        task.add_done_callback(self._helping.discard)

    def _tree(self) -> ShimTree:
        """All that it has started, for want of a cgroup. Raises OSError if there is no descriptor or memory to look."""
        start = start_time(self._pid)
        lives = self._pidfd >= 0 and not pidfd_ended(self._pidfd)  # so that start is its own
        return ShimTree(self._pid, start if lives else None)

    async def _end_others(self) -> None:
        """Its time is over, and its shim has killed all that it may: root ends what runs as another user."""
        if os.geteuid() != 0:
            return
        try:
            pids = self._cgroup.pids if self._cgroup is not None and self._has_cgroup else self._tree().pids
            work = partial(end_others, pids, self._record.owner)
            await self._endings.run(self._record.owner, f"others in {self.uid}", work, ENDING_LIMIT)
        except (UntrustedError, OSError) as error:
            logger.warning("what runs in %s as another user is not ended yet: %s", self.uid, error)

    async def _end_tree(self) -> None:
        try:
            work = partial(end_tree, self._tree())
            left = await self._endings.run(self._record.owner, f"tree of {self.uid}", work, ENDING_LIMIT)
            why = f"processes {', '.join(map(str, left))} do not end, even with SIGKILL"
        except (UntrustedError, OSError) as error:
            left, why = [0], UNSEEN.format(error)
        if not left:
            self.give_up(NOT_ENDED)
        elif self._link.connected:
            self._set(phase="stuck", reason=f"{NOT_ENDED_YET}, and {why}")

    def give_up(self, why: str) -> None:
        """A shim that is of no use is killed: then its pod is gone, and is reported so."""
        logger.error("shim of %s is killed: %s", self.uid, why)
        self._why_killed, self._killed_at = why, self._loop.time()
        self._link.close()
        with suppress(OSError):  # it is looked at again when the shim is dead
            self._kill_cgroup()
        if self._pidfd >= 0:
            with suppress(ProcessLookupError, PermissionError):  # _died hears of it
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            if self._not_dead is None:  # one whose disk hangs may not end: its workers are swept all the same
                self._not_dead = self._loop.call_later(STUCK_AFTER, self.sweep)

    def _set(self, **fields: Any) -> None:
        self._reported, self._ordered = self._reported.model_copy(update=fields), None
        self._show()

    def _show(self, *, in_turn: bool = False, progress: bool = False) -> None:
        """``in_turn``: at the shim's word, which may be another one without end. ``progress``: of its workers only."""
        if in_turn and self._telling is not None:
            return
        if in_turn and progress:
            self._speech.later(self, self._show)
            return
        if in_turn and (wait := self._changes.spend(1, self._loop.time())):
            self._telling = self._loop.call_later(wait, self._tell)
            return
        if in_turn and not self._speech.changes.may(self._loop.time()):
            self._speech.later(self, self._show)
            return
        self._speech.forget(self)
        now = self._reported if self._ordered is None else self._reported.starting(self._ordered[0])
        self.status = self._with_held(now)
        if (self.status.phase == "stuck") != self._record.stuck:
            self._keep_record(stuck=self.status.phase == "stuck")
        self._changed()

    def _with_held(self, status: PodStatus) -> PodStatus:
        held = self._record.devices if status.phase == "stuck" else ()
        return status if status.held == held else status.model_copy(update={"held": held})

    def _keep_record(self, **fields: Any) -> None:
        """For the next agent."""
        self._record = replace(self._record, **fields)
        self._keep(self._record)

    def _tell(self) -> None:
        self._telling = None
        self._show()

    def let_go(self) -> None:
        """Forget the shim and leave it running."""
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._start, self._sweeping, *self._helping):
            if task is not None:
                task.cancel()
        self._speech.forget(self)
        self._unwatch()
        self._link.close()
        if self._process is not None:
            self._process.returncode = 0  # it outlives us: not a child that was forgotten
            self._process = None


def last_line(file: Path, owner: int) -> str:
    """Of a shim's own log, which lies in a folder of the job's user."""
    try:
        with UntrustedFolder(file.parent.parent, file.parent.name, owner=owner) as folder:
            lines = folder.end_of(file.name, 4000, also=os.geteuid()).decode("utf-8", "backslashreplace").splitlines()
    except UntrustedError as error:
        return str(error)
    lines_left = [line for line in lines if line.strip()]
    return lines_left[-1] if lines_left else "it printed nothing"

"""The agent's side of the lease process (``nodeagent/lease``): what it is to do, what it says, and that it is there.

Must never renew, grant, or decide who may run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

import structlog

from nodeagent import __version__
from nodeagent.agent.questions import Names
from nodeagent.lease.core import NOBODY_WAITS, LeaseState
from nodeagent.lease.lending import LoanRow, Promises, Table
from nodeagent.lease.order import (
    LeaseOrder,
    LeasePort,
    Server,
    Tls,
    read_order,
    remove_order,
    write_order,
)
from nodeagent.lease.resp import place
from nodeagent.lease.statefiles import (
    Bridged,
    Pulse,
    address_reader,
    bridged_reader,
    find_holder,
    lease_folder,
    promises_reader,
    pulse_file,
    read_pulse,
    read_status,
    unannounced_reader,
    wake_socket,
    write_table,
)
from nodeagent.model.base import RECORD_VERSION
from nodeagent.osutil import units
from nodeagent.osutil.commands import DIES, ends
from nodeagent.osutil.linux import boot_id, boottime, power_mark, socket_path
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.store.endpoint import AccessError, StoreEndpoint
from nodeagent.store.keys import prefix
from nodeagent.store.scripts import load
from nodeagent.store.wire import Reached

START_LIMIT = 5.0
"""Seconds from the start of the process until it must have its lock."""
FIRST_RETRY = 0.02
LAST_RETRY = 1.0
"""Seconds until the next start, after one that failed or whose process ended before it had renewed: few at first, since
workers run on the last grant only; then twice as many each time, up to the last."""
PASSWORD_LATE = 5.0
"""Seconds for which the disk of the password file does not answer until the log says so."""
COMES_BACK = 1.0
"""Seconds for systemd to start it again."""
LOOK = 0.01
"""Seconds between two looks whether it has its lock."""
END_LIMIT = 2.0
"""Seconds for one that was asked to end."""
SCRIPTS = {"renew": "renew_lease", "leave": "leave", "let_go": "let_go"}
"""Of an order, by its fields."""
LOG = "lease.log"
LONGEST_LOG = 1 << 20
"""Bytes of its log; a longer one begins anew at its next start."""
_SOURCE = Path(__file__).parents[2]


class LeaseProcess(Protocol):
    """Renews this node's lease and grants its pods their time. Nothing here waits, and nothing raises."""

    def tend(self, life: str, start: int, era: str, cluster_uid: str) -> None:
        """This life is to be looked after from now on, in the store of that era and cluster. To be called again
        whenever it may have changed, and with each beat: where the store is may have changed too."""

    def wake(self) -> None:
        """There is a new grant file, or the store answers again."""

    def alive(self, cut_off: bool, standing: Mapping[str, int] = NOBODY_WAITS) -> None:
        """The agent is there. ``cut_off``: the store has not answered what it asked last. ``standing``: and others may
        wait for what it has to start or to report of these jobs (uids), each with the number of the generation, of
        which nothing runs here."""

    def know(self, life: str, leaving: bool, jobs: Mapping[str, LoanRow]) -> bool:
        """By this it asks for failsafe time, and lends it, from now on. False if the order cannot be written: then it
        may go by what it knew before."""

    def promises(self) -> Promises | None:
        """What it has promised others; None if nobody can know that yet."""

    def bridged(self) -> Bridged:
        """What runs on failsafe time here, and what gets none."""

    def address(self) -> str:
        """``host:port`` where other nodes ask it; empty if nobody can."""

    def end(self) -> None:
        """The lease was given back: nothing is granted any more, and the process ends."""

    def pulse(self) -> Pulse | None:
        """What it last granted, and when; None if it has not turned yet, or that cannot be read."""

    def unannounced(self) -> int:
        """The newest revision in the store that woke nobody, as of its last renewal; 0: it has written none."""

    def elsewhere(self, era: str | None) -> str:
        """Where this node's lease is renewed now, if that is another store than the agent's, which is in this era:
        another cluster's, or another server that is in another era. Empty if it is no other, or none renews it.
        None: where it may be another one, for all that is known without asking the store."""

    def status(self) -> tuple[LeaseState, str]:
        """What it is at, and why."""


class ReachedStore(Protocol):
    """What has been connected to the store."""

    @property
    def reached(self) -> Reached | None:
        """Where the store was last; None until it has been reached."""


class LocalLeaseProcess:
    """The real one: beside this agent, and not below it. ``unit``: the agent's, then it is one itself; without, it is a
    child of the agent's in a session of its own, which nothing of the agent's end touches. ``door``: where other nodes
    are to ask it."""

    def __init__(self, config: AgentConfig, node: str, store: ReachedStore, unit: str, door: LeasePort) -> None:
        self.config = config
        """Another one, when the agent has read it anew."""
        self._node, self._store, self._unit, self._door = node, store, unit, door
        self._folder = lease_folder(config.dirs.run)
        self._boot = boot_id()
        self._promises, self._bridged = promises_reader(self._folder, self._boot), bridged_reader(self._folder)
        self._address, self._unannounced = address_reader(self._folder), unannounced_reader(self._folder)
        self._pulse = str(pulse_file(self._folder))
        self._login = StoreEndpoint(config.redis)
        self._look = asyncio.Event()
        """The password is to be read anew."""
        self._order = self._standing()
        self._tended = False
        """The order is this agent's."""
        self._known: Table | None = None
        """What was written last of the jobs."""
        self._written: Table | None = None
        """The same with numeric addresses, as it is written down."""
        self._names = Names(self._write_table)
        self._ended = False
        self._changed = asyncio.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._troubles: set[str] = set()
        """That were logged since the last new order."""
        self._log = structlog.get_logger("lease").bind(node=node)

    # --- words and signs

    def tend(self, life: str, start: int, era: str, cluster_uid: str) -> None:
        self._look.set()
        self._tend(life, start, era, cluster_uid)

    def _tend(self, life: str, start: int, era: str, cluster_uid: str) -> None:
        order = self._order_for(life, start, era, cluster_uid)
        if order is None or (self._tended and order == self._order):
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_order(self._folder, order, {step.sha: step.source for step in map(load, SCRIPTS.values())})
        except OSError as error:
            self._complain(f"the lease process's order cannot be written: {error}")
            return
        self._order, self._tended, self._ended = order, True, False
        self._troubles.clear()
        self._changed.set()
        self.wake()

    def relocate(self, address: str) -> None:
        """Others are to ask this node there from now on. Where that cannot be written down, the next ``tend`` tries."""
        self._door = self._door._replace(address=address)
        if self._tended and (order := self._order) is not None:
            self._tend(order.life, order.start, order.era, order.cluster_uid)

    def wake(self) -> None:
        self._send({})

    def alive(self, cut_off: bool, standing: Mapping[str, int] = NOBODY_WAITS) -> None:
        word: dict[str, object] = {"alive": True}
        if cut_off:
            word |= {"cut_off": True, "standing": " ".join(f"{uid} {number}" for uid, number in standing.items())}
        self._send(word)

    def know(self, life: str, leaving: bool, jobs: Mapping[str, LoanRow]) -> bool:
        self._known = Table(self._boot, self._node, life, leaving, jobs)
        self._write_table()
        return self._written is not None

    def promises(self) -> Promises | None:
        return self._promises.read()

    def bridged(self) -> Bridged:
        return self._bridged.read()

    def address(self) -> str:
        return self._address.read()

    def end(self) -> None:
        self._order, self._tended, self._ended = None, False, True
        try:
            remove_order(self._folder)
        except OSError as error:
            self._complain(f"the order that gives the lease back cannot be written: {error}")
        self._changed.set()
        self.wake()

    def pulse(self) -> Pulse | None:
        try:
            return read_pulse(self._pulse)
        except OSError as error:
            self._complain(f"what the lease process grants cannot be read: {error}")
            return None

    def unannounced(self) -> int:
        return self._unannounced.read()

    def elsewhere(self, era: str | None) -> str:
        order, pulse = self._order, self.pulse()
        if order is None or pulse is None or boottime() - pulse.renewed > order.lease:
            return ""
        ours = self._order_for(order.life, order.start, order.era, order.cluster_uid)
        if ours is None:  # the store has not been reached yet
            same = era is not None
        else:
            same = order.era == era or _database(order.server) == _database(ours.server)
            same = same and order.prefix == ours.prefix
        return "" if same else place(order.server)

    def status(self) -> tuple[LeaseState, str]:
        try:
            status = read_status(self._folder)
        except OSError as error:  # it may be at anything
            return "holding", f"its state cannot be read: {error}"
        return ("idle", "") if status is None else (status.state, status.why)

    def _send(self, word: object) -> None:
        """It is lost where nobody listens, or nobody keeps up."""
        try:
            with (
                socket_path(wake_socket(self._folder)) as path,
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as mouth,
            ):
                mouth.sendto(json.dumps(word).encode(), path)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            pass
        except OSError as error:
            self._complain(f"the lease process cannot be spoken to: {error}")

    def _write_table(self) -> None:
        known = self._known
        if known is None:
            return
        self._names.keep(place.address for row in known.jobs.values() for place in row.places.values())
        table = known._replace(jobs={uid: self._numeric(row) for uid, row in known.jobs.items()})
        if table == self._written:
            return
        self._written = None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_table(self._folder, table)
        except OSError as error:
            self._complain(f"the jobs cannot be written for the lease process: {error}")
            return
        self._written = table

    def _numeric(self, row: LoanRow) -> LoanRow:
        places = {node: p._replace(address=self._names.numeric(p.address)) for node, p in row.places.items()}
        return row._replace(places={node: place for node, place in places.items() if place.address})

    # --- the order

    def _standing(self) -> LeaseOrder | None:
        """What an earlier agent ordered."""
        try:
            return read_order(self._folder, self._boot)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _order_for(self, life: str, start: int, era: str, cluster_uid: str) -> LeaseOrder | None:
        """None while the store has not been reached."""
        reached, timing = self._store.reached, self.config.timing
        if reached is None:
            return None
        return LeaseOrder(
            boot=self._boot, node=self._node, life=life, start=start, era=era, cluster_uid=cluster_uid,
            heartbeat=timing.heartbeat, lease=timing.lease, fence=timing.fence, kill=timing.kill,
            promise=timing.promise, timeout=timing.store_timeout,
            failsafe=timing.failsafe, failsafe_limit=timing.failsafe_limit,
            patience=self.config.without_agent, grace=self.config.drain,
            prefix=prefix(self.config.cluster), record_version=str(RECORD_VERSION),
            server=Server(reached.path, reached.address, reached.port, self._login.greeting(), self._tls(reached)),
            **{name: load(step).sha for name, step in SCRIPTS.items()}, door=self._door,
        )  # fmt: skip

    def _tls(self, reached: Reached) -> Tls | None:
        redis = self.config.redis
        if not redis.place.tls:
            return None
        files = (redis.tls.ca_file, redis.tls.cert_file, redis.tls.key_file)
        ca, cert, key = ("" if file is None else str(file) for file in files)
        return Tls(ca, cert, key, reached.host if redis.tls.check_hostname else "")

    async def _renew_password(self) -> None:
        """Reads it anew with each beat, beside the loop, and orders anew if it is another one. One that cannot be read
        changes nothing: the connections that there are may go on for long without it."""
        before = trouble = ""
        while True:
            await self._look.wait()
            self._look.clear()
            try:
                if (silent := await self._login.renew_greeting()) > PASSWORD_LATE:
                    trouble = (
                        f"the password file {self.config.redis.password_file} does not come back: the lease process "
                        "goes on with what it held before; check the disk that it is on"
                    )
                elif not silent:
                    trouble = ""
            except AccessError as error:
                trouble = str(error)
            if trouble != before:
                before = trouble
                if trouble:
                    self._log.error(trouble)
            order = self._order
            if self._tended and order is not None and order.server.greeting != self._login.greeting():
                self._tend(order.life, order.start, order.era, order.cluster_uid)

    # --- that it runs

    async def run(self) -> None:
        """Keeps it running, until cancelled; it goes on without the agent then. One of another version, and one that
        hangs, are replaced."""
        helpers = [asyncio.create_task(self._names.run()), asyncio.create_task(self._renew_password())]
        try:
            await self._keep()
        finally:
            for helper in helpers:
                helper.cancel()
            if self._child is not None:
                self._child.returncode = 0  # it outlives us: not a child that was forgotten

    async def _keep(self) -> None:
        before, retry, renewed = False, FIRST_RETRY, self._renewed()
        while True:
            failed = False
            self._changed.clear()
            holder = self._holder()
            if holder is None:
                if not self._wanted():
                    await self._changed.wait()
                elif not (before and self._unit and await self._is_there(COMES_BACK)):
                    failed = not await self._start()
                before = False
            elif not holder[1]:
                await asyncio.sleep(LOOK)  # it has just begun
            else:
                began, last = boottime(), renewed
                await self._watch(*holder)
                before, renewed = holder[1] == __version__, self._renewed()  # another one was stopped here
                # It does not renew while the store is away.
                failed = renewed in (0.0, last) and boottime() - began < LAST_RETRY
                retry = retry if failed else FIRST_RETRY
            if failed:
                await asyncio.sleep(retry)
                retry = min(2 * retry, LAST_RETRY)

    def _holder(self) -> tuple[int, str] | None:
        """As ``find_holder``; as one that has just begun where there is no looking: it must not be stopped for that."""
        try:
            return find_holder(self._folder)
        except OSError as error:
            self._complain(f"whether the lease process runs is not to be seen: {error}")
            return 0, ""

    def _renewed(self) -> float:
        """When the last good renewal was sent, as the newest process knows."""
        pulse = self.pulse()
        return 0.0 if pulse is None else pulse.renewed

    def _wanted(self) -> bool:
        order = self._order
        if self._ended or order is None:  # of a node that may not join there is nothing to look after
            return False
        try:
            status = read_status(self._folder)
        except OSError as error:
            self._complain(f"the lease process's state cannot be read: {error}")
            return True
        if status is None or status.state != "left":
            return True
        return status.of != (order.life, order.start, order.era)

    async def _start(self) -> bool:
        """Whether it had its lock within the limit."""
        command = [sys.executable, "-sSP", "-m", "nodeagent.lease", str(self.config.dirs.run)]
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(_SOURCE), "LANG": "C.UTF-8"} | power_mark()
        try:
            if self._unit:
                await units.start(units.lease_command(self._unit, env, command))
            else:
                await self._end_child()
                self._fork(command, env)
        except (OSError, units.UnitError) as error:
            self._complain(f"the lease process does not start: {error}")
            if self._unit:  # what is left of an earlier one has its name
                await self._stop_unit()
            return False
        there = await self._is_there(START_LIMIT)
        if not there:
            self._complain("the lease process does not start: see its log")
        return there

    async def _end_child(self) -> None:
        """One that has not taken the lock in time, or that ended unseen."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            await ends(self._child, DIES)

    def _fork(self, command: list[str], env: dict[str, str]) -> None:
        """A child in a session of its own."""
        handed = []
        if power_mark():  # a local cluster ends with its supervisor
            handed = [os.pidfd_open(os.getppid())]
            command = [*command, str(handed[0])]
        try:
            # Not in dirs.logs: a folder that is missing, full or hangs must not keep a node without its lease.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _log_file(self._folder / LOG) as log:
                self._child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=env, umask=0o077,
                    start_new_session=True, pass_fds=handed,
                )  # fmt: skip
        finally:
            for fd in handed:
                os.close(fd)

    async def _is_there(self, seconds: float) -> bool:
        """It has its lock, within so many seconds; not if our child has ended before."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._holder() is None:
            if loop.time() > end or (self._child is not None and self._child.poll() is not None):
                return False
            await asyncio.sleep(LOOK)
        return True

    async def _watch(self, pid: int, version: str) -> None:
        """Until it has ended."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError as error:
            self._complain(f"the lease process cannot be watched: {error}")
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(handle, ended.set)
        try:
            if self._holder() != (pid, version):
                return  # the number may have been another's when the handle was made
            if version != __version__:
                self._log.info("a lease process of another version is replaced", pid=pid, version=version)
                await self._end(handle, ended)
            else:
                await self._until_ended(pid, handle, ended)
        finally:
            loop.remove_reader(handle)
            os.close(handle)
            if self._child is not None and self._child.poll() is not None:
                self._child = None

    async def _until_ended(self, pid: int, handle: int, ended: asyncio.Event) -> None:
        """Kill it if it hangs: a process that stands still is one that grants nothing, and nobody else may."""
        fence = self.config.timing.fence
        turned, began, pause, silent = 0.0, boottime(), fence / 8, 0
        while not await _within(ended, pause):
            pulse, now = self.pulse(), boottime()
            if self._order is None or pulse is None:
                turned, began, pause, silent = 0.0, now, fence / 8, 0
                continue
            if pulse.turned != turned:
                turned, silent = pulse.turned, 0
            quiet = now - max(turned, began)
            pause = max(fence / 2 - quiet, fence / 8)  # not before it may be silent for too long
            if quiet < fence / 2:
                continue
            silent += 1  # a machine that has stood still stood still for both of us: it may turn first
            if silent > 1:
                self._log.error("the lease process hangs: killed", pid=pid, waited=round(quiet, 2))
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                began, silent = now, 0
        if self._order is not None and self._wanted():
            self._log.error("the lease process has ended: it is started again", pid=pid)

    async def _end(self, handle: int, ended: asyncio.Event) -> None:
        if self._unit:
            await self._stop_unit()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if await _within(ended, END_LIMIT):
                return

    async def _stop_unit(self) -> None:
        with contextlib.suppress(units.UnitError):  # there is none
            await units.start(units.stop_command(units.lease_unit(self._unit)))

    def _complain(self, what: str) -> None:
        """Once, until there is a new order."""
        if what not in self._troubles:
            self._troubles.add(what)
            self._log.error(what)


def _database(server: Server) -> tuple[str, str, int, tuple[tuple[str, ...], ...]]:
    """Which of which server."""
    chosen = tuple(words for words in server.greeting if words[0] == "SELECT")
    return server.path, server.host, server.port, chosen


async def _within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def _log_file(path: Path) -> IO[bytes]:
    """To be written at its end. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    if os.fstat(fd).st_size > LONGEST_LOG:
        os.ftruncate(fd, 0)
    return os.fdopen(fd, "ab", buffering=0)

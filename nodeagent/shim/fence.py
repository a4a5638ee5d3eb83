"""The fence: kills the workers when the time that this pod was granted has passed.

``ProcessGuard`` has a thread of its own in the shim, so that a slow disk under the shim's loop cannot delay it. Nobody
sends it more time: before it kills it reads the pod's grant record again. The watchdog behind it is a process of its
own for when the whole shim is stopped: ``SLACK`` later it kills the workers' groups, then everything below the shim
that the shim did not name as its own. It knows pids and the grant record, nothing else, and dies with the shim.
Standard library only. The guard must never wait for anything but its timer and its lock, and the lock is held for
system calls that cannot block; the watchdog must never act while the shim does.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Container, Mapping
from pathlib import Path

from nodeagent.lease.grants import NOTHING, Grant, GrantReader
from nodeagent.osutil.linux import arm_timer, boottime, boottime_timer, kill_group, pidfd_ended
from nodeagent.osutil.suspend import Suspension
from nodeagent.shim.loop import Loop
from nodeagent.shim.processes import ShimChildren, kill_below, reap, start_function


class ProcessGuard:
    """Holds the pidfds of everything that may run only in granted time. ``record``: the pod's grant; where there is
    none, there is no time. ``suspension``: of this machine."""

    def __init__(self, record: Path, suspension: Suspension) -> None:
        self.suspended = 0.0
        """Seconds for which the machine was suspended while the time passed by which the fence acted last."""
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable after the fence has acted."""
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self._fenced: set[int] = set()
        self._reader = _open(record)
        self._until = 0.0
        self._suspension = suspension
        self._timer = boottime_timer()
        self.watchdog = Watchdog(self._reader)
        threading.Thread(target=self._watch, name="fence", daemon=True).start()

    def look(self) -> Grant:
        """What is granted now. The fence acts by it: at once, if that is over."""
        with self._lock:
            return self._look()

    def _look(self) -> Grant:
        grant = self._reader.read() if self._reader is not None else NOTHING
        if grant.until != self._until:
            self._until = grant.until
            arm_timer(self._timer, grant.until)
        if boottime() < grant.until:
            self._suspension.note()
        return grant

    def _is_over(self) -> bool:
        """The time has passed, also by what the record says by now."""
        return boottime() >= self._until and boottime() >= self._look().until

    def hold(self, pid: int, pidfd: int) -> bool:
        """Guard this process group; False (and it is killed) if the time has passed already."""
        self.watchdog.hold(pid, pidfd)
        with self._lock:
            self._held[pid] = pidfd
            if not self._is_over():
                return True
            self._fenced.add(pid)
            kill_group(pid, pidfd)
            self.suspended = self._suspension.since()
            return False

    def signal(self, pid: int, number: int, *, alone: bool = False) -> None:
        """Signal a guarded process, and its group unless ``alone``."""
        with self._lock:
            if pid not in self._held:
                return
            if alone:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._held[pid], number)
            else:
                kill_group(pid, self._held[pid], number)

    def release(self, pid: int) -> bool:
        """The process has ended and is about to be reaped: what is left of its group is killed, its pidfd closed.
        Whether it was the fence, or the watchdog, that ended it.

        Only an unreaped leader pins the group's number, so this comes before the reaping.
        """
        by_watchdog = self.watchdog.release(pid)
        with self._lock:
            pidfd = self._held.pop(pid)
            kill_group(pid, pidfd)
            os.close(pidfd)
            fenced = pid in self._fenced
            self._fenced.discard(pid)
        return fenced or by_watchdog

    def _watch(self) -> None:
        while True:
            os.read(self._timer, 8)
            with self._lock:
                if not self._is_over():
                    continue
                for pid, pidfd in self._held.items():
                    if not pidfd_ended(pidfd):
                        self._fenced.add(pid)
                        kill_group(pid, pidfd)
                self.suspended = self._suspension.since()
            os.eventfd_write(self.wake, 1)


def _open(record: Path) -> GrantReader | None:
    try:
        return GrantReader(record)
    except OSError as error:
        print(f"no time can be granted: {error}", file=sys.stderr, flush=True)
        return None


SLACK = 0.15
"""Seconds past the granted time: after the shim's fence, within the protocol's ``kill``."""
START_AGAIN = 0.1
"""Seconds from its end to its next start."""

_COMMAND = struct.Struct("=cq")
_HOLD, _RELEASE, _SPARE, _NO_LONGER = b"h", b"r", b"s", b"n"
_KILLED = struct.Struct("=q")
MOST_HELD = 8192
"""Process groups that a shim guards at the most: the workers of some roles, a thousand each, and a hook."""
SWEEP_EVERY = (0.002, 0.1)
"""Seconds between two looks for what has left the groups: at first, and at most (something does not die)."""
EMPTY_LOOKS = 4
"""Looks in a row that find nothing until there is none: a process whose parent dies moves to another one, and a look
that has read the one before and the other after misses it."""


class Watchdog:
    """The shim's side. Every call returns at once; none waits for the process, which knows from its fork on all that
    was to know by then. ``grant``: until when what it holds may run; None: no time at all."""

    def __init__(self, grant: GrantReader | None) -> None:
        self.pid = 0
        self._grant = grant
        self._link: socket.socket | None = None
        self._held: dict[int, int] = {}
        self._killed: set[int] = set()

    def start(self, loop: Loop, children: ShimChildren) -> None:
        """Fork it, and again whenever it ends. Call before any worker starts. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def body() -> None:
            watch(theirs, self._grant, self._held, set(children.expected()))

        with contextlib.closing(theirs):
            try:
                self.pid = start_function(body, 2, 2, "the watchdog", preferred=True)
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._link = ours

        def start_again(first: bool = True) -> None:
            try:
                self.start(loop, children)
            except OSError as error:  # a full process table, say; the shim's own fence holds meanwhile
                if first:
                    print(f"no watchdog for now: {error.strerror}; tried until there is", file=sys.stderr, flush=True)
                loop.after(START_AGAIN, lambda: start_again(first=False))

        def ended() -> None:
            self._collect()  # before anything is sent to it, which finds the link broken
            children.forget(self.pid)
            reap(self.pid)
            self._unlink()
            loop.after(START_AGAIN, start_again)

        children.expect(self.pid, ended)
        children.changed = self._child

    def hold(self, pid: int, pidfd: int) -> None:
        """Watch this process group, whose leader the pidfd names."""
        self._held[pid] = pidfd
        self._send(_HOLD, pid, pidfd=pidfd)

    def release(self, pid: int) -> bool:
        """Its leader has ended and is about to be reaped. Whether it was the watchdog that killed it."""
        self._held.pop(pid, None)
        self._collect()
        self._send(_RELEASE, pid)
        killed = pid in self._killed
        self._killed.discard(pid)
        return killed

    def _child(self, pid: int, expected: bool) -> None:
        """A child of the shim's own is spared, unless it is held."""
        self._send(_SPARE if expected else _NO_LONGER, pid)

    def _collect(self) -> None:
        """What it has killed: written before the kills, so that it is known before the deaths are."""
        while self._link is not None:
            try:
                data = self._link.recv(_KILLED.size * MOST_HELD)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                return
            self._killed.update(pid for (pid,) in _KILLED.iter_unpack(data))

    def _send(self, what: bytes, pid: int, pidfd: int = -1) -> None:
        """One that leaves some hundred orders unread, all that its link holds, is stopped itself and is replaced: the
        next one knows from its fork what they were about."""
        if self._link is None:
            return
        try:
            socket.send_fds(self._link, [_COMMAND.pack(what, pid)], [pidfd] if pidfd >= 0 else [])
        except OSError:
            self._collect()
            self._unlink()
            os.kill(self.pid, signal.SIGKILL)  # our own child, not reaped yet: its end starts the next

    def _unlink(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def watch(link: socket.socket, grant: GrantReader | None, held: dict[int, int], spared: set[int]) -> None:
    """The process itself: until the shim closes the link, or dies and this process with it. ``held``, ``spared``: what
    the shim held, and its own children, at the fork."""
    gc.disable()  # nothing here makes cycles, and a collection would copy the shim's pages
    _close_all_but(link.fileno(), -1 if grant is None else grant.fd, *held.values())
    spared.add(os.getpid())
    due = _due(grant) if held else None  # until what is held is killed; None: nothing is held, or that was done
    pause: float | None = None  # until the next look for what has left the groups; None: nothing to look for
    empty = 0  # looks in a row that found nothing
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    while True:
        wait = pause if due is None else max(0.0, due - boottime())
        if poll.poll(None if wait is None else wait * 1000):
            data, fds, _, _ = socket.recv_fds(link, 64, 1)
            if not data:
                return
            what, pid = _COMMAND.unpack(data)
            if what == _SPARE:
                spared.add(pid)
            elif what == _NO_LONGER:
                spared.discard(pid)
            else:
                if what == _HOLD:
                    held[pid] = fds[0]
                elif pid in held:
                    os.close(held.pop(pid))
                due, pause = _due(grant) if held else None, None  # the shim is at work again
        elif due is None:
            assert pause is not None
            empty = 0 if _sweep(held, spared) else empty + 1
            pause = min(pause * 2, SWEEP_EVERY[1]) if empty < EMPTY_LOOKS else None
        else:
            due = _due(grant)
            if boottime() >= due:
                _kill(link, held)
                due, pause, empty = None, SWEEP_EVERY[0], 0  # until the shim speaks again


def _due(grant: GrantReader | None) -> float:
    """When what is held has to be dead, as far as is granted by now."""
    return (grant.read().until if grant is not None else 0.0) + SLACK


def _kill(link: socket.socket, held: Mapping[int, int]) -> None:
    """What it kills is one message: a link has no room for one of each, and the shim reads nothing meanwhile."""
    alive = [pid for pid, pidfd in held.items() if not pidfd_ended(pidfd)]
    if alive:
        with contextlib.suppress(BlockingIOError):
            link.send(b"".join(map(_KILLED.pack, alive)), socket.MSG_DONTWAIT)
    for pid in alive:
        kill_group(pid, held[pid])


def _sweep(held: Mapping[int, int], spared: Container[int]) -> bool:
    """Kill what is below the shim and below what is held. Whether to look again: anything may be alive."""
    try:
        found = kill_below(os.getppid(), spared)
        for pid, pidfd in held.items():
            found += kill_below(pid)
            if not pidfd_ended(pidfd):
                kill_group(pid, pidfd)
                found.append(pid)
    except OSError:  # no descriptor to look with
        return True
    return bool(found)


def _close_all_but(*kept: int) -> None:
    """Pipes and sockets of the shim's that this fork inherited: their other ends must see the shim's own close."""
    keep = set(kept)
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)

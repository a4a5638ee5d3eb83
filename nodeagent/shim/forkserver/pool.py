"""The shim's side of the pre-forked workers: forked ahead by the fork server, one after the other, each with a socket
of its own on which it waits for work.

Standard library only. They run nothing of the job's but what it preloads, so they need no granted time; they die with
the fork server, or when their socket closes. Must never wait for one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodeagent.osutil.linux import pidfd_ended
from nodeagent.shim.loop import Delay, Loop
from nodeagent.shim.processes import watched

MOST = 16
"""Pre-forked workers at most: each holds some 10 MB of its own."""
REFILL_AFTER = 0.4
"""Seconds after a start until the next ones are forked: the first steps come first."""
PARK_BOUND = 30.0
"""Seconds until one that does not say it is pre-forked is killed."""
LOSSES = 3
"""When so many have died without a start in between, no more are forked until the next start."""
NO_MESSAGE = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""What the job's modules can write where the fork server answers, or a pre-forked worker, raises one of these."""


@dataclass(slots=True)
class Preforked:
    """One of them. ``private``: bytes of memory that it shares with nobody; None until it waits for work."""

    pid: int
    pidfd: int
    link: socket.socket
    bound: Delay
    private: int | None = None
    spoilt: bool = False

    def give(self, command: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Its work. One that died this very moment does not take it: its death is a worker's by now."""
        with contextlib.closing(self.link), contextlib.suppress(BrokenPipeError, ConnectionError):
            socket.send_fds(self.link, [json.dumps(command).encode()], fds)


class Pool:
    """``prefork`` has the fork server fork one onto this descriptor, deeply warmed or not; ``reap`` has it reap one."""

    def __init__(
        self,
        loop: Loop,
        prefork: Callable[[int, bool, Callable[[int, str], None]], None],
        reap: Callable[[int], None],
        changed: Callable[[], None],
    ) -> None:
        self._loop, self._prefork, self._reap, self._changed = loop, prefork, reap, changed
        self._children: list[Preforked] = []
        self._forking = False
        self._deep = True
        self._lost = 0
        self._refill: Delay | None = None
        self.size = 0
        """How many should wait."""
        self.notes: list[str] = []
        """What went wrong, for the person."""

    @property
    def waiting(self) -> list[Preforked]:
        """Those that wait for work."""
        return [child for child in self._children if child.private is not None]

    @property
    def filling(self) -> bool:
        """Some that should wait do not yet, and will: each of them within ``PARK_BOUND``, or they are given up."""
        return self._lost < LOSSES and len(self.waiting) < min(self.size, MOST)

    def fill(self) -> None:
        """Fork the next one, if any is wanted; each that is ready brings the next."""
        coming = self._forking or len(self.waiting) < len(self._children)
        if coming or self._refill is not None or not self.filling:
            return
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # no descriptor is free
            self._lose(f"no worker could be pre-forked: {error.strerror}")
            return
        ours.setblocking(False)
        self._forking = True
        with theirs:
            self._prefork(theirs.fileno(), self._deep, lambda pid, error: self._forked(ours, pid, error))

    def take(self) -> Preforked | None:
        """The one that has waited longest. It is the caller's now, who gives it work once it is guarded. A worker is
        being started, with or without it: the pool is filled again when the first steps are over."""
        self._lost = 0
        if self._refill is not None:
            self._refill.cancel()
        self._refill = self._loop.after(REFILL_AFTER, self._refill_now)
        for child in self.waiting:
            self._forget(child)
            if not pidfd_ended(child.pidfd):
                os.close(child.pidfd)
                return child
            self._bury(child)
        return None

    def clear(self) -> None:
        """The fork server is dead, and they with it: the shim reaps them."""
        if self._refill is not None:
            self._refill.cancel()
            self._refill = None
        self._forking = False
        for child in list(self._children):
            self._forget(child)
            child.link.close()
            os.close(child.pidfd)

    def _refill_now(self) -> None:
        self._refill = None
        self.fill()

    def _forked(self, link: socket.socket, pid: int, error: str) -> None:
        asked, self._forking = self._forking, False
        if not pid:
            link.close()
            if asked:
                self._lose(f"no worker could be pre-forked: {error}")
            return
        try:
            pidfd = watched(pid)
        except OSError as problem:
            link.close()
            self._reap(pid)
            self._lose(f"a pre-forked worker cannot be watched: {problem.strerror}")
            return
        bound = self._loop.after(PARK_BOUND, lambda: self._overdue(child))
        child = Preforked(pid, pidfd, link, bound)
        self._children.append(child)
        self._loop.watch(link.fileno(), lambda: self._readable(child))

    def _readable(self, child: Preforked) -> None:
        try:
            data = child.link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            why = "a pre-forked worker died while it warmed up" if child.private is None else "a pre-forked worker died"
            self._forget(child)
            self._bury(child)
            self._lose("" if child.spoilt else why)
            return
        try:
            waits = self._stated(child, json.loads(data))
        except NO_MESSAGE:  # what it warmed up with can write here
            self._note("a pre-forked worker sent what is no message: it was ended")
            child.spoilt = True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            return
        if waits:
            self._changed()
            self.fill()

    def _stated(self, child: Preforked, message: Mapping[str, Any]) -> bool:
        """Whether it waits for work now."""
        if message["note"]:
            self._note(f"warming up a pre-forked worker failed: {str(message['note'])[:500]}")
        if message["spoilt"]:
            child.spoilt, self._deep = True, False
            self._note(f"pre-forked workers wait without warming up: {str(message['spoilt'])[:500]}")
            return False
        child.private = int(message["private"])
        child.bound.cancel()
        return True

    def _overdue(self, child: Preforked) -> None:
        self._note(f"a pre-forked worker was not warm after {PARK_BOUND:.0f} s")
        child.spoilt = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def _lose(self, why: str) -> None:
        """One has died. The next one does less; too many are no use at all."""
        self._lost += 1
        self._deep = False
        if why:
            self._note(why)
        if self._lost == LOSSES:
            self._note("no workers are pre-forked until the next start")
        self._changed()
        self.fill()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _forget(self, child: Preforked) -> None:
        child.bound.cancel()
        self._loop.forget(child.link.fileno())
        self._children.remove(child)

    def _bury(self, child: Preforked) -> None:
        child.link.close()
        os.close(child.pidfd)
        self._reap(child.pid)

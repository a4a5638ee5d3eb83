"""Who this agent is: the node's life, the count of starts, and the lock that lets one agent at a time be it.

Lives in the run folder, which a reboot empties; a different boot id ends the life as well. A stand-in
(``standin.py``) holds the lock like any agent; the next start ends it before it takes the lock. Never speaks to the
store.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import select
import signal
import time
from pathlib import Path

from nodeagent.model.node import Incarnation
from nodeagent.osutil.ownfolder import NotOurFolderError, check, own
from nodeagent.workers.linux import write_atomic

STANDS_IN = "holds the place at least until"
"""In the lock file, behind the pid: this agent is there only until the next start, which may end it from then on."""
LINE = 78
"""Length of what the lock file says."""

LOOK_TIME = 0.1
"""Seconds; a stand-in that looks whether somebody waits holds that lock for far less."""
KILL_TIMEOUT = 5.0
"""Seconds until a stand-in that was killed is gone: it can only be a process that is stuck in the kernel."""


class IdentityError(Exception):
    """This agent cannot be the node; the text says why and what to do."""


class Identity:
    """The life file and its lock. Use ``take()`` once; the lock ends with the process."""

    def __init__(self, run_dir: Path, boot_id: str) -> None:
        self._file = run_dir / "life.json"
        self._lock_path = run_dir / "agent.lock"
        self._queue_path = run_dir / "next.lock"
        self._boot_id = boot_id
        self._lock: int | None = None
        self._queue: int | None = None

    def queue(self) -> None:
        """Be the next start, before the long part of it: then a stand-in waits for as long as that takes. Raises
        IdentityError when an agent runs that is no stand-in, or when another start waits for its end."""
        claim(self._file.parent, make=True)
        deadline = time.monotonic() + LOOK_TIME
        while (queue := _locked(self._queue_path)) is None:
            if time.monotonic() > deadline:
                raise IdentityError(f"another agent is just starting with {self._file.parent}; let it, or stop it")
            time.sleep(LOOK_TIME / 50)
        lock = _locked(self._lock_path)
        if lock is None and not self._stand_in():
            other = self._holder() or "unknown"
            os.close(queue)
            raise IdentityError(
                f"another agent (pid {other}) runs with {self._file.parent}; stop it, or give this one its own dirs.run"
            )
        self._queue, self._lock = queue, lock

    @property
    def stood_in_for(self) -> bool:
        """After ``queue()``: a stand-in is there, and looks after the workers until ``take()``."""
        if self._lock is None:
            self._lock = _locked(self._lock_path)
        return self._lock is None

    @property
    def awaited(self) -> bool:
        """For a stand-in: the next start is under way."""
        queue = _locked(self._queue_path)
        if queue is None:
            return True
        os.close(queue)
        return False

    def take(self) -> Incarnation:
        """Lock the run folder and count this start; a stand-in is killed first. Raises IdentityError when another agent
        runs there."""
        if self._queue is None:
            self.queue()
        self._read()  # a damaged file must not cost the workers their stand-in
        if self._lock is None:
            self._end_stand_in()
        assert self._lock is not None
        self._say(f"{os.getpid()}")
        self._leave_queue()
        last = self._read()
        now = Incarnation(life=secrets.token_hex(8), start=1) if last is None else _next(last)
        self._write(now)
        return now

    def hand_to(self, pid: int) -> None:
        """A stand-in has our lock as well, and has it alone when this process is gone: say so."""
        self._say(f"{pid} {STANDS_IN} 0")

    def hold_off(self, until: float) -> None:
        """For a stand-in: it is not to be ended before this time of CLOCK_BOOTTIME."""
        self._say(f"{os.getpid()} {STANDS_IN} {until}")

    @property
    def held_off(self) -> float:
        """After ``queue()``: the time before which the stand-in is not to be ended; one that hangs says no later
        one."""
        return _until(self._holder()) or 0.0

    def _say(self, text: str) -> None:
        assert self._lock is not None
        os.pwrite(self._lock, f"{text:<{LINE}}\n".encode(), 0)  # one write: nobody reads half of it

    def _holder(self) -> str:
        return self._lock_path.read_text(errors="replace").strip()

    def _stand_in(self) -> int | None:
        """The pid of the stand-in that holds the lock."""
        holder = self._holder()
        return None if _until(holder) is None else int(holder.partition(" ")[0])

    def _end_stand_in(self) -> None:
        pid = self._stand_in()
        if pid is not None and (handle := _opened(pid)) is not None:
            try:
                self._lock = _locked(self._lock_path)
                if self._lock is None:  # nobody else could have taken it: the holder is the one that was opened
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    ended = select.poll()  # not select(): the number may be a high one
                    ended.register(handle, select.POLLIN)
                    ended.poll(KILL_TIMEOUT * 1000)
            finally:
                os.close(handle)
        if self._lock is None:
            self._lock = _locked(self._lock_path)
        if self._lock is None:
            self._leave_queue()
            raise IdentityError(f"the agent before this one (pid {self._holder()}) does not end, even with SIGKILL")

    def _leave_queue(self) -> None:
        if self._queue is not None:
            os.close(self._queue)
            self._queue = None

    def renew(self) -> Incarnation:
        """A new life: the old one was declared lost, and can never run anything again."""
        now = Incarnation(life=secrets.token_hex(8), start=1)
        self._write(now)
        return now

    def release(self) -> None:
        """Give up the lock, keep the life."""
        self._leave_queue()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self) -> Incarnation | None:
        try:
            data = json.loads(self._file.read_text())
            if data["boot_id"] != self._boot_id:
                return None
            return Incarnation(life=str(data["life"]), start=int(data["start"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise IdentityError(
                f"{self._file} is damaged ({error}); if no worker of this node runs, remove it and start again"
            ) from error

    def _write(self, now: Incarnation) -> None:
        text = json.dumps({"life": now.life, "start": now.start, "boot_id": self._boot_id})
        write_atomic(self._file, text, durable=True)


def claim(path: Path, *, make: bool = False) -> None:
    """Believe in this folder only if it is this agent's own. Raises IdentityError."""
    try:
        if make or path.exists():
            own(path)
        else:
            check(path)
    except NotOurFolderError as error:
        raise IdentityError(str(error)) from error


def _locked(path: Path) -> int | None:
    """The file, open and locked until it is closed; None while somebody else has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _opened(pid: int) -> int | None:
    """A pidfd; None if there is no such process."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _until(holder: str) -> float | None:
    """Of a stand-in's line in the lock file: when it may be ended; None if it is another agent's."""
    found = re.fullmatch(rf"\d+ {STANDS_IN} (\d+(?:\.\d+)?)", holder)
    return float(found[1]) if found else None


def _next(last: Incarnation) -> Incarnation:
    return Incarnation(life=last.life, start=last.start + 1)

"""Who this agent is: the node's life, the count of starts, and the lock that lets one agent at a time be it.

Lives in the run folder, which a reboot empties; a different boot id ends the life as well. Never speaks to the store.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path

from nodeagent.model.node import Incarnation
from nodeagent.osutil.linux import write_atomic
from nodeagent.osutil.ownfolder import NotOurFolderError, check, own

LINE = 78
"""Length of what the lock file says."""


class IdentityError(Exception):
    """This agent cannot be the node; the text says why and what to do."""


class Identity:
    """The life file and its lock. Use ``take()`` once; the lock ends with the process."""

    incarnation: Incarnation
    """As taken or renewed last; there is none before ``take()``."""

    def __init__(self, run_dir: Path, boot_id: str) -> None:
        self._file = run_dir / "life.json"
        self._lock_path = run_dir / "agent.lock"
        self._boot_id = boot_id
        self._lock: int | None = None

    def take(self) -> Incarnation:
        """Lock the run folder and count this start. Raises IdentityError when another agent runs there."""
        claim(self._file.parent, make=True)
        self._lock = _locked(self._lock_path)
        if self._lock is None:
            other = self._lock_path.read_text(errors="replace").strip() or "unknown"
            raise IdentityError(
                f"another agent (pid {other}) runs with {self._file.parent}; stop it, or give this one its own dirs.run"
            )
        os.pwrite(self._lock, f"{os.getpid():<{LINE}}\n".encode(), 0)  # one write: nobody reads half of it
        last = self._read()
        self._write(Incarnation(life=secrets.token_hex(8), start=1) if last is None else _next(last))
        return self.incarnation

    def renew(self) -> Incarnation:
        """A new life: the old one was declared lost, and can never run anything again."""
        self._write(Incarnation(life=secrets.token_hex(8), start=1))
        return self.incarnation

    def release(self) -> None:
        """Give up the lock, keep the life."""
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
        self.incarnation = now


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


def _next(last: Incarnation) -> Incarnation:
    return Incarnation(life=last.life, start=last.start + 1)

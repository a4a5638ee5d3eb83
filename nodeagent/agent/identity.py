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


class IdentityError(Exception):
    """This agent cannot be the node; the text says why and what to do."""


class Identity:
    """The life file and its lock. Use ``take()`` once; the lock ends with the process."""

    def __init__(self, run_dir: Path, boot_id: str) -> None:
        self._file = run_dir / "life.json"
        self._lock_path = run_dir / "agent.lock"
        self._boot_id = boot_id
        self._lock: int | None = None

    def take(self) -> Incarnation:
        """Lock the run folder and count this start. Raises IdentityError when another agent runs there."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(fd, 64).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise IdentityError(
                f"another agent (pid {other}) runs with {self._file.parent}; stop it, or give this one its own dirs.run"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock = fd
        last = self._read()
        now = Incarnation(life=secrets.token_hex(8), start=1) if last is None else _next(last)
        self._write(now)
        return now

    def renew(self) -> Incarnation:
        """A new life: the old one was declared lost, and can never run anything again."""
        now = Incarnation(life=secrets.token_hex(8), start=1)
        self._write(now)
        return now

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
        temporary = self._file.with_suffix(".tmp")
        with temporary.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(self._file)


def _next(last: Incarnation) -> Incarnation:
    return Incarnation(life=last.life, start=last.start + 1)

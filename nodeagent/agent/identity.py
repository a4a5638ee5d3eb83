"""Who this agent is: the node's life, the count of starts, and the lock that lets one agent at a time be it.

Lives in the run folder, which a reboot empties; a different boot id ends the life as well. Never speaks to the store.

Also says whether the agent's folders are its own user's: in a folder that every user may write to (/tmp), another user
may have created the path first. Must never take over a folder of another user.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from pathlib import Path

from nodeagent.model.node import Incarnation
from nodeagent.osutil.linux import write_atomic

LINE = 78
"""Length of what the lock file says."""


class IdentityError(Exception):
    """This agent cannot be the node; the text says why and what to do."""


class LockHeldError(Exception):
    """Another agent is the node: it ends just now, or runs on, or hangs. The text says which and what to do."""


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
        """Lock the run folder and count this start. Raises LockHeldError while another agent runs there, and
        IdentityError."""
        claim(self._file.parent, make=True)
        self._lock = _locked(self._lock_path)
        if self._lock is None:
            other = self._lock_path.read_text(errors="replace").strip() or "unknown"
            raise LockHeldError(
                f"another agent (pid {other}) runs with {self._file.parent}: if it should be gone, kill it (kill -9); "
                "if it is another node's, give this one its own dirs.run"
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


class NotOurFolderError(Exception):
    """Another user could read or change files there; ``str()`` says what to do."""


def own(path: Path) -> None:
    """Make the folder if it is missing. Raises NotOurFolderError if another user owns it, or if its path leads through
    an entry that another user put into a folder that every user may write to; OSError if it cannot be made."""
    check(path)
    path.mkdir(parents=True, exist_ok=True)
    check(path)  # another user may have been faster
    _whose(path, path.stat(), {os.geteuid()})


def check(path: Path) -> None:
    """Checks that only this user or root made the existing part of the path. Raises NotOurFolderError."""
    here = Path(path.anchor)
    for name in path.parts[1:]:
        open_to_all = here.stat().st_mode & stat.S_IWOTH
        here = here / name
        try:
            if open_to_all:
                _whose(here, here.lstat(), {0, os.geteuid()})
            here.stat()
        except FileNotFoundError:
            return


def _whose(path: Path, found: os.stat_result, owners: set[int]) -> None:
    wrong = ""
    if found.st_uid not in owners:
        wrong = f"belongs to uid {found.st_uid}, not to {os.geteuid()}"
    elif stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        wrong = "may be written to by everybody"
    if wrong:
        raise NotOurFolderError(
            f"{path} {wrong}: what is in it could be anybody's. Remove it, or use a folder of your own (dirs.run, "
            f"dirs.state and dirs.logs in the agent's config; or set XDG_RUNTIME_DIR and HOME)"
        )

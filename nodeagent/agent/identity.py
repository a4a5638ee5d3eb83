"""Who this agent is: the node's name and life, the count of starts, and the lock that lets one agent at a time be it.

Lives in the run folder, which a reboot empties; a different boot id ends the life as well. A life is one node's: what
runs in it was given to that node, and never goes on as another. Never speaks to the store.

Also says whether the agent's folders are its own user's: in a folder that every user may write to (/tmp), another user
may have created the path first. Must never take over a folder of another user.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from nodeagent.model.base import NAME
from nodeagent.model.node import Incarnation
from nodeagent.osutil.linux import NotPlainError, hold_folder, open_plain, write_atomic
from nodeagent.spec.agentconfig import name_of_host

LINE = 78
"""Length of what the lock file says."""


class IdentityError(Exception):
    """This agent cannot be the node; the text says why and what to do."""


class LockHeldError(Exception):
    """Another agent is the node: it ends just now, or runs on, or hangs. The text says which and what to do."""


class IdentityNotSavedError(Exception):
    """Who this agent is cannot be saved just now: the run folder is full, say. The text says where and why."""


class _SavedLife(NamedTuple):
    """What the life file says."""

    node: str
    incarnation: Incarnation


class Identity:
    """The life file and its lock. Use ``take()`` once; the lock ends with the process."""

    node: str
    """Its name in the cluster; there is none before ``take()``, and no other one after it."""
    incarnation: Incarnation
    """As taken or renewed last; there is none before ``take()``."""

    def __init__(self, run_dir: Path, boot_id: str, configured: str | None, hostname: str) -> None:
        """``configured``: the node's name by the config. None: it names none; then the node keeps the name that its
        life began with, and a new life has that of the machine."""
        self._file = run_dir / "life.json"
        self._lock_path = run_dir / "agent.lock"
        self._boot_id = boot_id
        self._configured, self._hostname = configured, hostname
        self._lock: int | None = None
        self._held: int | None = None
        """The run folder: nobody removes what is old in it while an agent is there, however long it runs."""
        self.before = ""
        """The node that this life is, where the config names another one: nothing of it may go on. Empty otherwise."""

    def take(self) -> Incarnation:
        """Lock the run folder and count this start. Raises LockHeldError while another agent runs there,
        IdentityNotSavedError, which leaves it free for another try, CheckError if a node that is to be called as its
        machine cannot be, and IdentityError."""
        try:
            return self._take()
        except OSError as error:
            self.release()
            raise self._not_saved(error) from error

    def _take(self) -> Incarnation:
        claim(self._file.parent, make=True)
        self._lock = _locked(self._lock_path)
        if self._lock is None:
            other = self._lock_path.read_text(errors="replace").strip() or "unknown"
            raise LockHeldError(
                f"another agent (pid {other}) runs with {self._file.parent}: if it should be gone, kill it (kill -9); "
                "if it is another node's, give this one its own dirs.run"
            )
        os.pwrite(self._lock, f"{os.getpid():<{LINE}}\n".encode(), 0)  # one write: nobody reads half of it
        self._held = hold_folder(self._file.parent)
        last = self._read()
        if last is None:
            self.node = self._configured or name_of_host(self._hostname)
            self._write(Incarnation(life=secrets.token_hex(8), start=1))
        elif self._configured in (None, last.node):
            self.node = last.node
            self._write(Incarnation(life=last.incarnation.life, start=last.incarnation.start + 1))
        else:  # the life ends when nothing of it runs any more, and until then an agent of the old name may take it up
            self.node, self.before, self.incarnation = self._configured, last.node, last.incarnation
        return self.incarnation

    def renew(self) -> Incarnation:
        """A new life: the old one was declared lost, or was another node's. Only when nothing of it runs any more.
        Raises IdentityNotSavedError."""
        try:
            self._write(Incarnation(life=secrets.token_hex(8), start=1))
        except OSError as error:
            raise self._not_saved(error) from error
        self.before = ""
        return self.incarnation

    def release(self) -> None:
        """Give up the lock, keep the life."""
        for fd in (self._lock, self._held):
            if fd is not None:
                os.close(fd)
        self._lock = self._held = None

    def _not_saved(self, error: OSError) -> IdentityNotSavedError:
        folder = self._file.parent
        return IdentityNotSavedError(
            f"who this agent is cannot be saved in {self._file}: {error.strerror}; until it can be, no agent starts "
            f"here, and after without_agent what runs is stopped. Look at df -h {folder} and df -i {folder}"
        )

    def _read(self) -> _SavedLife | None:
        try:
            with open_plain(self._file) as file:
                data = json.loads(file.read())
            if data["boot_id"] != self._boot_id:
                return None
            if not re.fullmatch(NAME, data["node"]):
                raise ValueError("it names no node")
            return _SavedLife(data["node"], Incarnation(life=str(data["life"]), start=int(data["start"])))
        except FileNotFoundError:
            return None
        except (NotPlainError, ValueError, KeyError, TypeError) as error:
            raise IdentityError(
                f"{self._file} is damaged ({error}); if no worker of this node runs, remove it and start again"
            ) from error

    def _write(self, now: Incarnation) -> None:
        text = json.dumps({"node": self.node, "life": now.life, "start": now.start, "boot_id": self._boot_id})
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

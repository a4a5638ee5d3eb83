"""The cgroup of one pod, through which root ends all of it at once: what survived its shim, wherever it now is in
the process tree and whatever became of its environment.

Under systemd it is the unit's own; elsewhere root makes one, where cgroup v2 is mounted and may be written. It belongs
to root, so no process of the pod can leave it. Without one, the mark in the environment has to do (``linux.py``). Where
it is, is known before the shim starts, and so to a later agent that finds no shim. Must never touch a cgroup whose name
does not say that it is a pod's.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import signal
from pathlib import Path

from nodeagent.osutil.linux import is_running, short, stat_fields
from nodeagent.osutil.units import SLICE

log = logging.getLogger(__name__)

PREFIX = "nodeagent-pod-"
"""How the name of a pod's cgroup begins, as that of its unit does."""
MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""Where cgroup v2 may be mounted."""
OURS = "nodeagent-pods"
"""In which each agent has a folder for those that it makes."""
FIRST = Path("/proc/1/cgroup")
"""The kernel's word on where the first process is: the slices that systemd makes are beside it."""


class PodCgroup:
    """One of them; every call is harmless when it no longer exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, pid: int) -> PodCgroup | None:
        """That this process is in; None if it is in no pod's, or has ended. Raises OSError if there is no descriptor or
        memory to look."""
        try:
            path = _path_of(Path(f"/proc/{pid}/cgroup"))
        except OSError as error:
            if short(error):
                raise
            return None
        return cls(path) if path is not None and path.name.startswith(PREFIX) else None

    @classmethod
    def make(cls, path: Path, pid: int) -> PodCgroup | None:
        """With this process in it, which has no children yet. None where none can be made."""
        made = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "cgroup.procs").write_text(str(pid))
        except OSError as error:  # mounted for reading only, as in most containers, or the shim has ended
            if not isinstance(error, PermissionError | ProcessLookupError) and error.errno != errno.EROFS:
                log.warning("no cgroup %s: its pod's processes are found by their mark alone: %s", path.name, error)
            made.remove()
            return None
        return made

    @property
    def exists(self) -> bool:
        return self.path.is_dir()

    def kill(self) -> list[int]:
        """SIGKILL all of it; what was found alive. Call it until nothing is. It waits for no disk and no process: the
        kernel lists them and signals them without their memory. Raises OSError if there is no descriptor or memory for
        it."""
        found = [pid for pid in self.pids() if is_running(pid)]
        if found:
            singly = [pid for pid in found if (stat := stat_fields(pid)) and stat[0] == "Z"]
            try:
                (self.path / "cgroup.kill").write_text("1")  # goes to main threads: no other heeds one that has ended
            except OSError:  # before Linux 5.14, or in a sandbox that hides it
                singly = found
            for pid in singly:
                self._kill(pid)
        return found

    def remove(self) -> None:
        """Once nothing of it lives; systemd removes its own."""
        with contextlib.suppress(OSError):
            self.path.rmdir()
            if self.path.parents[1].name == OURS:
                self.path.parent.rmdir()

    def pids(self) -> list[int]:
        """All in it, those that end among them. Raises OSError if there is no descriptor or memory to look."""
        try:
            return [int(word) for word in (self.path / "cgroup.procs").read_text().split()]
        except OSError as error:
            if short(error):
                raise
            return []

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            fd = os.pidfd_open(pid)
            try:
                if pid in self.pids():  # the number may have been reused before the pidfd pinned it
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)


def cgroups_folder(run_dir: Path) -> Path | None:
    """Where the cgroups of this agent's pods are made; None where it makes none. Another agent, of another container,
    may have a run folder with the same path, and never has the same one. Raises OSError."""
    mount = _mount()
    if mount is None or os.geteuid() != 0:
        return None
    facts = run_dir.stat()
    name = hashlib.sha256(os.fsencode(f"{run_dir} {facts.st_dev} {facts.st_ino}")).hexdigest()[:16]
    return mount / OURS / name


def cgroup_of_pod(run_dir: Path, key: str) -> Path | None:
    """That of the pod with this run folder's name, which the agent itself makes; None where it makes none.
    Raises OSError."""
    folder = cgroups_folder(run_dir)
    return folder / f"{PREFIX}{key}" if folder is not None else None


def cgroup_of_unit(unit: str) -> Path | None:
    """That in which systemd starts this unit of a shim. Raises OSError."""
    first = _path_of(FIRST)
    if first is None:
        return None
    return (first.parent if first.name == "init.scope" else first) / SLICE / unit


def cgroups_left(run_dir: Path) -> dict[str, PodCgroup]:
    """Those that agents with this run folder have made, by the names of their pods' run folders. Raises OSError."""
    try:
        folder = cgroups_folder(run_dir)
        found = list(folder.iterdir()) if folder is not None else []
    except FileNotFoundError:
        return {}
    return {path.name.removeprefix(PREFIX): PodCgroup(path) for path in found if path.name.startswith(PREFIX)}


def _path_of(file: Path) -> Path | None:
    """Of the process of this file of /proc. Raises OSError."""
    mount, lines = _mount(), file.read_text().splitlines()
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    return mount / path if mount is not None and path is not None else None


def _mount() -> Path | None:
    return next((mount for mount in MOUNTS if (mount / "cgroup.procs").exists()), None)

"""The cgroup of one pod, through which root ends all of it at once: what survived its shim, wherever it now is in
the process tree and whatever became of its environment.

Under systemd it is the unit's own; elsewhere root makes one, where cgroup v2 is mounted and may be written. It belongs
to root, so no process of the pod can leave it. Without one, the mark in the environment has to do (``linux.py``). Must
never touch a cgroup whose name does not say that it is a pod's.
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

log = logging.getLogger(__name__)

PREFIX = "nodeagent-pod-"
"""How the name of a pod's cgroup begins, as that of its unit does."""
MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""Where cgroup v2 may be mounted."""


class PodCgroup:
    """One of them; every call is harmless when it no longer exists."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, pid: int) -> PodCgroup | None:
        """That this process is in; None if it is in no pod's, or has ended. Raises OSError if there is no descriptor or
        memory to look."""
        mount = _mount()
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError as error:
            if short(error):
                raise
            return None
        for line in lines:
            path = line.removeprefix("0::/")
            if mount is not None and path != line and Path(path).name.startswith(PREFIX):
                return cls(mount / path)
        return None

    @classmethod
    def make(cls, folder: Path, pid: int) -> PodCgroup | None:
        """One for the pod of this run folder, with this process in it, which has no children yet. None where none can
        be made."""
        mount = _mount()
        if mount is None or os.geteuid() != 0:
            return None
        name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        path = mount / "nodeagent-pods" / f"{PREFIX}{name}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "cgroup.procs").write_text(str(pid))
        except OSError as error:  # mounted for reading only, as in most containers, or the shim has ended
            if not isinstance(error, PermissionError | ProcessLookupError) and error.errno != errno.EROFS:
                log.warning("no cgroup for %s, whose processes are found by their mark alone: %s", folder, error)
            return None
        return cls(path)

    def kill(self) -> list[int]:
        """SIGKILL all of it; what was found alive. Call it until nothing is. It waits for no disk and no process: the
        kernel lists them and signals them without their memory. Raises OSError if there is no descriptor or memory for
        it."""
        found = [pid for pid in self._pids() if is_running(pid)]
        if found:
            singly = [pid for pid in found if (stat := stat_fields(pid)) and stat[0] == "Z"]
            try:
                (self._path / "cgroup.kill").write_text("1")  # goes to main threads: no other heeds one that has ended
            except OSError:  # before Linux 5.14, or in a sandbox that hides it
                singly = found
            for pid in singly:
                self._kill(pid)
        return found

    def remove(self) -> None:
        """Once nothing of it lives; systemd removes its own."""
        with contextlib.suppress(OSError):
            self._path.rmdir()

    def _pids(self) -> list[int]:
        try:
            return [int(word) for word in (self._path / "cgroup.procs").read_text().split()]
        except OSError as error:
            if short(error):
                raise
            return []

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            fd = os.pidfd_open(pid)
            try:
                if pid in self._pids():  # the number may have been reused before the pidfd pinned it
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)


def _mount() -> Path | None:
    return next((mount for mount in MOUNTS if (mount / "cgroup.procs").exists()), None)

"""Where a local cluster's files are stored. Owns paths and their length; never knows whether a process is alive.

::

    <runtime>/local/<name>/           files that end with the boot; short, since it holds sockets
        cluster.json  lock  control.sock  cluster.key  redis/
        n1/ n2/ ...                   each node's run folder, emptied by a power cut
    <data>/                           redis.log and the nodes' disks
        agent configs, n1/state n1/logs n1/agent.log ...  supervisor.log
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HOME_VARIABLE = "NODEAGENT_LOCAL"
"""Environment variable: a short folder for all local clusters, in place of the system's runtime and state folders."""
LONGEST_BASE = 42
"""The most bytes of the folder that holds the clusters' run folders: this leaves about 45 for an agent's sockets."""
DEFAULT = "default"
"""The name of a cluster that was given none."""
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,15}")
"""Pattern of a cluster's name: short, since it is part of every socket's path."""


class LocalError(Exception):
    """The local cluster cannot do what was requested. ``str()`` is a sentence for people."""

    code = 1
    """The tool's exit code."""

    def __init__(self, message: str, words: Iterable[str] = (), next_step: str = "") -> None:
        super().__init__(message)
        self.words = tuple(words)
        """The last lines of a process that the sentence is about; any text, but bounded."""
        self.next_step = next_step


class LocalRefusedError(LocalError):
    """The request is not possible in the present state."""

    code = 6


class UsageError(LocalError):
    """The command names no cluster where there are several, or one that cannot be."""

    code = 2


class NotFoundError(LocalError):
    """There is no such cluster or node."""

    code = 3


class LocalTimedOutError(LocalError):
    """The request was not done within its bound."""

    code = 4


@dataclass(frozen=True, slots=True)
class LocalFolders:
    """The folders of one user's local clusters."""

    run: Path
    data: Path

    @classmethod
    def of_user(cls) -> LocalFolders:
        """The current user's folders. Raises LocalError if no usable folder can be made."""
        uid = os.geteuid()
        if home := os.environ.get(HOME_VARIABLE):
            base = Path(home).absolute()
            return cls(_usable(base / "run"), base / "data")
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        private = Path(f"/tmp/nodeagent-{uid}/local")
        if uid == 0:
            data, wanted = Path("/var/lib/nodeagent/local"), Path("/run/nodeagent/local")
        else:
            state = os.environ.get("XDG_STATE_HOME", "")
            data = (Path(state) if state.startswith("/") else _home(uid) / ".local/state") / "nodeagent/local"
            wanted = Path(runtime) / "nodeagent/local" if runtime.startswith("/") else private
        if len(os.fsencode(wanted)) > LONGEST_BASE:
            wanted = private
        try:
            return cls(_usable(wanted), data)
        except LocalError:
            if wanted == private:
                raise
            return cls(_usable(private), data)

    def cluster(self, name: str) -> Path:
        """The run folder of the cluster with this name."""
        return self.run / name


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """One node's files."""

    run: Path
    config: Path
    state: Path
    logs: Path
    agent_log: Path

    @property
    def api_socket(self) -> Path:
        return self.run / "api.sock"


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """One cluster's files."""

    run: Path
    data: Path

    @property
    def info(self) -> Path:
        """The file that identifies the cluster (registry.py)."""
        return self.run / "cluster.json"

    @property
    def lock(self) -> Path:
        """Locked while its supervisor lives."""
        return self.run / "lock"

    @property
    def control(self) -> Path:
        return self.run / "control.sock"

    @property
    def key(self) -> Path:
        """The cluster's key, which all its agents share."""
        return self.run / "cluster.key"

    @property
    def redis(self) -> Path:
        return self.run / "redis"

    @property
    def supervisor_log(self) -> Path:
        return self.data / "supervisor.log"

    def node(self, name: str) -> NodeLayout:
        disk = self.data / name
        return NodeLayout(self.run / name, disk / "agent.yaml", disk / "state", disk / "logs", disk / "agent.log")


def folder_mode() -> int:
    """Mode of folders that hold no secret: root's may be entered by others, since its jobs may run as other users."""
    return 0o711 if os.geteuid() == 0 else 0o700


def make_folder(path: Path) -> None:
    """Make a folder that holds no secret, with this mode whatever the umask. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(folder_mode())


def temporary_data() -> Path:
    """A folder for the data of a cluster that lives as long as one command."""
    path = Path(tempfile.mkdtemp(prefix="nodeagent-local-"))
    make_folder(path)
    return path


def _home(uid: int) -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise LocalError(f"uid {uid} has no home folder: set HOME or {HOME_VARIABLE}") from None


def _usable(path: Path) -> Path:
    """The folder, made if missing. Raises LocalError if it is too long, cannot be made, or is not this user's own."""
    if len(os.fsencode(path)) > LONGEST_BASE:
        raise LocalError(
            f"{path} is too long to hold sockets (at most {LONGEST_BASE} bytes): "
            f"set {HOME_VARIABLE} to a short folder such as /tmp/na"
        )
    try:
        path.mkdir(mode=folder_mode(), parents=True, exist_ok=True)
        owners = [(p, p.lstat()) for p in (path, path.parent)]
    except OSError as error:
        raise LocalError(
            f"cannot make {path} ({error.strerror}): set {HOME_VARIABLE} to a short folder that you can write"
        ) from error
    for place, found in owners[:1] if path.parent == Path("/tmp") else owners:
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise LocalError(
                f"{place} is not a folder of yours that only you can write (another user made it): "
                f"remove it, or set {HOME_VARIABLE} to a short folder of your own"
            )
    return path

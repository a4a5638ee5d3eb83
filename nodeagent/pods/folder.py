"""Where a pod keeps its files, what the host writes there for its shim, and what it believes of a pod.

``<run>/pods/<key>/``: pod.json, shim.json, the socket ``s`` (gone with the pod). ``<state>/pods/<uid>/``: the highest
promise, the newest start. ``<logs>/<job>-<uid8>/``: output. Each pod's own folders belong to the job's user, who may
put anything there; the folders above them to the agent. ``<run>/shims/<key>.json``, the agent's alone, says what pod it
is. ``<run>/grants/<key>`` says how long it may run (``lease/grants.py``), ``<run>/pods/.answers/<key>`` what its shim
answers.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nodeagent.lease.grants import grant_key
from nodeagent.model.jobspec import JobSpec, Role
from nodeagent.osutil.linux import open_plain, short, write_atomic
from nodeagent.osutil.untrusted import NotSeenError, UntrustedError, UntrustedFolder

log = logging.getLogger(__name__)

LEFTOVER = ".left-"
"""How the names of run folders begin that are only to be removed."""


@dataclass(frozen=True, slots=True)
class PodRecord:
    """What the agent that started a shim knew of its pod; the next agent believes this, and nothing that lies in the
    user's folder."""

    uid: str
    owner: int
    """The uid of the job's user."""
    mark: str
    logs: Path
    cgroup: Path | None = None
    """In which all of it is, where one could be made."""
    devices: tuple[str, ...] = ()
    """That its workers were given last."""
    stuck: bool = False
    """Something of it did not end, even with SIGKILL."""
    asked: int = 0
    """The most workers, forked ahead too, or ports of which its shim was to tell at once."""


class PodRecords:
    """The records of this node's pods, in a folder that only the agent's user can look into."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "shims"

    def write(self, record: PodRecord) -> None:
        """Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._file(record.uid), json.dumps(asdict(record), default=os.fspath), durable=False)

    def forget(self, uid: str) -> None:
        self._file(uid).unlink(missing_ok=True)

    def all(self) -> dict[str, PodRecord]:
        """Records by the name of their run folder. Raises OSError if there is no descriptor or memory to read one."""
        found = {}
        for file in sorted(self._folder.glob("*.json")):
            try:
                with open_plain(file) as opened:
                    value = json.loads(opened.read())
                cgroup = Path(value["cgroup"]) if value["cgroup"] else None
                found[file.stem] = PodRecord(
                    value["uid"], value["owner"], value["mark"], Path(value["logs"]), cgroup,
                    tuple(value["devices"]), value["stuck"], value["asked"],
                )  # fmt: skip
            except (OSError, ValueError, KeyError, TypeError) as error:
                if isinstance(error, OSError) and short(error):
                    raise  # what runs there would be taken for nothing
                log.warning("no pod in %s: %s", file, error)
        return found

    def _file(self, uid: str) -> Path:
        return self._folder / f"{folder_name(uid)}.json"


def pods_folder(run_dir: Path) -> Path:
    return run_dir / "pods"


def run_folder(run_dir: Path, uid: str) -> Path:
    """Short, since it holds a socket."""
    return pods_folder(run_dir) / folder_name(uid)


def folder_name(uid: str) -> str:
    """Of a pod's run folder."""
    return grant_key(uid)


def state_folder(state_dir: Path, uid: str) -> Path:
    return state_dir / "pods" / uid


def log_folder(logs_dir: Path, job: str, uid: str) -> Path:
    """The folder whose files ``logs.read_logs`` reads."""
    return logs_dir / f"{job}-{uid[:8]}"


def promised_number(state_dir: Path, uid: str) -> int:
    """The highest generation that this pod ever promised; 0 if there is none to be read. The folder is the job's
    user's: what lies there may be anything. Raises NotSeenError."""
    try:
        with UntrustedFolder(state_dir, "pods", uid) as folder:
            number = folder.read_object("highest.json").get("number")
    except NotSeenError:
        raise
    except UntrustedError:
        return 0
    return number if type(number) is int and 0 < number < 1 << 53 else 0


def own_folder(path: Path, uid: int, gid: int) -> None:
    """Make the folder, private to the user, or find it as his; folders above it that are missing can be passed through
    by everybody. Raises OSError, and UntrustedError where it is another's."""
    _make_above(path)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        with UntrustedFolder(path.parent, path.name) as found:
            if found.owner not in (uid, os.geteuid()):
                raise UntrustedError(f"{path} belongs to uid {found.owner}, not to {uid}: remove it") from None
            if os.geteuid() == 0 and found.owner != uid:  # an agent died between the two
                os.fchown(found.fd, uid, gid)
        return
    if os.geteuid() == 0:
        os.chown(path, uid, gid, follow_symlinks=False)


def make_run_folder(path: Path, content: dict[str, Any], uid: int, gid: int) -> Path | None:
    """A new folder for a shim, with its pod.json, that becomes the user's when all of ours is in it: so nothing of his
    can be in our way. What had its name is put away; its new name is returned. Raises OSError."""
    _make_above(path)
    before = put_away(path)
    path.mkdir(mode=0o700)
    write_atomic(path / "pod.json", json.dumps(content), durable=False)
    if os.geteuid() == 0:
        os.chown(path / "pod.json", uid, gid, follow_symlinks=False)
        os.chown(path, uid, gid, follow_symlinks=False)
    return before


def put_away(path: Path) -> Path | None:
    """Give a run folder a name under which it is only to be removed; None if there is none. Raises OSError."""
    away = path.with_name(f"{LEFTOVER}{secrets.token_hex(6)}")
    try:
        path.rename(away)
    except FileNotFoundError:
        return None
    return away


def _make_above(path: Path) -> None:
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)  # another pod's look may be faster
        path.parent.chmod(0o755)  # whatever the umask


def pod_file(
    uid: str,
    spec: JobSpec,
    own_user: bool,
    state: Path,
    logs: Path,
    grant: Path,
    address: str,
    ports: tuple[int, int],
    log_max_bytes: int,
    log_keep: int,
) -> dict[str, Any]:
    """The content of pod.json."""
    longest, sooner = spec.graces()
    return {
        "uid": uid,
        "job": spec.name,
        "mark": f"{uid}-{secrets.token_hex(8)}",
        "command": spec.role.command,
        "roles": {role.name: _role(role) for role in spec.roles} if spec.several else {},
        "ordered": spec.ordered,
        "working_dir": spec.working_dir,
        "environ": spec.submitter.environ,
        "own_user": own_user,
        "env": spec.env,
        "env_file": spec.env_file,
        "container": spec.container.model_dump() if spec.container is not None else None,
        "modules": spec.modules,
        "limits": spec.limits,
        "preload": spec.preload,
        "guessed": spec.guessed,
        "fork_server": spec.fork_server,
        "preforked": workers if isinstance(workers := spec.role.workers_per_node, int) else 0,
        "checkpoint_dir": spec.checkpoint_dir,
        "hooks": spec.hooks.model_dump(),
        "grace": longest,
        "sooner": sooner,
        "restarts": spec.restarts.model_dump(),
        "hang": spec.watched_by.model_dump() if spec.watched_by is not None else None,
        "state": str(state),
        "logs": str(logs),
        "grant": str(grant),
        "log_max_bytes": log_max_bytes,
        "log_keep": log_keep,
        "address": address,
        "ports": ports,
        "agent_uid": os.geteuid(),
    }


def _role(role: Role) -> dict[str, Any]:
    """What the shim has to know of one of several roles."""
    ready = role.ready.model_dump() if role.ready is not None else None
    return {"command": role.command, "after": role.after, "ready": ready, "alone": role.alone}

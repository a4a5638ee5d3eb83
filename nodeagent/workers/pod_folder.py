"""Where a pod keeps its files, and what the host writes there for its shim.

``<run>/pods/<key>/``: pod.json, shim.json, the socket ``s`` (gone with the pod). ``<state>/pods/<uid>/``: the highest
promise, exit records (stay). ``<logs>/<job>-<uid8>/``: output (stays). Each pod's own folders belong to the job's
user, the folders above them to the agent.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from nodeagent.model.jobspec import JobSpec
from nodeagent.workers.linux import write_atomic


def pods_folder(run_dir: Path) -> Path:
    return run_dir / "pods"


def run_folder(run_dir: Path, uid: str) -> Path:
    """Short, since it holds a socket."""
    return pods_folder(run_dir) / hashlib.sha256(uid.encode()).hexdigest()[:10]


def state_folder(state_dir: Path, uid: str) -> Path:
    return state_dir / "pods" / uid


def log_folder(logs_dir: Path, job: str, uid: str) -> Path:
    """The folder whose files ``logs.read_logs`` reads."""
    return logs_dir / f"{job}-{uid[:8]}"


def promised_number(folder: Path) -> int:
    """The highest generation that the pod of this state folder ever promised; 0 if there is none to be read. The folder
    is the job's user's: what lies there may be anything."""
    try:
        fd = os.open(folder / "highest.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        number = json.loads(os.read(fd, 4096))["number"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    finally:
        os.close(fd)
    return number if isinstance(number, int) and number > 0 else 0


def own_folder(path: Path, uid: int, gid: int) -> None:
    """Make the folder, private to the user; folders above it that are missing can be passed through by everybody."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        path.parent.chmod(0o755)  # whatever the umask
    path.mkdir(exist_ok=True, mode=0o700)
    if os.geteuid() == 0:
        os.chown(path, uid, gid, follow_symlinks=False)


def pod_file(
    uid: str,
    spec: JobSpec,
    own_user: bool,
    state: Path,
    logs: Path,
    address: str,
    ports: tuple[int, int],
    log_max_bytes: int,
    log_keep: int,
) -> dict[str, Any]:
    """The content of pod.json."""
    return {
        "uid": uid,
        "job": spec.name,
        "mark": f"{uid}-{secrets.token_hex(8)}",
        "command": spec.role.command,
        "working_dir": spec.working_dir,
        "environ": spec.submitter.environ,
        "own_user": own_user,
        "env": spec.env,
        "env_file": spec.env_file,
        "limits": spec.limits,
        "preload": spec.preload,
        "standby": spec.standby,
        "parked": workers if isinstance(workers := spec.role.workers_per_node, int) else 0,
        "checkpoint_dir": spec.checkpoint_dir,
        "hooks": spec.hooks.model_dump(),
        "hang": spec.hang.model_dump() if spec.hang is not None else None,
        "state": str(state),
        "logs": str(logs),
        "log_max_bytes": log_max_bytes,
        "log_keep": log_keep,
        "address": address,
        "ports": ports,
        "agent_uid": os.geteuid(),
    }


def write_pod_file(folder: Path, content: dict[str, Any], uid: int, gid: int) -> None:
    path = folder / "pod.json"
    write_atomic(path, json.dumps(content), durable=False)
    if os.geteuid() == 0:
        os.chown(path, uid, gid, follow_symlinks=False)

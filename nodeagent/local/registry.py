"""The local clusters of this user. Owns each cluster's ``cluster.json`` and lock, its ports, and its agents' config
files: the differences between a local node and a real one; everything else keeps the agent's defaults. A cluster lives
exactly as long as its supervisor holds the lock, whatever the file says. Must never end a living cluster.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nodeagent.local import power
from nodeagent.local.layout import (
    DEFAULT,
    ClusterLayout,
    LocalError,
    LocalFolders,
    LocalRefusedError,
    LocalTimedOutError,
    NotFoundError,
    UsageError,
    make_folder,
)
from nodeagent.osutil.linux import listens
from nodeagent.pods.cgroup import cgroups_left

_SETTLING = ".new-"
"""Prefix of a run folder that is not a cluster yet."""
TURN = 15.0
"""Seconds; longer than the longest sweep (a power cut's bound)."""
ANSWERS = 0.5
"""Seconds in which an agent takes a connection."""
ADDRESS = "127.0.0.1"
SLOTS = 64
"""Workers without a GPU that a local node runs at once."""
COOLDOWN = "5s"
"""Shorter than on a real cluster, since a person is watching."""
PORTS_EACH = 200
FIRST_PORT = 20000


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """One local cluster, as described by its ``cluster.json``."""

    name: str
    uid: str
    """Unique among all clusters; part of the power mark."""
    run: Path
    data: Path
    created: float
    temporary: bool
    """The cluster lives as long as one command."""
    ports: tuple[int, int]
    """Its rendezvous ports, FROM and TO."""

    @property
    def layout(self) -> ClusterLayout:
        return ClusterLayout(self.run, self.data)

    def nodes(self) -> list[str]:
        """Names of its nodes, in the order they were added."""
        names = [path.parent.name for path in self.data.glob("n*/agent.yaml")]
        return sorted(names, key=lambda name: (len(name), name))


def find() -> dict[str, list[Path]]:
    """The api sockets of all live nodes of this user's running clusters, by the cluster's name: clusters that ``up``
    started before those of a single command, newer before older, n1 before n2; a cluster without a live node is left
    out. Removes clusters whose supervisor died. Raises LocalError if that cannot be done."""
    try:
        folders = LocalFolders.of_user()
    except LocalError:  # no folder for local clusters, so there are none; ``up`` reports the error
        return {}
    found = {}
    for cluster in clusters(folders):
        sockets = [cluster.layout.node(node).api_socket for node in cluster.nodes()]
        if live := [path for path in sockets if listens(path, ANSWERS)]:
            found[cluster.name] = live
    return found


def clusters(folders: LocalFolders) -> list[LocalCluster]:
    """The running clusters, in the order of ``find``. Raises LocalError, also for one that cannot be understood."""
    sweep(folders)
    found = [c for path in folders.run.iterdir() if not path.name.startswith(".") and (c := load(path))]
    return sorted(found, key=lambda c: (c.temporary, -c.created))


def cluster(folders: LocalFolders, name: str | None = None) -> LocalCluster:
    """The running cluster with this name; without a name, the only one, if it stays until ``down``. Raises
    NotFoundError, UsageError."""
    running = clusters(folders)
    names = ", ".join(one.name for one in running)
    for found in running:
        if found.name == name:
            return found
    if name and running:
        raise NotFoundError(f"no local cluster {name!r} is running; there is {names}")
    if len(running) > 1:
        raise UsageError(f"{len(running)} local clusters run here ({names}); say which one is meant: --name NAME")
    if running and running[0].temporary:
        raise NotFoundError(
            f"there is only {names}, of a `run --local`, which ends with that command; if it is meant: --name {names}"
        )
    if running:
        return running[0]
    raise NotFoundError("no local cluster is running; start one: nodeagentctl local up --nodes 3")


def create(
    folders: LocalFolders, name: str, data: Path, ports: tuple[int, int], *, temporary: bool
) -> tuple[LocalCluster, int]:
    """Register a cluster. Returns it with the file descriptor that holds its lock: the supervisor inherits it, and
    the cluster lives until the last copy is closed. Raises RefusedError if the name is taken."""
    with _turn(folders):
        place = folders.cluster(name)
        if place.exists():
            of = "" if name == DEFAULT else f" --name {name}"
            raise LocalRefusedError(
                f"the local cluster {name!r} is running already",
                next_step=f"add a node to it: nodeagentctl local add{of}; or end it: nodeagentctl local down{of}; "
                "or choose another --name",
            )
        made = LocalCluster(name, uuid.uuid4().hex[:12], place, data, time.time(), temporary, ports)
        draft = Path(tempfile.mkdtemp(prefix=_SETTLING, dir=folders.run))
        make_folder(draft)
        (draft / "cluster.json").write_text(json.dumps(asdict(made), default=str) + "\n")
        lock = os.open(draft / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(place)
        return made, lock


def sweep(folders: LocalFolders) -> None:
    """Remove what clusters without a supervisor left behind: processes, run folders, temporary data."""
    with _turn(folders):
        for path in folders.run.iterdir():
            if path.name.startswith(_SETTLING):  # its creator died within `create`; no other process creates one now
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir() and not _held(path / "lock"):
                try:
                    dead = load(path)
                except LocalError:  # nothing says what it was
                    dead = None
                if dead is not None:
                    remove(dead, keep_data=not dead.temporary)
                else:
                    _remove_runs(path)


def remove(cluster: LocalCluster, *, keep_data: bool) -> None:
    """End every process of a cluster whose supervisor is gone or is the caller, and remove its folders."""
    power.cut(cluster.uid)
    if not keep_data:
        shutil.rmtree(cluster.data, ignore_errors=True)
    _remove_runs(cluster.run)


def _remove_runs(run: Path) -> None:
    for node in run.glob("n*"):
        remove_run(node)
    shutil.rmtree(run, ignore_errors=True)


def remove_run(node: Path) -> None:
    """Remove the run folder of a node of which nothing lives, and the cgroups of its pods: no later agent finds them
    without this very folder."""
    with suppress(OSError):  # no descriptor to look: an empty cgroup stays
        for left in cgroups_left(node).values():
            left.remove()
    shutil.rmtree(node, ignore_errors=True)


def alive(cluster: LocalCluster) -> bool:
    """Returns whether the cluster's supervisor lives."""
    return _held(cluster.layout.lock)


def load(path: Path) -> LocalCluster | None:
    """The cluster with this run folder; None if the folder holds none. Raises LocalError, which names the file and its
    key, if what it holds was not written by this version."""
    file = path / "cluster.json"
    try:
        found = json.loads(file.read_bytes())
    except OSError:  # removed in the meantime
        return None
    except (ValueError, RecursionError) as error:
        raise _not_ours(file, f"is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise _not_ours(file, "is not a JSON object")
    for key, (kind, fits) in KINDS.items():
        if key not in found:
            raise _not_ours(file, f"has no {key!r}")
        if not fits(found[key]):
            raise _not_ours(file, f"{key!r} is {json.dumps(found[key])[:60]}, which is not {kind}")
    known = {key: found[key] for key in KINDS}
    return LocalCluster(**known | {"run": path, "data": Path(known["data"]), "ports": tuple(known["ports"])})


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("text", _text),
    "uid": ("text", _text),
    "data": ("an absolute path", lambda value: _text(value) and value.startswith("/")),
    "created": ("a time in seconds", lambda value: type(value) in (int, float) and math.isfinite(value)),
    "temporary": ("true or false", lambda value: isinstance(value, bool)),
    "ports": (
        "two numbers", lambda value: isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)
    ),
}  # fmt: skip
"""Keys of ``cluster.json``, with what each has to be: the file decides which folder is removed."""


def _not_ours(file: Path, what: str) -> LocalError:
    lock = file.with_name("lock")
    return LocalError(
        f"{file}: {what}: was it changed, or written by another version of nodeagent?",
        next_step=f"end its supervisor (fuser {lock} shows the pid), then: nodeagentctl local status",
    )


def node_names(count: int, first: int = 1) -> list[str]:
    return [f"n{number}" for number in range(first, first + count)]


def write_config(cluster: LocalCluster, node: str, *, gpus: Sequence[str], slots: int) -> Path:
    """Write one node's config file and return its path."""
    import yaml  # the tool imports this module for other commands, too, and has to start fast

    layout = cluster.layout.node(node)
    config = {
        "cluster": cluster.name,
        "cluster_key": str(cluster.layout.key),
        "node": {"id": node, "address": ADDRESS, "cpu_slots": slots, "gpus": list(gpus) if gpus else "none"},
        "redis": {"url": f"unix://{cluster.layout.redis / 'redis.sock'}"},
        "api": {"listen": "off"},  # its agents reach each other through their sockets
        "ports": {"api": 0, "rendezvous": "{}-{}".format(*cluster.ports)},
        "dirs": {"run": str(layout.run), "state": str(layout.state), "logs": str(layout.logs)},
        "timing": {"cooldown": COOLDOWN},
        "jobs": {"allow_root": os.geteuid() == 0},
    }
    if not gpus:  # without GPUs there is little to watch, and every node would watch the same machine
        config["health"] = "off"
    make_folder(layout.config.parent)
    layout.config.write_text("# written by nodeagentctl local\n" + yaml.safe_dump(config, sort_keys=False))
    return layout.config


def choose_ports(taken: Collection[tuple[int, int]]) -> tuple[int, int]:
    """A range of rendezvous ports below those that the kernel uses for outgoing connections. It is apart from the
    ranges in ``taken`` while there is room."""
    lowest = _first_ephemeral()
    starts = range(FIRST_PORT if lowest > FIRST_PORT + PORTS_EACH else 1024, lowest - PORTS_EACH, PORTS_EACH)
    free = [s for s in starts if not any(a <= s + PORTS_EACH - 1 and s <= b for a, b in taken)]
    start = random.choice(free or list(starts) or [61000])
    return start, start + PORTS_EACH - 1


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32768


def _held(lock: Path) -> bool:
    """Returns whether a supervisor holds the lock. Uses a shared lock, so two callers do not see each other's."""
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(handle)


@contextmanager
def _turn(folders: LocalFolders) -> Iterator[None]:
    """One process at a time creates or sweeps. Raises TimedOutError if another process does not end its turn."""
    handle = os.open(folders.run / ".turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + TURN
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LocalTimedOutError(
                        f"another command has been cleaning up in {folders.run} for {TURN:g} s: "
                        f"`fuser -v {folders.run}/.turn` names it"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)

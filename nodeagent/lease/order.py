"""What the agent has the lease process do: whose lease it renews, where, and how long it does so on its own.

``<run>/lease/order.json`` is the agent's, private, and replaced as a whole; so are its scripts, in files beside it.
Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nodeagent.osutil.linux import open_plain, write_atomic


class Tls(NamedTuple):
    """Files, as in the config's ``redis.tls``; empty: none, or the system's own."""

    ca: str
    cert: str
    key: str
    server: str
    """The name that the server's certificate must have."""


class Server(NamedTuple):
    """The store's server, as the agent reached it last."""

    path: str
    """Of a unix socket; empty: host and port."""
    host: str
    """A numeric address: to look up a name may take longer than the fence."""
    port: int
    greeting: tuple[tuple[str, ...], ...]
    """Commands that each connection begins with: who we are, and which database."""
    tls: Tls | None


class StoreScript(NamedTuple):
    """A script, as the agent knows it."""

    sha: str
    file: Path
    """With its source. It is read only for a server that does not know the script: the sources are longer than all
    else that a lease process has to hold."""


class LeasePort(NamedTuple):
    """Where this node is asked by others (``peers.py``)."""

    address: str
    """As others reach this node."""
    ports: tuple[int, int]
    """The first one that is free is taken; both inside."""
    secret: str
    """Of the cluster, in hexadecimal."""


class LeaseOrder(NamedTuple):
    """One life of a node. Times are in seconds."""

    boot: str
    node: str
    life: str
    start: int
    """Of the agent that gave this order."""
    era: str
    """Of the store: what it lost or went back to is the agent's to settle, not for this process to renew."""
    cluster_uid: str
    """Of the store."""
    heartbeat: float
    lease: float
    fence: float
    kill: float
    promise: float
    timeout: float
    """How long a renewal may take."""
    failsafe: float
    """Without a renewal for so long, the failsafe members are asked for time."""
    failsafe_limit: float
    patience: float
    """How long healthy training goes on without the agent."""
    grace: float
    """How long the orderly stop after that may take."""
    prefix: str
    record_version: str
    server: Server
    renew: str
    leave: str
    let_go: str
    """Hashes of scripts (``script_of``)."""
    door: LeasePort

    @property
    def incarnation(self) -> tuple[str, str, int, str]:
        """Who gave it: node, life, start and era. Nothing that was asked for another one counts for this one."""
        return self.node, self.life, self.start, self.era


def order_file(folder: Path) -> Path:
    return folder / "order.json"


def script_of(folder: Path, sha: str) -> StoreScript:
    """Of an order in this folder. The file's name is the hash: no script of another version comes in its place."""
    return StoreScript(sha, folder / f"{sha}.lua")


def write_order(folder: Path, order: LeaseOrder, sources: Mapping[str, str]) -> None:
    """``sources``: of its scripts, by their hashes. They are there before the order is; those of the order before it,
    until it is. Raises OSError."""
    scripts = {script_of(folder, sha).file: source for sha, source in sources.items()}
    for file, source in scripts.items():
        write_atomic(file, source, durable=False)
    server = order.server
    plain = server._asdict() | {"tls": None if server.tls is None else server.tls._asdict()}
    data = order._asdict() | {"server": plain, "door": order.door._asdict()}
    write_atomic(order_file(folder), json.dumps(data), durable=False)
    _remove_scripts(folder, scripts)


def remove_order(folder: Path) -> None:
    """Raises OSError."""
    order_file(folder).unlink(missing_ok=True)
    _remove_scripts(folder, ())


def _remove_scripts(folder: Path, kept: Container[Path]) -> None:
    for file in folder.glob("*.lua"):
        if file not in kept:
            file.unlink(missing_ok=True)


def read_order(folder: Path, boot: str) -> LeaseOrder | None:
    """None if there is none, or if it is from before the last boot. Raises OSError, ValueError, KeyError and TypeError:
    then it is not an agent of this version that wrote it."""
    try:
        with open_plain(order_file(folder)) as file:
            data: dict[str, Any] = json.loads(file.read())
    except FileNotFoundError:
        return None
    if data["boot"] != boot:
        return None
    server = data.pop("server")
    tls = server.pop("tls")
    greeting = tuple(tuple(words) for words in server.pop("greeting"))
    place = Server(**server, greeting=greeting, tls=None if tls is None else Tls(**tls))
    door = data.pop("door")
    first, last = door.pop("ports")
    return LeaseOrder(**data, server=place, door=LeasePort(**door, ports=(first, last)))

"""What the agent has the lease process do: whose lease it renews, where, and how long it does so on its own.

``<run>/lease/order.json`` is the agent's, private, and replaced as a whole. Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from nodeagent.osutil.linux import write_atomic


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
    source: str


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
    renew: StoreScript
    leave: StoreScript
    let_go: StoreScript
    door: LeasePort

    @property
    def incarnation(self) -> tuple[str, str, int, str]:
        """Who gave it: node, life, start and era. Nothing that was asked for another one counts for this one."""
        return self.node, self.life, self.start, self.era


STEPS = ("renew", "leave", "let_go")
"""Fields of an order that are scripts."""


def order_file(folder: Path) -> Path:
    return folder / "order.json"


def write_order(folder: Path, order: LeaseOrder) -> None:
    """Raises OSError."""
    server = order.server
    plain = server._asdict() | {"tls": None if server.tls is None else server.tls._asdict()}
    steps = {name: getattr(order, name)._asdict() for name in STEPS}
    data = order._asdict() | {"server": plain, "door": order.door._asdict()} | steps
    write_atomic(order_file(folder), json.dumps(data), durable=False)


def read_order(folder: Path, boot: str) -> LeaseOrder | None:
    """None if there is none, or if it is from before the last boot. Raises OSError, ValueError, KeyError and TypeError:
    then it is not an agent of this version that wrote it."""
    try:
        data: dict[str, Any] = json.loads(order_file(folder).read_text())
    except FileNotFoundError:
        return None
    if data["boot"] != boot:
        return None
    server = data.pop("server")
    tls = server.pop("tls")
    greeting = tuple(tuple(words) for words in server.pop("greeting"))
    place = Server(**server, greeting=greeting, tls=None if tls is None else Tls(**tls))
    data |= {name: StoreScript(**data.pop(name)) for name in STEPS}
    door = data.pop("door")
    first, last = door.pop("ports")
    return LeaseOrder(**data, server=place, door=LeasePort(**door, ports=(first, last)))

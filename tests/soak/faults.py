"""The faults of a soak: real ones, each healed by itself when it returns, with what a seeded random has chosen.

All nodes are on one machine, so its network is cut for all of them at once: between workers, and between agents (Redis
listens on a unix socket). One node's cable, and an agent's clock, are cut and stepped elsewhere
(tests/e2e/test_partitions.py, test_clocks.py, tests/nodes).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodeagent.ctl.terminal import CtlError
from nodeagent.local import control
from tests.e2e.clocks import WallClock
from tests.e2e.support import Cluster, bounded

SHORT, LONG = (0.5, 1.5), (4.5, 8.0)
"""Seconds without an agent: within the lease of 3 s, and past it."""
AWAY = (1.0, 8.0)
"""Seconds without Redis, a disk with room, or a node's power."""
SKEW = 3600
"""Seconds by which the clock of Redis is put forth or back, at most."""
CUT = ("meta l4proto tcp", "meta l4proto udp", "meta l4proto { tcp, udp }")
"""What does not arrive: between workers, between agents, or all."""
_cuts = itertools.count(1)
"""Each cut has a table of its own: of two at the same time one ends first."""
FLOOD = 300
"""Requests of an API flood."""


@dataclass
class Place:
    """The cluster under test, the training in it, and the one random that chooses."""

    one: Cluster
    nodes: tuple[str, ...]
    small: bool
    """The cluster's folder is a small file system, which may be filled."""
    seed: int
    cables: bool = False
    """The cluster has a network namespace of its own, in which packets may be dropped."""
    clock: WallClock | None = None
    """That Redis has; None: the machine's."""
    training: str = ""
    elastic: bool = True
    report: Callable[[str], None] = print
    redis_pids: set[int] = field(default_factory=set)
    """Of every Redis that was seen."""
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def supervisor(self) -> dict[str, Any]:
        """What the local cluster's supervisor says: pids of Redis and agents, and which nodes are on."""
        (socket,) = self.one.home.glob("local/run/*/control.sock")
        return control.ask(socket, {"do": "status"})

    def agent(self, node: str) -> int | None:
        pid: int | None = next(n["agent_pid"] for n in self.supervisor()["nodes"] if n["name"] == node)
        return pid

    def redis(self) -> int | None:
        pid: int | None = self.supervisor()["redis"]["pid"]
        self.redis_pids |= {pid} if pid is not None else set()
        return pid

    def pids(self, what: str) -> list[int]:
        """Of the training: ``workers``, or its shims' and fork servers' (``shim_pid``, ``fork_server_pid``)."""
        with suppress(CtlError):  # nobody answers: then another fault is had in its place
            if what == "workers":
                return sorted(self.one.workers(self.training).values())
            return sorted(pod[what] for pod in self.one.job(self.training)["pods"] if pod[what])
        return []


Draw = dict[str, Any]
"""What was chosen before a fault begins, so that the same seed chooses the same whatever time it takes."""
Fault = Callable[[Place, Draw], bool]
"""Whether it hit anything: what it was meant for may just not be there."""


def signalled(pid: int | None, number: signal.Signals) -> bool:
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


@contextmanager
def frozen(pid: int | None) -> Iterator[bool]:
    """A process that does not run meanwhile; whether it was there."""
    try:
        yield signalled(pid, signal.SIGSTOP)
    finally:
        signalled(pid, signal.SIGCONT)


def one_of(pids: list[int], draw: Draw) -> int | None:
    return pids[int(draw["which"] * len(pids))] if pids else None


def kill_of_training(what: str) -> Fault:
    return lambda place, draw: signalled(one_of(place.pids(what), draw), signal.SIGKILL)


def worker_freeze(place: Place, draw: Draw) -> bool:
    with frozen(one_of(place.pids("workers"), draw)) as hit:
        time.sleep(draw["away"])
    return hit


def agent_kill(place: Place, draw: Draw) -> bool:
    return signalled(place.agent(draw["node"]), signal.SIGKILL)


def agent_freeze(place: Place, draw: Draw, seconds: str) -> bool:
    pid = place.agent(draw["node"])
    place.one.frozen.add(draw["node"])
    try:
        with frozen(pid) as hit:
            time.sleep(draw[seconds])
    finally:
        place.one.frozen.discard(draw["node"])
    return hit


def agent_freeze_short(place: Place, draw: Draw) -> bool:
    return agent_freeze(place, draw, "short")


def agent_freeze_long(place: Place, draw: Draw) -> bool:
    return agent_freeze(place, draw, "long")


def power_cut(place: Place, draw: Draw) -> bool:
    place.one.ctl("local", "kill", draw["node"])
    try:
        time.sleep(draw["away"])
    finally:
        place.one.ctl("local", "start", draw["node"])
    return True


def redis_freeze(place: Place, draw: Draw) -> bool:
    with frozen(place.redis()) as hit:
        time.sleep(draw["away"])
    return hit


def redis_kill(place: Place, draw: Draw) -> bool:
    return signalled(place.redis(), signal.SIGKILL)


def disk_full(place: Place, draw: Draw) -> bool:
    """Of Redis, of every agent's state and of all output; not of the checkpoints."""
    ballast = place.one.home / "local" / "ballast"
    try:
        with ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        time.sleep(draw["away"])
    finally:
        ballast.unlink(missing_ok=True)
    return True


def cable_cut(place: Place, draw: Draw) -> bool:
    """On a machine with one node each it would be the switch that is gone. Connections stand still and go on."""
    rule, table = CUT[int(draw["which"] * len(CUT))], f"soak{next(_cuts)}"
    chain = f"add table ip {table}; add chain ip {table} in {{ type filter hook input priority 0; }}"
    subprocess.run(["nft", f"{chain}; add rule ip {table} in {rule} drop"], check=True, capture_output=True)
    try:
        time.sleep(draw["away"])
    finally:
        subprocess.run(["nft", f"delete table ip {table}"], check=True, capture_output=True)
    return True


def clock_skew(place: Place, draw: Draw) -> bool:
    """Of Redis, and back again."""
    assert place.clock is not None
    try:
        place.clock.step(round((2 * draw["which"] - 1) * SKEW))
        time.sleep(draw["away"])
    finally:
        place.clock.step(0)
    return True


def api_flood(place: Place, draw: Draw) -> bool:
    """Requests one after the other, and readers of output that hang up in the middle."""
    with suppress(CtlError):
        for _ in range(FLOOD):
            place.one.ask("/v1/jobs")
    with Path(os.devnull).open("w") as nowhere:
        for _ in range(3):
            with bounded(place.one.start("logs", place.training, "-f", to=(nowhere, nowhere))):
                time.sleep(draw["short"])
    return True


def scale(place: Place, draw: Draw) -> bool:
    if not place.elastic:
        return False
    return place.one.ctl("scale", place.training, str(draw["size"]), "--no-wait", check=None).returncode == 0


def drain(place: Place, draw: Draw) -> bool:
    hit = place.one.ctl("drain", draw["node"], "--no-wait", check=None).returncode == 0
    time.sleep(draw["away"])
    place.one.until(
        lambda: place.one.ctl("uncordon", draw["node"], check=None).returncode == 0, 60, f"{draw['node']} is uncordoned"
    )
    return hit


FAULTS: dict[str, Fault] = {
    "worker kill": kill_of_training("workers"),
    "worker freeze": worker_freeze,
    "shim kill": kill_of_training("shim_pid"),
    "fork server kill": kill_of_training("fork_server_pid"),
    "agent kill": agent_kill,
    "agent freeze, short": agent_freeze_short,
    "agent freeze, long": agent_freeze_long,
    "power cut": power_cut,
    "redis freeze": redis_freeze,
    "redis kill": redis_kill,
    "disk full": disk_full,
    "cable cut": cable_cut,
    "clock skew": clock_skew,
    "api flood": api_flood,
    "scale": scale,
    "drain": drain,
}


def choose(place: Place) -> tuple[str, Draw]:
    """The next fault. Draws the same numbers whichever it is."""
    chance = place.chance
    able = {"disk full": place.small, "cable cut": place.cables, "clock skew": place.clock is not None}
    names = [name for name in FAULTS if able.get(name, True)]
    name = chance.choice(names)
    return name, {
        "which": chance.random(), "node": chance.choice(place.nodes), "size": chance.randint(1, len(place.nodes)),
        "short": chance.uniform(*SHORT), "long": chance.uniform(*LONG), "away": chance.uniform(*AWAY),
    }  # fmt: skip

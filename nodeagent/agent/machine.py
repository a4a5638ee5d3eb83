"""This machine: address, network interface, boot id, CPUs, and what an agent does for it beside its pods. Its GPUs are
found by ``hardware/discovery.py``.

Decides nothing about jobs.
"""

from __future__ import annotations

import ipaddress
import os
import queue
import socket
import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import psutil

from nodeagent.model.node import Gpu, NodeFacts, Readiness
from nodeagent.osutil.linux import boot_id
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.store.scripts import version

if TYPE_CHECKING:
    from nodeagent.agent.diagnosis import Diagnosis, Preflight
    from nodeagent.agent.health import NodeHealth
    from nodeagent.agent.published import Meter
    from nodeagent.agent.systemd import Notifier
    from nodeagent.model.facts import PodUsage
    from nodeagent.plan.cluster import Cluster
    from nodeagent.pods.base import PodStatus

RESOLVE_BOUND = 0.25
"""Seconds for the look-up of the host's own name: it is in a file, or near. Workers may wait for this start."""


def find_address(config: AgentConfig, environ: Mapping[str, str]) -> str:
    """The address that peers use: configured, POD_IP, the source address of the default route, or that of any
    interface but loopback."""
    if config.node.address:
        return config.node.address
    if environ.get("POD_IP"):
        return environ["POD_IP"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: chooses a route, sends nothing
            return str(probe.getsockname()[0])
        except OSError:  # no default route, as on a private network
            outward = (a for _, found in sorted(interface_addresses().items()) for a in found if not _is_loopback(a))
            return next(outward, "127.0.0.1")


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Each network interface's IPv4 addresses, then its global IPv6 ones."""
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        v4 = [a.address for a in addresses if a.family == socket.AF_INET]
        v6 = [a.address for a in addresses if a.family == socket.AF_INET6 and "%" not in a.address]
        found[name] = (*v4, *v6)
    return found


def gloo_interface(address: str, named: Collection[str], interfaces: Mapping[str, Collection[str]]) -> str | None:
    """The interface that gloo has to be given, None where it finds a usable one by itself.

    gloo listens on what the host's name resolves to (``named``), and on loopback if it resolves to nothing. Where that
    is loopback (Debian's 127.0.1.1 in /etc/hosts), no other machine reaches it: it then needs the interface that holds
    the node's ``address``.
    """
    if _is_loopback(address) or not all(map(_is_loopback, named)):
        return None
    return next((name for name, found in sorted(interfaces.items()) if address in found), None)


def resolve_hostname(name: str, bound: float = RESOLVE_BOUND) -> tuple[str, ...]:
    """What the host's name resolves to; nothing if it does not, or not within ``bound`` seconds."""
    answers: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found = []
        answers.put(tuple(dict.fromkeys(str(row[4][0]) for row in found)))

    threading.Thread(target=ask, name="hostname", daemon=True).start()  # a look-up cannot be cancelled
    try:
        return answers.get(timeout=bound)
    except queue.Empty:
        return ()


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def node_facts(config: AgentConfig, address: str, gpus: tuple[Gpu, ...], started: float, peer: str) -> NodeFacts:
    """Everything an agent tells about its machine."""
    slots, hostname = config.node.cpu_slots, socket.gethostname()
    return NodeFacts(
        address=address,
        hostname=hostname,
        boot_id=boot_id(),
        agent_pid=os.getpid(),
        agent_version=version(),
        started=started,
        cpu_slots=slots if slots is not None else os.cpu_count() or 1,
        gpus=gpus,
        labels=dict(config.node.labels),
        spot=config.node.spot,
        topology=config.topology,
        data_interface=config.node.data_interface,
        gloo_interface=gloo_interface(address, resolve_hostname(hostname), interface_addresses()),
        api_socket=str(config.dirs.run / "api.sock"),
        peer=peer,
    )


class OwnMachine:
    """What an agent does for its machine beside its pods: nothing, where nobody can be asked about it."""

    diagnosis: Diagnosis | None = None
    """Checks the hardware by work."""
    node_health: NodeHealth | None = None
    """Looks after the node's health."""

    def alive(self) -> None:
        """The agent's loop goes on."""

    def usage(self, _statuses: Mapping[str, PodStatus], _now: float) -> Mapping[str, PodUsage]:
        """What the pods use, by job uid. ``now`` is CLOCK_BOOTTIME."""
        return {}

    def checked(self, readiness: dict[str, Readiness], _cluster: Cluster) -> dict[str, Readiness]:
        """Readiness by job uid, as it is with the checks before a job's start in it."""
        return readiness


class AttendedMachine(OwnMachine):
    """The real one."""

    def __init__(
        self,
        notifier: Notifier,
        meter: Meter,
        diagnosis: Diagnosis,
        preflight: Preflight | None,
        node_health: NodeHealth | None,
    ) -> None:
        self._notifier, self._meter, self._preflight = notifier, meter, preflight
        self.diagnosis, self.node_health = diagnosis, node_health

    def alive(self) -> None:
        self._notifier.alive()

    def usage(self, statuses: Mapping[str, PodStatus], now: float) -> Mapping[str, PodUsage]:
        return self._meter.measure(statuses, now)

    def checked(self, readiness: dict[str, Readiness], cluster: Cluster) -> dict[str, Readiness]:
        return self._preflight.amend(readiness, cluster) if self._preflight is not None else readiness

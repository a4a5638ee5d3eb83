"""This machine: address, network interface, boot id, CPUs, and how much of it is used, by which pod. Its GPUs are found
by ``hardware/discovery.py``.

Decides nothing about jobs. Must never scan all of /proc (a machine with many cores has thousands of kernel threads),
nor read what makes the kernel walk a process's memory. So psutil reads the machine but not the processes: it finds
children by a scan, and gives the time of a start by the wall clock, which steps.
"""

from __future__ import annotations

import ipaddress
import os
import queue
import socket
import threading
from collections.abc import Collection, Mapping

import psutil

from nodeagent.model.facts import MachineUsage, PodUsage
from nodeagent.model.node import Gpu, NodeFacts
from nodeagent.osutil.linux import boot_id, family, proc_stat
from nodeagent.pods.base import PodStatus
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.store.scripts import version

RESOLVE_BOUND = 0.25
"""Seconds for the look-up of the host's own name: it is in a file, or near. Workers may wait for this start."""


def find_address(config: AgentConfig, environ: Mapping[str, str]) -> str:
    """The address that peers use: configured, POD_IP, the source address of the default route, or that of any
    interface but loopback."""
    if config.node.address:
        return config.node.address
    if environ.get("POD_IP"):
        return environ["POD_IP"]
    if routed := routed_address():
        return routed
    outward = (a for _, found in sorted(interface_addresses().items()) for a in found if not _is_loopback(a))
    return next(outward, "127.0.0.1")


def is_named(config: AgentConfig, environ: Mapping[str, str]) -> bool:
    """Somebody says where peers reach this node: it is looked for nowhere else."""
    return bool(config.node.address or environ.get("POD_IP"))


def routed_address() -> str:
    """The source address of the default route; empty without one, as on a private network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: chooses a route, sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def moved_address(address: str, interface: str, interfaces: Mapping[str, Collection[str]], routed: str) -> str:
    """Where a node is reached whose address was ``address``, which ``interface`` held: the same while it is one of this
    machine's (``interfaces``) that others can reach; then another of that interface's, else ``routed``, that of the
    default route. Never one of just any interface: a bridge of containers has an address, too."""
    if not _is_loopback(address) and interface_of(address, interfaces):
        return address
    here = [a for a in interfaces.get(interface, ()) if not _is_loopback(a) and (":" in a) == (":" in address)]
    if here and routed not in here:
        return here[0]
    return routed if routed and not _is_loopback(routed) else address


def interface_of(address: str, interfaces: Mapping[str, Collection[str]]) -> str:
    """Which of them holds it; empty if none does."""
    return next((name for name, found in sorted(interfaces.items()) if address in found), "")


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
    return interface_of(address, interfaces) or None


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


MOST_PROCESSES = 256
"""Processes of all pods together that are read in one measurement; those beyond it are not counted. What a pod leaves
of its part the next one has, of those that name more."""
SLACK = 2
"""Ticks by which the kernel's rounding may let a process seem to have started earlier."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Meter:
    """Remembers the CPU time of each process since the measurement before."""

    def __init__(self) -> None:
        self._ticks: dict[int, tuple[int, int]] = {}
        """Process to (start time, CPU ticks)."""
        self._at = 0.0

    def measure(self, statuses: Mapping[str, PodStatus], now: float) -> dict[str, PodUsage]:
        """By job uid: of every pod that has a process. ``now`` is CLOCK_BOOTTIME."""
        roots = {uid: status.pids for uid, status in statuses.items()}
        before, since = self._ticks, self._at
        self._ticks, self._at = {}, now
        if not any(roots.values()):
            return {}
        machine = machine_usage()
        found, left = {}, MOST_PROCESSES
        named = sorted((uid for uid in roots if roots[uid]), key=lambda uid: len(roots[uid]))
        for i, uid in enumerate(named):
            cpu = pages = count = 0
            pids = family(roots[uid], left // (len(named) - i))
            left -= len(pids)
            for pid in pids:
                try:
                    fields = proc_stat(f"/proc/{pid}/stat")
                except OSError:  # no descriptor to look with: not counted this time
                    continue
                if not fields:
                    continue
                ticks, start = int(fields[11]) + int(fields[12]), int(fields[19])
                self._ticks[pid] = (start, ticks)
                cpu += cpu_spent(start, ticks, before.get(pid), since)
                pages += int(fields[21])
                count += 1
            cores = round(cpu / _TICKS / (now - since), 2) if 0 < since < now else None
            found[uid] = PodUsage(cpu=cores, memory=pages * _PAGE, processes=count, machine=machine)
        return found


def cpu_spent(start: int, ticks: int, before: tuple[int, int] | None, since: float) -> int:
    """CPU ticks of a process since the measurement at ``since``: of one that was not seen then, all if it started
    after it, else (it is another pod's, or it was beyond the bound) none."""
    if before is not None and before[0] == start:
        return max(0, ticks - before[1])
    return ticks if start >= since * _TICKS - SLACK else 0


def machine_usage() -> MachineUsage:
    """This machine now."""
    memory = psutil.virtual_memory()
    return MachineUsage(
        load=round(os.getloadavg()[0], 2),
        cpus=os.cpu_count() or 1,
        memory_used=max(0, memory.total - memory.available),
        memory_total=memory.total,
    )

"""Machines on a switch: network namespaces with an address each, and cables that can be cut both ways or one way.

Each namespace is held by a process that dies with this one, and goes with it, however the tests end. Nothing leads
out of them: no route, no address on the machine's own network. Must never touch the machine's own namespace.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from nodeagent.osutil.tether import tethered

SUBNET = "10.77.0"
CLONE_NEWNET = 0x40000000
PATIENCE = 10.0
"""Seconds for a tool to do its work."""
Way = tuple[str, str]
"""From a machine to another one."""


def why_not() -> str:
    """Why it cannot be done here; empty if it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            return f"no {tool} here: install {package}"
    try:
        with Net() as net:
            net.machine("probe")
            with net.cut([("probe", "probe")]):
                pass
    except OSError as error:
        return f"no network namespaces here: {error}"
    return ""


class Net:
    """A switch, and the machines on it. All go when it is left."""

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._cuts: list[tuple[Way, str]] = []

    def __enter__(self) -> Self:
        try:
            self._namespace("switch")
            self._ip("switch", "link add br0 type bridge", "link set br0 up")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def machine(self, name: str) -> str:
        """A new machine with a cable to the switch; its address."""
        holder, port = self._namespace(name), len(self._holders)
        self._ip(
            "switch", f"link add p{port} type veth peer name eth0 netns {holder.pid}", f"link set p{port} master br0",
            f"link set p{port} up",
        )  # fmt: skip
        self._ip(name, "link set lo up", f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up")
        return self.address(name)

    def address(self, name: str) -> str:
        return f"{SUBNET}.{list(self._holders).index(name)}"

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread, what it starts and what sockets it opens, are on that machine."""
        with Path("/proc/thread-self/ns/net").open() as home, _space(self._holders[name].pid).open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    @contextmanager
    def cut(self, ways: Iterable[Way], protocol: str = "") -> Iterator[None]:
        """What is sent these ways does not arrive (of this protocol: ``tcp`` or ``udp``), and nobody is told."""
        mine = [(way, protocol) for way in ways]
        self._cuts += mine
        self._filter({to for (_, to), _ in mine})
        try:
            yield
        finally:
            for one in mine:
                self._cuts.remove(one)
            self._filter({to for (_, to), _ in mine})

    def _filter(self, names: Iterable[str]) -> None:
        """Every machine drops what must not arrive there: it cannot be asked to send nothing. All at once, as a cable
        is cut."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._drop, names))

    def _drop(self, name: str) -> None:
        rules = [
            f"ip saddr {self.address(source)} {f'meta l4proto {protocol} ' if protocol else ''}drop"
            for (source, to), protocol in self._cuts
            if to == name
        ]
        fresh = ["add table ip cut", "delete table ip cut", "add table ip cut"]
        fresh.append("add chain ip cut in { type filter hook input priority 0; }")
        with self.inside(name):
            _run(["nft", "-f", "-"], given="\n".join([*fresh, *(f"add rule ip cut in {rule}" for rule in rules), ""]))

    def _namespace(self, name: str) -> subprocess.Popen[bytes]:
        holder = subprocess.Popen(tethered(["unshare", "--net", "sleep", "infinity"]), stdin=subprocess.DEVNULL)
        self._holders[name] = holder
        end, mine = time.monotonic() + PATIENCE, _space(os.getpid()).readlink()
        while _space(holder.pid).readlink() == mine:
            if holder.poll() is not None or time.monotonic() > end:
                raise OSError(f"no namespace for {name}: unshare ended with {holder.poll()}")
            time.sleep(0.005)
        return holder

    def _ip(self, name: str, *commands: str) -> None:
        with self.inside(name):
            _run(["ip", "-batch", "-"], given="\n".join(commands))

    def _end(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait(PATIENCE)


def named(name: str, address: str, folder: Path) -> Callable[[Sequence[str]], list[str]]:
    """Makes a command one on a machine of that name, which leads to this address there."""
    hosts = folder / f"{name}.hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address} {name}\n")
    begin = f'hostname {name} && mount --bind {hosts} /etc/hosts && exec "$@"'
    return lambda command: ["unshare", "--mount", "--uts", "sh", "-c", begin, "sh", *command]


def both(one: Iterable[str], other: Iterable[str]) -> list[Way]:
    """All ways between two groups."""
    others = list(other)
    return [way for a in one for b in others for way in ((a, b), (b, a))]


def _space(pid: int) -> Path:
    return Path(f"/proc/{pid}/ns/net")


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def _run(command: list[str], given: str) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}\n{given}")

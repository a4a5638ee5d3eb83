"""The nodes' network: the switch of ``tests/e2e/netns.py``, with cables that can be pulled, and made slow."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.e2e.netns import Net
from tests.nodes.wire import Wire, tap

SIOCGIFHWADDR = 0x8927
HUB = "hub"
"""A machine on the switch that is no node: this process looks from there, and Ansible runs there."""


class Network(Net):
    """Machines by name. ``hub`` is always there."""

    def __enter__(self) -> Self:
        super().__enter__()
        self.machine(HUB)
        return self

    def space(self, name: str) -> Path:
        """The file of a machine's network namespace."""
        return Path(f"/proc/{self._holders[name].pid}/ns/net")

    def unplug(self, name: str) -> None:
        """The link goes down: the node sees it, too."""
        self._ip("switch", f"link set p{self._port(name)} down")

    def plug(self, name: str) -> None:
        self._ip("switch", f"link set p{self._port(name)} up")

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        self.unplug(name)
        try:
            yield
        finally:
            self.plug(name)

    @contextmanager
    def slow(self, name: str, *, delay: float, loss: float, rate: float) -> Iterator[None]:
        """Another cable in its place, with the same addresses at its end: so many seconds each way, this share of the
        frames lost, so many bytes per second."""
        address, port = self.address(name), self._port(name)
        with self.inside("switch"):
            near = tap("slow0")
        with self.inside(name):
            far, card = tap("slow0"), hardware_address("eth0")
        with Wire((near, far), delay, loss, rate):
            self._ip("switch", f"link set p{port} down", "link set slow0 master br0", "link set slow0 up")
            self._ip(
                name, f"addr del {address}/24 dev eth0", "link set eth0 down", "link set eth0 name cable0",
                "link set slow0 name eth0", f"link set eth0 address {card}", f"addr add {address}/24 dev eth0",
                "link set eth0 up",
            )  # fmt: skip
            try:
                yield
            finally:
                self._ip(
                    name, "link set eth0 down", "link set eth0 name slow0", "link set cable0 name eth0",
                    f"addr add {address}/24 dev eth0", "link set eth0 up",
                )  # fmt: skip
                self._ip("switch", f"link set p{port} up")

    def _port(self, name: str) -> int:
        return list(self._holders).index(name) + 1


def hardware_address(device: str) -> str:
    """Of a network device where this thread is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFHWADDR, struct.pack("256s", device.encode()))
    return answer[18:24].hex(":")

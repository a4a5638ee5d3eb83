"""The nodes' network: the switch of ``tests/e2e/netns.py``, with cables that can be pulled. Slow ones come later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.e2e.netns import Net

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

    def _port(self, name: str) -> int:
        return list(self._holders).index(name) + 1

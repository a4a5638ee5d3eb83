"""This node's address while the agent runs: DHCP may give the machine another one.

Looks, and says where the node is reached now; what has to know it is given it. Must never move a node whose address
somebody named, nor one whose address is still the machine's own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import structlog

from nodeagent.agent.machine import (
    gloo_interface,
    interface_addresses,
    interface_of,
    moved_address,
    resolve_hostname,
    routed_address,
)

LOOK_EVERY = 5.0
"""Seconds between two looks at the machine's addresses."""

Take = Callable[[str, str | None], Awaitable[None]]
"""Has all that must know it take the new address, and the interface that gloo has to be given (``gloo_interface``).
May raise OSError: then it is tried again."""
LookAgain = Callable[[str, str], tuple[str, str]]
"""As ``look_again``."""


class AddressWatch:
    """``run`` once."""

    def __init__(self, address: str, look: LookAgain | None) -> None:
        """``look``: None where somebody named the address, which stays then."""
        self.address = address
        """The newest that was taken."""
        self._look = look
        self._interface = ""
        self._moved = asyncio.Event()
        self._log = structlog.get_logger("address")

    async def run(self, take: Take, pause: float = LOOK_EVERY) -> None:
        """Until cancelled; returns at once where there is nothing to look for."""
        while (look := self._look) is not None:
            await self._once(look, take)
            await asyncio.sleep(pause)

    async def _once(self, look: LookAgain, take: Take) -> None:
        new, interface = await asyncio.to_thread(look, self.address, self._interface)
        if new != self.address:
            gloo = await asyncio.to_thread(gloo_of, new)
            try:
                await take(new, gloo)
            except OSError as error:
                self._log.error("this machine's new address cannot be used yet", address=new, why=str(error))
                return
            self._log.warning("this machine has another address", before=self.address, now=new)
            self.address = new
            self._moved.set()
        self._interface = interface

    async def moves(self) -> None:
        """Wait for the next move that nobody has waited for."""
        await self._moved.wait()
        self._moved.clear()


def look_again(address: str, interface: str) -> tuple[str, str]:
    """The address of this node whose address was ``address``, on ``interface``; and on which one it is now."""
    interfaces = interface_addresses()
    new = moved_address(address, interface, interfaces, routed_address())
    return new, interface_of(new, interfaces) or interface


def gloo_of(address: str) -> str | None:
    return gloo_interface(address, resolve_hostname(socket.gethostname()), interface_addresses())

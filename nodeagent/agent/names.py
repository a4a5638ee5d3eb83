"""Numeric addresses of hosts that are known by a name, for whom must not look one up: a look-up may take longer than
the fence. Looks up beside the loop, and keeps what was found last."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from nodeagent.lease.peers import is_numeric, split

AGAIN = 60.0
"""Seconds between two look-ups of a name that was found."""
RETRY = 2.0
BOUND = 5.0
"""Seconds that one look-up may take."""


class Names:
    """``run`` once."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """``changed`` is called when a name has another address than before."""
        self._changed = changed
        self._found: dict[str, str] = {}
        self._due: dict[str, float] = {}
        self._new = asyncio.Event()

    def numeric(self, address: str) -> str:
        """``host:port`` with the host's address; empty as long as that is not known."""
        try:
            host, port = split(address)
        except ValueError:
            return ""
        if not is_numeric(host):
            if host not in self._due:
                self._due[host] = 0.0
                self._new.set()
            host = self._found.get(host, "")
        if not host:
            return ""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._new.clear()
            for host in [host for host, due in self._due.items() if loop.time() >= due]:
                await self._look_up(host)
            wait = min(self._due.values(), default=loop.time() + AGAIN) - loop.time()
            try:
                async with asyncio.timeout(max(0.0, wait)):
                    await self._new.wait()
            except TimeoutError:
                pass

    async def _look_up(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(BOUND):
                found = await loop.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        except (TimeoutError, OSError):
            self._due[host] = loop.time() + RETRY
            return
        self._due[host] = loop.time() + AGAIN
        if (new := str(found[0][4][0])) != self._found.get(host):
            self._found[host] = new
            self._changed()

"""What the Redis server itself spent: its CPU time, however many share the machine, and the bytes that it sent."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from nodeagent.local.privateredis import PrivateRedis
from nodeagent.store.link import Links
from nodeagent.store.whois import parse_info

T = TypeVar("T")
TRIES = 20
PLAIN = 500
"""Plain commands that the yardstick is the mean of."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of some calls."""

    redis: float = 0.0
    """Microseconds of the server's CPU."""
    sent: float = 0.0
    """Bytes that it sent."""
    here: float = 0.0
    """Microseconds of this process's CPU: of the agents, where agents alone did the calls."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.redis + other.redis, self.sent + other.sent, self.here + other.here)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.redis * times, self.sent * times, self.here * times)

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1


class Meter:
    """Over one private server. To be closed."""

    def __init__(self, server: PrivateRedis) -> None:
        self._pid, self._links = server.pid, Links(server.url, 1)
        self._asking = Cost()
        """What it costs to ask what something costs."""

    async def of(self, call: Awaitable[T]) -> tuple[Cost, T]:
        """Await it, and say what that cost."""
        sent, own = await self._sent()
        before, began = await self._redis(), time.process_time()
        result = await call
        here, after = time.process_time() - began, await self._redis()
        cost = Cost(after - before, (await self._sent())[0] - sent - own, here * 1e6)
        return cost - self._asking, result

    async def plain(self) -> Cost:
        """One plain command: the yardstick, since a busy machine makes all CPU times longer."""

        async def some() -> None:
            async with self._links.one() as link:
                for _ in range(PLAIN):
                    await link.ask("SET", "yardstick", "x" * 100)

        return (await self.of(some()))[0] * (1 / PLAIN)

    async def empty(self) -> None:
        """As an operator's mistake does it: everything is gone, and the server goes on."""
        async with self._links.one() as link:
            await link.ask("FLUSHALL")

    async def close(self) -> None:
        await self._links.close()

    async def _redis(self) -> float:
        async with self._links.one() as link:
            await link.ask("PING")  # what came before is answered, and accounted for
        return self._on_cpu()

    def _on_cpu(self) -> float:
        return int(Path(f"/proc/{self._pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1000

    async def _sent(self) -> tuple[int, int]:
        """Bytes sent so far, and those that the answer to this question adds to them."""
        async with self._links.one() as link:
            text = await link.ask("INFO", "stats")
        return int(parse_info(text)["total_net_output_bytes"]), len(text) + len(str(len(text))) + 5

    async def __aenter__(self) -> Self:
        nothing = [(await self.of(asyncio.sleep(0)))[0].redis for _ in range(TRIES)]
        self._asking = Cost(statistics.median(nothing))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

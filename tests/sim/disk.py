"""A node's disk in the simulation: what was fsynced outlives processes, boots and power cuts; what was not is gone."""

from __future__ import annotations

import asyncio
import random

SLOWEST = 0.02
"""Seconds of the slowest fsync."""


class SimDisk:
    """What the agent keeps of its view. ``broken``: nothing can be written."""

    def __init__(self, name: str) -> None:
        self._rng = random.Random(name)
        self.kept: bytes | None = None
        self.writes = 0
        self.broken = False

    def read(self) -> bytes | None:
        return self.kept

    def keep_damaged(self) -> str:
        raise AssertionError("nothing damages it")

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(self._rng.uniform(0.0005, SLOWEST))
        if self.broken:
            raise OSError("no space left on device")
        self.kept = data
        self.writes += 1

    async def append(self, data: bytes) -> None:
        assert self.kept is not None
        await self.write(self.kept + data)

"""Waiting until what an operator wrote is on the disks of enough nodes: then no single failure loses it, whatever
becomes of Redis.

Woken by the store's stream and by this agent's own saver, never by polling. Must never fail: what was written is
written, and this only finds out how safe it is by now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from nodeagent.agent.clock import Clock
from nodeagent.agent.saver import Saver
from nodeagent.plan.cluster import Cluster
from nodeagent.store.base import Store, StoreError
from nodeagent.store.messages import Saved

COPIES = 2
"""Nodes that must have a write on their disks: as many as are live, where those are fewer."""
AGAIN = 0.1
"""Seconds until the store is asked again after it did not answer."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """On which disks a write is."""

    nodes: tuple[str, ...]
    wanted: int
    waited: float

    @property
    def safe(self) -> bool:
        return len(self.nodes) >= self.wanted


class Acknowledger:
    """Waits for one write after the other, each within ``bound`` seconds."""

    def __init__(
        self, node: str, saver: Saver, *, store: Store, clock: Clock, cluster: Callable[[], Cluster], bound: float
    ) -> None:
        self._node, self._saver, self._bound = node, saver, bound
        self._store, self._clock, self._cluster = store, clock, cluster
        self._others: dict[str, Saved] = {}

    async def __call__(self, write: Saved) -> Acknowledged:
        """``write``: its revision, and the era in which it was made."""
        started = self._clock.now()
        own = asyncio.ensure_future(self._saver.reached(write))
        told = asyncio.ensure_future(self._told(write))
        try:
            async with asyncio.timeout(self._bound):
                while not self._look(write, started).safe:
                    await asyncio.wait({t for t in (own, told) if not t.done()}, return_when=asyncio.FIRST_COMPLETED)
                    if told.done():
                        told.result()
                        if self._look(write, started).safe:
                            break
                        told = asyncio.ensure_future(self._told(write))
        except TimeoutError:
            pass
        finally:
            own.cancel()
            told.cancel()
        return self._look(write, started)

    async def _told(self, write: Saved) -> None:
        """Until other nodes have told of enough saves that cover the write."""
        if self._look(write, 0.0).wanted < COPIES:
            await self._saver.reached(write)
        at = ""
        while True:
            try:
                saves = await self._store.saved(at, self._bound)
            except StoreError:
                await asyncio.sleep(AGAIN)
                continue
            at, self._others = saves.at, saves.nodes
            if self._look(write, 0.0).safe:
                return

    def _look(self, write: Saved, started: float) -> Acknowledged:
        cluster = self._cluster()
        live = [node for node in sorted(cluster.nodes) if cluster.live(node)]
        known = dict(self._others)
        if self._saver.saved is not None:
            known[self._node] = self._saver.saved
        there = tuple(
            node for node in live
            if node in known and known[node].era == write.era and known[node].rev >= write.rev
        )  # fmt: skip
        wanted = min(COPIES, max(1, len(live)))  # this node lives, even where it has not read so yet
        return Acknowledged(nodes=there, wanted=wanted, waited=self._clock.now() - started)

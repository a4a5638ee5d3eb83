"""Keeps a copy of the agent's view on its disk, says up to which revision it is there, and waits until what an
operator wrote is on the disks of enough nodes.

Only what changed is written: at once where somebody waits for it (an operator's command, a checkpoint's commit),
otherwise a moment after a change, so that it is never between a fault and its recovery. Must never be acted on: what is
read at the start is only offered to a store that lost its own.

Woken by the store's stream and by this agent's own saver, never by polling. Must never fail: what was written is
written, and this only finds out how safe it is by now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from nodeagent.agent.metrics import Metrics
from nodeagent.agent.recovery import Known
from nodeagent.agent.savedview import Disk, Writing
from nodeagent.agent.snapshot import Snapshot
from nodeagent.model.job import Checkpoint
from nodeagent.osutil.clock import Clock, wait_for
from nodeagent.plan.cluster import Cluster
from nodeagent.store.base import Store, StoreError
from nodeagent.store.messages import Saved

SETTLE = 1.0
"""Seconds from a change that nobody waits for to its write: at most one in as long."""
GAP = 0.02
"""Seconds between two writes at least, whoever waits."""
RETRY = 5.0
"""Seconds after a write that failed."""


class Saver:
    """One agent's copy. ``notify`` is called when others wait for a save that has just been made."""

    def __init__(
        self, node: str, disk: Disk, writing: Writing, *,
        snapshot: Snapshot, clock: Clock, metrics: Metrics, notify: Callable[[], None],
    ) -> None:  # fmt: skip
        self._disk, self._writing, self._snapshot = disk, writing, snapshot
        self._clock, self._metrics, self._notify = clock, metrics, notify
        self._log = structlog.get_logger("kept").bind(node=node)
        self._pointers: dict[str, Checkpoint | None] = {}
        self._news = asyncio.Event()
        self.saved: Saved | None = None
        """What is on the disk."""
        self.trouble = ""
        """Why the last write failed; empty if it did not."""

    def load(self) -> Known | None:
        """What was kept before this start."""
        try:
            data = self._disk.read()
        except OSError as error:
            self._log.error("the jobs kept on this disk cannot be read: unknown from now on", why=str(error))
            return None
        if data is None:
            return None
        known, wrong = self._writing.unpack(data)
        for text in wrong[:10]:
            self._log.error("a part of the jobs kept on this disk cannot be read and is left out", why=text)
        if known is not None:
            self._log.info("jobs kept on this disk", jobs=len(known.jobs), rev=known.rev, damaged=len(wrong))
        return known

    async def run(self) -> None:
        """Write whatever changes, until cancelled."""
        while True:
            await self._snapshot.touched.wait()
            due = self._clock.now() + SETTLE
            while not self._urgent() and (left := due - self._clock.now()) > 0:
                self._snapshot.touched.clear()
                await wait_for(self._snapshot.touched, left)
            self._snapshot.touched.clear()
            if not self._current():
                continue
            await self._save()
            await asyncio.sleep(RETRY if self.trouble else GAP)

    async def reached(self, wanted: Saved) -> None:
        """Until everything up to this is on the disk."""
        while self.saved is None or self.saved.era != wanted.era or self.saved.rev < wanted.rev:
            self._news.clear()
            await self._news.wait()

    def _current(self) -> bool:
        """The view is the store's: what a store that lost writes brings must not replace what is kept."""
        return self._snapshot.complete and not self._snapshot.recovering and not self._snapshot.rereads

    def _urgent(self) -> bool:
        """Somebody waits for what is not on the disk yet."""
        saved = self.saved
        if saved is None or saved.rev < self._snapshot.wanted <= self._snapshot.rev:
            return True
        return any(self._pointers.get(uid) != job.checkpoint for uid, job in self._snapshot.jobs.items())

    async def _save(self) -> None:
        known = self._snapshot.known(self._clock.now())
        pointers = {job.uid: job.checkpoint for job in known.jobs}
        started = self._clock.now()
        try:
            news = self._writing.news(known)
            if news is None:
                await self._disk.write(self._writing.pack(known))
            else:
                await self._disk.append(news)
        except BaseException as error:
            self._writing.doubt()
            if not isinstance(error, OSError):
                raise
            self._metrics.save_errors.inc()
            if str(error) != self.trouble:
                self._log.error("jobs cannot be kept on this disk; trying again", why=str(error))
            self.trouble = str(error)
            self._snapshot.touched.set()
            return
        if self.trouble:
            self._log.info("jobs are kept on this disk again")
        self.trouble, self._pointers = "", pointers
        self._metrics.save_seconds.observe(self._clock.now() - started)
        before, self.saved = self.saved, Saved(era=known.era, rev=known.rev)
        self._news.set()
        if (before.rev if before is not None else 0) < self._snapshot.wanted <= known.rev:
            self._notify()


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
        notify = asyncio.ensure_future(self._notify(write))
        try:
            async with asyncio.timeout(self._bound):
                while not self._look(write, started).safe:
                    await asyncio.wait({t for t in (own, notify) if not t.done()}, return_when=asyncio.FIRST_COMPLETED)
                    if notify.done():
                        notify.result()
                        if self._look(write, started).safe:
                            break
                        notify = asyncio.ensure_future(self._notify(write))
        except TimeoutError:
            pass
        finally:
            own.cancel()
            notify.cancel()
        return self._look(write, started)

    async def _notify(self, write: Saved) -> None:
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

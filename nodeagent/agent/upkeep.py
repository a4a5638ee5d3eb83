"""What keeps signatures good over time: what the guard remembers goes to the disk, and admissions of jobs that live on
are signed anew before they expire, by whichever agent looks first. Decides no verdict.
"""

from __future__ import annotations

import asyncio

import structlog

from nodeagent.agent.clock import Clock
from nodeagent.agent.guard import Guard
from nodeagent.agent.lease import Lease
from nodeagent.agent.snapshot import Snapshot
from nodeagent.store.base import Store, StoreRefusedError, StoreUnavailableError
from nodeagent.trust.seal import Seal

SAVE_PAUSE = 1.0
"""Seconds between two writes to the disk."""
RENEW_LOOK = 60.0
"""Seconds between two looks at which admissions are to be renewed."""
RENEW_PAUSE = 3600.0
"""Seconds in which one job's is renewed at most once by one agent, whatever its clock shows."""


class Upkeep:
    """Two tasks of one agent, for as long as it runs."""

    def __init__(
        self, guard: Guard, seal: Seal, *, lease: Lease, store: Store, clock: Clock, snapshot: Snapshot
    ) -> None:
        self._guard, self._seal = guard, seal
        self._lease, self._store, self._clock, self._snapshot = lease, store, clock, snapshot
        self._renewed: dict[str, float] = {}
        self._log = structlog.get_logger("trust").bind(node=lease.node)

    async def remember(self) -> None:
        """Write down what changed, whenever something has."""
        while True:
            await self._guard.dirty.wait()
            self._guard.dirty.clear()
            try:
                await self._guard.save(self._clock.wall())
            except OSError as error:
                self._log.error("which jobs have ended cannot be written down; trying again", why=str(error))
                self._guard.dirty.set()
            await asyncio.sleep(SAVE_PAUSE)

    async def renew(self) -> None:
        """Look at all admissions, now and then."""
        while True:
            await asyncio.sleep(RENEW_LOOK)
            if self._lease.joined and self._snapshot.complete and not self._snapshot.recovering:
                await self._renew_due()

    async def _renew_due(self) -> None:
        now, wall = self._clock.now(), self._clock.wall()
        self._renewed = {uid: at for uid, at in self._renewed.items() if now < at + RENEW_PAUSE}
        for job in self._guard.due(self._snapshot.jobs, wall):
            if job.uid in self._renewed or job.admission is None:
                continue
            self._renewed[job.uid] = now
            anew = self._seal.renewed(job, wall, self._lease.node)
            try:
                self._snapshot.absorb_job(await self._store.renew(job.uid, job.admission.signature, anew))
            except (StoreUnavailableError, StoreRefusedError) as error:
                self._log.debug("admission not renewed", job=job.name, why=str(error))

"""Finds out that somebody wrote over a job's record in the store without another revision: no difference shows that,
and the steps that decide by the record are refused again and again.

A step that is refused makes an agent suspicious where its own record of the job has the very revision of the store's.
Then, and only then, it reads the record whole, and has it restored if it is another one. Two agents that were only in
each other's way never have the same revision with another content.
"""

from __future__ import annotations

import structlog

from nodeagent.agent.context import AgentContext
from nodeagent.agent.membership import Membership
from nodeagent.store.base import StepFailedError, StoreRefusedError

BY_THE_RECORD = frozenset({"ended", "stale", "unsupported", "not_live", "busy"})
"""Codes of refusals that what stands in a job's record may cause."""
AGAIN = 5.0
"""Seconds until a record of the same revision is compared again: in a large gang that costs as much as reading it."""
MOST = 1024
"""Jobs of which it is known when they were compared, before those that are gone are forgotten."""


class Comparison:
    """Of one agent's decisions, or of its workers' commits: neither waits for when the other's were compared."""

    def __init__(self, context: AgentContext, membership: Membership) -> None:
        self._membership, self._store = membership, context.store
        self._snapshot, self._clock = context.snapshot, context.clock
        self._compared: dict[str, tuple[int, float]] = {}
        """Revision and time (our clock), by job."""
        self._log = structlog.get_logger("comparison").bind(node=membership.node)

    async def written_over(self, uid: str, refusal: StoreRefusedError | StepFailedError) -> bool:
        """Whether a step of this job was refused since somebody wrote over its record: then all agents restore it.
        Raises StoreUnavailableError and StoreRefusedError."""
        job, era = self._snapshot.job(uid), self._snapshot.era
        if job is None or not isinstance(refusal, StoreRefusedError) or refusal.code not in BY_THE_RECORD:
            return False
        if self._snapshot.recovering or self._snapshot.rereads or not self._due(uid, job.rev):
            return False
        if not await self._store.differs(job, era):
            return False
        self._log.error("somebody wrote over a job's record in the store: it is to be restored", job=job.name, uid=uid)
        self._membership.distrust(f"job:{uid}")
        await self._membership.beat()
        return True

    def _due(self, uid: str, rev: int) -> bool:
        now = self._clock.now()
        if len(self._compared) > MOST:
            self._compared = {job: last for job, last in self._compared.items() if job in self._snapshot.jobs}
        last = self._compared.get(uid)
        if last is not None and last[0] == rev and now - last[1] < AGAIN:
            return False
        self._compared[uid] = rev, now
        return True

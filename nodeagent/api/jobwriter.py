"""Writes what is wanted of jobs to the store, and decides each change on the record that it replaces.

Must never write what was decided on a record that has changed since.
"""

from __future__ import annotations

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, intents
from nodeagent.api.auth import DATABASE, UserDatabase
from nodeagent.api.errors import unknown
from nodeagent.api.once import Once
from nodeagent.api.requests import write_again
from nodeagent.model.job import TERMINAL, Control, JobRecord


class JobWriter:
    """Over one agent's view."""

    def __init__(self, view: AgentView, names: UserDatabase = DATABASE) -> None:
        self._view, self._names = view, names

    async def change(
        self, who: auth.Caller, uid: str, ref: str, one: Once | None, intent: intents.Intent
    ) -> tuple[JobRecord, bool]:
        """One change of a job of the view, for who may make it, and whether it was one. Without ``one`` it is not
        remembered. Raises ``ApiError`` and ``StoreError``."""
        request, did = ("", "") if one is None else (one.request, one.did())

        async def attempt() -> tuple[JobRecord, bool]:
            job = self.known(uid, ref)
            await self.may_change(who, job)
            base = self.foundation(job, ends=intent in (intents.stop, intents.delete))
            change = intent(base) or anew(job, base)
            if change is None:
                if one is not None and job.phase not in TERMINAL:  # whatever others do: it is done already
                    await self._view.store.control(uid, job.control.rev, None, request, "", "", did)
                return job, False
            control, text = self.signed(base, change, who), f"{change.text} (by {who.name})"
            event = change.event
            return await self._view.store.control(uid, job.control.rev, control, request, event, text, did), True

        return await write_again(self._view, attempt)

    async def may_change(self, who: auth.Caller, job: JobRecord) -> None:
        """Raises ``ApiError``."""
        if who.uid != job.owner:
            await self._names.learn([job.owner])
        auth.may_change_job(who, job, self._names.shown)

    def foundation(self, job: JobRecord, *, ends: bool = False) -> JobRecord:
        return intents.foundation(job, self._view.cluster().refused.get(job.uid), ends=ends)

    def signed(self, base: JobRecord, change: intents.Change, who: auth.Caller) -> Control:
        """The job's next control."""
        more = {"by": who.name, "rev": base.control.rev + 1}
        return self._view.seal.control(base.uid, Control(**(base.control.model_dump() | change.change | more)))

    def known(self, uid: str, ref: str) -> JobRecord:
        """The job as it is by now."""
        jobs = self._view.cluster().jobs
        if uid not in jobs:
            raise unknown("job", ref, (j.name for j in jobs.values()))
        return jobs[uid]


def anew(job: JobRecord, base: JobRecord) -> intents.Change | None:
    """Where nobody signed what is wanted of a job, saying it again changes that."""
    return None if base is job else intents.Change({}, "JobResumed", "say anew what is wanted")

"""Writes jobs, and what is wanted of them, to the store: admits what a caller submits, and decides each change on the
record that it replaces.

Must never write what was decided on a record that has changed since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, intents, limits, requests
from nodeagent.api.admission import admitted, with_quotas
from nodeagent.api.auth import DATABASE, UserDatabase
from nodeagent.api.errors import ApiError, unknown
from nodeagent.api.once import Once
from nodeagent.api.requests import Done, seen, write_again
from nodeagent.model.job import TERMINAL, Control, JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.queueing.dependencies import is_awaited
from nodeagent.spec.jobcheck import check_spec
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import QuotaClaims


class JobWriter:
    """Over one agent's view."""

    def __init__(self, view: AgentView, names: UserDatabase = DATABASE) -> None:
        self._view, self._names = view, names
        self._counting = asyncio.Lock()
        """Held by who submits to a queue with a quota for each user."""

    async def admitted(
        self, who: auth.Caller, spec: JobSpec, count: int = 1, beside: Sequence[tuple[JobSpec, int]] = ()
    ) -> JobSpec:
        """The job as the caller may submit it, with the submitter as this agent sees him, and its queue. ``count``,
        ``beside``: of a batch (``admission.admitted``). Raises ``ApiError``."""
        if who.remote and spec.user == spec.submitter.user:  # who submits, by the name that he has elsewhere
            spec = spec.model_copy(update={"user": who.name})
        await self._may_submit(who, spec)
        _no_live_array(self._view.cluster(), spec.name)
        seen = {"user": who.name, "uid": who.uid, "gid": who.gid}
        if not who.trusted:
            spec = spec.model_copy(update={"submitter": spec.submitter.model_copy(update=seen)})
        if problems := check_spec(spec):
            raise ApiError(
                "spec", f"job {spec.name!r} cannot run", "correct it; nothing was submitted", problems=problems
            )
        return await admitted(self._view.cluster(), who, spec, self._names, count, beside)

    async def _may_submit(self, who: auth.Caller, spec: JobSpec) -> None:
        """Raises ``ApiError``."""
        config, node = self._view.config, self._view.node
        limits.within_policy(who, spec, config.limits, node)

        def look() -> None:
            auth.may_submit(who, spec.user, config.jobs)
            limits.may_submit_at_all(who, config.limits, node)

        await self._names.ask((who, spec.user, config.jobs, config.limits), look, f"user {spec.user}")

    async def written(
        self,
        who: auth.Caller,
        specs: Sequence[JobSpec],
        admit: Callable[[], Awaitable[Sequence[JobSpec]]],
        write: Callable[[Sequence[JobSpec], QuotaClaims | None], Awaitable[Done]],
    ) -> Done:
        """Have jobs written that were admitted as ``specs``, and read them. Where a queue counts what each user has
        they are admitted again, by a view that has all that was submitted to it before: one submit after the other,
        here and, by the store's word, on all nodes. Raises ``ApiError`` and ``StoreError``."""

        async def attempt() -> Done:
            read = self._view.rev
            found = await admit()
            queues = with_quotas(self._view.cluster(), who, found)
            return await write(found, QuotaClaims(queues=queues, read=read))

        try:
            if not with_quotas(self._view.cluster(), who, specs):
                done = await write_again(self._view, partial(write, specs, None))
                await seen(self._view)
                return done
            async with self._counting:
                done = await write_again(self._view, attempt)
                await seen(self._view)
                return done
        except StoreRefusedError as refused:
            if refused.code == "full":
                raise await limits.no_room(refused, self._names) from None
            raise

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


def _no_live_array(cluster: Cluster, name: str) -> None:
    """Raises ``ApiError`` if a live array has this name: commands could not tell it from a job."""
    if requests.is_live_array(cluster, name):
        raise ApiError("state", f"an array named {name!r} has live jobs", "choose another name; nothing was submitted")


def noted(cluster: Cluster, names: Collection[str]) -> None:
    """Raises ``ApiError`` if a job of one of these names has ended and another job has yet to note that end: the new
    job would replace its record."""
    for job in cluster.jobs.values():
        if job.name in names and job.phase in TERMINAL and is_awaited(cluster, job):
            raise ApiError(
                "stopping",
                f"another job waits for the job named {job.name} (uid {job.uid}, {job.phase}), and has yet to note "
                "its end",
                "try again in a moment, or choose another name",
            )

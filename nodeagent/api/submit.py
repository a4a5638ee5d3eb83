"""Submits jobs over HTTP: one, or several with arrays among them, and of several all or none.

Turns the jobs in a request into jobs to store: an array becomes its members, and names of other jobs become their uids.
Must never submit only a part: everything is looked up and checked before the one request to the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, limits, requests
from nodeagent.api.admission import admitted, with_quotas
from nodeagent.api.arrays import of_array
from nodeagent.api.auth import DATABASE, UserDatabase
from nodeagent.api.errors import ApiError, unknown
from nodeagent.api.once import as_asked, earlier, once
from nodeagent.api.requests import find_any_job, saved, seen, write_again
from nodeagent.api.serializers import Json
from nodeagent.model.job import TERMINAL, Control, JobRecord
from nodeagent.model.jobspec import MOST_JOBS, MOST_MEMBERS, After, Array, JobSpec, Need, Submission, Submitter
from nodeagent.plan.queueing.dependencies import is_awaited
from nodeagent.plan.queueing.room import never
from nodeagent.spec import jobvalues
from nodeagent.spec.errors import CheckError
from nodeagent.spec.jobcheck import check_spec, mistakes, too_much
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import NewJob, QuotaClaims

_NOBODY = {"user": "", "uid": 0, "gid": 0, "host": "", "cwd": ""}
"""In the place of a submitter that has been read."""
SIGNED_AT_ONCE = 16
"""Jobs that are signed without a pause: signing a thousand would block the agent's loop for a second."""
_NOTHING = "nothing was submitted"


@dataclass(slots=True)
class _Job:
    """A job or an array of the request, before an array is expanded to its members."""

    asked: Submission
    spec: JobSpec
    """As it is admitted."""
    indices: jobvalues.Indices | None
    uids: list[str] = field(default_factory=list)
    """The job's own uid, or the members' uids."""
    met: list[str] = field(default_factory=list)
    ends_of: tuple[After, ...] = ()
    """The jobs that its ``after`` names."""

    @property
    def count(self) -> int:
        """Of the members, or 1."""
        return 1 if self.indices is None else len(self.indices.numbers)

    @property
    def known_as(self) -> str:
        """The uid, or the array's id, that other jobs' ``after`` uses."""
        return self.uids[0] if self.indices is None else f"array-{self.uids[0]}"

    def names(self) -> list[str]:
        """Names of the job, or of its members. Raises ``CheckError`` if one is no valid name of a job."""
        if self.indices is None:
            return [self.spec.name]
        return [jobvalues.member_name(self.spec.name, i) for i in self.indices.numbers]


def uids(first: str, count: int) -> list[str]:
    """Uids for the jobs of one request: the same for the same ``first``, which is random."""
    return [first, *(hashlib.sha256(f"{first}/{i}".encode()).hexdigest()[:32] for i in range(1, count))]


def read(asked: Mapping[str, Any]) -> list[Submission]:
    """The jobs in a body: {jobs: [{spec, after?: {NAME: ok|any}, array?: TEXT, begin_in?: SECONDS}], submitter}, in
    which the specs have no submitter. Raises ``ApiError``."""
    jobs = asked.get("jobs")
    if not isinstance(jobs, list) or not 1 <= len(jobs) <= MOST_JOBS:
        raise ApiError("usage", f"jobs must be a list of 1 to {MOST_JOBS} jobs", "send {jobs: [{spec: {...}}]}")
    found: list[Submission] = []
    submitter: Submitter | None = None
    for job in jobs:
        if not isinstance(job, dict) or not isinstance(job.get("spec"), dict):
            raise ApiError("usage", "a job has no spec", "send {jobs: [{spec: {...}}]}")
        requests.has_only(job, ("spec", "after", "array", "begin_in"), "a job")
        begin_in = requests.seconds(job, "begin_in")
        begins = {} if begin_in is None else {"begin": time.time() + begin_in}
        # The rest of a body may be the submitter: it is read once, not with each job.
        spec = read_spec(job["spec"] | begins, asked.get("submitter") if submitter is None else _NOBODY)
        submitter = submitter or spec.submitter
        try:
            after, array = jobvalues.after(job.get("after")), jobvalues.array(job.get("array"))
        except CheckError as error:
            raise ApiError("spec", f"job {spec.name!r} cannot run: {error}", _NOTHING) from None
        found.append(Submission(spec.model_copy(update={"submitter": submitter}), after, array or ""))
    return found


def read_spec(value: Mapping[str, Any], submitter: object) -> JobSpec:
    """A job's spec of this submitter. Raises ``ApiError`` with every mistake."""
    if value.get("after") or value.get("array") or "submitter" in value:
        beside = "send {jobs: [{spec, after, array}], submitter}"
        raise ApiError("usage", "after, array and submitter stand beside the spec", beside)
    value = {**value, "submitter": submitter}
    problems = too_much(value)  # first, since what follows runs in the loop
    if not problems:
        try:
            return JobSpec.from_json(json.dumps(value))
        except ValidationError as wrong:
            problems = mistakes(wrong)
    raise ApiError("spec", "the job's spec is not right", f"correct it; {_NOTHING}", problems=problems)


def laid_out(jobs: Sequence[Submission], first: str) -> list[_Job]:
    """The jobs with their uids. Raises ``ApiError`` for duplicate names, too many jobs, jobs that wait for each
    other."""
    found: list[_Job] = []
    names: set[str] = set()
    for job in jobs:
        one = _Job(job, job.spec, jobvalues.indices(job.array) if job.array else None)
        try:
            own = {one.spec.name, *one.names()}
        except CheckError as error:
            raise ApiError("spec", f"array {job.spec.name!r}: {error}", _NOTHING) from None
        if twice := names.intersection(own):
            raise ApiError("spec", f"two of the jobs are named {min(twice)!r}", "give each a name of its own")
        names.update(own)
        found.append(one)
    if (count := sum(job.count for job in found)) > MOST_MEMBERS:
        raise ApiError("spec", f"{count} jobs at once, with those of arrays", f"submit at most {MOST_MEMBERS}")
    here = {job.spec.name for job in jobs}
    try:
        TopologicalSorter({job.spec.name: here.intersection(job.after) for job in jobs}).prepare()
    except CycleError as error:
        raise ApiError("spec", f"jobs wait for each other: {', '.join(error.args[1])}", "break the circle") from None
    made = iter(uids(first, count))
    for one in found:
        one.uids = list(islice(made, one.count))
    return found


class SubmitRoutes:
    """The handler, over one agent's view."""

    def __init__(self, view: AgentView, names: UserDatabase = DATABASE) -> None:
        self._view, self._names = view, names
        self._counting = asyncio.Lock()
        """Held by who submits to a queue with a quota for each user."""

    def table(self) -> list[web.RouteDef]:
        """The one route."""
        return [web.post("/v1/jobs", self._post)]

    async def _post(self, request: web.Request) -> web.Response:
        """POST /v1/jobs {jobs, submitter, request_id, dry_run} (``read``)."""
        who = await auth.caller(request, self._view.config.jobs)
        asked = await requests.read(request, "jobs", "submitter", "dry_run")
        return await self.submit(who, requests.request_id(asked), read(asked), dry_run=asked.get("dry_run") is True)

    async def submit(
        self, who: auth.Caller, request: str, submissions: Sequence[Submission], *, dry_run: bool = False
    ) -> web.Response:
        """Submits all of them, or none. Raises ``ApiError``."""
        one = once(request, "submit", who.uid, [as_asked(job) for job in submissions])
        jobs, era = laid_out(submissions, uuid.uuid4().hex), self._view.era
        if not dry_run and (made := await earlier(self._view.store, one)) is not None:
            # Whatever would refuse it by now. A job that is not in the view yet would be taken for one that is gone.
            await self._view.refresh()
            await self._still_there(uids(made.subject, sum(job.count for job in jobs)))
            return await self._submitted(jobs, made.subject, made.rev, era)
        names = {name for job in jobs for name in job.names()}
        # The store knows of each job's name, but of no array's: commands could not tell it from a job's.
        self._free({job.spec.name for job in jobs if job.indices is not None} | (names if dry_run else set()))
        await self._resolve(who, jobs)
        quota = limits.quota(who, self._view.config.limits)
        if quota is not None:
            limits.within_quota(who, quota, [(job.spec, job.count) for job in jobs])
        await self._admit(who, jobs)
        if dry_run:
            return await self._tried(jobs)
        self._noted(names)
        era, now = self._view.era, time.time()
        # Where a queue counts what each user has they are admitted again, by a view that has all that was submitted to
        # it before: one submit after the other, here and, by the store's word, on all nodes.
        counted = self._counted(who, jobs)

        async def attempt() -> tuple[str, int]:
            claims = None
            if counted:
                read = self._view.rev
                await self._admit(who, jobs)
                claims = QuotaClaims(queues=self._counted(who, jobs), read=read)
            return await self._view.store.submit(
                await self._signed(who, jobs, now), who.uid, now, who.name, one.request, one.did(),
                era=self._view.era, quota=quota, claims=claims,
            )  # fmt: skip

        try:
            async with self._counting if counted else nullcontext():
                first, rev = await write_again(self._view, attempt)
                await seen(self._view)
        except StoreRefusedError as refused:
            if refused.code == "full":
                raise await limits.no_room(refused, self._names) from None
            raise
        return await self._submitted(jobs, first, rev, era)

    async def _tried(self, jobs: Sequence[_Job]) -> web.Response:
        """The answer to a dry run. What the jobs' submitter brought stands in it once: a body may be little else, and
        it would be answered 256 times."""
        unmet = await self._unmet(jobs)

        def found() -> Json:
            rows = [
                {"spec": job.spec.model_dump(exclude={"submitter"}), "jobs": job.count, "unmet": why}
                for job, why in zip(jobs, unmet, strict=True)
            ]
            return {"dry_run": True, "submitter": jobs[0].spec.submitter.model_dump(), "jobs": rows}

        return await requests.written_answer(found)

    async def _submitted(self, jobs: Sequence[_Job], first: str, rev: int, era: str) -> web.Response:
        """``first``: the first job's uid, of the first call if this request came before."""
        named = [(n, why) for job, why in zip(jobs, await self._unmet(jobs), strict=True) for n in job.names()]
        rows = [
            {"name": name, "uid": uid, "unmet": why}
            for (name, why), uid in zip(named, uids(first, len(named)), strict=True)
        ]
        return web.json_response({"jobs": rows} | await saved(self._view, rev, era), status=201)

    async def _still_there(self, made: Sequence[str]) -> None:
        """Raises ``ApiError`` if none of the jobs that a request submitted is there any more."""
        if not self._view.cluster().jobs.keys().isdisjoint(made):
            return
        try:
            await find_any_job(self._view, made[0])
        except ApiError as error:
            if error.code != "not_found":
                raise
            what = "the job is" if len(made) == 1 else "the jobs are"
            raise ApiError(
                "not_found",
                f"this request was carried out before, and {what} not there any more",
                "submit anew, with another request id",
            ) from None

    async def _unmet(self, jobs: Sequence[_Job]) -> list[str]:
        """Of each job why no known node could run it; a pause after each, which may look at all nodes for each role."""
        found = []
        for job in jobs:
            found.append(never(self._view.cluster(), job.spec))
            await asyncio.sleep(0)
        return found

    def _free(self, names: Collection[str]) -> None:
        """Raises ``ApiError`` if a live job has one of these names."""
        for job in self._view.cluster().jobs.values():
            if job.name in names and job.phase not in TERMINAL:
                raise ApiError(
                    "state",
                    f"a job named {job.name} is live (uid {job.uid}, {job.phase})",
                    f"choose another name; {_NOTHING}",
                )

    def _noted(self, names: Collection[str]) -> None:
        """Raises ``ApiError`` if a job of one of these names has ended and another job has yet to note that end: the
        new job would replace its record."""
        cluster = self._view.cluster()
        for job in cluster.jobs.values():
            if job.name in names and job.phase in TERMINAL and is_awaited(cluster, job):
                raise ApiError(
                    "stopping",
                    f"another job waits for the job named {job.name} (uid {job.uid}, {job.phase}), and has yet to note "
                    "its end",
                    "try again in a moment, or choose another name",
                )

    def _counted(self, who: auth.Caller, jobs: Sequence[_Job]) -> tuple[str, ...]:
        """The queues that count what the caller has, of these admitted jobs."""
        return with_quotas(self._view.cluster(), who, [job.spec for job in jobs])

    async def _admit(self, who: auth.Caller, jobs: Sequence[_Job]) -> None:
        """Sets each job's spec: as the caller may submit it. Raises ``ApiError``."""
        beside: list[tuple[JobSpec, int]] = []
        for job in jobs:
            await asyncio.sleep(0)
            spec = await self._allowed(who, job.asked.spec.model_copy(update={"after": job.ends_of}))
            job.spec = await admitted(self._view.cluster(), who, spec, self._names, job.count, beside)
            beside.append((job.spec, job.count))

    async def _allowed(self, who: auth.Caller, spec: JobSpec) -> JobSpec:
        """The spec with its submitter as this agent sees him. Raises ``ApiError``."""
        if who.remote and spec.user == spec.submitter.user:  # who submits, by the name that he has elsewhere
            spec = spec.model_copy(update={"user": who.name})
        config, node = self._view.config, self._view.node
        limits.within_policy(who, spec, config.limits, node)

        def look() -> None:
            auth.may_submit(who, spec.user, config.jobs)
            limits.may_submit_at_all(who, config.limits, node)

        await self._names.ask((who, spec.user, config.jobs, config.limits), look, f"user {spec.user}")
        if requests.is_live_array(self._view.cluster(), spec.name):  # commands could not tell it from a job
            raise ApiError("state", f"an array named {spec.name!r} has live jobs", f"choose another name; {_NOTHING}")
        if not who.trusted:
            seen_as = {"user": who.name, "uid": who.uid, "gid": who.gid}
            spec = spec.model_copy(update={"submitter": spec.submitter.model_copy(update=seen_as)})
        if problems := check_spec(spec):
            raise ApiError("spec", f"job {spec.name!r} cannot run", f"correct it; {_NOTHING}", problems=problems)
        return spec

    async def _resolve(self, who: auth.Caller, jobs: Sequence[_Job]) -> None:
        """Sets for what each job's ``after`` stands: jobs and arrays of the same request, or known ones. Raises
        ``ApiError``."""
        here = {job.spec.name: job for job in jobs}
        known = dict[str, tuple[JobRecord | None, list[JobRecord]]]()  # each job may name as many
        for job in jobs:
            await asyncio.sleep(0)
            ends_of = []
            for name, need in job.asked.after.items():
                if (other := here.get(name)) is not None:
                    array = 0 if other.indices is None else other.count
                    ends_of.append(After(uid=other.known_as, name=name, need=need, array=array))
                    continue
                if name not in known:
                    known[name] = await self._named(who, name)
                ends_of.append(self._after(job, name, need, *known[name]))
            job.ends_of = tuple(ends_of)

    def _after(self, job: _Job, name: str, need: Need, found: JobRecord | None, members: Sequence[JobRecord]) -> After:
        """What a name stands for, by which this job and the members of this array are found. Raises ``ApiError``."""
        if members and (found is None or found.name != name):
            array_of = members[0].spec.array
            assert array_of is not None
            if need == "ok" and len(members) < array_of.count:
                raise ApiError(
                    "state",
                    f"of array {name} {len(members)} of {array_of.count} jobs are listed: how the others ended is not "
                    f"looked up",
                    f"write {{{name}: any}}, or name jobs; nothing was submitted",
                )
            return After(uid=array_of.id, name=name, need=need, array=array_of.count)
        if found is None or name not in (found.name, found.uid):  # the name is the beginning of another job's uid
            raise unknown("job", name, (j.name for j in self._view.cluster().jobs.values()))
        if found.phase in TERMINAL:
            if need == "ok" and found.phase != "succeeded":
                raise ApiError(
                    "state",
                    f"job {job.spec.name!r} could never run: it comes after {name}, which has {found.phase} "
                    f"(uid {found.uid})",
                    f"write {{{name}: any}}, or leave it out; nothing was submitted",
                )
            job.met.append(found.uid)
        return After(uid=found.uid, name=found.name, need=need)

    async def _named(self, who: auth.Caller, name: str) -> tuple[JobRecord | None, list[JobRecord]]:
        """The job that is found by this name, and the members of the newest array of this name. Raises ``ApiError``
        where there is neither."""
        members = of_array(self._view.cluster(), name, who)
        try:
            return await find_any_job(self._view, name), members
        except ApiError as error:
            if error.code != "not_found" or not members:
                raise
        return None, members

    async def _signed(self, who: auth.Caller, jobs: Sequence[_Job], now: float) -> list[NewJob]:
        """Every member, with its signatures."""
        new: list[NewJob] = []
        for job in jobs:
            for i, uid in enumerate(job.uids):
                if len(new) % SIGNED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                spec = job.spec if job.indices is None else _member(job, i)
                seal, target = self._view.seal, spec.nodes.target
                control = Control(rev=1, target=target, by=who.name, met=tuple(job.met))
                admission = seal.admit(uid, who.uid, spec, now, self._view.node)
                new.append(NewJob(uid=uid, spec=spec, control=seal.control(uid, control), admission=admission))
        return new


def _member(job: _Job, i: int) -> JobSpec:
    """The spec of the member with this index."""
    assert job.indices is not None
    numbers = job.indices.numbers
    array = Array(
        name=job.spec.name, id=job.known_as, index=numbers[i], count=len(numbers), first=numbers[0], last=numbers[-1],
        at_once=job.indices.at_once,
    )  # fmt: skip
    name = jobvalues.member_name(job.spec.name, numbers[i])
    return job.spec.model_copy(update={"name": name, "array": array})

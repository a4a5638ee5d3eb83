"""Several jobs in one request: the jobs of one file, of which all or none are submitted, and the members of an array,
which are stopped or deleted together.

Turns the jobs in a request into jobs to submit: an array becomes its members, and names of other jobs become their
uids. Must never submit only a part: everything is looked up and checked before the one request to the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from aiohttp import web

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, intents, limits, requests
from nodeagent.api.errors import ApiError, unknown
from nodeagent.api.jobwriter import JobWriter, noted
from nodeagent.api.once import as_asked, earlier, once
from nodeagent.api.requests import find_any_job, saved, seen
from nodeagent.model.job import TERMINAL, JobRecord, first_control
from nodeagent.model.jobspec import MOST_JOBS, MOST_MEMBERS, After, Array, JobSpec, Need, Submission, Submitter
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.queueing.room import never
from nodeagent.spec import jobvalues
from nodeagent.spec.errors import CheckError
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import NewJob, QuotaClaims

OVER = ("state", "not_found")
"""How the stop of a job that has ended, and any change of one that is gone, is refused."""
_NOBODY = {"user": "", "uid": 0, "gid": 0, "host": "", "cwd": ""}
"""In the place of a submitter that has been read."""
SIGNED_AT_ONCE = 16
"""Jobs that are signed without a pause: signing a thousand would block the agent's loop for a second."""


@dataclass(slots=True)
class _Job:
    """A job or an array of the batch, before an array is expanded to its members."""

    spec: JobSpec
    after: Mapping[str, Need]
    indices: jobvalues.Indices | None
    uids: Sequence[str]
    """The job's own uid, or the members' uids."""
    met: list[str] = field(default_factory=list)
    ends_of: tuple[After, ...] = ()
    """The jobs that its ``after`` names."""

    @property
    def known_as(self) -> str:
        """The uid, or the array's id, that other jobs' ``after`` uses."""
        return self.uids[0] if self.indices is None else f"array-{self.uids[0]}"

    def names(self) -> list[str]:
        """Names of the job, or of its members. Raises ``CheckError`` if one is no valid name of a job."""
        if self.indices is None:
            return [self.spec.name]
        return [jobvalues.member_name(self.spec.name, i) for i in self.indices.numbers]


def uids(base: str, count: int) -> list[str]:
    """Uids for the jobs of one batch: the same for the same ``base``, which is random."""
    return [hashlib.sha256(f"{base}/{i}".encode()).hexdigest()[:32] for i in range(count)]


def read(asked: Mapping[str, Any], read_spec: Callable[[object], JobSpec]) -> list[Submission]:
    """The jobs in a body: {jobs: [{spec, after?: {NAME: ok|any}, array?: TEXT, begin_in?: SECONDS}], submitter}, in
    which the specs have no submitter. Raises ``ApiError``."""
    jobs, submitter = asked.get("jobs"), asked.get("submitter")
    if not isinstance(jobs, list) or not 1 <= len(jobs) <= MOST_JOBS:
        raise ApiError("usage", f"jobs must be a list of 1 to {MOST_JOBS} jobs", "send {jobs: [{spec: {...}}]}")
    found: list[Submission] = []
    shared: Submitter | None = None
    for job in jobs:
        if not isinstance(job, dict) or not isinstance(job.get("spec"), dict):
            raise ApiError("usage", "a job has no spec", "send {jobs: [{spec: {...}}]}")
        requests.has_only(job, ("spec", "after", "array", "begin_in"), "a job")
        begin_in = requests.seconds(job, "begin_in")
        begins = {} if begin_in is None else {"begin": time.time() + begin_in}
        if shared is None or "submitter" in job["spec"]:
            spec = read_spec({"submitter": submitter, **job["spec"], **begins})
        else:  # the rest of a body may be the submitter: it is read once, not with each job
            spec = read_spec({"submitter": _NOBODY, **job["spec"], **begins}).model_copy(update={"submitter": shared})
        if "submitter" not in job["spec"]:
            shared = spec.submitter
        try:
            after, array = jobvalues.after(job.get("after")), jobvalues.array(job.get("array"))
        except CheckError as error:
            raise ApiError("spec", f"job {spec.name!r} cannot run: {error}", "nothing was submitted") from None
        found.append(Submission(spec, after, array or ""))
    return found


def laid_out(jobs: Sequence[Submission], base: str) -> list[_Job]:
    """The jobs with their uids. Raises ``ApiError`` for duplicate names, too many jobs, jobs that wait for each
    other."""
    found: list[_Job] = []
    names: set[str] = set()
    made, count = uids(base, MOST_MEMBERS), 0
    for job in jobs:
        indices = jobvalues.indices(job.array) if job.array else None
        members = 1 if indices is None else len(indices.numbers)
        one = _Job(job.spec, job.after, indices, made[count : count + members])
        try:
            own = {one.spec.name, *one.names()}
        except CheckError as error:
            raise ApiError("spec", f"array {job.spec.name!r}: {error}", "nothing was submitted") from None
        if twice := names.intersection(own):
            raise ApiError("spec", f"two of the jobs are named {min(twice)!r}", "give each a name of its own")
        names.update(own)
        found.append(one)
        count += members
    if count > MOST_MEMBERS:
        raise ApiError("spec", f"{count} jobs at once, with those of arrays", f"submit at most {MOST_MEMBERS}")
    here = {job.spec.name for job in jobs}
    try:
        TopologicalSorter({job.spec.name: here.intersection(job.after) for job in jobs}).prepare()
    except CycleError as error:
        raise ApiError("spec", f"jobs wait for each other: {', '.join(error.args[1])}", "break the circle") from None
    return found


def of_array(cluster: Cluster, name: str, who: auth.Caller) -> list[JobRecord]:
    """The members, by index, of the newest array of this name in the view: the caller's own, if he has any. Of ended
    jobs other users' new ones take only the names that they have, so the records of two arrays of a name may be there.
    """
    named = [j for j in cluster.jobs.values() if j.spec.array is not None and j.spec.array.name == name]
    if not named:
        return []
    newest = max(
        named, key=lambda job: (job.owner == who.uid, job.phase not in TERMINAL, job.submitted, job.order)
    ).spec.array
    assert newest is not None
    return with_id(cluster, newest.id)


def with_id(cluster: Cluster, array: str) -> list[JobRecord]:
    """The members, by index, of the array with this id."""
    members = [j for j in cluster.jobs.values() if j.spec.array is not None and j.spec.array.id == array]
    return sorted(members, key=lambda job: job.order)


class Batches:
    """The handlers, for one agent's view; ``writer`` checks and changes single jobs."""

    def __init__(self, view: AgentView, writer: JobWriter) -> None:
        self._view, self._writer = view, writer

    def table(self) -> list[web.RouteDef]:
        """The routes of arrays."""
        return [
            web.get("/v1/arrays/{array}", self._show),
            web.post("/v1/arrays/{array}/stop", self._each(intents.stop)),
            web.delete("/v1/arrays/{array}", self._each(intents.delete)),
        ]

    async def submit(self, who: auth.Caller, asked: dict[str, Any], submissions: list[Submission]) -> web.Response:
        """Submits all of them, or none. Raises ``ApiError``."""
        base, as_written = uuid.uuid4().hex, [one.spec for one in submissions]
        figures = [as_asked(one.spec) | {"after": dict(one.after), "array": one.array} for one in submissions]
        one, dry_run = once(requests.request_id(asked), "submit", who.uid, figures), asked.get("dry_run") is True
        jobs = laid_out(submissions, base)
        if not dry_run and (made := await earlier(self._view.store, one)) is not None:
            return await self._submitted(jobs, made.did, self._view.era)  # whatever would refuse it by now
        for job in jobs:
            if job.indices is not None:
                self._free(job.spec.name)
        known = {job.spec.name: job for job in jobs}
        seen: dict[str, tuple[JobRecord | None, list[JobRecord]]] = {}
        for job in jobs:
            await asyncio.sleep(0)
            job.ends_of = tuple(
                [await self._after(who, job, name, need, known, seen) for name, need in job.after.items()]
            )

        quota = limits.quota(who, self._view.config.limits)
        if quota is not None:
            limits.within_quota(who, quota, [(job.spec, len(job.uids)) for job in jobs])

        async def admit() -> list[JobSpec]:
            beside: list[tuple[JobSpec, int]] = []
            for job, written in zip(jobs, as_written, strict=True):
                await asyncio.sleep(0)
                spec = written.model_copy(update={"after": job.ends_of})
                job.spec = await self._writer.admitted(who, spec, len(job.uids), beside)
                beside.append((job.spec, len(job.uids)))
            return [job.spec for job in jobs]

        specs = await admit()
        if dry_run:
            return await self._tried(jobs)
        noted(self._view.cluster(), {name for job in jobs for name in job.names()})
        era, now = self._view.era, time.time()

        async def write(_specs: Sequence[JobSpec], claims: QuotaClaims | None) -> str:
            new = await self._signed(who, jobs, now)
            return await self._view.store.submit_all(
                one.did(base), new, who.uid, now, who.name, one.request, era=self._view.era, quota=quota, claims=claims
            )

        done = await self._writer.written(who, specs, admit, write)
        return await self._submitted(jobs, done.partition(" ")[2], era)

    async def _tried(self, jobs: Sequence[_Job]) -> web.Response:
        """The answer to a dry run. What the jobs' submitter brought stands in it once: a body may be little else, and
        it would be answered 256 times."""
        unmet, shared = await self._unmet(jobs), jobs[0].spec.submitter

        def text() -> bytes:
            rows = [
                {
                    "spec": job.spec.model_dump(exclude={"submitter"} if job.spec.submitter == shared else None),
                    "jobs": len(job.uids),
                    "unmet": why,
                }
                for job, why in zip(jobs, unmet, strict=True)
            ]
            return json.dumps({"dry_run": True, "submitter": shared.model_dump(), "jobs": rows}).encode()

        return web.Response(body=await requests.written(text), content_type="application/json")

    async def _submitted(self, jobs: Sequence[_Job], base: str, era: str) -> web.Response:
        """``base``: that of the first attempt, if this request came before."""
        names = [name for job in jobs for name in job.names()]
        unmet = [why for job, one in zip(jobs, await self._unmet(jobs), strict=True) for why in [one] * len(job.uids)]
        made, records = uids(base, len(names)), self._view.cluster().jobs
        rev = max((records[uid].rev for uid in made if uid in records), default=0)
        of = zip(names, made, unmet, strict=True)
        rows = [{"name": name, "uid": uid, "unmet": why} for name, uid, why in of]
        return web.json_response({"jobs": rows} | await saved(self._view, rev, era), status=201)

    async def _unmet(self, jobs: Sequence[_Job]) -> list[str]:
        """Of each job why no known node could run it; a pause after each, which may look at all nodes for each role."""
        found = []
        for job in jobs:
            found.append(never(self._view.cluster(), job.spec))
            await asyncio.sleep(0)
        return found

    def _free(self, name: str) -> None:
        """Raises ``ApiError`` if a live job has an array's name: commands could not tell them apart."""
        if any(j.name == name and j.phase not in TERMINAL for j in self._view.cluster().jobs.values()):
            raise ApiError("state", f"a job named {name!r} is live", "choose another name; nothing was submitted")

    async def _after(
        self,
        who: auth.Caller,
        job: _Job,
        name: str,
        need: Need,
        known: Mapping[str, _Job],
        seen: dict[str, tuple[JobRecord | None, list[JobRecord]]],
    ) -> After:
        """The job or array that a name stands for: in the same batch, or a known one. ``seen``: what names were found
        to stand for, since each job of a batch may name as many. Raises ``ApiError``."""
        if (other := known.get(name)) is not None:
            array = 0 if other.indices is None else len(other.uids)
            return After(uid=other.known_as, name=name, need=need, array=array)
        if name not in seen:
            seen[name] = await self._named(who, name)
        found, members = seen[name]
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
                seal, control = self._view.seal, first_control(spec, who.name, None)
                control = control.model_copy(update={"met": tuple(job.met)})
                admission = seal.admit(uid, who.uid, spec, now, self._view.node)
                new.append(NewJob(uid=uid, spec=spec, control=seal.control(uid, control), admission=admission))
        return new

    async def _show(self, request: web.Request) -> web.Response:
        """GET /v1/arrays/{array}: the number of its listed jobs in each phase, and the number of ended ones that still
        stop workers. The cost does not grow much with the number of members."""
        members = self._members(request, await auth.caller(request, self._view.config.jobs))
        array = members[0].spec.array
        assert array is not None
        phases = Counter(job.phase for job in members)
        stopping = sum(
            job.phase in TERMINAL and job.generation is not None and bool(job.generation.holders) for job in members
        )
        return web.json_response(array.model_dump(exclude={"index"}) | {"phases": phases, "stopping": stopping})

    def _members(self, request: web.Request, who: auth.Caller) -> list[JobRecord]:
        """The members of the array in the path, which has its id or its name. Raises ``ApiError``."""
        name, cluster = request.match_info["array"], self._view.cluster()
        if members := with_id(cluster, name) or of_array(cluster, name, who):
            return members
        raise unknown("array", name, {j.spec.array.name for j in cluster.jobs.values() if j.spec.array is not None})

    def _each(self, intent: intents.Intent) -> Callable[[web.Request], Any]:
        """A handler that makes the same change to every member that allows it. Members go on meanwhile: one that ends,
        or whose record goes, is passed over."""

        async def handler(request: web.Request) -> web.Response:
            who = await auth.caller(request, self._view.config.jobs)
            name = requests.request_id(await requests.read(request))
            era, members = self._view.era, self._members(request, who)
            await earlier(self._view.store, once(name, intent.__name__, [job.uid for job in members]))
            wanted = [j for j in members if j.phase not in TERMINAL or intent is intents.delete]
            for job in wanted:
                await self._writer.may_change(who, job)
            changed = []
            for job in wanted:
                try:
                    changed.append(await self._writer.change(who, job.uid, job.name, None, intent))
                except (ApiError, StoreRefusedError) as refused:
                    if refused.code not in OVER:
                        raise
            await seen(self._view)
            array = members[0].spec.array
            rows = [{"name": after.name, "uid": after.uid, "changed": new} for after, new in changed]
            disks = await saved(self._view, max((after.rev for after, _ in changed), default=0), era)
            return web.json_response({"id": array and array.id, "jobs": rows} | disks)

        return handler


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

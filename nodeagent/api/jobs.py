"""Jobs over HTTP: list, show, and the changes that operators make (written by ``jobwriter.py``).

A change reads the record, decides the new control, and writes it under the revision it read. Must never write what was
decided on a record that has changed since.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, intents, limits, requests
from nodeagent.api.accounting import job_use
from nodeagent.api.admission import may_grow, with_quotas
from nodeagent.api.auth import DATABASE, UserDatabase
from nodeagent.api.errors import ApiError
from nodeagent.api.jobdetail import (
    AuditTail,
    alone_json,
    failing_node,
    generations,
    policies_due,
    setbacks_json,
    start_json,
    waits,
    way_out,
)
from nodeagent.api.jobpods import workers_time
from nodeagent.api.jobwriter import JobWriter, anew
from nodeagent.api.limits import JobSizes, owner_json, spec_bytes
from nodeagent.api.once import earlier, once
from nodeagent.api.published import cuts_in, published, published_of
from nodeagent.api.requests import WRITE_TRIES, find_any_job, saved, seen
from nodeagent.api.serializers import Json, budget_json, items, job_json, lent_json, planned_json, shown_to, unread_json
from nodeagent.api.throttle import Throttle
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.pod import PodState
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.failure.blame import describe_cut
from nodeagent.plan.failure.hang import watching
from nodeagent.plan.placing.topology import placed_text, placement_asked
from nodeagent.plan.queueing.queue import places
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.client import MOST_JOBS
from nodeagent.store.messages import QuotaClaims

PAGE = 100
"""Jobs of the history in one answer at most."""
SLICE = 0.02
"""Seconds that the plan is asked about one job after the other without a pause: the agent's loop waits no longer."""
_PLACE = re.compile(r"(?=\S{1,40} )-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)? [0-9A-Za-z._-]{1,64}")
"""A number as the store writes it, and a uid. What the store cannot read counts as its failure."""


class JobRoutes:
    """The handlers, over one agent's view."""

    def __init__(self, view: AgentView, throttle: Throttle, names: UserDatabase = DATABASE) -> None:
        self.view = view
        self._throttle, self.sizes, self._names = throttle, JobSizes(MOST_JOBS, spec_bytes), names
        self._audit = AuditTail(view)
        self._writer = JobWriter(view, names)

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        change = "/v1/jobs/{job}/"
        return [
            web.get("/v1/jobs", self.index),
            web.get("/v1/history", self.history),
            web.get("/v1/jobs/{job}", self.show),
            web.delete("/v1/jobs/{job}", self.delete),
            web.post(change + "scale", self._scale("scale")),
            web.post(change + "scaleout", self._scale("scaleout")),
            web.post(change + "scalein", self._scale("scalein")),
            web.post(change + "pause", self._simple(intents.pause)),
            web.post(change + "resume", self._simple(intents.resume)),
            web.post(change + "restart", self._simple(intents.restart)),
            web.post(change + "stop", self._simple(intents.stop)),
        ]

    async def _json(self, job: JobRecord) -> Json:
        pods, answered = await published(self.view, job, True)
        await self._names.learn([job.owner])
        return self._row(job, self.view.cluster(), pods, answered)

    def _row(self, job: JobRecord, cluster: Cluster, pods: dict[str, PodState], answered: bool) -> Json:
        health = self.view.health()
        planned = self._planned(job, cluster, places(cluster), health.store_waits)
        lent = lent_json(workers_time(job, self.view.node, health, self.view.pods().get(job.uid)))
        row = job_json(job, cluster, pods, time.time(), not answered, self._names.shown, planned)
        return row | {"lent": lent} | planned

    def _planned(self, job: JobRecord, cluster: Cluster, line: Mapping[str, int], store_waits: str) -> Json:
        """What is known of a job only in the loop's thread: ``planned_json``, and why it waits."""
        return planned_json(job, cluster, line) | waits(self.view, job, cluster, line, store_waits)

    async def index(self, request: web.Request) -> web.Response:
        """GET /v1/jobs: in the order of submission."""
        who = await auth.caller(request, self.view.config.jobs)
        cluster = self.view.cluster()
        await self._names.learn(job.owner for job in cluster.jobs.values())
        pods, answered = await published_of(self.view, cluster.jobs.values())
        planned = await self._planned_all(cluster)
        node, health, here, now = self.view.node, self.view.health(), self.view.pods(), time.time()

        def row(job: JobRecord) -> Json:
            lent, plan = lent_json(workers_time(job, node, health, here.get(job.uid))), planned[job.uid]
            found = job_json(job, cluster, pods[job.uid], now, not answered, self._names.shown, plan)
            return shown_to(found | {"lent": lent} | plan, seen=auth.may_see(who, job))

        def found() -> Json:
            rows = map(row, sorted(cluster.jobs.values(), key=lambda j: (j.order, j.submitted)))
            return items([*rows], store_away_since=health.store_away_since)

        return await requests.written_answer(found)

    async def _planned_all(self, cluster: Cluster) -> dict[str, Json]:
        """``_planned`` of every job, by uid. The line is the one of ``cluster``, looked up once: by a later slice the
        loop may keep what belongs to a newer view, and would line all jobs up anew for this one."""
        line, store_waits, found = places(cluster), self.view.health().store_waits, dict[str, Json]()
        slice_began = time.monotonic()
        for job in cluster.jobs.values():
            if time.monotonic() - slice_began > SLICE:
                await asyncio.sleep(0)  # a beat or a recovery that is due goes first
                slice_began = time.monotonic()
            found[job.uid] = self._planned(job, cluster, line, store_waits)
        return found

    @requests.takes("after", "limit")
    async def history(self, request: web.Request) -> web.Response:
        """GET /v1/history?after&limit: ended jobs that ``index`` does not list any more, the oldest end first, and
        apart from them those whose record cannot be read. Where there may be more, ``next`` is the ``after`` of the
        next page."""
        who = await auth.caller(request, self.view.config.jobs)
        cluster, limit = self.view.cluster(), min(requests.number(request, "limit") or PAGE, PAGE)
        after = request.query.get("after", "")
        if after and not _PLACE.fullmatch(after):
            raise ApiError(
                "usage", f"after={after[:64]!r} is no place in the history", "take the next of the page before"
            )
        found = await self.view.store.history(after, limit)
        await self._names.learn(job.owner for job in found.jobs)
        rows = [shown_to(self._row(job, cluster, {}, True), seen=auth.may_see(who, job)) for job in found.jobs]
        return web.json_response(items(rows, unread=unread_json(found.unread), next=found.place))

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/jobs/{job}: with the reasons, the generations, the budget and the spec."""
        who = await auth.caller(request, self.view.config.jobs)
        cluster = self.view.cluster()
        job = await find_any_job(self.view, request.match_info["job"])
        events = await self._audit.read()
        reports = job.last_reports
        if job.generation is not None and any(r.state != "running" for r in job.generation.reports.values()):
            reports = job.generation.reports
        store_waits = "" if job.phase in TERMINAL else self.view.health().store_waits
        pods, answered = await published(self.view, job, events is not None)
        await self._names.learn([job.owner])
        unreachable = [describe_cut(cut, time.time()) for cut in cuts_in(self.view, job, pods)]
        detail = self._row(job, cluster, pods, answered) | {
            "why": [*([store_waits] if store_waits else []), *unreachable, *self.view.explain(job.uid)],
            "unreachable": unreachable,
            "store_waits": store_waits,
            "refused": job.uid in cluster.refused,
            "failing_node": failing_node(job, cluster),
            "way_out": way_out(job, cluster),
            "policies_due": policies_due(job, cluster),
            "setbacks": setbacks_json(job, cluster),
            "no_progress": watching(job.generation) if job.generation is not None and job.phase == "running" else "",
            "budget": budget_json(job, cluster),
            "usage": job_use(job, cluster, time.time()),
            "generations": generations(job, events or ()),
            "reports": {node: r.model_dump() for node, r in reports.items()},
            "alone": alone_json(job),
            "outside": {} if job.generation is None else dict(job.generation.outside),
            "hold_timeout": job.spec.hold_timeout,
            "store_away_since": self.view.health().store_away_since,
            "placement": {"asks": placement_asked(job.spec), "placed": placed_text(cluster, job)},
            "limits": await owner_json(self.view, self._throttle, self.sizes, self._names, job),
            "spec": job.spec.model_dump(),
        }
        detail |= start_json(job, cluster, time.time())
        return web.json_response(shown_to(detail, seen=auth.may_see(who, job)))

    def _scale(self, verb: intents.Verb) -> Callable[[web.Request], Any]:
        """POST .../scale {target}, .../scaleout {count}, .../scalein {count | nodes}; {timeout?, request_id}."""

        async def handler(request: web.Request) -> web.Response:
            asked = await requests.read(request, *intents.FIELDS[verb])
            return await self._change_size(request, intents.read_scale(verb, asked, requests.request_id(asked)))

        return handler

    async def _change_size(self, request: web.Request, asked: intents.Asked) -> web.Response:
        """As ``_change``; but a count is a delta, so what was done before is looked up before anything is decided."""
        who = await auth.caller(request, self.view.config.jobs)
        ref = request.match_info["job"]
        found = await find_any_job(self.view, ref)
        uid = found.uid
        if uid not in self.view.cluster().jobs:
            await self._writer.may_change(who, found)
            intents.scale(asked, found, self.view.cluster().served)  # says that it has ended
        for _ in range(WRITE_TRIES):
            await self.view.refresh()  # the deadline is in served time: an old view of it could be past already
            job, era = self._writer.known(uid, ref), self.view.era
            await self._writer.may_change(who, job)
            base = self._writer.foundation(job)  # before anything else is read: the verdict is of this very record
            one = asked.of(job)
            if (made := await earlier(self.view.store, one)) is not None:
                disks = await saved(self.view, made.rev, era)
                return web.json_response(await self._json(job) | disks | intents.repeated(asked, made.did))
            change = intents.scale(asked, base, self.view.cluster().served) or anew(job, base)
            new, claims = None if change is None else self._writer.signed(base, change, who), None
            if new is not None and base.spec.several and new.target > base.control.target:
                sized = base.spec.of_sizes(new.sizes)
                limits.few_enough_nodes(who, sized, self.view.config.limits, self.view.node, "nothing was changed")
                may_grow(self.view.cluster(), who, sized)
                queues = with_quotas(self.view.cluster(), who, [sized])
                claims = QuotaClaims(queues=queues, read=self.view.rev) if queues else None
            done = asked.done(base, new or base.control)
            event, text = ("", "") if change is None else (change.event, f"{change.text} (by {who.name})")
            try:
                after = await self.view.store.control(
                    uid, job.control.rev, new, asked.request, event, text, one.did(done.text), claims
                )
            except StoreRefusedError as refused:
                if refused.code != "stale":
                    raise
                continue
            if after.control == (new or job.control):
                await seen(self.view)
                more = done.reply(changed=new is not None) | await saved(self.view, after.rev, era)
                return web.json_response(await self._json(after) | more)
        raise ApiError(
            "state",
            f"others changed job {ref!r} each time this was tried; nothing was changed",
            "look, then ask again: nodeagentctl get",
        )

    def _simple(self, intent: intents.Intent) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.Response:
            return await self._change(request, await requests.read(request), intent)

        return handler

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/jobs/{job} {request_id}: a live job is stopped first."""
        return await self._change(request, await requests.read(request), intents.delete)

    async def _change(self, request: web.Request, asked: dict[str, Any], intent: intents.Intent) -> web.Response:
        who = await auth.caller(request, self.view.config.jobs)
        name = requests.request_id(asked)
        ref = request.match_info["job"]
        found = await find_any_job(self.view, ref)
        uid = found.uid
        await self._writer.may_change(who, found)
        one, era = once(name, intent.__name__, uid), self.view.era
        if (made := await earlier(self.view.store, one)) is not None:
            await seen(self.view)
            after = await find_any_job(self.view, uid)
            disks = await saved(self.view, made.rev, era)
            return web.json_response(await self._json(after) | disks | {"changed": False, "repeated": True})
        if uid not in self.view.cluster().jobs:
            return await self._change_past(who, found, intent)
        after, changed = await self._writer.change(who, uid, ref, one, intent)
        if changed:
            await seen(self.view)
        disks = await saved(self.view, after.rev, era)
        return web.json_response(await self._json(after) | disks | {"changed": changed})

    async def _change_past(self, who: auth.Caller, job: JobRecord, intent: intents.Intent) -> web.Response:
        """Of a job of the history: it can be deleted, and nothing else."""
        if intent is not intents.delete:
            intent(job)  # says that it has ended
        await self.view.store.remove(job.uid, who.name)
        return web.json_response(await self._json(job) | {"changed": True})

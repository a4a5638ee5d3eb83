"""Arrays over HTTP: jobs that were submitted as one, and are looked at, stopped and deleted as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, intents, requests
from nodeagent.api.auth import DATABASE, UserDatabase
from nodeagent.api.errors import ApiError, unknown
from nodeagent.api.jobwriter import JobWriter
from nodeagent.api.once import earlier, once
from nodeagent.api.requests import saved, seen
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.store.base import StoreRefusedError

OVER = ("state", "not_found")
"""How the stop of a job that has ended, and any change of one that is gone, is refused."""


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


class ArrayRoutes:
    """The handlers, over one agent's view."""

    def __init__(self, view: AgentView, names: UserDatabase = DATABASE) -> None:
        self._view, self._writer = view, JobWriter(view, names)

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        return [
            web.get("/v1/arrays/{array}", self._show),
            web.post("/v1/arrays/{array}/stop", self._each(intents.stop)),
            web.delete("/v1/arrays/{array}", self._each(intents.delete)),
        ]

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

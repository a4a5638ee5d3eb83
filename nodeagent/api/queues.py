"""Queues over HTTP: list, show, and operators' changes of the tree. The whole tree is read, changed and written under
the revision that was read: of two simultaneous changes, the second is made on top of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, requests
from nodeagent.api.admission import live_jobs
from nodeagent.api.auth import DATABASE, UserDatabase
from nodeagent.api.errors import ApiError, unknown
from nodeagent.api.once import earlier, once
from nodeagent.api.requests import saved, seen, write_again
from nodeagent.api.serializers import Json, items
from nodeagent.model.job import JobRecord
from nodeagent.model.queue import DEFAULT_QUEUE, Queue, Queues
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import QueueShare, holdings, overbooked, standings
from nodeagent.plan.fairshare.resources import NOTHING, used
from nodeagent.plan.queueing.elastic import making_room
from nodeagent.plan.queueing.queue import places
from nodeagent.spec.errors import SpecError
from nodeagent.spec.queuefile import changed_queue, tree_mistakes, whole_tree, with_queue, without_queue

_UNCHANGED = "nothing was changed"

QueuesChange = Callable[[Cluster], tuple[Queues, str]]
"""From the view: the new tree, and a sentence for the event log."""


class QueueRoutes:
    """The handlers, for one agent's view."""

    def __init__(self, view: AgentView, names: UserDatabase = DATABASE) -> None:
        self.view, self._names = view, names

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        one = "/v1/queues/{queue}"
        return [
            web.get("/v1/queues", self.index),
            web.put("/v1/queues", self.apply),
            web.get(one, self.show),
            web.post(one + "/create", self.create),
            web.post(one + "/set", self.set),
            web.post(one + "/open", self.open),
            web.post(one + "/close", self.close),
            web.delete(one, self.delete),
        ]

    async def index(self, _request: web.Request) -> web.Response:
        """GET /v1/queues: parents before their children."""
        cluster = self.view.cluster()
        rows = [queue_json(cluster, one) for one in standings(cluster).values()]
        away = self.view.health().store_away_since
        return web.json_response(items(rows, rev=cluster.queues.rev, store_away_since=away))

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/queues/{queue}: with its jobs, in their order, and its users."""
        cluster = self.view.cluster()
        found = _find(cluster, request.match_info["queue"])
        jobs = live_jobs(cluster, found.name)
        await self._names.learn(job.owner for job in jobs)
        row = queue_json(cluster, standings(cluster)[found.name])
        away = self.view.health().store_away_since
        return web.json_response(
            row | {"work": self._work(cluster, jobs), "by_user": self._users(cluster, found), "store_away_since": away}
        )

    def _work(self, cluster: Cluster, jobs: Iterable[JobRecord]) -> list[Json]:
        line, held = places(cluster), used(cluster)
        rows = [
            {
                "name": job.name,
                "owner": self._names.shown(job.owner),
                "phase": job.phase,
                "used": held.get(job.uid, NOTHING)._asdict(),
                "place": line.get(job.uid),
                "reason": self._why(cluster, job) if job.uid in line else job.reason,
            }
            for job in jobs
        ]
        return sorted(rows, key=lambda row: (row["place"] or 0, row["name"]))

    def _why(self, cluster: Cluster, job: JobRecord) -> str:
        room = making_room(cluster, job)
        return "; ".join((*self.view.why(job.uid), *((room,) if room else ())))

    def _users(self, cluster: Cluster, queue: Queue) -> list[Json]:
        found = [(owner, use) for (name, owner), use in holdings(cluster).by_user.items() if name == queue.name]
        return [{"user": self._names.shown(owner), "used": use._asdict()} for owner, use in sorted(found)]

    async def create(self, request: web.Request) -> web.Response:
        """POST .../create {settings, request_id, dry_run?}: settings are KEY=VALUE."""
        name, asked = request.match_info["queue"], await requests.read(request, "settings", "dry_run")
        settings = _settings(asked)

        def change(cluster: Cluster) -> tuple[Queues, str]:
            tree = cluster.queues
            if name in tree.by_name:
                raise ApiError(
                    "state",
                    f"there is a queue {name!r}",
                    f"change it: nodeagentctl queue set {name} KEY=VALUE; {_UNCHANGED}",
                )
            return with_queue(tree, _changed(name, None, settings)), f"queue {name} created"

        return await self._write(request, asked, ("create", name, settings), change)

    async def set(self, request: web.Request) -> web.Response:
        """POST .../set {settings, request_id, dry_run?}: an empty value restores the default."""
        name, asked = request.match_info["queue"], await requests.read(request, "settings", "dry_run")
        settings = _settings(asked)
        if not settings:
            raise ApiError("usage", "nothing to set", "give KEY=VALUE, such as weight=2")

        def change(cluster: Cluster) -> tuple[Queues, str]:
            before = _find(cluster, name)
            return with_queue(cluster.queues, _changed(name, before, settings)), f"queue {name}: {', '.join(settings)}"

        return await self._write(request, asked, ("set", name, settings), change)

    async def open(self, request: web.Request) -> web.Response:
        """POST .../open {request_id}: the queue takes jobs again."""
        return await self._turn(request, "state=open", "opened")

    async def close(self, request: web.Request) -> web.Response:
        """POST .../close {request_id}: the queue takes no new jobs; its jobs continue."""
        return await self._turn(request, "state=closed", "closed")

    async def _turn(self, request: web.Request, setting: str, done: str) -> web.Response:
        name, asked = request.match_info["queue"], await requests.read(request, "dry_run")

        def change(cluster: Cluster) -> tuple[Queues, str]:
            before = _find(cluster, name)
            return with_queue(cluster.queues, _changed(name, before, (setting,))), f"queue {name} {done}"

        return await self._write(request, asked, (setting, name), change)

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/queues/{queue} {request_id}: only a queue without children and live jobs."""
        name, asked = request.match_info["queue"], await requests.read(request, "dry_run")

        def change(cluster: Cluster) -> tuple[Queues, str]:
            _find(cluster, name)
            if name == DEFAULT_QUEUE:
                raise ApiError(
                    "state", f"queue {name!r} always exists", f"close it: nodeagentctl queue close {name}; {_UNCHANGED}"
                )
            if below := cluster.queues.children.get(name, ()):
                raise ApiError(
                    "state",
                    f"queue {name!r} has queues below it ({', '.join(below)})",
                    f"delete these first; {_UNCHANGED}",
                )
            return without_queue(cluster.queues, name), f"queue {name} deleted"

        return await self._write(request, asked, ("delete", name), change)

    async def apply(self, request: web.Request) -> web.Response:
        """PUT /v1/queues {queues, request_id, dry_run?}: replaces the whole tree, all or nothing."""
        asked = await requests.read(request, "queues", "dry_run")
        queues = _read_queues(asked.get("queues"))

        def change(cluster: Cluster) -> tuple[Queues, str]:
            return whole_tree(cluster.queues, queues), "the queues were replaced by those of a file"

        return await self._write(request, asked, ("apply", asked["queues"]), change)

    async def _write(
        self, request: web.Request, asked: dict[str, Any], figures: tuple[object, ...], change: QueuesChange
    ) -> web.Response:
        """``figures``: what makes it this change and no other."""
        who = await auth.caller(request, self.view.config.jobs)
        auth.may_change_queues(who)
        one, dry_run = once(requests.request_id(asked), "queue", *figures), asked.get("dry_run") is True
        if (made := await earlier(self.view.store, one)) is not None:
            found = {"changed": False, "changes": [], "dry_run": dry_run, "warning": ""}
            return web.json_response(found | await saved(self.view, made.rev, self.view.era))

        async def attempt() -> tuple[Json, int | None, str]:
            cluster, era = self.view.cluster(), self.view.era
            before = cluster.queues
            after, text = change(cluster)
            _check(cluster, after)
            changes = _differences(before, after)
            found: Json = {"changed": bool(changes), "changes": changes, "dry_run": dry_run}
            new = [one for one in overbooked(cluster, after) if one not in overbooked(cluster, before)]
            found["warning"] = "; ".join(new)
            if dry_run or not changes:
                return found, None, era
            rev = max(before.rev, cluster.queues_rev) + 1
            tree = self.view.seal.queues(after.model_copy(update={"rev": rev, "by": who.name}))
            text = f"{text} (by {who.name})"
            record = await self.view.store.queues(cluster.queues_rev, tree, one.request, text, one.did())
            return found, record.rev, era

        found, rev, era = await write_again(self.view, attempt)
        if rev is None:
            return web.json_response(found)
        await seen(self.view)
        return web.json_response(found | await saved(self.view, rev, era))


def queue_json(cluster: Cluster, one: QueueShare) -> Json:
    """One queue: its keys, and its present use. ``share`` is the largest part of any one resource that it uses;
    ``entitled`` its part by weight if all queues want theirs; ``depth`` 0 is the top; ``runs_at_least`` the
    ``min_runtime`` that holds for its jobs, its own or one from above it."""
    queue = one.queue
    return {"name": queue.name, **queue.model_dump(mode="json")} | {
        "used": one.use._asdict(),
        "share": round(one.share, 4),
        "entitled": round(one.entitled, 4),
        "runs_at_least": cluster.queues.min_runtime(queue.name),
        "jobs": one.jobs,
        "waiting": one.waiting,
        "children": list(cluster.queues.children.get(queue.name, ())),
        "depth": len([*cluster.queues.path(queue.name)]) - 1,
    }


def _find(cluster: Cluster, name: str) -> Queue:
    tree = cluster.queues.by_name
    if name not in tree:
        raise unknown("queue", name, tree)
    return tree[name]


def _settings(asked: dict[str, Any]) -> tuple[str, ...]:
    value = asked.get("settings", [])
    if not isinstance(value, list) or not all(isinstance(one, str) and len(one) <= 10_000 for one in value):
        raise ApiError("usage", "settings must be a list of texts", 'send {settings: ["weight=2", ...]}')
    return tuple(value)


def _changed(name: str, before: Queue | None, settings: Sequence[str]) -> Queue:
    try:
        return changed_queue(name, before, settings)
    except SpecError as error:
        raise ApiError(
            "spec", f"queue {name!r} cannot have these settings", _UNCHANGED, problems=str(error).splitlines()
        ) from None


def _read_queues(value: object) -> tuple[Queue, ...]:
    if not isinstance(value, list):
        raise ApiError("usage", "queues must be a list", "send {queues: [{name: ..., ...}, ...]}")
    try:
        return tuple(Queue.model_validate(one) for one in value)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ApiError("spec", "a queue cannot be read", _UNCHANGED, problems=lines) from None


def _check(cluster: Cluster, after: Queues) -> None:
    """Raises ``ApiError`` if the tree is not valid, or if jobs would lose their queue."""
    problems = [str(mistake) for mistake in tree_mistakes(after)]
    for name in cluster.queues.by_name:
        jobs = [job.name for job in live_jobs(cluster, name)]
        some = ", ".join(jobs[:3]) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
        if jobs and name not in after.by_name:
            problems.append(f"queue {name}: it has live jobs ({some}): close it, and delete it when they have ended")
        elif jobs and name in after.children:
            below = ", ".join(after.children[name])
            problems.append(f"queue {name}: it has live jobs ({some}), so it can have no children ({below})")
    if problems:
        raise ApiError("state", "this tree of queues is not possible", _UNCHANGED, problems=problems)


def _differences(before: Queues, after: Queues) -> list[Json]:
    """Each queue that changed, by name."""
    rows = []
    for name in sorted({*before.by_name, *after.by_name}):
        old, new = before.by_name.get(name), after.by_name.get(name)
        if old != new:
            change = "created" if old is None else "deleted" if new is None else "changed"
            keys = []
            if old is not None and new is not None:
                keys = [key for key in Queue.model_fields if getattr(old, key) != getattr(new, key)]
            rows.append({"name": name, "change": change, "keys": keys})
    return rows

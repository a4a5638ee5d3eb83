"""Nodes over HTTP: list, show, cordon, uncordon, drain, forget."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, requests
from nodeagent.api.errors import ApiError
from nodeagent.api.jobdetail import node_setbacks
from nodeagent.api.once import earlier, once
from nodeagent.api.published import cuts_of
from nodeagent.api.requests import find_node, saved, seen
from nodeagent.api.serializers import Json, items, node_json
from nodeagent.model.node import Cordon, Incarnation, NodeFacts, NodeRecord
from nodeagent.plan.failure.blame import describe_cut
from nodeagent.plan.nodes.availability import BY as WINDOW
from nodeagent.plan.nodes.work import work_on

PAGE = 500
"""The most nodes in one answer of the list: about a megabyte."""


class NodeRoutes:
    """The handlers, for one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self.view = view

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        return [
            web.get("/v1/nodes", self.index),
            web.get("/v1/nodes/{node}", self.show),
            web.post("/v1/nodes/{node}/cordon", self.cordon),
            web.post("/v1/nodes/{node}/uncordon", self.uncordon),
            web.post("/v1/nodes/{node}/drain", self.drain),
            web.post("/v1/nodes/{node}/forget", self.forget),
        ]

    @requests.takes("after", "limit")
    async def index(self, request: web.Request) -> web.Response:
        """GET /v1/nodes?after&limit: by name, those after this one. ``next`` is the ``after`` of the next page, and
        empty where there is none."""
        cluster, now = self.view.cluster(), time.time()
        room, after = min(requests.number(request, "limit") or PAGE, PAGE), request.query.get("after", "")
        away = self.view.health().store_away_since

        def found() -> Json:
            work, names = work_on(cluster), sorted(name for name in cluster.nodes if name > after)
            rows = [node_json(cluster.nodes[name], cluster, now, work) for name in names[:room]]
            more = names[room - 1] if len(names) > room else ""
            return items(rows, store_away_since=away, next=more)

        return await requests.written_answer(found)

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/nodes/{node}."""
        cluster = self.view.cluster()
        node, now = find_node(cluster, request.match_info["node"]), time.time()
        here = [
            job for job in cluster.jobs.values() if job.generation is not None and node.id in job.generation.members
        ]
        cuts = await cuts_of(self.view, here)
        lost = [
            f"job {name}: {describe_cut(cut, now)}"
            for name, pairs in sorted(cuts.items())
            for cut in pairs
            if node.id in (cut.node, cut.other)
        ]
        away = self.view.health().store_away_since
        more = {"unreachable": lost, "setbacks": node_setbacks(node.id, cluster), "store_away_since": away}
        return web.json_response(node_json(node, cluster, now) | more)

    async def cordon(self, request: web.Request) -> web.Response:
        """POST .../cordon {reason, request_id}: no new work. A draining node becomes only cordoned."""
        return await self._set(request, drain=False)

    async def drain(self, request: web.Request) -> web.Response:
        """POST .../drain {reason, request_id}: no new work, and running work moves away."""
        return await self._set(request, drain=True)

    async def uncordon(self, request: web.Request) -> web.Response:
        """POST .../uncordon {request_id}: the node takes work again, unless a maintenance window is open."""
        node = find_node(self.view.cluster(), request.match_info["node"])
        if node.window is not None and node.cordon is not None and node.cordon.by == WINDOW:
            raise ApiError(
                "state",
                f"node {node.id} is {node.window.text}, and not cordoned",
                f"end the window: nodeagentctl reserve delete {node.window.window}",
            )
        return await self._write(request, await requests.read(request), None)

    async def forget(self, request: web.Request) -> web.Response:
        """POST .../forget {request_id}: the caller confirms that the node, whose lease has lapsed, is permanently down.
        If the node left, or is already lost, its record is removed: ``removed``."""
        asked, name = await requests.read(request), request.match_info["node"]
        one = once(requests.request_id(asked), "forget", name)
        who = await self._who(request, name)
        if await earlier(self.view.store, one) is None:
            find_node(self.view.cluster(), name)
        era = self.view.era
        forgotten = await self.view.store.forget(name, who.name, one.request, one.did())
        node = forgotten.node or _only_named(name)
        return await self._written(node.model_copy(update={"rev": forgotten.rev}), era, removed=forgotten.removed)

    async def _set(self, request: web.Request, drain: bool) -> web.Response:
        asked = await requests.read(request, "reason")
        reason = requests.text(asked, "reason").strip()
        if not reason:
            raise ApiError("usage", "a reason is missing", "say why: --reason TEXT (it is shown to everybody)")
        return await self._write(request, asked, (reason, drain))

    async def _write(self, request: web.Request, asked: dict[str, Any], want: tuple[str, bool] | None) -> web.Response:
        node, who = await self._may(request)
        verb = "uncordon" if want is None else "drain" if want[1] else "cordon"
        one = once(requests.request_id(asked), verb, node.id, "" if want is None else want[0])
        await earlier(self.view.store, one)
        cordon = None if want is None else Cordon(reason=want[0], by=who.name, at=time.time(), drain=want[1])
        era = self.view.era
        written = await self.view.store.cordon(node.id, cordon, one.request, one.did(), by=who.name)
        return await self._written(written, era)

    async def _may(self, request: web.Request) -> tuple[NodeRecord, auth.Caller]:
        """The node in the path, and the caller, who may change it."""
        node = find_node(self.view.cluster(), request.match_info["node"])
        return node, await self._who(request, node.id)

    async def _who(self, request: web.Request, node: str) -> auth.Caller:
        """The caller, who may change this node."""
        who = await auth.caller(request, self.view.config.jobs)
        auth.may_change_nodes(who, node)
        return who

    async def _written(self, record: NodeRecord, era: str, **more: bool) -> web.Response:
        await seen(self.view)
        disks = await saved(self.view, record.rev, era)
        return web.json_response(node_json(record, self.view.cluster(), time.time()) | disks | more)


def _only_named(node: str) -> NodeRecord:
    """Stands for a record that the same request removed before: only its name is known."""
    facts = NodeFacts(
        address="", hostname="", boot_id="", agent_pid=0, agent_version="", started=time.time(), cpu_slots=0
    )
    return NodeRecord(id=node, incarnation=Incarnation(life="", start=1), lost=True, joined=0, facts=facts)

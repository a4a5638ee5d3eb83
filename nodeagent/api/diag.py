"""Checks by work over HTTP: start them on this agent's own node, and see how far they are; those of another node are
its own agent's. Must never judge."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from nodeagent.agent.diagnosis import Diagnosis
from nodeagent.api import auth, requests
from nodeagent.api.care import known_gpu
from nodeagent.api.errors import ApiError
from nodeagent.api.forward import elsewhere
from nodeagent.api.requests import find_node
from nodeagent.api.view import AgentView
from nodeagent.plan.bookings import booked, used_devices


class DiagRoutes:
    """The handlers, over one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self.view = view

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        path = "/v1/nodes/{node}/diag"
        return [web.get(path, self.show), web.post(path, self.start)]

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/nodes/{node}/diag: how far the newest run is, and its report once it has ended."""
        node = find_node(self.view.cluster(), request.match_info["node"])
        if (answer := await elsewhere(self.view, node, request)) is not None:
            return answer
        return web.json_response(self._state())

    async def start(self, request: web.Request) -> web.Response:
        """POST /v1/nodes/{node}/diag {gpu, busy, request_id}: begin a run; GPUs in use only with ``busy``."""
        asked = await requests.read(request)
        name = requests.request_id(asked)
        node = find_node(self.view.cluster(), request.match_info["node"])
        auth.may_change_nodes(await auth.caller(request, self.view.config.jobs), node.id)
        if (answer := await elsewhere(self.view, node, request, asked)) is not None:
            return answer
        diagnosis = self._diagnosis
        gpu, busy = requests.text(asked, "gpu"), asked.get("busy") is True
        if diagnosis.request == name:
            return web.json_response(self._state())
        if diagnosis.running:
            raise ApiError("state", f"node {node.id} is being checked already", "ask again when that has ended")
        cluster = self.view.cluster()
        gpus = [known_gpu(node, gpu)] if gpu else [one.uuid for one in node.facts.gpus]
        used = used_devices(booked(cluster), node.id, by_others_than="")
        taken = sorted(used.intersection(gpus) if gpus else used)
        if taken and not busy:
            what = f"{len(taken)} of its GPUs are" if gpus else "it is"
            raise ApiError(
                "state",
                f"node {node.id} is not checked: {what} in use by a job ({', '.join(taken[:4])})",
                "drain it first, choose a GPU with --gpu, or check it all the same with --busy (it slows the job down)",
            )
        others = [record for record in cluster.nodes.values() if record.id != node.id]
        diagnosis.start(gpus, taken, "check" if busy else "refuse", others, name, whole=not gpu)
        return web.json_response(self._state())

    @property
    def _diagnosis(self) -> Diagnosis:
        found = self.view.diagnosis
        assert found is not None, "every agent that serves has one"
        return found

    def _state(self) -> dict[str, Any]:
        diagnosis = self._diagnosis
        ran = diagnosis.report is not None
        return {
            "name": self.view.node,
            "state": "running" if diagnosis.running else "done" if ran else "none",
            "step": diagnosis.step,
            "began": diagnosis.began,
            "ended": diagnosis.ended,
            "report": diagnosis.report,
        }

"""The health of nodes over HTTP: the rules in force, an operator's confirmation of a repair, drills, and checks by
work.

Changes of a node's health are forwarded to that node's own agent, which alone stores them. Must never judge.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from nodeagent import hardware_missing
from nodeagent.agent.diagnosis import Diagnosis
from nodeagent.agent.view import AgentView
from nodeagent.api import auth, requests
from nodeagent.api.errors import ApiError, unknown
from nodeagent.api.forward import elsewhere
from nodeagent.api.once import once, same
from nodeagent.api.requests import find_node
from nodeagent.api.serializers import items, verdict_json
from nodeagent.model.node import NodeRecord
from nodeagent.plan.nodes.devices import booked, used_devices
from nodeagent.store.messages import Answer

if TYPE_CHECKING:
    from nodeagent.agent.health import NodeHealth

MOST_XID = 9999


class NodeHealthRoutes:
    """The handlers, for one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self.view = view

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        return [
            web.get("/v1/health/rules", self.rules),
            web.post("/v1/nodes/{node}/health/ack", self.acknowledge),
            web.post("/v1/nodes/{node}/health/inject", self.inject),
        ]

    async def rules(self, _request: web.Request) -> web.Response:
        """GET /v1/health/rules: the table in force on this node."""
        must_have_hardware()
        from nodeagent.hardware.judging.judge import rules

        policy = self.view.node_health.policy if self.view.node_health is not None else None
        rows = []
        declared = self.view.node_health.monitor.declared if self.view.node_health is not None else {}
        for rule in (*rules(), *declared.values()):
            mode = "off" if policy is None or rule.id in policy.off else "on"
            rows.append(
                {
                    "name": rule.id,
                    "severity": rule.severity,
                    "action": rule.action,
                    "heals": rule.heals,
                    "after": rule.after,
                    "mode": "dry run" if policy is not None and rule.id in policy.dry_run else mode,
                    "text": rule.text,
                    "source": rule.source,
                }
            )
        return web.json_response(items(rows, node=self.view.node))

    async def acknowledge(self, request: web.Request) -> web.Response:
        """POST .../health/ack {gpu, rule, request_id}: the fault is repaired, so its probation begins. Without ``gpu``:
        all faults of the node."""
        node, _, asked = await self._may(request, "gpu", "rule")
        if (answer := await elsewhere(self.view, node, request, asked)) is not None:
            return answer
        node_health = self._node_health(node)
        gpu, rule = requests.text(asked, "gpu"), requests.text(asked, "rule")
        meant = [
            v for v in node_health.monitor.verdicts if (not gpu or v.device == gpu) and (not rule or v.rule == rule)
        ]  # fmt: skip
        if gpu and not meant:  # a GPU that is no longer part of the node may still have a verdict
            known_gpu(node, gpu)
        if not meant:
            raise ApiError(
                "state", f"no such verdict is on node {node.id}", f"see them: nodeagentctl describe node/{node.id}"
            )
        for device in {v.device for v in meant}:
            node_health.monitor.acknowledge(device, rule or None)
        keys = {(v.rule, v.device) for v in meant}
        after = [verdict_json(v, node, time.time()) for v in node_health.monitor.verdicts if (v.rule, v.device) in keys]
        return web.json_response({"name": node.id, "verdicts": after})

    async def inject(self, request: web.Request) -> web.Response:
        """POST .../health/inject {xid, gpu, request_id}: judge an Xid that the hardware did not report."""
        node, who, asked = await self._may(request, "xid", "gpu")
        if (answer := await elsewhere(self.view, node, request, asked)) is not None:
            return answer
        node_health = self._node_health(node)
        code, gpu = asked.get("xid"), requests.text(asked, "gpu")
        if not isinstance(code, int) or isinstance(code, bool) or not 1 <= code <= MOST_XID:
            raise ApiError("usage", f"xid must be a whole number from 1 to {MOST_XID}", "NVIDIA's catalog lists them")
        if not node.facts.gpus:
            raise ApiError("state", f"node {node.id} has no GPU", "see: nodeagentctl nodes")
        device = known_gpu(node, gpu) if gpu else node.facts.gpus[0].uuid
        from nodeagent.hardware.readings import DeviceEvent

        node_health.monitor.inject(DeviceEvent("xid", time.time(), device, code, f"drill by {who.name}: Xid {code}"))
        return web.json_response({"name": node.id, "gpu": device, "xid": code})

    async def _may(self, request: web.Request, *names: str) -> tuple[NodeRecord, auth.Caller, dict[str, Any]]:
        """The node, the caller (who may change it), and the body, which may have these fields."""
        asked = await requests.read(request, *names)
        requests.request_id(asked)
        node = find_node(self.view.cluster(), request.match_info["node"])
        who = await auth.caller(request, self.view.config.jobs)
        auth.may_change_nodes(who, node.id)
        return node, who, asked

    def _node_health(self, node: NodeRecord) -> NodeHealth:
        must_have_hardware()
        if self.view.node_health is None:
            raise ApiError(
                "state",
                f"the health of node {node.id} is not monitored",
                "take `health: off` out of its agent's config",
            )
        return self.view.node_health


def must_have_hardware() -> None:
    """Raises ``ApiError`` if this node's agent was installed without what watches the hardware."""
    if missing := hardware_missing():
        raise ApiError(
            "state", f"this node's hardware is not watched: {missing}", "install all of nodeagent, restart its agent"
        )


def known_gpu(node: NodeRecord, uuid: str) -> str:
    """The GPU's uuid; raises ``ApiError`` if the node does not have it."""
    if all(uuid != gpu.uuid for gpu in node.facts.gpus):
        raise unknown(f"GPU of node {node.id}", uuid, (gpu.uuid for gpu in node.facts.gpus))
    return uuid


class DiagRoutes:
    """The handlers, for one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self.view = view

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        path = "/v1/nodes/{node}/diag"
        return [web.get(path, self.show), web.post(path, self.start)]

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/nodes/{node}/diag: the progress of the newest run, and its report once it has ended."""
        node = find_node(self.view.cluster(), request.match_info["node"])
        if (answer := await elsewhere(self.view, node, request)) is not None:
            return answer
        return web.json_response(self._state())

    async def start(self, request: web.Request) -> web.Response:
        """POST /v1/nodes/{node}/diag {gpu, busy, request_id}: begin a run; GPUs in use only with ``busy``."""
        asked = await requests.read(request, "gpu", "busy")
        name = requests.request_id(asked)
        node = find_node(self.view.cluster(), request.match_info["node"])
        auth.may_change_nodes(await auth.caller(request, self.view.config.jobs), node.id)
        if (answer := await elsewhere(self.view, node, request, asked)) is not None:
            return answer
        must_have_hardware()
        diagnosis = self._diagnosis
        gpu, busy = requests.text(asked, "gpu"), asked.get("busy") is True
        one = once(name, "diag", gpu, busy)
        known, _, change = diagnosis.request.partition(" ")
        if known == name:
            same(one, Answer(subject=node.id, did=change))
            return web.json_response(self._state())
        if diagnosis.running:
            raise ApiError("state", f"node {node.id} is being checked already", "try again when that check has ended")
        cluster = self.view.cluster()
        gpus = [known_gpu(node, gpu)] if gpu else [one.uuid for one in node.facts.gpus]
        used = used_devices(booked(cluster), node.id, by_others_than="") | node.facts.held.keys()
        taken = sorted(used.intersection(gpus) if gpus else used)
        if taken and not busy:
            what = f"{len(taken)} of its GPUs are" if gpus else "it is"
            raise ApiError(
                "state",
                f"node {node.id} is not checked: {what} in use by a job ({', '.join(taken[:4])})",
                "drain it first, choose a GPU with --gpu, or check it nevertheless with --busy (it slows the job down)",
            )
        others = [record for record in cluster.nodes.values() if record.id != node.id]
        diagnosis.start(gpus, taken, "check" if busy else "refuse", others, f"{name} {one.did()}", whole=not gpu)
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

"""``top`` over HTTP: what uses the cluster. Figures are those that agents publish with their pods; of the machine that
is asked they are measured now. Must never cost anything while nobody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from aiohttp import web

from nodeagent.agent.usage import machine_usage
from nodeagent.api.published import places
from nodeagent.api.shapes import Json, Work, items, node_state, work_on
from nodeagent.api.view import AgentView
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.pod import PodState
from nodeagent.model.usage import MachineUsage
from nodeagent.plan.cluster import Cluster
from nodeagent.store.base import StoreUnavailableError

Pods = Mapping[str, Sequence[PodState]]
"""Job uid to the pods that agents publish."""


class TopRoutes:
    """The handler, over one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self.view = view

    def table(self) -> list[web.RouteDef]:
        """The one route."""
        return [web.get("/v1/top", self.top)]

    async def top(self, _request: web.Request) -> web.Response:
        """GET /v1/top: nodes as items, by name, and the live jobs."""
        cluster, me = self.view.cluster(), self.view.me()
        pods: Pods = {}  # what is used is then not known; who is where still is
        if self.view.health().store_away_since is None:
            with contextlib.suppress(StoreUnavailableError):
                pods = await self.view.store.pods({job.uid: places(cluster, job) for job in live_jobs(cluster)})
        here = "" if me is None else me.facts.boot_id
        about = {"store_away_since": self.view.health().store_away_since}

        def text() -> bytes:
            return json.dumps(top_json(cluster, pods, here, machine_usage()) | about).encode()

        # In a thread: of a thousand nodes it takes longer than the agent's loop should stand.
        return web.Response(body=await asyncio.to_thread(text), content_type="application/json", charset="utf-8")


def live_jobs(cluster: Cluster) -> list[JobRecord]:
    """Jobs that may have processes, in the order of their submission."""
    live = (j for j in cluster.jobs.values() if j.phase not in TERMINAL or (j.head and j.head.holders))
    return sorted(live, key=lambda j: (j.order, j.submitted))


def top_json(cluster: Cluster, pods: Pods, here: str, machine: MachineUsage) -> Json:
    """The answer. ``machine`` is that of all nodes whose boot id is ``here``. Pure."""
    told = [p for states in pods.values() for p in states if cluster.live(p.node)]
    of_node, of_job = defaultdict[str, list[PodState]](list), defaultdict[str, list[PodState]](list)
    for pod in told:
        of_node[pod.node].append(pod)
        of_job[pod.uid].append(pod)
    work = work_on(cluster)
    nodes = [
        _node(cluster.nodes[name], cluster, of_node.get(name, ()), work.get(name, ({}, [])), here, machine)
        for name in sorted(cluster.nodes)
    ]
    return items(nodes, jobs=[_job(j, of_job.get(j.uid, ())) for j in live_jobs(cluster)])


def _node(
    node: NodeRecord, cluster: Cluster, pods: Sequence[PodState], work: Work, here: str, machine: MachineUsage
) -> Json:
    live = cluster.live(node.id)
    on = machine if live and node.facts.boot_id == here else next((p.usage.machine for p in pods if p.usage), None)
    (booked, placed), facts = work, node.facts
    return {
        "name": node.id,
        "state": node_state(node, cluster)[0],
        "load": None if on is None else on.load,
        "cpus": None if on is None else on.cpus,
        "memory_used": None if on is None else on.memory_used,
        "memory_total": None if on is None else on.memory_total,
        "gpus": len(facts.gpus),
        "gpus_used": sum(g.uuid in booked for g in facts.gpus),
        "cpu_slots": facts.cpu_slots,
        "cpu_slots_used": sum(device.startswith("cpu") for device in booked),
        "jobs": sorted({p["job"] for p in placed}),
        **_sums(pods),
    }


def _job(job: JobRecord, pods: Sequence[PodState]) -> Json:
    head = job.head
    members = head.ordered() if head is not None and head.state != "ended" else ()
    part = {m.node for m in members} | (set(head.holders) if head is not None else set())
    if job.phase == "paused" and head is not None:
        part |= set(head.members)  # they keep its interpreters
    mine = [p for p in pods if p.node in part]
    return {
        "name": job.name,
        "uid": job.uid,
        "phase": job.phase,
        "nodes": len(members),
        "world_size": sum(m.workers for m in members),
        "gpus": sum(not d.startswith("cpu") for m in members for d in m.devices),
        **_sums(mine),
        "pods": [
            {"role": p.role, "node": p.node, "phase": p.phase, "workers": len(p.workers), **_sums([p])} for p in mine
        ],
    }


def _sums(pods: Sequence[PodState]) -> Json:
    """Of those pods that were measured; None where none was."""
    known = [p.usage for p in pods if p.usage is not None]
    cpus = [u.cpu for u in known if u.cpu is not None]
    return {
        "cpu": round(sum(cpus), 2) if cpus else None,
        "memory": sum(u.memory for u in known) if known else None,
        "processes": sum(u.processes for u in known) if known else None,
    }

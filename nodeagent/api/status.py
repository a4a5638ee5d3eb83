"""The whole cluster in one answer, for the status page (GET /v1/status), and its use of resources (``top``).

Computed from the snapshot, at most once a second for any number of viewers. The audit log is read only if a generation
has changed since the last read. Must never cost anything while there is no viewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from aiohttp import web

from nodeagent import __version__
from nodeagent.agent.gauges import node_state
from nodeagent.agent.machine import machine_usage
from nodeagent.agent.view import AgentView
from nodeagent.api import requests
from nodeagent.api.accounting import shares_json
from nodeagent.api.auth import NameOf, UserDatabase
from nodeagent.api.errors import not_joined, what_goes_on
from nodeagent.api.jobdetail import AuditTail, generations, waits
from nodeagent.api.published import places
from nodeagent.api.serializers import (
    API_VERSION,
    Json,
    budget_json,
    items,
    job_json,
    placed_json,
    planned_json,
    verdict_json,
)
from nodeagent.model.facts import MachineUsage
from nodeagent.model.job import TERMINAL, JobEvent, JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.pod import PodState
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.usage import of_job, total
from nodeagent.plan.nodes.health import breaker, condition
from nodeagent.plan.nodes.work import NodeWork, work_on
from nodeagent.plan.queueing.queue import places as in_line
from nodeagent.store.base import StoreUnavailableError

PATH = "/v1/status"
FRESH = 1.0
"""Seconds for which one answer serves all callers."""
MAX_LIVE, MAX_ENDED, MAX_GENERATIONS = 100, 10, 20
"""Jobs, and generations of a job, that are shown: the oldest live jobs, the newest of the others."""
MAX_NODES = 500
"""Nodes that are shown: first those of which there is something to say."""
SETTLED = 5.0
"""Seconds after a change in which more may be known about the same generation: the length of its recovery comes
later."""
_OF_JOB = (
    "name", "uid", "phase", "reason", "generation", "generation_state", "restarts", "min", "max", "target", "borrowed",
    "chief", "gpus", "world_nodes", "world_size", "owner", "desired", "cause", "submitted", "started", "ended",
    "checkpoint", "roles",
)  # fmt: skip
_OF_VERDICT = ("rule", "severity", "stage", "text", "gpu", "dry_run", "next")


class StatusRoutes:
    """The handler, for one agent's view, with the newest answer."""

    def __init__(self, view: AgentView, names: UserDatabase) -> None:
        self._names = names
        self.view = view
        self._stories = Stories(view)
        self._one = asyncio.Lock()
        self._made = -FRESH
        self._body = b""

    def table(self) -> list[web.RouteDef]:
        """The one route."""
        return [web.get(PATH, self.status)]

    async def status(self, _request: web.Request) -> web.Response:
        """GET /v1/status: the present state, or that of at most a second ago."""
        if self.view.me() is None:
            raise not_joined(self.view)
        async with self._one:
            if time.monotonic() - self._made >= FRESH:
                cluster = self.view.cluster()
                jobs, more = shown(cluster)
                stories = await self._stories.read(jobs, time.monotonic())
                line, store_waits = in_line(cluster), self.view.health().store_waits
                why = {
                    job.uid: planned_json(job, cluster, line) | waits(self.view, job, cluster, line, store_waits)
                    for job in jobs
                }
                about = self._about() | {"more_jobs": more}
                await self._names.learn(job.owner for job in jobs)
                # a thousand nodes take tens of milliseconds
                self._body = await requests.written(
                    partial(_body, about, cluster, jobs, why, stories, self._names.shown)
                )
                self._made = time.monotonic()
        return web.Response(body=self._body, content_type="application/json", headers={"Cache-Control": "no-store"})

    def _about(self) -> Json:
        health = self.view.health()
        return {
            "apiVersion": API_VERSION,
            "cluster": self.view.config.cluster,
            "node": self.view.node,
            "version": __version__,
            "store_away_since": health.store_away_since,
            "goes_on": what_goes_on(health),
            "store_waits": health.store_waits,
        }


def _body(
    about: Json,
    cluster: Cluster,
    jobs: list[JobRecord],
    why: dict[str, Json],
    stories: dict[str, list[Json]],
    names: NameOf,
) -> bytes:
    now = time.time()
    rows = nodes_json(cluster, now) | {
        "jobs": [_job(cluster, job, why[job.uid], stories.get(job.uid, []), now, names) for job in jobs],
        "shares": shares_json(cluster, now),
    }
    return json.dumps(about | {"now": now} | rows).encode()


class Stories:
    """The generations of jobs, as last computed."""

    def __init__(self, view: AgentView) -> None:
        self._audit = AuditTail(view)
        self._marks: dict[str, object] = {}
        self._changed = 0.0
        self._rows: dict[str, list[Json]] = {}

    async def read(self, jobs: list[JobRecord], at: float) -> dict[str, list[Json]]:
        """Generations by uid, computed anew if anything about them has changed. While the store is unreachable: the
        last result; for a job that has changed since, what its record says. ``at``: seconds of a clock that never goes
        back."""
        marks: dict[str, object] = {job.uid: _mark(job) for job in jobs}
        if marks == self._marks and at - self._changed > SETTLED:
            return self._rows
        events = await self._audit.read()
        if events is None:
            same = {uid for uid, mark in marks.items() if self._marks.get(uid) == mark}
            return {job.uid: self._rows[job.uid] if job.uid in same else generations(job, ()) for job in jobs}
        if marks != self._marks:
            self._marks, self._changed = marks, at
        reported: defaultdict[str, list[JobEvent]] = defaultdict(list)
        for event in events:
            reported[event.uid].append(event)
        self._rows = {job.uid: generations(job, reported[job.uid]) for job in jobs}
        return self._rows


def _mark(job: JobRecord) -> tuple[object, ...]:
    """A value that changes whenever the job's generations must be computed anew."""
    generation = job.generation
    return (
        job.uid,
        job.phase,
        len(job.budget),
        job.restarts,
        *(() if generation is None else (generation.number, generation.state)),
    )


def shown(cluster: Cluster) -> tuple[list[JobRecord], int]:
    """(live jobs in the order of their submission, then ended ones, newest first; the number that is left out)."""
    live = sorted((j for j in cluster.jobs.values() if j.phase not in TERMINAL), key=lambda j: (j.order, j.submitted))
    over = sorted((j for j in cluster.jobs.values() if j.phase in TERMINAL), key=lambda j: j.ended or 0.0, reverse=True)
    jobs = live[:MAX_LIVE] + over[:MAX_ENDED]
    return jobs, len(cluster.jobs) - len(jobs)


def nodes_json(cluster: Cluster, now: float) -> Json:
    """Nodes by name, with fewer fields than in ``node_json``, since there may be many; the number that is left out; and
    sums over all of them, and over all jobs."""
    work = work_on(cluster)
    stated = {name: node_state(node, cluster, work) for name, node in cluster.nodes.items()}
    states = {name: state for name, (state, _) in stated.items()}

    def plain(name: str) -> bool:
        node = cluster.nodes[name]
        return states[name] == "ready" and not condition(node) and all(gpu.healthy for gpu in node.facts.gpus)

    names = sorted(sorted(cluster.nodes, key=lambda name: (plain(name), name))[:MAX_NODES])
    there = [name for name, state in states.items() if state not in ("lost", "left")]
    gpus = [(name, gpu) for name in there for gpu in cluster.nodes[name].facts.gpus]
    return {
        "nodes": [_node(cluster.nodes[name], cluster, stated[name], work.get(name, NodeWork()), now) for name in names],
        "more_nodes": len(states) - len(names),
        "totals": {
            "nodes": len(states),
            "states": Counter(states.values()),
            "gpus": len(gpus),
            "healthy": sum(gpu.healthy for _, gpu in gpus),
            "used": sum(gpu.uuid in work[name].booked for name, gpu in gpus if name in work),
            "phases": Counter(job.phase for job in cluster.jobs.values()),
        },
    }


def _job(cluster: Cluster, job: JobRecord, why: Json, story: list[Json], now: float, names: NameOf) -> Json:
    """One job. Times are Unix seconds, so the answer does not change while nothing happens."""
    row = job_json(job, cluster, {}, now, names=names, planned=why) | why
    costs = [g["downtime"] for g in story if g["downtime"] is not None]
    ran = [g for g in story if g["state"] != "not formed"]
    goodput = total(of_job(job, cluster.served, int(now * 1000))).goodput
    return {
        **{key: row[key] for key in _OF_JOB},
        "outcome": row["outcome"] and {key: row["outcome"][key] for key in ("code", "text")},
        "since": round(now - max(0, cluster.served - job.since) / 1000),
        "budget": budget_json(job, cluster),
        "goodput": None if goodput is None else round(goodput, 3),
        "generations": [_generation(g) for g in story[-MAX_GENERATIONS:]],
        "earlier": max(0, len(story) - MAX_GENERATIONS),
        "downtime": round(sum(costs), 3),
        "all_known": len(costs) == job.restarts and len(ran) == job.restarts + 1,
    }


def _generation(reported: Json) -> Json:
    ended = reported["ended_by"]
    return reported | {"ended_by": None if ended is None else {k: v for k, v in ended.items() if k != "error"}}


def _node(node: NodeRecord, cluster: Cluster, stated: tuple[str, str], work: NodeWork, now: float) -> Json:
    (state, reason), booked, facts = stated, work.booked, node.facts
    verdicts = [verdict_json(verdict, node, now) for verdict in facts.health]
    return {
        "name": node.id,
        "state": state,
        "reason": reason,
        "gpus": [
            {"index": gpu.index, "name": gpu.name, "healthy": gpu.healthy, "why": gpu.why, "job": booked.get(gpu.uuid)}
            for gpu in facts.gpus
        ],
        "condition": condition(node),
        "verdicts": [{key: verdict[key] for key in _OF_VERDICT} for verdict in verdicts],
        "breaker": breaker(cluster, facts),
        "pods": [placed_json(pod) for pod in work.pods],
        "cpu_slots": facts.cpu_slots,
        "cpu_slots_used": sum(device.startswith("cpu") for device in booked),
        "version": facts.agent_version,
    }


Pods = Mapping[str, Sequence[PodState]]
"""Job uid to the pods that agents publish."""


class TopRoutes:
    """The handler, for one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self.view = view

    def table(self) -> list[web.RouteDef]:
        """The one route."""
        return [web.get("/v1/top", self.top)]

    async def top(self, _request: web.Request) -> web.Response:
        """GET /v1/top: nodes as items, by name, and the live jobs."""
        cluster, me = self.view.cluster(), self.view.me()
        pods: Pods = {}  # then the use is unknown, but places are known
        if self.view.health().store_away_since is None:
            with contextlib.suppress(StoreUnavailableError):
                pods = await self.view.store.pods({job.uid: places(cluster, job) for job in live_jobs(cluster)})
        here = "" if me is None else me.facts.boot_id
        about = {"store_away_since": self.view.health().store_away_since}

        return await requests.written_answer(lambda: top_json(cluster, pods, here, machine_usage()) | about)


def live_jobs(cluster: Cluster) -> list[JobRecord]:
    """Jobs that may have processes, in the order of their submission."""
    live = (j for j in cluster.jobs.values() if j.phase not in TERMINAL or (j.generation and j.generation.holders))
    return sorted(live, key=lambda j: (j.order, j.submitted))


def top_json(cluster: Cluster, pods: Pods, here: str, machine: MachineUsage) -> Json:
    """The answer. ``machine`` is the machine of all nodes whose boot id is ``here``. Pure."""
    reported = [p for states in pods.values() for p in states if cluster.live(p.node)]
    of_node, of_job = defaultdict[str, list[PodState]](list), defaultdict[str, list[PodState]](list)
    for pod in reported:
        of_node[pod.node].append(pod)
        of_job[pod.uid].append(pod)
    work = work_on(cluster)
    nodes = [
        _node_use(cluster.nodes[name], cluster, of_node.get(name, ()), work.get(name, NodeWork()), here, machine)
        for name in sorted(cluster.nodes)
    ]
    return items(nodes, jobs=[_job_use(j, of_job.get(j.uid, ())) for j in live_jobs(cluster)])


def _node_use(
    node: NodeRecord, cluster: Cluster, pods: Sequence[PodState], work: NodeWork, here: str, machine: MachineUsage
) -> Json:
    live = cluster.live(node.id)
    on = machine if live and node.facts.boot_id == here else next((p.usage.machine for p in pods if p.usage), None)
    booked, facts = work.booked, node.facts
    return {
        "name": node.id,
        "state": node_state(node, cluster, {node.id} if work.pods else ())[0],
        "load": None if on is None else on.load,
        "cpus": None if on is None else on.cpus,
        "memory_used": None if on is None else on.memory_used,
        "memory_total": None if on is None else on.memory_total,
        "gpus": len(facts.gpus),
        "gpus_used": sum(g.uuid in booked for g in facts.gpus),
        "cpu_slots": facts.cpu_slots,
        "cpu_slots_used": sum(device.startswith("cpu") for device in booked),
        "jobs": work.jobs(),
        **_sums(pods),
    }


def _job_use(job: JobRecord, pods: Sequence[PodState]) -> Json:
    generation = job.generation
    members = generation.ordered() if generation is not None and generation.state != "ended" else ()
    part = {m.node for m in members} | (set(generation.holders) if generation is not None else set())
    if job.phase == "paused" and generation is not None:
        part |= set(generation.members)  # these nodes keep its interpreters
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
    """Sums over the pods that were measured; None if none was."""
    known = [p.usage for p in pods if p.usage is not None]
    cpus = [u.cpu for u in known if u.cpu is not None]
    return {
        "cpu": round(sum(cpus), 2) if cpus else None,
        "memory": sum(u.memory for u in known) if known else None,
        "processes": sum(u.processes for u in known) if known else None,
    }

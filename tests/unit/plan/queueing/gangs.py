"""Clusters in which a large gang waits behind others, and what is decided there: for the tests of reservations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Nodes
from nodeagent.model.node import NodeRecord, Readiness
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing import heldback
from nodeagent.plan.steps import Propose
from tests.unit.plan.build import NOW, READY, WALL, make_cluster, make_generation, make_job, make_node
from tests.unit.plan.build import make_spec as spec_of

GRACE = 30
"""Seconds, of every job here."""
MINUTE = 60_000


def nodes(count: int, ready: Mapping[str, Readiness]) -> list[NodeRecord]:
    return [make_node(f"n{i}", slots=1, ready=ready) for i in range(1, count + 1)]


def runs(name: str, on: list[str], minutes: float | None = None, order: int = 0, size: int = 0) -> JobRecord:
    """It runs since ``NOW``; ``minutes``: its time limit."""
    limit = None if minutes is None else 60 * minutes
    spec = spec_of(size=(1 if size else len(on), size or len(on)), name=name, time_limit=limit)
    job = make_job("running", make_generation(on), uid=f"u-{name}", spec=spec, order=order, since=NOW)
    return job.model_copy(update={"first_active": NOW})


def waits(
    name: str, size: int, order: int, minutes: float | None = None, *, within: str = "", priority: int = 0
) -> JobRecord:
    limit = None if minutes is None else 60 * minutes
    spec = spec_of(size=(size, size), name=name, time_limit=limit, within=within, priority=priority)
    return make_job(uid=f"u-{name}", spec=spec, order=order, since=0)


def cluster_of(count: int, *jobs: JobRecord, standing: Readiness = READY) -> Cluster:
    """Nodes of one slot, on which every job is ready."""
    return make_cluster(nodes(count, {job.uid: standing for job in jobs}), *jobs)


def decided(cluster: Cluster, name: str) -> tuple[set[str] | None, str]:
    """The nodes that the job starts on, if it does; and why."""
    found = decide(cluster, cluster.jobs[f"u-{name}"], WALL)
    started = set(found.step.members) if isinstance(found.step, Propose) else None
    return started, "; ".join(found.why)


def at(cluster: Cluster, served: int) -> Cluster:
    return replace(cluster, served=served)


TEAM = Queue(name="team", capability=Amount(nodes=4))


def of_team(cluster: Cluster, *queues: Queue) -> Cluster:
    """All jobs are of the queue ``team``, but those whose name begins with ``x``."""
    jobs = {
        uid: j.model_copy(update={"spec": j.spec.model_copy(update={"queue": "other" if j.name[0] == "x" else "team"})})
        for uid, j in cluster.jobs.items()
    }
    return replace(cluster, jobs=jobs, queues=Queues(queues=(*(queues or (TEAM,)), Queue(name="other"))), notes=Notes())


def borrower(on: list[str], target: int, order: int = 0) -> JobRecord:
    job = runs("auto", on, order=order, size=8)
    role = job.spec.role.model_copy(update={"nodes": Nodes(min=1, max=8, target=target, auto=True)})
    spec = job.spec.model_copy(update={"roles": (role,)})
    return job.model_copy(update={"spec": spec, "control": job.control.model_copy(update={"target": target})})


def estimate(cluster: Cluster, name: str) -> int | None:
    found = heldback.start_estimate(cluster, cluster.jobs[f"u-{name}"])
    return found.start if found is not None else None

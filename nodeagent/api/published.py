"""The pods that agents publish, as one agent reads them: from the store, or only its own pod while the store is
unreachable. Also the members of a gang that cannot reach each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping

from nodeagent.agent.published import pod_state
from nodeagent.agent.view import AgentView
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.pod import PodState
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.failure.blame import Cut, find_cuts
from nodeagent.plan.nodes.candidates import asked
from nodeagent.store.base import StoreUnavailableError

MOST_JOBS = 200
"""Jobs whose pods are read in one request, the oldest first."""


def places(cluster: Cluster, job: JobRecord) -> frozenset[str]:
    """Nodes that may have a pod of the job: the nodes of its generation, and nodes that report their readiness for
    it."""
    ready, generation = asked(cluster).get(job.uid, {}), job.generation
    return frozenset(ready) if generation is None else frozenset((*ready, *generation.members, *generation.holders))


async def published(view: AgentView, job: JobRecord, asking: bool = True) -> tuple[dict[str, PodState], bool]:
    """(the published pods, whether the store answers). If the store does not answer, or ``asking`` is false: only this
    node's own pod. An ended job has none."""
    found, asking = await published_of(view, (job,), asking)
    return found[job.uid], asking


async def published_of(
    view: AgentView, jobs: Collection[JobRecord], asking: bool = True
) -> tuple[dict[str, dict[str, PodState]], bool]:
    """The published pods of many jobs, by uid, read with one request."""
    cluster = view.cluster()
    live = {j.uid: j for j in jobs if j.phase not in TERMINAL or (j.generation and j.generation.holders)}
    none: dict[str, dict[str, PodState]] = {job.uid: {} for job in jobs}
    if not live:
        return none, asking
    if asking and view.health().store_away_since is None:
        with contextlib.suppress(StoreUnavailableError):
            reported = await view.store.pods({uid: places(cluster, job) for uid, job in live.items()})
            return none | {uid: {pod.node: pod for pod in pods} for uid, pods in reported.items()}, True
    return none | {uid: _own(view, job) for uid, job in live.items()}, False


def _own(view: AgentView, job: JobRecord) -> dict[str, PodState]:
    mine = view.pods().get(job.uid)
    if mine is None:
        return {}
    return {view.node: pod_state(job, view.node, mine, view.health().unreachable.get(job.uid, {}))}


def cuts_in(view: AgentView, job: JobRecord, pods: Mapping[str, PodState]) -> tuple[Cut, ...]:
    """Members and failsafe members of the job's running gang that cannot reach each other. ``pods``: the
    result of ``published``."""
    generation = job.generation
    if job.phase != "running" or generation is None or generation.state != "active":
        return ()
    members = {node: pod for node, pod in pods.items() if node in generation.members}
    known = view.health().store_away_since is None
    return find_cuts(members, view.cluster().nodes, known=known, outside=job.outside_failsafe_members)


async def cuts_of(view: AgentView, jobs: Iterable[JobRecord]) -> dict[str, tuple[Cut, ...]]:
    """Job name to its cuts, for the first ``MOST_JOBS`` running gangs, those of one node last; gangs without cuts
    are left out. Raises nothing."""
    gangs = [
        j for j in jobs
        if j.phase == "running" and j.generation is not None
        and (len(j.generation.members) > 1 or j.outside_failsafe_members)
    ]  # fmt: skip
    first = sorted(gangs, key=lambda j: (j.generation is None or len(j.generation.members) == 1, j.order))[:MOST_JOBS]
    pods, _ = await published_of(view, first)
    cuts = {job.name: cuts_in(view, job, pods[job.uid]) for job in first}
    return {name: pairs for name, pairs in cuts.items() if pairs}

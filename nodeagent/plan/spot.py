"""Nodes that may be taken away at short notice: who uses them, and how long a gang has to leave one that is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import NodeFacts
from nodeagent.plan.cluster import Cluster, SeenNodes, changed, seen

SPARE = 5.0
"""Seconds before a node is taken away by which its workers are to have ended."""


def shuns(spec: JobSpec, facts: NodeFacts) -> str:
    """Why a job does not use a node that may be taken away, as what follows its name; empty if it would."""
    if not facts.spot or spec.elastic or spec.spot:
        return ""
    return "is a spot node, which a job that needs all its nodes uses only with spot: allow"


@dataclass(frozen=True, slots=True)
class _Spot:
    seen: SeenNodes
    nodes: frozenset[str]


def spot_nodes(cluster: Cluster) -> frozenset[str]:
    """All of them, live or not. The very same object for as long as they are the same."""
    return cluster.once("spot", lambda before: _look(cluster, before)).nodes


def _look(cluster: Cluster, before: _Spot | None) -> _Spot:
    news = changed(cluster, before.seen) if before is not None else None
    if before is None or news is None:
        return _Spot(seen(cluster), frozenset(n for n, record in cluster.nodes.items() if record.facts.spot))
    found = before.nodes - news | {n for n in news if n in cluster.nodes and cluster.nodes[n].facts.spot}
    return _Spot(seen(cluster), before.nodes if found == before.nodes else found)


def grace_left(cluster: Cluster, job: JobRecord, nodes: Iterable[str], wall: float) -> float | None:
    """Seconds that workers have to leave, where these nodes are taken away sooner than the job's grace ends; None: all
    of that. ``wall`` is Unix time."""
    notices = (cluster.nodes[n].facts.notice for n in nodes)
    longest = job.spec.longest_grace
    left = min((notice.until - wall - SPARE for notice in notices if notice is not None), default=longest)
    return max(0.0, round(left, 1)) if left < longest else None

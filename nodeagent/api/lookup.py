"""Which job or node a path means. Reads the snapshot only; must never guess between two."""

from __future__ import annotations

from nodeagent.api.errors import ApiError, unknown
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.plan.cluster import Cluster

MIN_PREFIX = 4
"""Fewest characters of a uid that stand for it."""


def find_job(cluster: Cluster, ref: str) -> JobRecord:
    """By name (the live one, else the one that ended last), by uid, or by a unique beginning of a uid.

    Raises ``ApiError`` (``not_found``; ``usage`` if several uids begin so).
    """
    if ref in cluster.jobs:
        return cluster.jobs[ref]
    named = [j for j in cluster.jobs.values() if j.name == ref]
    if named:
        return max(named, key=lambda j: (j.phase not in TERMINAL, j.submitted))
    if len(ref) >= MIN_PREFIX:
        begins = [j for uid, j in cluster.jobs.items() if uid.startswith(ref)]
        if len(begins) == 1:
            return begins[0]
        if begins:
            uids = ", ".join(sorted(j.uid for j in begins))
            raise ApiError("usage", f"{ref!r} is the beginning of several uids: {uids}", "give more of it")
    raise unknown("job", ref, (j.name for j in cluster.jobs.values()))


def find_node(cluster: Cluster, ref: str) -> NodeRecord:
    """By id. Raises ``ApiError`` (``not_found``)."""
    if ref not in cluster.nodes:
        raise unknown("node", ref, cluster.nodes)
    return cluster.nodes[ref]

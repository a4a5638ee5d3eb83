"""Which job or node a path means. Must never guess between two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from nodeagent.api.errors import ApiError, unknown
from nodeagent.api.view import AgentView
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.store.base import StoreUnavailableError

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
            raise _several(ref, begins)
    raise unknown("job", ref, (j.name for j in cluster.jobs.values()))


async def find_any_job(view: AgentView, ref: str) -> JobRecord:
    """As ``find_job``, and where the view has none of that uid or name in the store's history of ended jobs: there too
    by uid, by name (the one that ended last), or by a unique beginning of a uid. While the store is away: in the view.

    Raises ``ApiError`` as ``find_job``.
    """
    found, none = None, None
    try:
        found = find_job(view.cluster(), ref)
    except ApiError as error:
        if error.code != "not_found":
            raise
        none = error
    if found is not None and ref in (found.uid, found.name):
        return found
    past: tuple[JobRecord, ...] = ()
    if view.health().store_away_since is None:
        with contextlib.suppress(StoreUnavailableError):
            past = await view.store.past(ref)
    for job in past:
        if ref in (job.uid, job.name):
            return job
    if len(ref) < MIN_PREFIX:
        past = ()
    begins = [*([found] if found is not None else []), *past]
    if len(begins) > 1:
        raise _several(ref, begins)
    if begins:
        return begins[0]
    assert none is not None
    raise none


def _several(ref: str, begins: Iterable[JobRecord]) -> ApiError:
    uids = ", ".join(sorted(job.uid for job in begins))
    return ApiError("usage", f"{ref!r} is the beginning of several uids: {uids}", "give more of it")


def find_node(cluster: Cluster, ref: str) -> NodeRecord:
    """By id. Raises ``ApiError`` (``not_found``)."""
    if ref not in cluster.nodes:
        raise unknown("node", ref, cluster.nodes)
    return cluster.nodes[ref]

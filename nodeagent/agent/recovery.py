"""Giving a store that may have lost writes what this agent knows: its view, page by page.

Owns the order of an offer; what the store takes of it is the store's to decide, and what is done afterwards (join, read
again) the lease's.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from nodeagent.agent.snapshot import Snapshot
from nodeagent.model.base import Record
from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import Timing
from nodeagent.store.base import Store, StoreRefusedError
from nodeagent.store.messages import Offer

PAGE = 64
"""Records in one call: some hundred kB, well within the store timeout."""


async def offer(store: Store, snapshot: Snapshot, timing: Timing, node: str, now: float) -> str:
    """Offer what the store lacks. Returns the era to which the store's records then belong, or nothing if there was
    nothing to offer. Raises as every step does; StoreRefusedError ``foreign`` means that jobs known here are not, and
    will not be, in that store."""
    if not snapshot.cluster_uid:
        return ""
    view = snapshot.cluster(now)
    header = Offer(
        cluster_uid=snapshot.cluster_uid,
        timing=timing,
        era=snapshot.era,
        rev=snapshot.rev if snapshot.complete else 0,
        served=view.served,
        by=node,
    )
    try:
        reply = await store.restore(header)
    except StoreRefusedError as refusal:
        if refusal.code == "foreign" and not view.jobs:
            return ""
        raise
    if reply.recovering and header.rev > reply.known:
        nodes, jobs, uids = list(view.nodes.values()), list(view.jobs.values()), tuple(sorted(view.jobs))
    else:  # the store knows better, but for the replies of our own newest steps
        nodes, jobs, uids = [], [job for job in view.jobs.values() if job.rev > reply.known], None
    if nodes or jobs:
        structlog.get_logger("recovery").warning(
            "restoring the store", node=node, jobs=len(jobs), nodes=len(nodes), known=reply.known, rev=header.rev
        )
    for last, page in _pages([*nodes, *jobs]):
        reply = await store.restore(
            header.model_copy(
                update={
                    "nodes": tuple(r for r in page if isinstance(r, NodeRecord)),
                    "jobs": tuple(r for r in page if isinstance(r, JobRecord)),
                    "uids": uids if last else None,
                }
            )
        )
    return reply.era


def _pages(records: Sequence[Record]) -> list[tuple[bool, Sequence[Record]]]:
    """Pages of bounded size, and which is the last."""
    starts = range(0, len(records), PAGE)
    return [(start + PAGE >= len(records), records[start : start + PAGE]) for start in starts]

"""Giving a store that may have lost writes what this agent knows, in memory or from its disk: its view, page by
page.

Owns the order of an offer; what the store takes of it is the store's to decide, and what is done afterwards (join, read
again) the lease's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from nodeagent.model.base import Record
from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import QueuesRecord
from nodeagent.model.timing import Timing
from nodeagent.model.usage import UsageDay
from nodeagent.model.window import WindowsRecord
from nodeagent.osutil.clock import Allowance, Clock
from nodeagent.store.base import Store, StoreRefusedError
from nodeagent.store.messages import PAGE_BYTES, StoreCopy

AnyRecord = TypeVar("AnyRecord", NodeRecord, JobRecord, UsageDay, QueuesRecord, WindowsRecord)

PAGE = 64
"""Most records in one call, and ``PAGE_BYTES`` the most bytes of them: well within the store timeout."""

FAR, FAR_SERVED = 9 * 10**14, 9 * 10**12
"""A higher revision or served time (ms) comes from what somebody wrote into the store; as in ``restore.lua``."""

BELIEVED = 1000
"""Most generations in the moment that a record on the disk is old."""

LOGGED_AGAIN = 60.0
"""Seconds until the log says again that the store is given the very same."""

LOGGED_AT_ONCE, LOGGED_PER_SECOND = 10.0, 1 / 60
"""Lines about joining, and as many about restoring the store, at once and in the long run: one that throws keys away is
joined and given what it lacks twice a second."""


class OfferLog:
    """What the log says of one agent's offers: a node that may not join yet makes the same one with each try."""

    def __init__(self, node: str, clock: Clock) -> None:
        self._clock = clock
        self._log = structlog.get_logger("recovery").bind(node=node)
        self._last: Mapping[str, int] = {}
        self._until = 0.0
        self._lines = Allowance(LOGGED_AT_ONCE, LOGGED_PER_SECOND)

    def restoring(self, **what: int) -> None:
        """Once, and again with other numbers or a while later; within the bound of all lines."""
        now = self._clock.now()
        if (what != self._last or now >= self._until) and self._lines.may(now):
            self._last, self._until = what, now + LOGGED_AGAIN
            self._log.warning("restoring the store", **what)


async def offer(
    store: Store, known: Known, timing: Timing, node: str, log: OfferLog, *,
    regroup: int, promised: Mapping[str, int] | None = None,
) -> str:  # fmt: skip
    """Offer what the store lacks; ``regroup`` in ms (``StoreCopy``). With a view from the disk goes what generations
    this node has promised there, by uid. Returns the era to which the store's records then belong, or nothing if there
    was nothing to offer. Raises as every step does; StoreRefusedError ``foreign`` means that jobs known here are not,
    and will not be, in that store."""
    if not known.cluster_uid:
        return ""
    numbers = {j.name: n for j in known.jobs if _ahead(j, n := (promised or {}).get(j.uid, 0))}
    header = _header(known, timing, node, regroup, numbers)
    try:
        try:
            reply = await store.restore(header)
        except StoreRefusedError as refusal:
            if refusal.code != "far":
                raise
            known = lowered(known)
            header = _header(known, timing, node, regroup, numbers)
            reply = await store.restore(header)
    except StoreRefusedError as refusal:
        if refusal.code == "foreign" and not known.jobs:
            return ""
        raise
    shared = [record for record in (known.queues, known.windows) if record is not None]
    if reply.recovering and header.rev > reply.known:
        nodes, jobs, usage = list(known.nodes), list(known.jobs), list(known.usage)
        uids = tuple(sorted(job.uid for job in jobs)) if known.whole else None
    else:  # the store knows better, but for the replies of our own newest steps; or this view is not complete
        nodes = [node for node in known.nodes if node.rev > reply.known and reply.recovering]
        jobs, uids = [job for job in known.jobs if job.rev > reply.known], None
        shared = [record for record in shared if record.rev > reply.known]
        usage = [day for day in known.usage if day.rev > reply.known and reply.recovering]
    if nodes or jobs or shared or usage:
        log.restoring(jobs=len(jobs), nodes=len(nodes), known=reply.known, rev=header.rev)
    for last, page in pages([*shared, *nodes, *usage, *jobs]):
        reply = await store.restore(
            header.model_copy(
                update={
                    "nodes": tuple(r for r in page if isinstance(r, NodeRecord)),
                    "jobs": tuple(r for r in page if isinstance(r, JobRecord)),
                    "queues": next((r for r in page if isinstance(r, QueuesRecord)), None),
                    "windows": next((r for r in page if isinstance(r, WindowsRecord)), None),
                    "usage": tuple(r for r in page if isinstance(r, UsageDay)),
                    "uids": uids if last else None,
                }
            )
        )
    return reply.era


def _header(known: Known, timing: Timing, node: str, regroup: int, numbers: Mapping[str, int]) -> StoreCopy:
    return StoreCopy(
        cluster_uid=known.cluster_uid,
        timing=timing,
        era=known.era,
        rev=known.rev,
        top=known.newest,
        holds=bool(known.jobs),
        served=known.served,
        by=node,
        numbers=dict(numbers),
        regroup=regroup,
        awaited=known.live,
    )


def lowered(known: Known) -> Known:
    """The same view with numbers from which a store can go on: revisions that are too high come, in their order, right
    after the highest of the others. Agents that have read the same give them the same ones."""
    shared = [record for record in (known.queues, known.windows) if record is not None]
    revs = {known.rev, *(r.rev for r in (*shared, *known.usage, *known.nodes, *known.jobs))}
    last = max((rev for rev in revs if rev <= FAR), default=0)
    lower = {rev: last + n for n, rev in enumerate(sorted(rev for rev in revs if rev > FAR), 1)}

    def of(record: AnyRecord) -> AnyRecord:
        return record.model_copy(update={"rev": lower[record.rev]}) if record.rev in lower else record

    return replace(
        known,
        rev=lower.get(known.rev, known.rev),
        served=known.served if known.served <= FAR_SERVED else FAR_SERVED // 2,
        nodes=tuple(map(of, known.nodes)),
        jobs=tuple(map(of, known.jobs)),
        usage=tuple(map(of, known.usage)),
        queues=of(known.queues) if known.queues is not None else None,
        windows=of(known.windows) if known.windows is not None else None,
    )


def _ahead(job: JobRecord, promised: int) -> bool:
    """A generation of it was promised that its record does not know of. A pod's files are its user's: a number that no
    generation can have had by then is not believed."""
    number = job.generation.number if job.generation is not None else 0
    return number < promised <= number + BELIEVED


def pages(records: Sequence[Record]) -> Iterator[tuple[bool, Sequence[Record]]]:
    """Pages of bounded size (a record that is larger than one has its own), and which is the last."""
    start = 0
    while start < len(records):
        size, count = 0, 0
        for record in records[start : start + PAGE]:
            size += len(record.to_json())
            if size > PAGE_BYTES and count:
                break
            count += 1
        yield start + count == len(records), records[start : start + count]
        start += count


@dataclass(frozen=True, slots=True)
class Known:
    """One view."""

    cluster_uid: str
    era: str
    rev: int
    """Everything up to this revision of the era is in it; some records may be newer."""
    served: int
    nodes: tuple[NodeRecord, ...]
    jobs: tuple[JobRecord, ...]
    usage: tuple[UsageDay, ...] = ()
    lapsed: frozenset[str] = frozenset()
    queues: QueuesRecord | None = None
    windows: WindowsRecord | None = None
    whole: bool = True
    """A job that is not in it is not in the store; else some records could not be read."""

    @property
    def newest(self) -> int:
        """The highest revision in it."""
        shared = (record.rev for record in (self.queues, self.windows) if record is not None)
        usage = max((day.rev for day in self.usage), default=0)
        return max((self.rev, *shared, usage, *(n.rev for n in self.nodes), *(j.rev for j in self.jobs)))

    @property
    def live(self) -> tuple[str, ...]:
        """Nodes that held their lease."""
        return tuple(n.id for n in self.nodes if not n.lost and not n.left and n.id not in self.lapsed)

    def written_by(self, node: str, version: str) -> bool:
        """This node's agent, as the view shows it, was of this version."""
        return any(record.id == node and record.facts.agent_version == version for record in self.nodes)

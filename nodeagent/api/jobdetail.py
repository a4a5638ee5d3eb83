"""The parts of a job's detail beyond its record: its generations, and what it waits for.

The record keeps how each generation ended. The audit log adds times, as far back as its newest part reaches. An agent
keeps that part between requests, so it reads and parses each event once. Must never treat it as the whole log: it holds
the newest ``EVENTS`` events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from nodeagent.agent.view import AgentView
from nodeagent.api.serializers import Json, budget_entry_json
from nodeagent.model.job import TERMINAL, JobEvent, JobRecord
from nodeagent.model.queue import amount_text, queue_of
from nodeagent.plan.cluster import SHOWN, Cluster, in_order, natural
from nodeagent.plan.failure.budget import alone_restarts
from nodeagent.plan.failure.policies import GO_ON
from nodeagent.plan.failure.timeouts import dues
from nodeagent.plan.fairshare.resources import Resources
from nodeagent.plan.nodes.availability import BY as WINDOW
from nodeagent.plan.nodes.candidates import asked, ruled_out
from nodeagent.plan.nodes.devices import booked
from nodeagent.plan.nodes.failing import failing_nodes
from nodeagent.plan.nodes.failsafe import silence
from nodeagent.plan.nodes.setbacks import in_words, left_out
from nodeagent.plan.queueing.dependencies import blocked
from nodeagent.plan.queueing.heldback import held_back, start_estimate, starts_at
from nodeagent.plan.queueing.queue import in_queue
from nodeagent.plan.queueing.room import never, room_for
from nodeagent.store.base import StoreUnavailableError

_FAULTS = frozenset({"WorkerFailed", "PodFailed", "NodeLost"})
_ENDS = frozenset({"JobPausing", "JobPaused", "JobStopped", "JobSucceeded", "JobFailed"})
"""What ends a generation, though nothing is formed after it: their texts say why."""


def _awaited(job: JobRecord, number: int) -> tuple[str, ...]:
    return tuple(job.silent) if number == job.last_number and job.phase not in TERMINAL else ()


def event_ms(event_id: str) -> int:
    """The time in a stream id, in ms."""
    return int(event_id.partition("-")[0])


def generations(job: JobRecord, events: Iterable[JobEvent]) -> list[Json]:
    """The generations, oldest first. ``active`` is when one started (Unix time). ``downtime``: seconds from the first
    report of the fault that ended the previous generation (for a hang: from the last progress) to this one's start;
    ``recovery`` divides that time into parts. None if the audit log does not reach back. ``ended_because``: why one
    ended that no fault and no change of the gang ended: a pause, a stop, the job's end; empty of any other."""
    formed: dict[int, JobEvent] = {}
    active: dict[int, int] = {}
    fault: dict[int, int] = {}
    started: dict[int, str] = {}
    ended: dict[int, str] = {}
    for event in events:
        if event.uid != job.uid or not event.generation:
            continue
        at = event_ms(event.id)
        if event.kind == "GenerationForming":
            formed.setdefault(event.generation, event)
        elif event.kind == "GenerationActive":
            active.setdefault(event.generation, at)
        elif event.kind == "GenerationStarted":
            started.setdefault(event.generation, event.text)
        elif event.kind in _FAULTS:
            fault.setdefault(event.generation, at)
        elif event.kind in _ENDS:
            ended.setdefault(event.generation, event.text)
    generation = job.generation
    if generation is not None and generation.state == "ended" and job.phase in (*TERMINAL, "pausing", "paused"):
        ended.setdefault(generation.number, job.reason)
    numbers = {int(n) for n in job.budget} | set(formed) | set(active) | ({generation.number} if generation else set())
    out: list[Json] = []
    before: int | None = None
    for number in sorted(numbers):
        spend = job.budget.get(str(number))
        current = generation is not None and generation.number == number
        ran = number in active or spend is not None or (job.active is not None and job.active.number == number)
        cause = formed[number].text if number in formed else ""
        if generation is not None and current:
            cause = generation.cause.text
        still = None
        if number in active and before is not None:
            began = fault.get(before) or (event_ms(formed[number].id) if number in formed else None)
            stalled = job.budget[str(before)].stalled if str(before) in job.budget else 0.0
            still = None if began is None else round(max(0, active[number] - began) / 1000 + stalled, 3)
        out.append(
            {
                "number": number,
                "cause": cause,
                "state": generation.state if generation is not None and current else ("ended" if ran else "not formed"),
                "active": active[number] / 1000 if number in active else None,
                "downtime": still,
                "recovery": started.get(number),
                "ended_by": None if spend is None else budget_entry_json(number, spend, _awaited(job, number)),
                "ended_because": "" if spend is not None else ended.get(number, "").partition(GO_ON)[0],
            }
        )
        if ran:
            before = number
    return out


EVENTS = 2000
"""The newest events of all jobs that are read from the audit log."""


class AuditTail:
    """The newest part of the audit log, for one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self._view = view
        self._one = asyncio.Lock()
        self._era = ""
        self._events: deque[JobEvent] = deque(maxlen=EVENTS)

    async def read(self) -> Sequence[JobEvent] | None:
        """The newest events, oldest first; None if the store does not answer (then only the first caller waits)."""
        if self._view.health().store_away_since is not None:
            return None
        async with self._one:
            if self._view.era != self._era:  # another history, whose ids may begin anywhere
                self._events.clear()
            era = self._view.era
            with contextlib.suppress(StoreUnavailableError):
                newer = await self._view.store.events(self._events[-1].id, EVENTS) if self._events else ()
                if not self._events or len(newer) == EVENTS:
                    newer = await self._view.store.events("0-0", -EVENTS)
                self._events.extend(newer)
                self._era = era
                return tuple(self._events)
        return None


def waits(view: AgentView, job: JobRecord, cluster: Cluster, line: Mapping[str, int], store_waits: str) -> Json:
    """A better ``reason``, or nothing: first why the job is not run, then why the store decides nothing, then the
    plan's. ``line``: the cluster's ``places``; ``store_waits``: as the agent's health has it."""
    if refusal := cluster.refused.get(job.uid):
        return {"reason": refusal.text}
    if job.phase not in TERMINAL and store_waits:
        return {"reason": store_waits}
    waiting = job.phase in ("queued", "holding") or (job.phase not in TERMINAL and silence(cluster, job))
    why = view.why(job.uid) if waiting else ()
    place = (f"number {line[job.uid]} of {len(line)} in the queue",) if job.uid in line and why else ()
    return {"reason": "; ".join((*why, *place))} if why else {}


def policies_due(job: JobRecord, cluster: Cluster) -> list[Json]:
    """Policies whose timeout runs: what they will do, for which event, and in how many seconds; who acts first comes
    first. Seconds of served time: they stand still while the store is away. Empty of a job that has ended."""
    due = sorted(dues(job), key=lambda one: one.at) if job.phase not in TERMINAL else []
    return [
        {"event": one.event, "do": one.action, "left": round(max(0, one.at - cluster.served) / 1000, 1)} for one in due
    ]


def setbacks_json(job: JobRecord, cluster: Cluster) -> list[Json]:
    """Nodes that the job goes on without for now, since they were no good to it: what each did
    (``text``), and in how many seconds of served time it is tried again (``left``)."""
    found = left_out(job, cluster.nodes, cluster.served) if job.phase not in TERMINAL else {}
    left = {n: max(0, until - cluster.served) / 1000 for n, (_, until) in found.items()}
    return [
        {"node": n, "text": in_words(job, found[n][0]), "left": round(left[n], 1)} for n in sorted(found, key=natural)
    ]


def node_setbacks(node: str, cluster: Cluster) -> list[Json]:
    """Jobs that go on without the node for now, since it was no good to them: as ``setbacks_json``, with the ``job``'s
    name instead of the node's."""
    found = [(job, one) for job in cluster.jobs.values() if job.setbacks for one in setbacks_json(job, cluster)]
    rows = [{"job": job.name, "text": one["text"], "left": one["left"]} for job, one in found if one["node"] == node]
    return sorted(rows, key=lambda row: str(row["job"]))


def failing_node(job: JobRecord, cluster: Cluster) -> str:
    """The node that is blamed for the job's failure, if job after job fails there at its start; else empty."""
    entry = job.budget.get(str(job.last_number))
    if job.phase != "failed" or entry is None or entry.node not in failing_nodes(cluster):
        return ""
    return entry.node


def way_out(job: JobRecord, cluster: Cluster) -> Json | None:
    """For a job in the queue: how its waiting could be ended; None for any other job. ``backoff``: seconds until it may
    start again. ``needs``, ``fit``, ``pending``, ``live``: the number of nodes that it needs at least (None for a job
    of several roles, whose places may share nodes), that could run it now, that could run it once they are ready, and
    that are live. ``enough``, ``enough_soon``: these are enough now, or once they are ready. ``cordoned``: the first
    few suitable nodes that are cordoned; ``mute``: those whose agents are silent; ``clocks``: live ones that
    refuse it by what their clocks show, and the one that signed it; ``unmet``: why no known nodes are suitable;
    ``unfit``: how many could, but for a check of theirs that failed; ``held``: other jobs hold nodes;
    ``barred``: nodes have room, but its queue may not use more; ``capped``: which queue may never use so much, if one;
    ``blocked``: it waits for other jobs; ``begins``: its start time has not come; ``reserved_for``: the job ahead for
    which suitable nodes are kept, else empty."""
    if not in_queue(job):
        return None
    room = room_for(cluster, job)
    cordons = {n: cordon for n, node in cluster.nodes.items() if (cordon := node.cordon) is not None}
    cordoned = [n for n in in_order(cluster) if n in cordons and cordons[n].by != WINDOW and cluster.live(n)]
    back = held_back(cluster, job)
    will_do = [n for n in cordoned if not ruled_out(job.spec, cluster.nodes[n])]
    mute = [n for n in in_order(cluster) if cluster.nodes[n].mute and cluster.live(n)]
    return {
        "backoff": round(max(0, job.not_before - cluster.served) / 1000, 1),
        "needs": None if job.spec.several else job.sized_before.nodes.min,
        "enough": room.enough,
        "enough_soon": room.enough_soon,
        "fit": room.fit,
        "pending": room.pending,
        "live": room.live,
        "barred": room.barred is not None,
        "capped": "" if room.barred is None else _capped(cluster, job, room.barred()),
        "cordoned": will_do[:SHOWN],
        "mute": [n for n in mute if not ruled_out(job.spec, cluster.nodes[n])][:SHOWN],
        "clocks": _clocks(job, cluster),
        "unmet": never(cluster, job.sized_before),
        "blocked": bool(blocked(cluster, job)),
        "begins": job.active is None and job.not_before > cluster.served,
        "reserved_for": back.by.name if back is not None else "",
        "unfit": room.unfit,
        "held": any(uid != job.uid for jobs in booked(cluster).values() for uid, _ in jobs),
    }


def _clocks(job: JobRecord, cluster: Cluster) -> list[str]:
    refuse = [n for n, ready in asked(cluster).get(job.uid, {}).items() if ready.clock and cluster.live(n)]
    by = [job.admission.by] if refuse and job.admission is not None else []
    return [*sorted(refuse, key=natural)[:SHOWN], *(one for one in by if one not in refuse)]


def _capped(cluster: Cluster, job: JobRecord, needs: Resources) -> str:
    """Which queue may not have as much as the job needs, even with nothing in use; empty if there is none."""
    found = cluster.queues.too_small(queue_of(job.spec.queue), needs._asdict())
    if found is None:
        return ""
    queue, resource, cap = found
    return f"queue {queue.name} may use {amount_text(cap, resource)}, and it needs {getattr(needs, resource)} at least"


def alone_json(job: JobRecord) -> list[Json]:
    """Workers that were started again alone in the newest generation, or with all of their role (``whole``: its name)
    where they were the first to fail: of each its ``rank``, ``node``, how often (``times``), and how it ended last
    (``text``)."""
    found: dict[int, Json] = {}
    for one in alone_restarts(job.generation):
        rank, times = one.cause.rank, found[one.cause.rank]["times"] if one.cause.rank in found else 0
        whole = one.role if one.cause.round else ""
        found[rank] = {"rank": rank, "node": one.node, "times": times + 1, "text": one.cause.text, "whole": whole}
    return [found[rank] for rank in sorted(found)]


def start_json(job: JobRecord, cluster: Cluster, wall: float) -> Json:
    """For a job that waits: ``start_estimate``, when it gets its nodes (Unix ms) if all others use their whole time
    limits, and ``starts_after``, the jobs that it waits for until then. None if the time limits do not determine it.
    ``wall``: Unix time."""
    found = start_estimate(cluster, job)
    if found is None:
        return {"start_estimate": None, "starts_after": []}
    return {"start_estimate": round(1000 * starts_at(cluster, found, wall)), "starts_after": list(found.after)}

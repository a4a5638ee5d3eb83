"""When jobs leave their nodes at the latest, and when a node has room for another job then. Of their time limits; a job
without one leaves at no known time. ``reservations.py`` decides what is kept for whom by that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Role
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import queue_of
from nodeagent.model.timing import millis
from nodeagent.model.world import Head
from nodeagent.plan.cluster import Cluster, in_order
from nodeagent.plan.failure.timeouts import ends_at
from nodeagent.plan.nodes.devices import Booking, booked
from nodeagent.plan.nodes.health import takes_work
from nodeagent.plan.queueing.borrowed import NO_NODES, lent, withheld
from nodeagent.plan.queueing.room import fits, kind_of, shape_of

UNKNOWN = 1 << 62
"""The served time at which a job without a time limit leaves its nodes."""


def working_nodes(cluster: Cluster) -> Sequence[str]:
    def look(_before: object) -> list[str]:
        return [n for n in in_order(cluster) if takes_work(cluster, n)]

    return cluster.notes.once("working", (cluster.nodes, cluster.lapsed), look)


@dataclass(frozen=True, slots=True)
class _Frees:
    """When a node has room, and what that was worked out from."""

    of: tuple[NodeRecord, Sequence[Booking], tuple[int, ...]]
    at: int | None


def free_at(cluster: Cluster, job: JobRecord) -> Mapping[str, int]:
    """Node to the served time at which it has room for a pod of the job, which has one role; not those that never
    have."""
    role = job.spec.role

    def look(before: Mapping[str, _Frees] | None) -> dict[str, _Frees]:
        held, leave, found = booked(cluster), departures(cluster, job), dict[str, _Frees]()
        for name in working_nodes(cluster):
            bookings = held.get(name, ())
            of = cluster.nodes[name], bookings, tuple([leave[uid].at(name) for uid, _ in bookings])
            last = before.get(name) if before is not None else None
            if last is not None and last.of[0] is of[0] and last.of[1] is of[1] and last.of[2] == of[2]:
                found[name] = last
            else:
                found[name] = _Frees(of, _room_at(role, *of))
        return found

    what = f"when:{shape_of(role)}:{alike_for(cluster, job)}"
    frees = cluster.once(what, look, size=len(cluster.nodes) // 8)
    return {name: one.at for name, one in frees.items() if one.at is not None}


def _room_at(role: Role, node: NodeRecord, bookings: Sequence[Booking], leave: Sequence[int]) -> int | None:
    order = sorted(range(len(bookings)), key=leave.__getitem__)
    for i, at in enumerate((0, *(leave[one] for one in order))):
        if fits(role, kind_of(node, {device for one in order[i:] for device in bookings[one][1]})):
            return at
    return None


@dataclass(frozen=True, slots=True)
class Leave:
    """When a job leaves its nodes, at the latest: served times (ms)."""

    members: Collection[str]
    stays: int
    """Those that it is to keep until its end."""
    lent: frozenset[str]
    """Those of them that it gives back when the job needs them that this is asked for."""
    goes: int
    """Nodes where its last workers are being stopped."""

    @property
    def at_last(self) -> int:
        """When it has left all of them."""
        return self.stays if self.members else self.goes

    def at(self, node: str) -> int:
        if node in self.lent:
            return 0
        return self.stays if node in self.members else self.goes


def departures(cluster: Cluster, job: JobRecord) -> Mapping[str, Leave]:
    """By job (uid), of those that have had nodes: when it leaves them for this job."""
    stay = withheld(cluster, queue_of(job.spec.queue))

    def look(_before: object) -> dict[str, Leave]:
        return {
            uid: _leaves(cluster, one, one.head, stay.get(uid, NO_NODES))
            for uid, one in cluster.jobs.items()
            if one.head is not None
        }

    return cluster.once(f"leave:{alike_for(cluster, job)}", look)


def alike_for(cluster: Cluster, job: JobRecord) -> str:
    """What the jobs have in common for which the same borrowed nodes come back: most often these are all."""
    name = queue_of(job.spec.queue)
    return name if withheld(cluster, name) else ""


def _leaves(cluster: Cluster, job: JobRecord, head: Head, stay: frozenset[str]) -> Leave:
    limit, grace = job.spec.time_limit, millis(job.spec.longest_grace)
    stays = UNKNOWN
    if limit is not None and job.first_active is None:
        stays = head.deadline + millis(limit) + grace
    elif at := ends_at(job):
        stays = at + grace
    members = head.members if head.state != "ended" else ()
    return Leave(members, stays, frozenset(lent(cluster, job)).difference(stay), head.since + grace)


def freed_at(cluster: Cluster, nodes: Collection[str]) -> int:
    """The latest served time at which one of these, all of them free now, was left by a job, or joined."""
    at = max(cluster.nodes[n].joined for n in nodes)
    for job in cluster.jobs.values():
        if (head := job.head) is None:
            continue
        smaller = head.state == "active" and head.cause.kind in ("scale", "share")  # nobody knows what it had before
        if smaller or (head.state == "ended" and any(n in head.members for n in nodes)):
            at = max(at, head.since + millis(job.spec.longest_grace))
    return at

"""Which nodes jobs leave for another job, and when.

What jobs with ``nodes: auto`` have borrowed comes back for a job of any queue, whatever parts the queues have by
weight: the parts say only which queue gives first. But no queue falls below what it is guaranteed by that, and one that
is not ``reclaimable`` gives nothing to others. All other nodes a job leaves at the end of its time limit at the latest;
a job without one leaves at no known time. ``transfers.py`` decides who needs nodes and how many come back,
``reservations.py`` what is reserved for whom until nodes come free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Role
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import queue_of
from nodeagent.model.timing import millis
from nodeagent.model.world import Generation
from nodeagent.plan.cluster import Cluster, in_order
from nodeagent.plan.failure.timeouts import ends_at
from nodeagent.plan.fairshare.queues import shared
from nodeagent.plan.fairshare.reclaim import Reclaim
from nodeagent.plan.fairshare.resources import of_devices
from nodeagent.plan.nodes.candidates import fits, kind_of, shape_of
from nodeagent.plan.nodes.devices import Booking, booked
from nodeagent.plan.nodes.health import takes_work
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.queueing.queue import line_key

UNKNOWN = 1 << 62
"""The served time at which a job without a time limit leaves its nodes."""
NO_NODES: frozenset[str] = frozenset()

PickGiven = Callable[[JobRecord, Collection[str]], str | None]
"""The node that a job gives back next, if it has one; not one of these, which were chosen already."""


def lent(cluster: Cluster, job: JobRecord) -> Sequence[str]:
    """Nodes that a job has on top of its target, the newest first: they are given back within a grace, at no cost. Only
    of a gang that runs: another forms first."""
    generation, nodes = job.generation, job.spec.role.nodes
    if (
        not nodes.auto
        or job.spec.segments
        or generation is None
        or generation.state != "active"
        or job.control.desired != "run"
    ):
        return ()
    return [m.node for m in survivors(cluster, job)][: job.control.target - 1 : -1]


def back_in_turn(
    cluster: Cluster, plan: Reclaim, to: str, donors: Iterable[tuple[JobRecord, int]], pick: PickGiven
) -> Iterator[tuple[JobRecord, str]]:
    """Jobs and their borrowed nodes, in the order in which these come back for a job of the queue ``to``: one after the
    other of the queue that is most above its part then, and of its jobs of the one that has most on top of its target.
    ``donors``: with how many these are; of equal ones the first goes first. ``plan``: what queues use; of what is
    found here each time so much less."""
    plan, groups, jobs = Reclaim(cluster, plan), dict[str, list[tuple[int, int]]](), list[JobRecord]()
    weighted = shared(cluster)
    for i, (donor, count) in enumerate(donors):
        jobs.append(donor)
        groups.setdefault(donor.spec.queue if weighted else "", []).append((-count, i))

    def first_of(name: str) -> tuple[float, int, int, str]:
        count, i = groups[name][0]
        return -plan.over(jobs[i]) if weighted else 0.0, count, i, name

    for group in groups.values():
        heapify(group)
    queues = [first_of(name) for name in groups]
    heapify(queues)
    chosen: set[str] = set()
    while queues:
        _, count, i, name = heappop(queues)
        donor = jobs[heappop(groups[name])[1]]
        node = pick(donor, chosen)
        if node is not None and donor.generation is not None:
            use = of_devices(donor.generation.members[node].devices)
            if plan.may_return(donor, use, to):
                yield donor, node
                plan.release(donor, use)
                chosen.add(node)
                heappush(groups[name], (count + 1, i))
        if groups[name]:
            heappush(queues, first_of(name))


def withheld(cluster: Cluster, queue: str) -> Mapping[str, frozenset[str]]:
    """Job (uid) to those of the nodes that it has borrowed which do not come back for a job of this queue: its own
    queue is not ``reclaimable``, or is guaranteed as much. Empty if there are none."""
    out = _lent_by_all(cluster)
    if not out:
        return {}

    def newest(donor: JobRecord, chosen: Collection[str]) -> str | None:
        return next((node for node in out[donor.uid] if node not in chosen), None)

    def look(_before: object) -> dict[str, frozenset[str]]:
        donors = [(cluster.jobs[uid], len(nodes)) for uid, nodes in out.items()]
        back: dict[str, set[str]] = {}
        for donor, node in back_in_turn(cluster, Reclaim(cluster), queue, donors, newest):
            back.setdefault(donor.uid, set()).add(node)
        stay = {uid: frozenset(nodes).difference(back.get(uid, ())) for uid, nodes in out.items()}
        return {uid: nodes for uid, nodes in stay.items() if nodes}

    return cluster.once(f"withheld:{queue}", look)


def _lent_by_all(cluster: Cluster) -> Mapping[str, Sequence[str]]:
    """Job (uid) to what it has borrowed, in the order of the line; nothing where all of it comes back for anybody."""

    def look(_before: object) -> dict[str, Sequence[str]]:
        if not any(one.guarantee.stated or not one.reclaimable for one in cluster.queues.by_name.values()):
            return {}
        jobs = sorted((job for job in cluster.jobs.values() if job.uid not in cluster.refused), key=line_key)
        return {job.uid: nodes for job in jobs if (nodes := lent(cluster, job))}

    return cluster.once("lent", look)


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
            uid: _leaves(cluster, one, one.generation, stay.get(uid, NO_NODES))
            for uid, one in cluster.jobs.items()
            if one.generation is not None
        }

    return cluster.once(f"leave:{alike_for(cluster, job)}", look)


def alike_for(cluster: Cluster, job: JobRecord) -> str:
    """What the jobs have in common for which the same borrowed nodes come back: most often these are all."""
    name = queue_of(job.spec.queue)
    return name if withheld(cluster, name) else ""


def _leaves(cluster: Cluster, job: JobRecord, generation: Generation, stay: frozenset[str]) -> Leave:
    limit, grace = job.spec.time_limit, millis(job.spec.longest_grace)
    stays = UNKNOWN
    if limit is not None and job.first_active is None:
        stays = generation.deadline + millis(limit) + grace
    elif at := ends_at(job):
        stays = at + grace
    members = generation.members if generation.state != "ended" else ()
    return Leave(members, stays, frozenset(lent(cluster, job)).difference(stay), generation.since + grace)


def freed_at(cluster: Cluster, nodes: Collection[str]) -> int:
    """The latest served time at which one of these, all of them free now, was left by a job, or joined."""
    at = max(cluster.nodes[n].joined for n in nodes)
    for job in cluster.jobs.values():
        if (generation := job.generation) is None:
            continue
        smaller = generation.state == "active" and generation.cause.kind in (
            "scale",
            "share",
        )  # nobody knows what it had before
        if smaller or (generation.state == "ended" and any(n in generation.members for n in nodes)):
            at = max(at, generation.since + millis(job.spec.longest_grace))
    return at

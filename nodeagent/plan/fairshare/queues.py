"""How queues share a cluster: what each of them uses, whose turn it is, and what no queue may exceed. Pure: the same
view gives the same order on every node. Chooses no nodes, and starts nothing.

The order of jobs that wait: those within what their queues are guaranteed; then by the queue's priority, and the job's.
Then, from the top of the tree down, queues that stay within their part with their next job, then those that have less
than it, then the others; of these the queue that would have the smaller share with its next job, and used less before.
Within a queue the same by user; then age. A share is a dominant one: of GPUs, nodes and CPU slots the largest part of
the cluster that is in use, by the weight. Each job that is put in line counts as if it ran, so that the line is the
order in which they would start; one that there is no room for counts for nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.queue import RESOURCES, Queue, Queues, amount_text, queue_of
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.resources import NOTHING, Resources, least, size, used, wanted
from nodeagent.plan.fairshare.usage import Decayed

NO_PAST = Decayed()
ROUNDING = 1e-9
TOP = ""
"""The root of the tree, above the queues without a parent."""


def shared(cluster: Cluster) -> bool:
    """There is more than one queue: else all is as without any."""
    return len(cluster.queues.by_name) > 1


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is in use."""

    by_queue: Mapping[str, Resources]
    """Those below it included; of a queue that is gone as well."""
    by_user: Mapping[tuple[str, int], Resources]
    """Of a queue's jobs, by their owner."""
    jobs: Mapping[str, tuple[str, ...]]
    """Queue, or one above it, to the jobs (uids) that hold something."""


def holdings(cluster: Cluster) -> Holdings:
    """By queue and user, from what jobs hold."""
    by_job = used(cluster)

    def look(_before: object) -> Holdings:
        by_queue: dict[str, Resources] = {}
        by_user: dict[tuple[str, int], Resources] = {}
        jobs: dict[str, list[str]] = {}
        for uid, use in by_job.items():
            job = cluster.jobs[uid]
            name = queue_of(job.spec.queue)
            user = (name, job.owner)
            by_user[user] = by_user.get(user, NOTHING).and_(use)
            for one in above(cluster.queues, name):
                by_queue[one] = by_queue.get(one, NOTHING).and_(use)
                jobs.setdefault(one, []).append(uid)
        return Holdings(by_queue, by_user, {name: tuple(uids) for name, uids in jobs.items()})

    return cluster.notes.once("holdings", (by_job, cluster.queues), look)


def above(tree: Queues, name: str) -> tuple[str, ...]:
    """The queue and those above it; a queue that is gone is alone."""
    return tree.paths.get(name) or (name,)


Amounts = tuple[int, int, int]
"""As ``Resources``, or these."""


def dominant(use: Amounts, total: Resources) -> float:
    """The largest part of the cluster that this is, of one of its resources."""
    (gpus, nodes, slots), (all_gpus, all_nodes, all_slots) = use, total
    return max(
        gpus / all_gpus if all_gpus else 0.0, nodes / all_nodes if all_nodes else 0.0,
        slots / all_slots if all_slots else 0.0, 0.0,
    )  # fmt: skip


class Part(NamedTuple):
    """What a queue is to have by weight, in the order of ``model.queue.RESOURCES``; hardly ever whole devices."""

    gpus: float = 0.0
    nodes: float = 0.0
    slots: float = 0.0


NO_PART = Part()


def beyond(use: Amounts, part: Part, total: Resources) -> float:
    """How much more than the part this is, of the resource of which it is most, as a part of the cluster; below 0 if it
    is less of each resource."""
    (gpus, nodes, slots), (due_gpus, due_nodes, due_slots), (all_gpus, all_nodes, all_slots) = use, part, total
    return max(
        (gpus - due_gpus) / all_gpus if all_gpus else -1.0, (nodes - due_nodes) / all_nodes if all_nodes else -1.0,
        (slots - due_slots) / all_slots if all_slots else -1.0, -1.0,
    )  # fmt: skip


def parts(tree: Queues, total: Resources, among: Collection[str] | None = None) -> dict[str, Part]:
    """Queue to its part of the cluster by weight, from the top down, parents before their children. No part is larger
    than the queue's capability: what it may not have is its siblings'. ``among``: queues that count; None: all."""
    divided = [_divided(tree, resource, amount, among) for resource, amount in zip(RESOURCES, total, strict=True)]
    return {name: Part(*(of[name] for of in divided)) for name in divided[0]}


def _divided(tree: Queues, resource: str, total: int, among: Collection[str] | None) -> dict[str, float]:
    found: dict[str, float] = {}

    def divide(parent: str, amount: float) -> None:
        siblings = [name for name in tree.children.get(parent, ()) if among is None or name in among]
        rest, shares = list(siblings), dict[str, float]()
        while rest:
            weights = sum(tree.by_name[name].weight for name in rest)
            shares |= {name: amount * tree.by_name[name].weight / weights for name in rest}
            caps = {name: tree.by_name[name].capability.stated.get(resource) for name in rest}
            full = {name: cap for name, cap in caps.items() if cap is not None and cap < shares[name]}
            shares |= full
            amount -= sum(full.values())
            rest = [name for name in rest if name not in full] if full else []
        for name in siblings:
            found[name] = shares[name]
            divide(name, found[name])

    divide(TOP, total)
    return found


def entitlements(cluster: Cluster) -> Mapping[str, Part]:
    """Queue to its part of the cluster by weight, siblings without jobs left out."""

    def look(_before: object) -> dict[str, Part]:
        tree = cluster.queues
        leaves = {queue_of(job.spec.queue) for job in cluster.jobs.values() if _counts(job)}
        return parts(tree, size(cluster).total, {name for leaf in leaves for name in above(tree, leaf)})

    return cluster.once("entitlements", look)


def _counts(job: JobRecord) -> bool:
    """It runs, or wants to."""
    return job.control.desired == "run" and job.phase not in TERMINAL


def owned(tree: Queues, name: str) -> Mapping[str, int]:
    """Resource to what the queue is guaranteed of it, where anything is."""
    if name not in tree.by_name:
        return {}
    all_of = {one: tree.guaranteed(name, one) for one in RESOURCES}
    return {resource: amount for resource, amount in all_of.items() if amount}


def overbooked(cluster: Cluster, tree: Queues) -> list[str]:
    """Of each resource of which the queues of this tree are guaranteed more than live nodes have, a sentence."""
    found = []
    for resource, has in zip(RESOURCES, size(cluster).total, strict=True):
        promised = sum(tree.guaranteed(name, resource) for name in tree.children.get("", ()))
        if promised > has:
            found.append(f"queues are guaranteed {amount_text(promised, resource)}, and the live nodes have {has}")
    return found


# --- capability: what no queue may exceed ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What one job may hold at most, since its queues may."""

    most: Mapping[str, int]
    """Resource to amount; a resource that is not in it is not limited."""
    by: Mapping[str, str]
    """Resource to the queue that says so."""

    def holds(self, use: Resources) -> bool:
        """That much is within it."""
        return not self.exceeded(use)

    def exceeded(self, use: Resources) -> tuple[str, ...]:
        """The resources of which this is too much."""
        return tuple(name for name, most in self.most.items() if getattr(use, name) > most)


NO_CEILING = Ceiling({}, {})


def ceiling(cluster: Cluster, job: JobRecord) -> Ceiling:
    """What the job may hold, with what others of its queues hold now. A job keeps what it has, also where a capability
    was lowered below it; one whose queue is gone gets nothing more."""
    if not cluster.queues.queues and not job.spec.queue:
        return NO_CEILING
    queues = tuple(cluster.queues.path(queue_of(job.spec.queue)))
    if queues and not any(queue.capability.stated for queue in queues):
        return NO_CEILING
    found = holdings(cluster)
    own = used(cluster).get(job.uid, NOTHING)
    if not queues:
        name = queue_of(job.spec.queue)
        return Ceiling(dict(zip(RESOURCES, own, strict=True)), dict.fromkeys(RESOURCES, name))
    most: dict[str, int] = {}
    by: dict[str, str] = {}
    for queue in queues:
        others, reserved = found.by_queue.get(queue.name, NOTHING).less(own), cluster.set_aside.get(queue.name, {})
        for name, cap in queue.capability.stated.items():
            left = max(cap - getattr(others, name) - reserved.get(name, 0), getattr(own, name))
            if left < most.get(name, left + 1):
                most[name], by[name] = left, queue.name
    return Ceiling(most, by)


def barring(cluster: Cluster, job: JobRecord, needs: Resources) -> str:
    """The lowest of the job's queues that cannot have so much now, and could if its other jobs had ended; empty if
    there is none."""
    found, own = holdings(cluster), used(cluster).get(job.uid, NOTHING)
    for queue in cluster.queues.path(queue_of(job.spec.queue)):
        stated, others = queue.capability.stated, found.by_queue.get(queue.name, NOTHING).less(own)
        if any(getattr(needs, name) > cap for name, cap in stated.items()):
            return ""
        if any(getattr(others, name) + getattr(needs, name) > cap for name, cap in stated.items()):
            return queue.name
    return ""


def claims(cluster: Cluster, job: JobRecord, use: Resources) -> tuple[str, ...]:
    """Queues with a capability of which the job takes more than it has, if it gets this."""
    own = used(cluster).get(job.uid, NOTHING)
    more = [name for name in RESOURCES if getattr(use, name) > getattr(own, name)]
    path = cluster.queues.path(queue_of(job.spec.queue))
    return tuple(sorted(queue.name for queue in path if any(name in queue.capability.stated for name in more)))


def full(cluster: Cluster, job: JobRecord, needs: Resources) -> str:
    """Why the job cannot have this now, and who holds what it would need; empty if no queue is in the way."""
    limit = ceiling(cluster, job)
    exceeded = limit.exceeded(needs)
    if not exceeded:
        return ""
    resource = exceeded[0]
    name = limit.by[resource]
    queue = cluster.queues.by_name.get(name)
    if queue is None:
        return f"queue {name} does not exist any more: create it again, or delete the job"
    own = getattr(used(cluster).get(job.uid, NOTHING), resource)
    cap, has = queue.capability.stated[resource], getattr(holdings(cluster).by_queue.get(name, NOTHING), resource)
    reserved = cluster.set_aside.get(name, {}).get(resource, 0)
    uses = f"has {has} in use" + (f" and reserves {reserved} for jobs before this one" if reserved else "")
    more = getattr(needs, resource) - own
    text = f"queue {name} may use {amount_text(cap, resource)} and {uses}; this needs {more} more"
    others = [uid for uid in holdings(cluster).jobs.get(name, ()) if uid != job.uid]
    held = sorted(((getattr(used(cluster)[uid], resource), cluster.jobs[uid]) for uid in others), key=_most_first)
    shown = [f"job {other.name} holds {amount}" for amount, other in held[:3] if amount]
    more = [f"{len(held) - 3} more jobs hold others"] if len(held) > 3 else []
    return f"{text} ({', '.join([*shown, *more])})" if shown else text


def _most_first(held: tuple[int, JobRecord]) -> tuple[int, int]:
    return -held[0], held[1].order


# --- the order of those that wait ---------------------------------------------------------------------


def in_line(
    cluster: Cluster, jobs: Iterable[JobRecord], past: Decayed = NO_PAST, *, without_room: Collection[str] = ()
) -> list[JobRecord]:
    """These jobs in the order in which they would start, if there was room for one after the other. ``past``: what
    queues and their users have used before; ``without_room``: jobs (uids) that there is no room for."""
    line = sorted(jobs, key=lambda job: (job.order, job.uid))
    first = _within_guarantees(cluster, line)
    classes: dict[tuple[bool, int, int], list[JobRecord]] = {}
    priorities = {name: queue.priority for name, queue in cluster.queues.by_name.items()}
    for job in line:
        rank = job.uid in first, priorities.get(queue_of(job.spec.queue), 0), job.spec.priority
        classes.setdefault(rank, []).append(job)
    turns = _Turns(cluster, past, without_room)
    return [job for rank in sorted(classes, reverse=True) for job in turns.take(classes[rank])]


def _within_guarantees(cluster: Cluster, jobs: Iterable[JobRecord]) -> frozenset[str]:
    """Those of these jobs (uids) with which their queues still have no more than they are guaranteed. ``jobs``: the
    oldest first."""
    found: set[str] = set()
    use: dict[str, Resources] = {}
    all_owned = {name: guarantee for name in cluster.queues.by_name if (guarantee := owned(cluster.queues, name))}
    if not all_owned:
        return frozenset()
    for job in sorted(jobs, key=lambda job: -job.spec.priority):
        name = queue_of(job.spec.queue)
        if guarantee := all_owned.get(name, {}):
            before = use.get(name, holdings(cluster).by_queue.get(name, NOTHING))
            needs = least(cluster, job.sized_before)
            after = before.and_(needs)
            if covers(guarantee, after, needs):
                found.add(job.uid)
                use[name] = after
    return frozenset(found)


def covers(guarantee: Mapping[str, int], use: Resources, of: Resources) -> bool:
    """The use is within what is guaranteed of the resources that ``of`` takes; never where none of these is. GPUs that
    a queue is guaranteed neither give its jobs without GPUs a right to nodes, nor keep them from others."""
    amounts = [(getattr(use, resource), most) for resource, most in guarantee.items() if getattr(of, resource)]
    return bool(amounts) and all(amount <= most for amount, most in amounts)


_Entry = tuple[int, float, int, str]
"""How far it has its part: 0, it is within it with its next job; 1, only without that one; 2, it has it. Then its share
and past, the oldest job, and the branch's name."""


@dataclass(slots=True)
class _Branch:
    """The root, a queue, or a user of a queue: what is below it takes turns."""

    weight: float = 1.0
    use: Resources = NOTHING
    past: float = 0.0
    """Its part of what it and its siblings used before, by the weight."""
    entitled: Part | None = None
    """Of a queue: its part of the cluster."""
    below: list[_Entry] = field(default_factory=list)
    """A heap of those below that have jobs in line."""
    jobs: list[JobRecord] = field(default_factory=list)
    """Of a user: those in line, the oldest last."""
    next: Resources = NOTHING
    """What its next job would have."""


class _Turns:
    """One pass over the jobs that wait. A job that has had its turn counts as if it ran."""

    def __init__(self, cluster: Cluster, past: Decayed, without_room: Collection[str]) -> None:
        self._cluster, self._total, self._held = cluster, size(cluster).total, holdings(cluster)
        self._past, self._users_past = _past(cluster.queues, past.by_queue), _users_past(past.by_user)
        self._entitled, self._without_room = entitlements(cluster), without_room
        self._branches: dict[str, _Branch] = {}
        self._paths: dict[tuple[str, int], tuple[str, ...]] = {}
        self._wanted: dict[tuple[object, ...], Resources] = {}
        """What a job of one role would have, by what that depends on."""

    def take(self, jobs: Sequence[JobRecord]) -> Iterable[JobRecord]:
        """All of them, in order. ``jobs``: the oldest first."""
        below: dict[str, dict[str, None]] = {}
        seen = set[tuple[str, ...]]()
        for job in reversed(jobs):
            path = self._path(job)
            self._branch(path[-1], path[-2]).jobs.append(job)
            if path not in seen:
                seen.add(path)
                for parent, child in pairwise(path):
                    below.setdefault(parent, {})[child] = None
        self._line_up(TOP, below)
        return [self._next() for _ in jobs]

    def _line_up(self, parent: str, below: Mapping[str, Iterable[str]]) -> None:
        heap = self._branch(parent).below
        for child in below.get(parent, ()):
            self._line_up(child, below)
            heap.append(self._entry(child, self._branches[child]))
        heapq.heapify(heap)

    def _next(self) -> JobRecord:
        path, last = list[tuple[list[_Entry], str, _Branch]](), self._branches[TOP]
        while heap := last.below:
            name = heap[0][3]
            last = self._branches[name]
            path.append((heap, name, last))
        job = last.jobs.pop()
        use = NOTHING if job.uid in self._without_room else last.next
        for heap, name, branch in reversed(path):
            if use is not NOTHING:
                branch.use = branch.use.and_(use)
            if branch.jobs or branch.below:
                heapq.heapreplace(heap, self._entry(name, branch))
            else:
                heapq.heappop(heap)
        return job

    def _entry(self, name: str, branch: _Branch) -> _Entry:
        """By the share that it would have with its next job; of equal ones the one with the older job goes first."""
        if branch.jobs:
            job = branch.jobs[-1]
            branch.next, oldest = self._uses(job), job.order
        else:
            first = branch.below[0]
            branch.next, oldest = self._branches[first[3]].next, first[2]
        (gpus, nodes, slots), more = branch.use, branch.next
        then = gpus + more[0], nodes + more[1], slots + more[2]
        share = dominant(then, self._total) / branch.weight + branch.past
        return 2 if branch.entitled is None else self._has_part(branch, branch.entitled, then), share, oldest, name

    def _has_part(self, branch: _Branch, part: Part, then: Amounts) -> int:
        """How far the queue has its part; ``then``: what it has with its next job. Who is within its part goes before
        others, whatever it used before."""
        if beyond(branch.use, part, self._total) > -ROUNDING:
            return 2
        return 0 if beyond(then, part, self._total) <= ROUNDING else 1

    def _path(self, job: JobRecord) -> tuple[str, ...]:
        """From the root over the queues to the user."""
        key = job.spec.queue, job.owner
        if key not in self._paths:
            name = queue_of(job.spec.queue)
            self._paths[key] = TOP, *reversed(above(self._cluster.queues, name)), f"{name}/{job.owner}"
        return self._paths[key]

    def _branch(self, name: str, queue: str = "") -> _Branch:
        """``queue``: of a user."""
        found = self._branches.get(name)
        if found is not None:
            return found
        if queue:
            owner = int(name.rpartition("/")[2])
            key = queue, owner
            found = _Branch(use=self._held.by_user.get(key, NOTHING), past=self._users_past.get(key, 0.0))
        else:
            known = self._cluster.queues.by_name.get(name)
            weight = known.weight if known is not None else 1.0
            use, past = self._held.by_queue.get(name, NOTHING), self._past.get(name, 0.0)
            found = _Branch(weight, use, past, self._entitled.get(name))
        self._branches[name] = found
        return found

    def _uses(self, job: JobRecord) -> Resources:
        if len(job.spec.roles) > 1:
            return wanted(self._cluster, job.sized, job.control.target)
        role = job.spec.roles[0]
        shape = (role.workers_per_node, role.gpus_per_worker, job.control.target)
        if shape not in self._wanted:
            self._wanted[shape] = wanted(self._cluster, job.spec, job.control.target)
        return self._wanted[shape]


def _past(tree: Queues, by_queue: Mapping[str, float]) -> dict[str, float]:
    """Queue to its part of what it and its siblings used before, by its weight."""
    summed: dict[str, float] = {}
    for name, seconds in by_queue.items():
        for one in above(tree, name):
            summed[one] = summed.get(one, 0.0) + seconds
    found: dict[str, float] = {}
    for siblings in tree.children.values():
        total = sum(summed.get(name, 0.0) for name in siblings)
        if total > 0:
            found |= {name: summed.get(name, 0.0) / total / tree.by_name[name].weight for name in siblings}
    return found


def _users_past(by_user: Mapping[tuple[str, int], float]) -> dict[tuple[str, int], float]:
    """A queue's user to the part of what all of its users used before."""
    totals: dict[str, float] = {}
    for (queue, _), seconds in by_user.items():
        totals[queue] = totals.get(queue, 0.0) + seconds
    return {key: seconds / totals[key[0]] for key, seconds in by_user.items() if totals[key[0]] > 0}


# --- for people -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueShare:
    """One queue, now."""

    queue: Queue
    use: Resources
    share: float
    """The largest part of the cluster that it uses, of one resource."""
    entitled: float
    """Its part of its parent's by weight, from the top down, if all of its siblings want theirs."""
    jobs: int
    """Those that have not ended, of it and below."""
    waiting: int


def standings(cluster: Cluster) -> dict[str, QueueShare]:
    """Every queue, parents before their children."""
    tree, held, total = cluster.queues, holdings(cluster), size(cluster).total
    live: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for job in cluster.jobs.values():
        if job.phase in TERMINAL:
            continue
        for name in above(tree, queue_of(job.spec.queue)):
            live[name] = live.get(name, 0) + 1
            waiting[name] = waiting.get(name, 0) + (job.phase in ("queued", "holding"))
    found: dict[str, QueueShare] = {}

    for name, part in parts(tree, total).items():
        queue, use = tree.by_name[name], held.by_queue.get(name, NOTHING)
        entitled = min((due / all_ for due, all_ in zip(part, total, strict=True) if all_), default=0.0)
        found[name] = QueueShare(queue, use, dominant(use, total), entitled, live.get(name, 0), waiting.get(name, 0))
    return found

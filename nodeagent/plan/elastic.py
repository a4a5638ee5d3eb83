"""How many nodes a job has: its target; and, with ``nodes: auto``, idle nodes on top of it. They are borrowed: who is
entitled to them and needs them gets them back. Worked out once for each view and for all jobs together, so that all
agents agree.

Gives nothing back of what a job's target says: whole jobs are not stopped here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from nodeagent.model.job import JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.health import bar
from nodeagent.plan.membership import asked, fitting, in_order, survivors
from nodeagent.plan.placement import Placement, choose, soon
from nodeagent.plan.queue import queue, rank

MOST_NEEDERS = 32
"""For so many jobs that lack nodes borrowed ones are looked for at a time: the first."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who borrows and who gives back, all jobs together."""

    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """A job (uid) that runs, and may grow, to the idle nodes that it may take."""
    gives: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """A job (uid) that runs to the nodes that it is to give back, each with the job (uid) that it is for."""


NOTHING = Sharing()


def nodes_wanted(cluster: Cluster, job: JobRecord) -> int:
    """How many nodes the job would have. A gang of several roles that runs has all its places: as many as it has."""
    head, target = job.head, job.control.target
    if job.spec.several and job.phase == "running" and head is not None:
        return len(head.members)
    if not _borrows(job):
        return target
    now = sharing(cluster)
    size = len(survivors(cluster, job)) - len(now.gives.get(job.uid, ())) + len(now.takes.get(job.uid, ()))
    return min(job.spec.nodes.max, max(target, size))


def borrowed(cluster: Cluster, job: JobRecord) -> int:
    """How many of its nodes the job has on top of its target."""
    return max(0, len(survivors(cluster, job)) - job.control.target) if _borrows(job) else 0


def place(cluster: Cluster, job: JobRecord, without: Collection[str] = ()) -> Placement:
    """Choose nodes for the next generation, never more than it is to have. ``without`` are nodes not to use this time.

    A scale-out is all or nothing: until all that it wants fit, the target from before it counts.
    """
    if job.spec.several:
        return choose(cluster, job, job.spec.nodes.target, without)
    if _borrows(job):
        may = {m.node for m in survivors(cluster, job)}.union(sharing(cluster).takes.get(job.uid, ()))
        without = {n for n in cluster.nodes if n not in may}.union(without, sharing(cluster).gives.get(job.uid, ()))
    full = choose(cluster, job, nodes_wanted(cluster, job), without)
    growing = job.control.growing
    if growing is None or len(full.chosen) >= growing.want:
        return full
    return choose(cluster, job, growing.before, without)


def awaited(cluster: Cluster, job: JobRecord, placement: Placement) -> tuple[str, ...]:
    """Nodes that are getting ready, and that the job would use if it waited for them."""
    if job.spec.several:
        places = soon(cluster, job).places
        return tuple(c.node for c in placement.pending if c.node in places)
    wanted = nodes_wanted(cluster, job)
    return tuple(c.node for c in placement.pending) if len(placement.chosen) < wanted else ()


def sharing(cluster: Cluster) -> Sharing:
    """What is to be taken and given back in this view."""
    return cluster.once("sharing", lambda _before: _share(cluster), cluster.refused)


def _borrows(job: JobRecord) -> bool:
    """It runs, or is about to, and may have nodes on top of its target. Before its first start it is like others."""
    head = job.head
    return job.spec.role.nodes.auto and head is not None and head.state != "ended" and job.control.desired == "run"


def _share(cluster: Cluster) -> Sharing:
    borrowers = [j for j in cluster.jobs.values() if j.uid not in cluster.refused and _borrows(j)]
    if not borrowers:
        return NOTHING
    ledger = _Ledger(cluster, sorted(borrowers, key=rank))
    for job, lack in islice(_needers(cluster), MOST_NEEDERS):
        ledger.provide(job, lack)
    ledger.lend_idle()
    ledger.level()
    return Sharing({uid: tuple(nodes) for uid, nodes in ledger.takes.items() if nodes}, ledger.gives)


def _needers(cluster: Cluster) -> Iterator[tuple[JobRecord, int]]:
    """Jobs that are to have nodes, and how many: those that run on fewer than their target, then those that wait."""
    jobs = [j for j in cluster.jobs.values() if j.uid not in cluster.refused and j.control.desired == "run"]
    for job in sorted((j for j in jobs if j.phase in ("forming", "running") and not j.spec.several), key=rank):
        lack = job.control.target - len(survivors(cluster, job))
        if lack > 0:
            yield job, lack
    for waiting in queue(cluster):
        if not waiting.job.spec.several:
            yield waiting.job, waiting.job.spec.nodes.min


class _Ledger:
    """What is idle, what is lent, and what becomes of it. What a generation leaves counts as free already: it will be
    in a moment, and nothing more need be given back for it."""

    def __init__(self, cluster: Cluster, borrowers: Iterable[JobRecord]) -> None:
        self._cluster = cluster
        self._borrowers = tuple(borrowers)
        self._used = self._devices_used()
        self._nodes = [n for n in in_order(cluster) if self._may_work(n)]
        self.takes: dict[str, list[str]] = {}
        self.gives: dict[str, dict[str, str]] = {}
        self._promised: set[str] = set()
        """Idle nodes, and nodes given back, that somebody is to have."""
        self._lent = {j.uid: self._on_top(j) for j in self._borrowers}
        """By job the nodes on top of its target that it has still, the newest first."""

    def provide(self, job: JobRecord, lack: int) -> None:
        """The idle nodes that a job lacks are not lent; where they are too few, borrowed ones are given back. Where
        those would be too few as well, nothing is done for it: it holds up nobody."""
        idle = list(islice((n for n in self._nodes if n not in self._promised and self._fits(job, n)), lack))
        back = self._to_give(job, lack - len(idle))
        runs = job.phase in ("forming", "running")
        if len(idle) + len(back) < lack and not runs:
            return
        self._promised.update(idle)
        if runs:
            self.takes.setdefault(job.uid, []).extend(idle)
        for donor, node in back:
            self._give(donor, node, job)

    def lend_idle(self) -> None:
        """Each idle node to the job with the fewest borrowed ones that can use it."""
        able = [j for j in self._borrowers if j.control.growing is None]
        while able:
            job = min(able, key=self._count)  # of equals the first
            node = next(self._idle_for(job), None) if self._size(job) < job.spec.nodes.max else None
            if node is None:
                able.remove(job)
                continue
            self._promised.add(node)
            self.takes.setdefault(job.uid, []).append(node)

    def level(self) -> None:
        """Between jobs that borrow: who has fewer, by two at least, gets one of who has most."""
        able = [j for j in self._borrowers if self._size(j) < j.spec.nodes.max]
        while able:
            poor = min(able, key=self._count)
            donors = [j for j in self._borrowers if self._count(j) - self._count(poor) >= 2 and self._lent[j.uid]]
            found = self._first_of(poor, sorted(donors, key=self._count, reverse=True))
            if found is None:
                able.remove(poor)
                continue
            self._give(*found, poor)
            if self._size(poor) >= poor.spec.nodes.max:
                able.remove(poor)

    def _to_give(self, job: JobRecord, lack: int) -> list[tuple[JobRecord, str]]:
        """Borrowed nodes for a job, one after the other of who has most then, the newest first."""
        found: list[tuple[JobRecord, str]] = []
        count = {j.uid: self._count(j) for j in self._borrowers if j.uid != job.uid}
        while len(found) < lack:
            chosen = {node for _, node in found}
            donors = sorted((j for j in self._borrowers if j.uid in count), key=lambda j: -count[j.uid])
            one = self._first_of(job, donors, chosen)
            if one is None:
                break
            found.append(one)
            count[one[0].uid] -= 1
        return found

    def _first_of(
        self, job: JobRecord, donors: Iterable[JobRecord], chosen: Collection[str] = ()
    ) -> tuple[JobRecord, str] | None:
        for donor in donors:
            for node in self._lent[donor.uid]:
                if node not in chosen and self._fits(job, node, donor):
                    return donor, node
        return None

    def _give(self, donor: JobRecord, node: str, job: JobRecord) -> None:
        self._lent[donor.uid].remove(node)
        self._promised.add(node)
        self.gives.setdefault(donor.uid, {})[node] = job.uid

    def _count(self, job: JobRecord) -> int:
        """How many nodes it has, or is to have, on top of its target."""
        return max(0, self._size(job) - job.control.target)

    def _size(self, job: JobRecord) -> int:
        size = len(survivors(self._cluster, job)) + len(self.takes.get(job.uid, ()))
        size -= len(self.gives.get(job.uid, ()))
        return size + sum(uid == job.uid for nodes in self.gives.values() for uid in nodes.values())

    def _on_top(self, job: JobRecord) -> list[str]:
        """Only of a gang that runs: another forms first."""
        if job.head is None or job.head.state != "active":
            return []
        members = [m.node for m in survivors(self._cluster, job)]
        return members[: job.control.target - 1 : -1]

    def _idle_for(self, job: JobRecord) -> Iterator[str]:
        """Those that have the job ready, or nearly, come first."""
        begun = asked(self._cluster).get(job.uid, {})
        leaving = job.control.leaving
        free = (n for n in self._nodes if n not in self._promised and n not in leaving and self._fits(job, n))
        return iter(sorted(free, key=lambda n: n not in begun))

    def _fits(self, job: JobRecord, node: str, donor: JobRecord | None = None) -> bool:
        """It has room for the job, once the donor has gone, and is none of its own."""
        ready = self._cluster.nodes[node].readiness.get(job.uid)
        if (ready is not None and ready.state == "unfit") or self._has(job, node):
            return False
        facts, used = self._cluster.nodes[node].facts, self._used.get(node, {})
        taken = {d for uid, devices in used.items() if donor is None or uid != donor.uid for d in devices}
        free = sum(g.healthy and g.uuid not in taken for g in facts.gpus)
        slots = sum(f"cpu{i}" not in taken for i in range(facts.cpu_slots))
        return fitting(job.spec.role, len(facts.gpus), free, slots) > 0

    def _has(self, job: JobRecord, node: str) -> bool:
        return job.uid in self._used.get(node, {})

    def _may_work(self, node: str) -> bool:
        record = self._cluster.nodes[node]
        return self._cluster.live(node) and record.cordon is None and not bar(record.facts)

    def _devices_used(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Node to the jobs (uids) whose newest generation has it, and the devices they have there."""
        found: dict[str, dict[str, tuple[str, ...]]] = {}
        for job in self._cluster.jobs.values():
            if job.head is not None and job.head.state != "ended":
                for node, member in job.head.members.items():
                    found.setdefault(node, {})[job.uid] = member.devices
        return found

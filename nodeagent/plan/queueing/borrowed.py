"""What jobs with ``nodes: auto`` have borrowed, for whom it comes back, and in which order.

A borrowed node comes back for a job of any queue, whatever parts the queues have by weight: these say only who gives
first. But no queue falls below what it is guaranteed by that, and one that is not ``reclaimable`` gives nothing to
others. Who needs nodes, and how many come back, is decided in ``ledger.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from nodeagent.model.job import JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import shared
from nodeagent.plan.fairshare.reclaim import Reclaim
from nodeagent.plan.fairshare.resources import of_devices
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.queueing.queue import line_key

NO_NODES: frozenset[str] = frozenset()

Pick = Callable[[JobRecord, Collection[str]], str | None]
"""The node that a job gives back next, if it has one; not one of these, which were chosen already."""


def lent(cluster: Cluster, job: JobRecord) -> Sequence[str]:
    """Nodes that a job has on top of its target, the newest first: they are given back within a grace, at no cost. Only
    of a gang that runs: another forms first."""
    head, nodes = job.head, job.spec.role.nodes
    if not nodes.auto or job.spec.segments or head is None or head.state != "active" or job.control.desired != "run":
        return ()
    return [m.node for m in survivors(cluster, job)][: job.control.target - 1 : -1]


def back_in_turn(
    cluster: Cluster, plan: Reclaim, to: str, donors: Iterable[tuple[JobRecord, int]], pick: Pick
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
        if node is not None and donor.head is not None:
            use = of_devices(donor.head.members[node].devices)
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

    return cluster.once(f"withheld:{queue}", look, cluster.refused)


def _lent_by_all(cluster: Cluster) -> Mapping[str, Sequence[str]]:
    """Job (uid) to what it has borrowed, in the order of the line; nothing where all of it comes back for anybody."""

    def look(_before: object) -> dict[str, Sequence[str]]:
        if not any(one.guarantee.stated or not one.reclaimable for one in cluster.queues.by_name.values()):
            return {}
        jobs = sorted((job for job in cluster.jobs.values() if job.uid not in cluster.refused), key=line_key)
        return {job.uid: nodes for job in jobs if (nodes := lent(cluster, job))}

    return cluster.once("lent", look, cluster.refused)

"""How many nodes a job has: its target; and, with ``nodes: auto``, idle nodes on top of it. They are borrowed: a job
that is entitled to them and needs them gets them back. Worked out once for each view and for all jobs together
(``ledger.py``), so that all agents agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from nodeagent.model.job import JobRecord
from nodeagent.plan.backfill import reserved
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.ledger import NOTHING, NodeLedger, Sharing, borrows
from nodeagent.plan.membership import survivors
from nodeagent.plan.queue import line_key, queue
from nodeagent.plan.share import shared

MOST_NEEDERS = 32
"""For so many jobs that wait, and for so many that run on too few nodes, nodes are looked for at a time: the first."""
MOST_OF_ROLES = 4
"""For so many jobs of several roles that wait nodes are looked for at a time: each of their places is laid out."""


def nodes_wanted(cluster: Cluster, job: JobRecord) -> int:
    """How many nodes the job would have. A gang of several roles that runs with all its places: as many as it has; else
    one for each place at most."""
    head, target = job.head, job.control.target
    if job.spec.several and job.phase == "running" and head is not None and job.control.growing is None:
        has = head.sizes
        return len(head.members) if all(has[role.name] >= role.places for role in job.sized.roles) else target
    now = sharing(cluster)
    if not borrows(job):
        back = now.gives.get(job.uid)
        return min(target, len(survivors(cluster, job)) - len(back)) if back else target
    size = len(survivors(cluster, job)) - len(now.gives.get(job.uid, ())) + len(now.takes.get(job.uid, ()))
    return min(job.spec.nodes.max, max(target, size))


def borrowed(cluster: Cluster, job: JobRecord) -> int:
    """How many of its nodes the job has on top of its target."""
    return max(0, len(survivors(cluster, job)) - job.control.target) if borrows(job) else 0


def eligible(cluster: Cluster, job: JobRecord) -> frozenset[str] | None:
    """Nodes that its next generation may be on, of a job that borrows; None: on any."""
    if not borrows(job):
        return None
    now = sharing(cluster)
    mine = frozenset(m.node for m in survivors(cluster, job))
    return mine.union(now.takes.get(job.uid, ())).difference(now.gives.get(job.uid, ()))


def sharing(cluster: Cluster) -> Sharing:
    """What is to be taken and given back in this view."""
    of = cluster.nodes, cluster.jobs, cluster.lapsed, cluster.queues, cluster.refused, reserved(cluster)
    return cluster.notes.once("sharing", of, lambda _before: _share(cluster))


def _share(cluster: Cluster) -> Sharing:
    borrowers = [j for j in cluster.jobs.values() if j.uid not in cluster.refused and borrows(j)]
    if not borrowers and not shared(cluster):
        return NOTHING
    ledger = NodeLedger(cluster, sorted(borrowers, key=line_key))
    waiting, short = _waiting(cluster, ledger.barring), _short(cluster, ledger.barring)
    if shared(cluster):  # who made room for one that waits has less than its target: those that wait go first
        late = [(job, lack) for job, lack in waiting if not ledger.provide(job, lack, rounded=False)]
        for job, lack in chain(late, short):
            ledger.provide(job, lack, rounded=True)
    else:
        for job, lack in chain(short, waiting):
            ledger.provide(job, lack, rounded=True)
    ledger.lend_idle()
    ledger.level()
    return Sharing({uid: tuple(nodes) for uid, nodes in ledger.takes.items() if nodes}, ledger.gives, ledger.stops)


Needers = Iterator[tuple[JobRecord, int]]
"""Jobs that are to have nodes, and how many."""


def _waiting(cluster: Cluster, barring: Callable[[JobRecord], str]) -> Needers:
    """Those that wait, in line."""
    jobs = (w.job for w in queue(cluster) if w.job.control.desired == "run")
    return ((job, job.spec.nodes.min) for job in _first(jobs, barring))


def _short(cluster: Cluster, barring: Callable[[JobRecord], str]) -> Needers:
    """Those that run on fewer nodes than their target."""
    jobs = [j for j in cluster.jobs.values() if j.uid not in cluster.refused and j.control.desired == "run"]
    run = [j for j in jobs if j.phase in ("forming", "running") and not j.spec.several]
    lacks = {j.uid: j.control.target - len(survivors(cluster, j)) for j in run}
    few = sorted((j for j in run if lacks[j.uid] > 0), key=line_key)
    return ((job, lacks[job.uid]) for job in _first(few, barring))


def _first(jobs: Iterable[JobRecord], barring: Callable[[JobRecord], str]) -> Iterator[JobRecord]:
    """Only so many. The first job that a capability bars is the last of its queue that counts."""
    left, of_roles, looked = MOST_NEEDERS, MOST_OF_ROLES, set[str]()
    for job in jobs:
        if job.spec.queue in looked or (job.spec.several and not of_roles):
            continue
        of_roles -= job.spec.several
        barred = barring(job)
        if barred or not left:
            looked.add(job.spec.queue)
        if barred or left:
            left -= not barred
            yield job

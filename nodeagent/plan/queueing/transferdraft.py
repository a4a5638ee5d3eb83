"""Who has, gets and gives which nodes, as far as it is decided: what the planner of transfers looks up and writes down.

Also which nodes a job may still get, from whom, and in which order they are asked. Decides for nobody who gets one
(``transfers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import queue_of
from nodeagent.model.world import Member
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.failure.faults import is_finishing
from nodeagent.plan.fairshare.queues import shared
from nodeagent.plan.fairshare.reclaim import Reclaim
from nodeagent.plan.fairshare.resources import NOTHING as NO_USE
from nodeagent.plan.fairshare.resources import Resources, least, wanted
from nodeagent.plan.nodes.candidates import asked, score
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.placing.arranging import arranged
from nodeagent.plan.placing.topology import gang_of
from nodeagent.plan.queueing.departures import NO_NODES, back_in_turn, lent
from nodeagent.plan.queueing.nodefit import NodeFit
from nodeagent.plan.queueing.reservations import ReservedNodes, reserved
from nodeagent.plan.queueing.reserving import Reservation

Given = tuple[JobRecord, str]
"""A job and one of its nodes that it gives."""


@dataclass(slots=True)
class NodeSearch:
    """Which nodes count for a job for which some are looked for."""

    rounded: bool = True
    """As of ``Reclaim.may_lose``."""
    inside: str = ""
    """If a capability bars the job: the queue whose jobs would have to give nodes up."""
    anywhere: bool = False
    """It does not matter which nodes are given up, since enough other nodes are idle."""
    only: frozenset[str] | None = None
    """If its nodes have to be together: those which would be, with those that it has."""
    found: set[str] = field(default_factory=set)
    """Nodes that it is to have, as far as they are found. Several jobs may have to leave the same."""

    def limit(self, inside: str, *, anywhere: bool) -> None:
        """As of these fields."""
        self.inside, self.anywhere = inside, anywhere


class TransferDraft:
    """Of one view. What a generation leaves counts as free already: it will be in a moment, and nothing more need be
    given back for it."""

    def __init__(self, cluster: Cluster, borrowers: Iterable[JobRecord]) -> None:
        self.cluster = cluster
        self.borrowers = tuple(borrowers)
        self.fit = NodeFit(cluster)
        self.takes: dict[str, list[str]] = {}
        self.gives: dict[str, dict[str, str]] = {}
        self.stops: dict[str, str] = {}
        """These three: as of ``Transfers``."""
        self.size = {j.uid: len(survivors(cluster, j)) for j in self.borrowers}
        """How many nodes each borrower has, or is to have."""
        self.lent = {j.uid: _given_back(cluster, j) for j in self.borrowers}
        """By borrower the nodes on top of its target that it has still, the newest first."""
        self.reclaim = Reclaim(cluster)
        self.shared = shared(cluster)
        self._promised: set[str] = set()
        """Idle nodes, and nodes given back, that somebody is to have."""
        self._searches: dict[str, NodeSearch] = {}
        self._running: dict[str, list[JobRecord]] | None = None
        self._reserved = reserved(cluster)
        self._capability_for: set[str] = set()
        """Jobs (uids) that get nothing now, but for which a queue reserves something of its capability."""
        self._lacking: dict[tuple[int, ...], list[Reservation]] = {}
        """As of ``_lack``."""
        self._provided: set[str] = set()
        """Jobs (uids) that have what they lacked: nothing more is reserved for them."""

    # -- what is looked for

    def search(self, job: JobRecord) -> NodeSearch:
        """The job's, from the first time on that it is asked for: what limited it last still does."""
        return self._searches.setdefault(job.uid, NodeSearch())

    def begin(self, job: JobRecord, *, rounded: bool) -> None:
        """Nodes are looked for anew."""
        search = self.search(job)
        search.rounded, search.found = rounded, set()
        if job.uid in self._capability_for:
            self.reclaim.unreserve(job, least(self.cluster, job.sized_before))
            self._capability_for.remove(job.uid)

    def stay_home(self) -> None:
        """From now on a borrower that has to stay in one domain takes only nodes there; all others take any."""
        for search in self._searches.values():
            search.only = None
        for job in self.borrowers:
            if job.spec.within:
                self.search(job).only = self._home(job)

    def reserve_capability(self, job: JobRecord) -> None:
        """A queue may reserve something of its capability for one that gets nothing now."""
        if any(one.uid == job.uid and one.queue for one in self._reserved.found):
            self.reclaim.reserve(job, least(self.cluster, job.sized_before))
            self._capability_for.add(job.uid)

    def barring(self, job: JobRecord) -> str:
        """The queue whose capability keeps the job from all that it lacks, if there is one."""
        more = wanted(self.cluster, job.spec, 1) if runs(job) else least(self.cluster, job.sized_before)
        return self.reclaim.barring(job, more)

    # -- what is decided

    def take(self, job: JobRecord, nodes: Collection[str]) -> None:
        """Idle ones."""
        self._promised.update(nodes)
        self.takes.setdefault(job.uid, []).extend(nodes)
        if job.uid in self.size:
            self.size[job.uid] += len(nodes)

    def give(self, donor: JobRecord, node: str, job: JobRecord) -> None:
        """Back to one that is to have it at once."""
        self.part(donor, node, job)
        if job.uid in self.size:
            self.size[job.uid] += 1

    def part(self, donor: JobRecord, node: str, job: JobRecord) -> None:
        """The donor gives it up for the job."""
        self._promised.add(node)
        self.gives.setdefault(donor.uid, {})[node] = job.uid
        if donor.uid in self.size:
            self.size[donor.uid] -= 1
            self.lent[donor.uid] = [n for n in self.lent[donor.uid] if n != node]

    def stop(self, donor: JobRecord, nodes: Iterable[str], job: JobRecord) -> None:
        """The donor makes room, with all these nodes."""
        self.stops[donor.uid] = job.uid
        self._promised.update(nodes)

    def decide(self, job: JobRecord, idle: Collection[str], back: Collection[Given], plan: Reclaim) -> None:
        """The job gets what it lacked: idle nodes, and borrowed ones. ``plan``: what queues use then."""
        self.reclaim = plan
        self._promised.update(idle)
        self._provided.add(job.uid)
        self._lacking.clear()
        for donor, node in back:
            self.give(donor, node, job)

    # -- what jobs have

    def on_top(self, job: JobRecord) -> int:
        """How many nodes a borrower has, or is to have, on top of its target."""
        return max(0, self.size[job.uid] - job.control.target)

    def may_grow(self, job: JobRecord) -> bool:
        """Neither is it being scaled out, nor does it make room, nor is its queue at its capability."""
        if job.control.growing is not None or job.uid in self.stops or job.uid in self.gives:
            return False
        return not self.reclaim.barring(job, wanted(self.cluster, job.spec, 1))

    def remaining(self, job: JobRecord, back: Collection[Given] = ()) -> list[Member]:
        """Members that the job is to have still, the newest first. ``back``: what is about to be given."""
        given = {*self.gives.get(job.uid, ()), *(node for donor, node in back if donor is job)}
        members = reversed(survivors(self.cluster, job))
        return [m for m in members if m.node not in given] if given else [*members]

    def above_min(self, job: JobRecord, back: Collection[Given] = ()) -> list[Member]:
        """Those that it could run without. A gang of several roles needs all."""
        members = self.remaining(job, back)
        return [] if job.spec.several else members[: max(0, len(members) - job.spec.nodes.min)]

    # -- from whom nodes may come

    def donors(self, job: JobRecord, needs: Resources) -> list[JobRecord]:
        """Jobs of queues that may have to give something for this one, in the order in which they are asked."""
        plan, owns, search = self.reclaim, self.reclaim.owns(job, needs), self.search(job)
        found = dict[float, list[JobRecord]]()
        for donors in self._run().values():
            first = donors[0]
            if search.inside and not plan.is_below(first, search.inside):
                continue
            if plan.may_lose(first, NO_USE, job, needs, owns, rounded=search.rounded):
                alike = found.setdefault(plan.over(first), [])
                of_others = bool(alike)
                alike += [j for j in donors if j.uid not in self.stops and j.uid != job.uid]
                if of_others or len(alike) != len(donors):
                    alike.sort(key=_gives_first)  # of several queues, or without some: sorted parts sort fast
        return [j for over in sorted(found, reverse=True) for j in found[over]]

    def _run(self) -> Mapping[str, Sequence[JobRecord]]:
        """Jobs that run, by their queue: those that could make room, in the order in which they are asked."""
        if self._running is None:
            self._running = {}
            for job in self.cluster.jobs.values():
                if job.generation is None or job.generation.state != "active" or job.control.desired != "run":
                    continue
                if is_finishing(job.generation):  # its nodes will be free in a moment
                    continue
                if job.uid not in self.cluster.refused:
                    self._running.setdefault(job.spec.queue, []).append(job)
            for jobs in self._running.values():
                jobs.sort(key=_gives_first)
        return self._running

    def to_give(self, job: JobRecord, most: int) -> list[Given]:
        """Borrowed nodes for a job, in the order in which they come back."""
        inside = self.search(job).inside
        able = (j for j in self.borrowers if self.lent[j.uid] and j.uid != job.uid)
        givers = ((j, self.on_top(j)) for j in able if not inside or self.reclaim.is_below(j, inside))

        def pick(donor: JobRecord, chosen: Collection[str]) -> str | None:
            return self.newest_lent(donor, job, chosen)

        return [*islice(back_in_turn(self.cluster, self.reclaim, queue_of(job.spec.queue), givers, pick), most)]

    def newest_lent(self, donor: JobRecord, job: JobRecord, chosen: Collection[str] = ()) -> str | None:
        """The newest of the nodes that the donor has borrowed, without those chosen already, that the job can use."""
        lent = self.lent[donor.uid]
        return next((n for n in lent if n not in chosen and self.fits(job, n, donor.uid)), None)

    def returns(self, donor: JobRecord, node: str, job: JobRecord) -> bool:
        """This node, which the donor has borrowed, may come back for the job."""
        use, to = self.fit.use_on(donor, node), queue_of(job.spec.queue)
        return self.fits(job, node, donor.uid) and self.reclaim.may_return(donor, use, to)

    # -- which nodes a job may have

    def idle_for(self, job: JobRecord) -> Iterator[str]:
        """Nodes with room for it that nobody is to have; those that have it ready, or nearly, come first."""
        begun = asked(self.cluster).get(job.uid, {})
        leaving, below = job.control.leaving, self.size.get(job.uid, 0) < job.control.target
        free = [n for n in self.fit.with_room(job) if n not in self._promised and n not in leaving]
        if below and (theirs := self._reserved.for_others.get(job.uid)):
            lacking = NO_NODES.union(*(one.nodes for one in self._lack(theirs)))
            free = [n for n in free if n not in theirs.nodes or n not in lacking]
        if arranged(self.cluster, job.spec):
            free.sort(key=self._distance(job))
        free.sort(key=lambda n: n not in begun)
        return (n for n in free if n not in self._promised and self.fits(job, n))

    def fits(self, job: JobRecord, node: str, donor: str = "") -> bool:
        """It may be one of the job's, has room for it, once the donor (uid) has gone, and is none of its own. With a
        donor: nor is it found for the job already."""
        search = self._searches.get(job.uid)
        if search is not None:
            if donor and search.anywhere:
                return True
            if (donor and node in search.found) or (search.only is not None and node not in search.only):
                return False
        if self._is_reserved(node, job):
            return False
        record = self.cluster.nodes[node]
        ready = record.readiness.get(job.uid)
        if (ready is not None and ready.state == "unfit") or job.uid in self.fit.used.get(node, {}):
            return False
        if job.uid in record.left_out:
            return False
        return self.fit.suits(job, node, donor)

    def _distance(self, job: JobRecord) -> Callable[[str], tuple[int, int]]:
        """Sort key: the nodes first that the job prefers, and of these those that are near to what it has."""
        cluster, role = self.cluster, job.spec.role
        gang = gang_of(cluster, job.spec)
        paths = [
            gang.paths[m.node] for m in survivors(cluster, job) if role.placement is None or not role.placement.spread
        ]
        homes = {path[: i + 1] for path in paths for i, name in enumerate(path) if name}
        depths = range(1, len(gang.levels) + 1)
        return lambda n: (-score(cluster, job, n), -sum(gang.paths[n][:depth] in homes for depth in depths))

    def _home(self, job: JobRecord) -> frozenset[str]:
        """Nodes in the domain that the job has to stay in."""
        gang = gang_of(self.cluster, job.spec)
        domains = {gang.paths[m.node][: gang.within] for m in survivors(self.cluster, job)}
        return frozenset(n for n in self.fit.nodes if {gang.paths[n][: gang.within]} == domains)

    def _is_reserved(self, node: str, job: JobRecord) -> bool:
        """The node is reserved for a gang that is earlier in line and still lacks nodes, and the job would not give it
        back then: as one of its target's, or since its queue has less than it is guaranteed, or is not reclaimable."""
        theirs = self._reserved.for_others.get(job.uid)
        if theirs is None or node not in theirs.nodes:
            return False
        gangs = [one.uid for one in self._lack(theirs) if node in one.nodes]
        if not gangs or self.size.get(job.uid, 0) < job.control.target:
            return bool(gangs)
        queues = (queue_of(self.cluster.jobs[uid].spec.queue) for uid in gangs)
        one = wanted(self.cluster, job.spec, 1)
        return not all(self.reclaim.would_return(job, one, queue) for queue in queues)

    def _lack(self, theirs: ReservedNodes) -> Sequence[Reservation]:
        """Of the reservations of these nodes those whose jobs still lack something."""
        if theirs.by not in self._lacking:
            by = (self._reserved.found[i] for i in theirs.by)
            self._lacking[theirs.by] = [one for one in by if one.nodes and one.uid not in self._provided]
        return self._lacking[theirs.by]


def runs(job: JobRecord) -> bool:
    """It has nodes already."""
    return job.phase in ("forming", "running")


def _given_back(cluster: Cluster, job: JobRecord) -> list[str]:
    """What the job may have to give back: nothing, once some of its pods have ended."""
    generation = job.generation
    return [] if generation is not None and is_finishing(generation) else [*lent(cluster, job)]


def _gives_first(job: JobRecord) -> tuple[int, int]:
    """Sort key: of jobs of one queue those with less priority give first, then the younger ones."""
    return job.spec.priority, -job.order

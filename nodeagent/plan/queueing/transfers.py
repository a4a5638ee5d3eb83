"""What becomes of idle and of borrowed nodes, and who makes room: all jobs of a view together, one job after the other.

A job that lacks nodes gets idle ones, then what others have borrowed; if that is not enough, jobs of queues with more
than their part make room (``TransferPlanner._make_room``), by the rules of ``fairshare/reclaim.py``. What is idle
still is lent. For whom nodes are looked for, and in which order, is decided in ``elastic.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import queue_of
from nodeagent.model.world import Member
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.failure.faults import is_finishing
from nodeagent.plan.fairshare.queues import shared
from nodeagent.plan.fairshare.reclaim import Reclaim
from nodeagent.plan.fairshare.resources import NOTHING as NO_USE
from nodeagent.plan.fairshare.resources import Resources, least, of_devices, together, wanted
from nodeagent.plan.nodes.candidates import Candidate, NodeKind, asked, kind_of, score
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.placing.arranging import arranged
from nodeagent.plan.placing.laying import count_on, lay
from nodeagent.plan.placing.places import Layout
from nodeagent.plan.placing.topology import PastPlaces, gang_of, gather
from nodeagent.plan.queueing.departures import NO_NODES, back_in_turn, lent
from nodeagent.plan.queueing.nodebooks import NodeBooks
from nodeagent.plan.queueing.reservations import KeptNodes, Reservation, reserved

MOST_PLACES = 4
"""So many sets of nodes are tried for a job whose nodes have to be together: not all of them can be given up."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Who borrows and who gives back, all jobs together."""

    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """A job (uid) that runs, and may grow, to the idle nodes that it may take."""
    gives: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """A job (uid) that runs to the nodes that it is to give back, each with the job (uid) that it is for."""
    stops: Mapping[str, str] = field(default_factory=dict)
    """A job (uid) that runs and is to wait in line again, and the job (uid) that it makes room for."""


NO_TRANSFERS = Transfers()


def borrows(job: JobRecord) -> bool:
    """It runs, or is about to, and may have nodes on top of its target. Before its first start it is like others. One
    in segments never does: idle nodes come one by one, and hardly ever as a whole segment of one domain."""
    generation, auto = job.generation, job.spec.role.nodes.auto and not job.spec.segments
    return auto and generation is not None and generation.state != "ended" and job.control.desired == "run"


@dataclass(slots=True)
class _Claim:
    """What a job asks of jobs of other queues."""

    job: JobRecord
    needs: Resources
    short: int
    """Nodes that it lacks still; below 0: so many are too many."""
    plan: Reclaim
    """What queues use without what is given."""
    owns: bool
    """Its queue is guaranteed what it asks for."""
    rounded: bool
    shrink: list[tuple[JobRecord, str]] = field(default_factory=list, init=False)
    """Who gives which node."""
    stop: list[tuple[JobRecord, int, Resources]] = field(default_factory=list, init=False)
    """Who is stopped: how many nodes that leaves, and what that job uses."""
    _open: dict[str, bool] = field(default_factory=dict, init=False)
    """By queue: whether it may give anything more."""

    def may_ask(self, donor: JobRecord) -> bool:
        """Its queue may give anything more."""
        name = donor.spec.queue
        if name not in self._open:
            self._open[name] = self._may_lose(donor, NO_USE)
        return self._open[name]

    def release(self, donor: JobRecord, use: Resources) -> bool:
        """The donor gives this much, if its queue may."""
        may = self._may_lose(donor, use)
        if may:
            self.plan.release(donor, use)
            self._open.clear()
        return may

    def _may_lose(self, donor: JobRecord, use: Resources) -> bool:
        return self.plan.may_lose(donor, use, self.job, self.needs, self.owns, rounded=self.rounded)


@dataclass(frozen=True, slots=True)
class _Source:
    """What a job could leave: one of its nodes, or all of them (``whole``), and what it has there."""

    donor: JobRecord
    nodes: tuple[str, ...]
    use: Resources
    whole: bool = False


class TransferPlanner:
    """What is idle, what is lent, and what becomes of it. What a generation leaves counts as free already: it will be
    in a moment, and nothing more need be given back for it."""

    def __init__(self, cluster: Cluster, borrowers: Iterable[JobRecord]) -> None:
        self._cluster = cluster
        self._borrowers = tuple(borrowers)
        self._books = NodeBooks(cluster)
        self.takes: dict[str, list[str]] = {}
        self.gives: dict[str, dict[str, str]] = {}
        self._promised: set[str] = set()
        """Idle nodes, and nodes given back, that somebody is to have."""
        self._size = {j.uid: len(survivors(cluster, j)) for j in self._borrowers}
        """How many nodes each has, or is to have."""
        self._lent = {j.uid: _given_back(cluster, j) for j in self._borrowers}
        """By job the nodes on top of its target that it has still, the newest first."""
        self.stops: dict[str, str] = {}
        self._run: dict[str, list[JobRecord]] | None = None
        self._reclaim = Reclaim(cluster)
        self._shared = shared(cluster)
        self._inside: dict[str, str] = {}
        """Of jobs (uids) that a capability bars: the queue whose jobs would have to give nodes up."""
        self._anywhere: set[str] = set()
        """Those among them for which enough other nodes are idle: it does not matter which nodes are given up."""
        self._found: dict[str, set[str]] = {}
        """By job (uid): nodes that it is to have, as far as they are found. Several jobs may have to leave the same."""
        self._only: dict[str, frozenset[str]] = {}
        """Of jobs (uids) whose nodes have to be together: which would be, with those that it has."""
        self._reserved = reserved(cluster)
        self._rounded = True
        """As of the call of ``provide``."""
        self._kept_for: set[str] = set()
        """Jobs (uids) that get nothing now, but for which a queue keeps something of its capability."""
        self._lacking: dict[tuple[int, ...], list[Reservation]] = {}
        """As of ``_lack``."""
        self._provided: set[str] = set()
        """Jobs (uids) that have what they lacked: nothing more is kept for them."""

    def provide(self, job: JobRecord, lack: int, *, rounded: bool) -> bool:
        """Find ``lack`` nodes for a job. Idle nodes that it can use are not lent to others. If they are too few,
        borrowed nodes are given back for it; then queues with more than their part make room. If that is still too
        little, nothing is done for a waiting job: it holds up nobody, and False is returned. Nor is it for a scale-out,
        which needs all of its newcomers: only what the gang had before is found for it then. If the job's nodes must
        be together (``within``, ``segments``), only nodes that are together count. ``rounded``: as of
        ``Reclaim.may_lose``."""
        self._rounded = rounded
        self._found.pop(job.uid, None)
        if job.uid in self._kept_for:
            self._reclaim.keep_no_more(job, least(self._cluster, job.sized_before))
            self._kept_for.remove(job.uid)
        if job.spec.several:
            return self._provide_places(job)
        runs, growing = job.phase in ("forming", "running"), job.control.growing
        if not runs or growing is None:
            return self._provide(job, lack, whole=not runs)
        if self._provide(job, lack, whole=True):
            return True
        before = growing.before - len(survivors(self._cluster, job))
        return before > 0 and self._provide(job, before, whole=False)

    def _provide(self, job: JobRecord, lack: int, *, whole: bool) -> bool:
        """``whole``: all of them or none. False: nothing was done."""
        if job.spec.placement is None:
            return self._provide_any(job, lack, whole=whole)
        failed: set[str] = set()
        for _ in range(MOST_PLACES):
            found = self._only[job.uid] = self._near(job, lack, failed)
            if not found or (whole and len(found) < lack):
                return False
            if self._provide_any(job, len(found), whole=whole):
                return True
            failed |= found
        return False

    def barring(self, job: JobRecord) -> str:
        """The queue whose capability keeps the job from all that it lacks, if there is one."""
        runs = job.phase in ("forming", "running")
        more = wanted(self._cluster, job.spec, 1) if runs else least(self._cluster, job.sized_before)
        return self._reclaim.barring(job, more)

    def _near(self, job: JobRecord, lack: int, failed: Collection[str]) -> frozenset[str]:
        """Nodes that are together, with those that it has, and that might be free for it: those that are idle rather
        than borrowed ones, and these rather than what queues would have to give. A job that runs does not move."""
        self._only.pop(job.uid, None)
        runs = job.phase in ("forming", "running")
        pools = [list(self._idle_for(job))]
        pools.append(
            [n for j in self._borrowers if j is not job for n in self._lent[j.uid] if self._returns(j, n, job)]
        )
        if self._shared:
            needs = wanted(self._cluster, job.spec, 1) if runs else least(self._cluster, job.spec)
            plan, owns = self._reclaim, self._reclaim.owns(job, needs)
            above, all_of = list[str](), list[str]()
            for donor in self._donors(job, needs):
                kept = self._kept(donor, ())
                able = [
                    m.node for m in kept if self._fits(job, m.node, donor.uid)
                    and plan.may_lose(donor, self._books.use_on(donor, m.node), job, needs, owns, rounded=self._rounded)
                ]  # fmt: skip
                all_of += able
                spare = {m.node for m in self._above_min(donor, ())}
                above += [n for n in able if n in spare]
            pools += [above] if runs else [above, all_of]
        seen: set[str] = set(failed)
        for i, pool in enumerate(pools):
            pools[i] = [n for n in dict.fromkeys(pool) if n not in seen]
            seen.update(pool)
        own = tuple(m.node for m in survivors(self._cluster, job)) if runs else ()
        want = len(own) + lack
        names = gather(pools, want, 1 if runs else want, gang_of(self._cluster, job.spec), PastPlaces(own, own))
        return frozenset(names).difference(own) if runs or len(names) >= want else frozenset()

    def _provide_any(self, job: JobRecord, lack: int, *, whole: bool) -> bool:
        """Wherever they are; as of ``_provide``."""
        idle = list(islice(self._idle_for(job), lack))
        allowed, inside = self._allowed(job, lack)
        if job.phase in ("forming", "running"):
            if inside and whole:
                return not allowed and self._help(job, lack, idle, inside, whole=True)
            if inside:
                lack, inside = (allowed, "") if allowed else (1, inside)
            return self._help(job, lack, idle[:lack], inside, whole=whole)
        if self._make_start(job, lack, idle, allowed, inside):
            return True
        if inside and allowed > len(idle) and self._make_start(job, lack, idle, allowed, ""):
            return True
        self._keep(job)
        return False

    def _keep(self, job: JobRecord) -> None:
        """A queue may keep something of its capability for one that gets nothing now."""
        if any(one.uid == job.uid and one.queue for one in self._reserved.found):
            self._reclaim.keep(job, least(self._cluster, job.sized_before))
            self._kept_for.add(job.uid)

    def _provide_places(self, job: JobRecord) -> bool:
        """Nodes for all places of a job of several roles that waits, or nothing: idle ones, and of what others could
        leave as little as will do."""
        self._limit(job, self.barring(job), anywhere=False)
        idle, sources = [*self._idle_for(job)], self._sources(job)
        tried = dict[int, tuple[Layout, Reclaim] | None]()

        def enough(count: int) -> bool:
            free = [(one.node, kind) for one, kind in self._open(job, idle, sources[:count])]
            room = count_on(self._cluster, job.sized_before, free)
            if room.room is False:
                return False
            if room.room and not self._without(sources[:count]).barring(job, room.most):
                return True
            tried[count] = self._laid(job, idle, sources[:count])
            return tried[count] is not None

        if not enough(len(sources)):
            self._keep(job)
            return False
        count = bisect_left(range(len(sources)), True, key=enough)
        found = tried[count] if count in tried else self._laid(job, idle, sources[:count])
        assert found is not None
        layout, plan = found
        needs, some = _use_of(layout), list[_Source]()
        for source in reversed(sources[:count]):
            plan.grant(source.donor, source.use)
            if _touches(layout, source) or plan.barring(job, needs):
                plan.release(source.donor, source.use)
                some.append(source)
        plan.grant(job, needs)
        nodes = [node for source in some if not source.whole for node in source.nodes]
        free = [node for node in layout.places if node in idle and node not in nodes]
        self._decide(job, free, [(one.donor, one.nodes[0]) for one in reversed(some) if not one.whole], plan)
        for one in some:
            if one.whole:
                self.stops[one.donor.uid] = job.uid
                self._promised.update(one.nodes)
        return True

    def _sources(self, job: JobRecord) -> list[_Source]:
        """What others could leave for all places of a job, those first that are to leave something first: what they
        borrowed, what they have above their ``min``, and all that they have."""
        back = self._to_give(job, len(self._books.nodes))
        found = [_Source(donor, (node,), self._books.use_on(donor, node)) for donor, node in back]
        if not self._shared:
            return found
        needs, plan = least(self._cluster, job.sized_before), Reclaim(self._cluster, self._reclaim)
        for one in found:
            plan.release(one.donor, one.use)
        owns, donors, given = plan.owns(job, needs), self._donors(job, needs), set[tuple[str, str]]()

        def leave(source: _Source) -> bool:
            able = plan.may_lose(source.donor, source.use, job, needs, owns, rounded=self._rounded)
            if able:
                plan.release(source.donor, source.use)
                found.append(source)
            return able

        for donor in donors:
            for member in self._above_min(donor, back):
                if self._fits(job, member.node, donor.uid):
                    if not leave(_Source(donor, (member.node,), self._books.use_on(donor, member.node))):
                        break
                    given.add((donor.uid, member.node))
        for donor in donors:
            rest = [m for m in self._kept(donor, back) if (donor.uid, m.node) not in given]
            if any(self._fits(job, m.node, donor.uid) for m in rest):
                use = together(self._books.use_on(donor, m.node) for m in rest)
                leave(_Source(donor, tuple(m.node for m in rest), use, whole=True))
        return found

    def _open(
        self, job: JobRecord, idle: Iterable[str], sources: Sequence[_Source]
    ) -> list[tuple[Candidate, NodeKind]]:
        """Idle nodes and those that the sources leave, with what each has for a job of several roles then."""
        gone: dict[str, set[str]] = {}
        for source in sources:
            for node in source.nodes:
                if self._fits(job, node, source.donor.uid):
                    gone.setdefault(node, set()).add(source.donor.uid)
        found = list[tuple[Candidate, NodeKind]]()
        for node in dict.fromkeys((*idle, *gone)):
            record, leave = self._cluster.nodes[node], gone.get(node, ())
            used = {d for uid, devices in self._books.used.get(node, {}).items() if uid not in leave for d in devices}
            devices = tuple(d for d in record.facts.devices() if d not in used)
            one = Candidate(node, record.incarnation.life, "fit", "", devices)
            found.append((one, kind_of(record, used)))
        return found

    def _without(self, sources: Iterable[_Source]) -> Reclaim:
        """What queues use without what is left so."""
        plan = Reclaim(self._cluster, self._reclaim)
        for source in sources:
            plan.release(source.donor, source.use)
        return plan

    def _laid(self, job: JobRecord, idle: Iterable[str], sources: Sequence[_Source]) -> tuple[Layout, Reclaim] | None:
        """Where the places of a job of several roles would be on idle nodes and on those, and what queues use without
        what is left so; None if not all have room, or if the job's queues may not have so much."""
        layout = lay(self._cluster, job, job.sized_before, [one for one, _ in self._open(job, idle, sources)])
        if layout.lack:
            return None
        plan = self._without(sources)
        return None if plan.barring(job, _use_of(layout)) else (layout, plan)

    def _allowed(self, job: JobRecord, lack: int) -> tuple[int, str]:
        """How many nodes its queues may have more for it, up to ``lack``; and the queue that is in the way of more."""
        runs = job.phase in ("forming", "running")
        inside = self.barring(job) if not runs else self._reclaim.barring(job, wanted(self._cluster, job.spec, lack))
        allowed = lack
        while inside and allowed and self._reclaim.barring(job, wanted(self._cluster, job.spec, allowed)):
            allowed -= 1
        return allowed, inside

    def _make_start(self, job: JobRecord, lack: int, idle: Sequence[str], allowed: int, inside: str) -> bool:
        """All that a job needs that waits, or nothing. ``inside``: only jobs of this queue are to give nodes up."""
        needs, plan = least(self._cluster, job.spec), Reclaim(self._cluster, self._reclaim)
        free = min(len(idle), allowed)
        self._limit(job, inside, anywhere=len(idle) == lack > free)
        back = self._get_back(job, idle[:free], lack - free, plan)
        short = lack - free - len(back)
        room: Reclaim | None = plan
        if short > 0:
            room = self._make_room(job, needs, short, back, plan) if self._shared else None
        if room is None or room.barring(job, needs):
            return False
        room.grant(job, needs)
        self._decide(job, idle if job.uid in self._anywhere else idle[:free], back, room)
        return True

    def _help(self, job: JobRecord, lack: int, idle: Sequence[str], inside: str, *, whole: bool) -> bool:
        """As many nodes as there are for one that runs on too few, or all or none (``whole``). ``inside``: as of
        ``_make_start``; the job's queues may have nothing more for it then."""
        plan = Reclaim(self._cluster, self._reclaim)
        free = 0 if inside else len(idle)
        self._limit(job, inside, anywhere=len(idle) == lack > free)
        back = self._get_back(job, idle[:free], lack - free, plan)
        if plan.barring(job, wanted(self._cluster, job.spec, free + len(back))):
            self._found[job.uid].difference_update(node for _, node in back)
            back, plan = [], Reclaim(self._cluster, self._reclaim)
        short = lack - free - len(back)
        plan.grant(job, wanted(self._cluster, job.spec, free + len(back)))
        if whole and short:
            more = wanted(self._cluster, job.spec, short)
            room = self._make_room(job, more, short, back, plan, whole=False) if self._shared else None
            if room is None:
                return False
            room.grant(job, more)
            plan = room
        elif self._shared:
            plan = self._fill_up(job, short, back, plan)
        idle = idle[: free + len(back)] if job.uid in self._anywhere else idle[:free]
        self._take(job, idle)
        self._decide(job, idle, back, plan)
        return True

    def _get_back(self, job: JobRecord, idle: Sequence[str], lack: int, plan: Reclaim) -> list[tuple[JobRecord, str]]:
        """Borrowed nodes for a job that is to have these idle ones; ``plan``: what queues use, without them then."""
        found = self._found[job.uid] = {*idle}
        back = self._to_give(job, lack)
        for donor, node in back:
            plan.release(donor, self._books.use_on(donor, node))
            found.add(node)
        return back

    def _limit(self, job: JobRecord, inside: str, *, anywhere: bool) -> None:
        """Whose nodes count for a job that a capability bars: those of this queue; ``anywhere``: which they are does
        not matter, since enough others are idle."""
        self._inside[job.uid] = inside
        self._anywhere -= {job.uid}
        if anywhere:
            self._anywhere.add(job.uid)

    def _decide(
        self, job: JobRecord, idle: Collection[str], back: Collection[tuple[JobRecord, str]], plan: Reclaim
    ) -> None:
        self._reclaim = plan
        self._promised.update(idle)
        self._provided.add(job.uid)
        self._lacking.clear()
        for donor, node in back:
            self._give(donor, node, job)

    def _may_give(self, donor: JobRecord, job: JobRecord) -> bool:
        inside = self._inside.get(job.uid)
        return donor.uid != job.uid and (not inside or self._reclaim.is_below(donor, inside))

    def lend_idle(self) -> None:
        """Each idle node to the job with the fewest borrowed ones that can use it."""
        self._only = {j.uid: self._home(j) for j in self._borrowers if j.spec.within}
        waits = [(self._count(j), i) for i, j in enumerate(self._borrowers) if self._may_grow(j)]
        heapify(waits)
        idle = [self._idle_for(j) for j in self._borrowers]
        while waits:
            i = heappop(waits)[1]
            job = self._borrowers[i]
            one = wanted(self._cluster, job.spec, 1)
            full = self._size[job.uid] >= job.spec.nodes.max or self._reclaim.barring(job, one)
            node = None if full else next(idle[i], None)
            if node is not None:
                self._take(job, [node])
                self._reclaim.grant(job, one)
                heappush(waits, (self._count(job), i))

    def level(self) -> None:
        """Between jobs that borrow: who has fewer, by two at least, gets one of who has most. Of those with equally few
        the one goes first whose queue has least of its part."""
        able = [j for j in self._borrowers if self._may_grow(j) and self._size[j.uid] < j.spec.nodes.max]
        while able:
            fewest = min(map(self._count, able))
            rich = [j for j in self._borrowers if self._count(j) - fewest >= 2 and self._lent[j.uid]]
            if not rich:
                return
            poorest = [j for j in able if self._count(j) == fewest]
            poor = min(poorest, key=self._reclaim.over) if self._shared else poorest[0]
            found = ((j, self._of(j, poor)) for j in sorted(rich, key=self._count, reverse=True))
            able_to = ((j, node) for j, node in found if node is not None and self._may_even_out(j, node, poor))
            donor, node = next(able_to, (None, ""))
            if donor is None:
                able.remove(poor)
                continue
            self._reclaim.release(donor, self._books.use_on(donor, node))
            self._reclaim.grant(poor, wanted(self._cluster, poor.spec, 1))
            self._give(donor, node, poor)
            if self._size[poor.uid] >= poor.spec.nodes.max:
                able.remove(poor)

    def _may_even_out(self, donor: JobRecord, node: str, poor: JobRecord) -> bool:
        """Between jobs of one queue always. Else no queue gets one from another that is as little above its part."""
        if not self._shared or donor.spec.queue == poor.spec.queue:
            return True
        use, needs = self._books.use_on(donor, node), wanted(self._cluster, poor.spec, 1)
        may = self._reclaim.may_return(donor, use, queue_of(poor.spec.queue))
        return may and self._reclaim.evens_out(donor, use, poor, needs)

    def _fill_up(self, job: JobRecord, lack: int, back: list[tuple[JobRecord, str]], plan: Reclaim) -> Reclaim:
        """One that runs on too few nodes gets more, one by one, for as long as its queue has less than its part: from
        jobs above their ``min``. No whole one is stopped for it: it has as many as it says that it needs. ``back``,
        ``plan``: as of ``_make_room``. Returns what queues use then."""
        one = wanted(self._cluster, job.spec, 1)
        for _ in range(lack):
            more = self._make_room(job, one, 1, back, plan, whole=False)
            if more is None:
                break
            more.grant(job, one)
            plan = more
        return plan

    def _make_room(
        self, job: JobRecord, needs: Resources, lack: int, back: list[tuple[JobRecord, str]], plan: Reclaim, *,
        whole: bool = True,
    ) -> Reclaim | None:  # fmt: skip
        """Have jobs of queues that have more than their part give nodes above their ``min``, and where that is too
        little stop some of them (``whole``). ``needs``: what the job would have more; ``back``: borrowed nodes that it
        gets; ``plan``: what queues use before. Returns what they use without what is given; None, and nothing is
        decided, where both is not enough."""
        claim = _Claim(job, needs, lack, Reclaim(self._cluster, plan), plan.owns(job, needs), self._rounded)
        donors = self._donors(job, needs)
        self._shrink(claim, donors, back)
        if whole:
            self._stop_some(claim, donors, back)
        if claim.short > 0:
            return None
        self._leave_surplus(claim)
        if claim.plan.barring(job, needs):
            return None
        for donor, node in claim.shrink:
            self._part(donor, node, job)
        for donor, _, _ in claim.stop:
            self.stops[donor.uid] = job.uid
            self._promised.update(m.node for m in self._kept(donor, back))
        return claim.plan

    def _shrink(self, claim: _Claim, donors: Iterable[JobRecord], back: Collection[tuple[JobRecord, str]]) -> None:
        """Nodes above the donors' ``min``, until there are enough."""
        for donor in donors:
            if not claim.may_ask(donor):
                continue
            for member in self._above_min(donor, back):
                if not self._fits(claim.job, member.node, donor.uid):
                    continue
                if not claim.release(donor, self._books.use_on(donor, member.node)):
                    break
                claim.shrink.append((donor, member.node))
                self._found[claim.job.uid].add(member.node)
                claim.short -= 1
                if claim.short <= 0:
                    return

    def _stop_some(self, claim: _Claim, donors: Iterable[JobRecord], back: Collection[tuple[JobRecord, str]]) -> None:
        """Whole donors, with all that they have left, until there is enough."""
        given = {(donor.uid, node) for donor, node in claim.shrink}
        for donor in donors:
            if claim.short <= 0:
                return
            if not claim.may_ask(donor):
                continue
            rest = [m for m in self._kept(donor, back) if (donor.uid, m.node) not in given]
            able = [m.node for m in rest if self._fits(claim.job, m.node, donor.uid)]
            use = self._books.use_of_all(donor, rest)
            if able and claim.release(donor, use):
                claim.stop.append((donor, len(able), use))
                self._found[claim.job.uid].update(able)
                claim.short -= len(able)

    def _leave_surplus(self, claim: _Claim) -> None:
        """Donors that are unnecessary since a larger one was added keep what they have; then nodes."""
        needed = []
        for donor, count, use in reversed(claim.stop):
            if claim.short + count <= 0:
                claim.plan.grant(donor, use)
                claim.short += count
            else:
                needed.append((donor, count, use))
        claim.stop = needed[::-1]
        while claim.shrink and claim.short < 0:
            donor, node = claim.shrink.pop()
            claim.plan.grant(donor, self._books.use_on(donor, node))
            claim.short += 1

    def _donors(self, job: JobRecord, needs: Resources) -> list[JobRecord]:
        """Jobs of queues that may have to give something for this one, in the order in which they are asked."""
        plan, owns = self._reclaim, self._reclaim.owns(job, needs)
        inside, found = self._inside.get(job.uid), dict[float, list[JobRecord]]()
        for donors in self._running().values():
            first = donors[0]
            if inside and not plan.is_below(first, inside):
                continue
            if plan.may_lose(first, NO_USE, job, needs, owns, rounded=self._rounded):
                alike = found.setdefault(plan.over(first), [])
                of_others = bool(alike)
                alike += [j for j in donors if j.uid not in self.stops and j.uid != job.uid]
                if of_others or len(alike) != len(donors):
                    alike.sort(key=_gives_first)  # of several queues, or without some: sorted parts sort fast
        return [j for over in sorted(found, reverse=True) for j in found[over]]

    def _home(self, job: JobRecord) -> frozenset[str]:
        """Nodes in the domain that the job has to stay in."""
        gang = gang_of(self._cluster, job.spec)
        domains = {gang.paths[m.node][: gang.within] for m in survivors(self._cluster, job)}
        return frozenset(n for n in self._books.nodes if {gang.paths[n][: gang.within]} == domains)

    def _running(self) -> Mapping[str, Sequence[JobRecord]]:
        """Jobs that run, by their queue: those that could make room, in the order in which they are asked."""
        if self._run is None:
            self._run = {}
            for job in self._cluster.jobs.values():
                if job.generation is None or job.generation.state != "active" or job.control.desired != "run":
                    continue
                if is_finishing(job.generation):  # its nodes will be free in a moment
                    continue
                if job.uid not in self._cluster.refused:
                    self._run.setdefault(job.spec.queue, []).append(job)
            for jobs in self._run.values():
                jobs.sort(key=_gives_first)
        return self._run

    def _kept(self, job: JobRecord, back: Collection[tuple[JobRecord, str]]) -> list[Member]:
        """Members that the job is to keep so far, the newest first."""
        given = {*self.gives.get(job.uid, ()), *(node for donor, node in back if donor is job)}
        members = reversed(survivors(self._cluster, job))
        return [m for m in members if m.node not in given] if given else [*members]

    def _above_min(self, job: JobRecord, back: Collection[tuple[JobRecord, str]]) -> list[Member]:
        """Those that it could run without. A gang of several roles needs all."""
        kept = self._kept(job, back)
        return [] if job.spec.several else kept[: max(0, len(kept) - job.spec.nodes.min)]

    def _to_give(self, job: JobRecord, lack: int) -> list[tuple[JobRecord, str]]:
        """Borrowed nodes for a job, in the order in which they come back."""
        givers = ((j, self._count(j)) for j in self._borrowers if self._lent[j.uid] and self._may_give(j, job))

        def pick(donor: JobRecord, chosen: Collection[str]) -> str | None:
            return self._of(donor, job, chosen)

        return [*islice(back_in_turn(self._cluster, self._reclaim, queue_of(job.spec.queue), givers, pick), lack)]

    def _returns(self, donor: JobRecord, node: str, job: JobRecord) -> bool:
        """This node, which the donor has borrowed, may come back for the job."""
        use, to = self._books.use_on(donor, node), queue_of(job.spec.queue)
        return self._fits(job, node, donor.uid) and self._reclaim.may_return(donor, use, to)

    def _of(self, donor: JobRecord, job: JobRecord, chosen: Collection[str] = ()) -> str | None:
        """The newest of the nodes that the donor has borrowed, without those chosen already, that the job can use."""
        lent = self._lent[donor.uid]
        return next((n for n in lent if n not in chosen and self._fits(job, n, donor.uid)), None)

    def _take(self, job: JobRecord, nodes: Collection[str]) -> None:
        self._promised.update(nodes)
        self.takes.setdefault(job.uid, []).extend(nodes)
        if job.uid in self._size:
            self._size[job.uid] += len(nodes)

    def _give(self, donor: JobRecord, node: str, job: JobRecord) -> None:
        self._part(donor, node, job)
        if job.uid in self._size:
            self._size[job.uid] += 1

    def _part(self, donor: JobRecord, node: str, job: JobRecord) -> None:
        self._promised.add(node)
        self.gives.setdefault(donor.uid, {})[node] = job.uid
        if donor.uid in self._size:
            self._size[donor.uid] -= 1
            self._lent[donor.uid] = [n for n in self._lent[donor.uid] if n != node]

    def _count(self, job: JobRecord) -> int:
        """How many nodes it has, or is to have, on top of its target."""
        return max(0, self._size[job.uid] - job.control.target)

    def _may_grow(self, job: JobRecord) -> bool:
        """Neither is it being scaled out, nor does it make room, nor is its queue at its capability."""
        if job.control.growing is not None or job.uid in self.stops or job.uid in self.gives:
            return False
        return not self._reclaim.barring(job, wanted(self._cluster, job.spec, 1))

    def _idle_for(self, job: JobRecord) -> Iterator[str]:
        """Nodes with room for it that nobody is to have; those that have it ready, or nearly, come first."""
        begun = asked(self._cluster).get(job.uid, {})
        leaving, below = job.control.leaving, self._size.get(job.uid, 0) < job.control.target
        free = [n for n in self._books.with_room(job) if n not in self._promised and n not in leaving]
        if below and (kept := self._reserved.kept.get(job.uid)):
            lacking = NO_NODES.union(*(one.nodes for one in self._lack(kept)))
            free = [n for n in free if n not in kept.nodes or n not in lacking]
        if arranged(self._cluster, job.spec):
            free.sort(key=self._distance(job))
        free.sort(key=lambda n: n not in begun)
        return (n for n in free if n not in self._promised and self._fits(job, n))

    def _distance(self, job: JobRecord) -> Callable[[str], tuple[int, int]]:
        """Sort key: the nodes first that the job prefers, and of these those that are near to what it has."""
        cluster, role = self._cluster, job.spec.role
        gang = gang_of(cluster, job.spec)
        paths = [
            gang.paths[m.node] for m in survivors(cluster, job) if role.placement is None or not role.placement.spread
        ]
        homes = {path[: i + 1] for path in paths for i, name in enumerate(path) if name}
        depths = range(1, len(gang.levels) + 1)
        return lambda n: (-score(cluster, job, n), -sum(gang.paths[n][:depth] in homes for depth in depths))

    def _fits(self, job: JobRecord, node: str, donor: str = "") -> bool:
        """It may be one of the job's, has room for it, once the donor (uid) has gone, and is none of its own. With a
        donor: nor is it found for the job already."""
        if donor and job.uid in self._anywhere:
            return True
        if donor and node in self._found.get(job.uid, ()):
            return False
        if job.uid in self._only and node not in self._only[job.uid]:
            return False
        if self._is_kept(node, job):
            return False
        record = self._cluster.nodes[node]
        ready = record.readiness.get(job.uid)
        if (ready is not None and ready.state == "unfit") or job.uid in self._books.used.get(node, {}):
            return False
        if job.uid in record.left_out:
            return False
        return self._books.suits(job, node, donor)

    def _is_kept(self, node: str, job: JobRecord) -> bool:
        """The node is kept for a gang that is earlier in line and still lacks nodes, and the job would not give it back
        then: as one of its target's, or since its queue has less than it is guaranteed, or is not reclaimable."""
        kept = self._reserved.kept.get(job.uid)
        if kept is None or node not in kept.nodes:
            return False
        gangs = [one.uid for one in self._lack(kept) if node in one.nodes]
        if not gangs or self._size.get(job.uid, 0) < job.control.target:
            return bool(gangs)
        queues = (queue_of(self._cluster.jobs[uid].spec.queue) for uid in gangs)
        one = wanted(self._cluster, job.spec, 1)
        return not all(self._reclaim.would_return(job, one, queue) for queue in queues)

    def _lack(self, kept: KeptNodes) -> Sequence[Reservation]:
        """Of the reservations that keep these nodes those whose jobs still lack something."""
        if kept.by not in self._lacking:
            by = (self._reserved.found[i] for i in kept.by)
            self._lacking[kept.by] = [one for one in by if one.nodes and one.uid not in self._provided]
        return self._lacking[kept.by]


def _given_back(cluster: Cluster, job: JobRecord) -> list[str]:
    """What the job may have to give back: nothing, once some of its pods have ended."""
    generation = job.generation
    return [] if generation is not None and is_finishing(generation) else [*lent(cluster, job)]


def _gives_first(job: JobRecord) -> tuple[int, int]:
    """Sort key: of jobs of one queue those with less priority give first, then the younger ones."""
    return job.spec.priority, -job.order


def _use_of(layout: Layout) -> Resources:
    """What the places of a gang take."""
    return together(of_devices([d for place in places for d in place.devices]) for places in layout.places.values())


def _touches(layout: Layout, source: _Source) -> bool:
    """Some place needs what the donor would leave."""
    generation = source.donor.generation
    assert generation is not None
    return any(
        device in generation.members[node].devices
        for node in source.nodes
        for place in layout.places.get(node, ())
        for device in place.devices
    )

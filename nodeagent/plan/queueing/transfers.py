"""What becomes of idle and of borrowed nodes, and who makes room: all jobs of a view together, one job after the other.

A job that lacks nodes gets idle ones, then what others have borrowed; if that is not enough, jobs of queues with more
than their part make room (``makingroom.py``). What is idle
still is lent. For whom nodes are looked for, and in which order, is decided in ``elastic.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import queue_of
from nodeagent.plan.fairshare.reclaim import Reclaim
from nodeagent.plan.fairshare.resources import least, wanted
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.placing.topology import PastPlaces, gang_of, gather
from nodeagent.plan.queueing.makingroom import fill_up, make_room
from nodeagent.plan.queueing.nodeledger import Given, NodeLedger, runs
from nodeagent.plan.queueing.roles import PlaceRoom

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


def provide(ledger: NodeLedger, job: JobRecord, lack: int, *, rounded: bool) -> bool:
    """Find ``lack`` nodes for a job. Idle nodes that it can use are not lent to others. If they are too few,
    borrowed nodes are given back for it; then queues with more than their part make room. If that is still too
    little, nothing is done for a waiting job: it holds up nobody, and False is returned. Nor is it for a scale-out,
    which needs all of its newcomers: only what the gang had before is found for it then. If the job's nodes must
    be together (``within``, ``segments``), only nodes that are together count. ``rounded``: as of
    ``Reclaim.may_lose``."""
    ledger.begin(job, rounded=rounded)
    if job.spec.several:
        return _provide_places(ledger, job)
    growing = job.control.growing
    if not runs(job) or growing is None:
        return _provide(ledger, job, lack, whole=not runs(job))
    if _provide(ledger, job, lack, whole=True):
        return True
    before = growing.before - len(survivors(ledger.cluster, job))
    return before > 0 and _provide(ledger, job, before, whole=False)


def _provide_places(ledger: NodeLedger, job: JobRecord) -> bool:
    ledger.search(job).limit(ledger.barring(job), anywhere=False)
    done = PlaceRoom(ledger, job).provide()
    if not done:
        ledger.reserve_capability(job)
    return done


def _provide(ledger: NodeLedger, job: JobRecord, lack: int, *, whole: bool) -> bool:
    """``whole``: all of them or none. False: nothing was done."""
    if job.spec.placement is None:
        return _provide_any(ledger, job, lack, whole=whole)
    failed, search = set[str](), ledger.search(job)
    for _ in range(MOST_PLACES):
        found = search.only = _near(ledger, job, lack, failed)
        if not found or (whole and len(found) < lack):
            return False
        if _provide_any(ledger, job, len(found), whole=whole):
            return True
        failed |= found
    return False


def _near(ledger: NodeLedger, job: JobRecord, lack: int, failed: Collection[str]) -> frozenset[str]:
    """Nodes that are together, with those that it has, and that might be free for it: those that are idle rather
    than borrowed ones, and these rather than what queues would have to give. A job that runs does not move."""
    search, is_running = ledger.search(job), runs(job)
    search.only = None
    lenders = (j for j in ledger.borrowers if j is not job)
    lent = [n for j in lenders for n in ledger.lent[j.uid] if ledger.returns(j, n, job)]
    pools = [[*ledger.idle_for(job)], lent]
    if ledger.shared:
        needs = wanted(ledger.cluster, job.spec, 1) if is_running else least(ledger.cluster, job.spec)
        plan, owns = ledger.reclaim, ledger.reclaim.owns(job, needs)
        above, all_of = list[str](), list[str]()
        for donor in ledger.donors(job, needs):
            able = [
                m.node
                for m in ledger.remaining(donor)
                if ledger.fits(job, m.node, donor.uid)
                and plan.may_lose(donor, ledger.books.use_on(donor, m.node), job, needs, owns, rounded=search.rounded)
            ]
            all_of += able
            spare = {m.node for m in ledger.above_min(donor)}
            above += [n for n in able if n in spare]
        pools += [above] if is_running else [above, all_of]
    seen: set[str] = set(failed)
    for i, pool in enumerate(pools):
        pools[i] = [n for n in dict.fromkeys(pool) if n not in seen]
        seen.update(pool)
    own = tuple(m.node for m in survivors(ledger.cluster, job)) if is_running else ()
    want = len(own) + lack
    names = gather(pools, want, 1 if is_running else want, gang_of(ledger.cluster, job.spec), PastPlaces(own, own))
    return frozenset(names).difference(own) if is_running or len(names) >= want else frozenset()


def _provide_any(ledger: NodeLedger, job: JobRecord, lack: int, *, whole: bool) -> bool:
    """Wherever they are; as of ``_provide``."""
    idle = list(islice(ledger.idle_for(job), lack))
    allowed, inside = _allowed(ledger, job, lack)
    if runs(job):
        if inside and whole:
            return not allowed and _help(ledger, job, lack, idle, inside, whole=True)
        if inside:
            lack, inside = (allowed, "") if allowed else (1, inside)
        return _help(ledger, job, lack, idle[:lack], inside, whole=whole)
    if _make_start(ledger, job, lack, idle, allowed, inside):
        return True
    if inside and allowed > len(idle) and _make_start(ledger, job, lack, idle, allowed, ""):
        return True
    ledger.reserve_capability(job)
    return False


def _allowed(ledger: NodeLedger, job: JobRecord, lack: int) -> tuple[int, str]:
    """How many nodes its queues may have more for it, up to ``lack``; and the queue that is in the way of more."""
    inside = ledger.reclaim.barring(job, wanted(ledger.cluster, job.spec, lack)) if runs(job) else ledger.barring(job)
    allowed = lack
    while inside and allowed and ledger.reclaim.barring(job, wanted(ledger.cluster, job.spec, allowed)):
        allowed -= 1
    return allowed, inside


def _make_start(ledger: NodeLedger, job: JobRecord, lack: int, idle: Sequence[str], allowed: int, inside: str) -> bool:
    """All that a job needs that waits, or nothing. ``inside``: only jobs of this queue are to give nodes up."""
    needs, plan = least(ledger.cluster, job.spec), Reclaim(ledger.cluster, ledger.reclaim)
    free = min(len(idle), allowed)
    ledger.search(job).limit(inside, anywhere=len(idle) == lack > free)
    back = _get_back(ledger, job, idle[:free], lack - free, plan)
    short = lack - free - len(back)
    room = plan if short <= 0 else make_room(ledger, job, needs, short, back, plan)
    if room is None or room.barring(job, needs):
        return False
    room.grant(job, needs)
    ledger.decide(job, idle if ledger.search(job).anywhere else idle[:free], back, room)
    return True


def _help(ledger: NodeLedger, job: JobRecord, lack: int, idle: Sequence[str], inside: str, *, whole: bool) -> bool:
    """As many nodes as there are for one that runs on too few, or all or none (``whole``). ``inside``: as of
    ``_make_start``; the job's queues may have nothing more for it then."""
    plan = Reclaim(ledger.cluster, ledger.reclaim)
    free = 0 if inside else len(idle)
    ledger.search(job).limit(inside, anywhere=len(idle) == lack > free)
    back = _get_back(ledger, job, idle[:free], lack - free, plan)
    if plan.barring(job, wanted(ledger.cluster, job.spec, free + len(back))):
        ledger.search(job).found.difference_update(node for _, node in back)
        back, plan = [], Reclaim(ledger.cluster, ledger.reclaim)
    short = lack - free - len(back)
    plan.grant(job, wanted(ledger.cluster, job.spec, free + len(back)))
    if whole and short:
        more = wanted(ledger.cluster, job.spec, short)
        room = make_room(ledger, job, more, short, back, plan, whole=False)
        if room is None:
            return False
        room.grant(job, more)
        plan = room
    else:
        plan = fill_up(ledger, job, short, back, plan)
    idle = idle[: free + len(back)] if ledger.search(job).anywhere else idle[:free]
    ledger.take(job, idle)
    ledger.decide(job, idle, back, plan)
    return True


def _get_back(ledger: NodeLedger, job: JobRecord, idle: Sequence[str], lack: int, plan: Reclaim) -> list[Given]:
    """Borrowed nodes for a job that is to have these idle ones; ``plan``: what queues use, without them then."""
    found = ledger.search(job).found = {*idle}
    back = ledger.to_give(job, lack)
    for donor, node in back:
        plan.release(donor, ledger.books.use_on(donor, node))
        found.add(node)
    return back


def lend_idle(ledger: NodeLedger) -> None:
    """Each idle node to the job with the fewest borrowed ones that can use it."""
    ledger.stay_home()
    waits = [(ledger.on_top(j), i) for i, j in enumerate(ledger.borrowers) if ledger.may_grow(j)]
    heapify(waits)
    idle = [ledger.idle_for(j) for j in ledger.borrowers]
    while waits:
        i = heappop(waits)[1]
        job = ledger.borrowers[i]
        one = wanted(ledger.cluster, job.spec, 1)
        full = ledger.size[job.uid] >= job.spec.nodes.max or ledger.reclaim.barring(job, one)
        node = None if full else next(idle[i], None)
        if node is not None:
            ledger.take(job, [node])
            ledger.reclaim.grant(job, one)
            heappush(waits, (ledger.on_top(job), i))


def level(ledger: NodeLedger) -> None:
    """Between jobs that borrow: who has fewer, by two at least, gets one of who has most. Of those with equally few
    the one goes first whose queue has least of its part."""
    able = [j for j in ledger.borrowers if ledger.may_grow(j) and ledger.size[j.uid] < j.spec.nodes.max]
    while able:
        fewest = min(map(ledger.on_top, able))
        rich = [j for j in ledger.borrowers if ledger.on_top(j) - fewest >= 2 and ledger.lent[j.uid]]
        if not rich:
            return
        poorest = [j for j in able if ledger.on_top(j) == fewest]
        poor = min(poorest, key=ledger.reclaim.over) if ledger.shared else poorest[0]
        found = ((j, ledger.newest_lent(j, poor)) for j in sorted(rich, key=ledger.on_top, reverse=True))
        able_to = ((j, node) for j, node in found if node is not None and _may_even_out(ledger, j, node, poor))
        donor, node = next(able_to, (None, ""))
        if donor is None:
            able.remove(poor)
            continue
        ledger.reclaim.release(donor, ledger.books.use_on(donor, node))
        ledger.reclaim.grant(poor, wanted(ledger.cluster, poor.spec, 1))
        ledger.give(donor, node, poor)
        if ledger.size[poor.uid] >= poor.spec.nodes.max:
            able.remove(poor)


def _may_even_out(ledger: NodeLedger, donor: JobRecord, node: str, poor: JobRecord) -> bool:
    """Between jobs of one queue always. Else no queue gets one from another that is as little above its part."""
    if not ledger.shared or donor.spec.queue == poor.spec.queue:
        return True
    use, needs = ledger.books.use_on(donor, node), wanted(ledger.cluster, poor.spec, 1)
    may = ledger.reclaim.may_return(donor, use, queue_of(poor.spec.queue))
    return may and ledger.reclaim.evens_out(donor, use, poor, needs)

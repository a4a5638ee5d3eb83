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
from nodeagent.plan.queueing.roles import PlaceRoom
from nodeagent.plan.queueing.transferdraft import Given, TransferDraft, runs

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


def provide(draft: TransferDraft, job: JobRecord, lack: int, *, rounded: bool) -> bool:
    """Find ``lack`` nodes for a job. Idle nodes that it can use are not lent to others. If they are too few,
    borrowed nodes are given back for it; then queues with more than their part make room. If that is still too
    little, nothing is done for a waiting job: it holds up nobody, and False is returned. Nor is it for a scale-out,
    which needs all of its newcomers: only what the gang had before is found for it then. If the job's nodes must
    be together (``within``, ``segments``), only nodes that are together count. ``rounded``: as of
    ``Reclaim.may_lose``."""
    draft.begin(job, rounded=rounded)
    if job.spec.several:
        return _provide_places(draft, job)
    growing = job.control.growing
    if not runs(job) or growing is None:
        return _provide(draft, job, lack, whole=not runs(job))
    if _provide(draft, job, lack, whole=True):
        return True
    before = growing.before - len(survivors(draft.cluster, job))
    return before > 0 and _provide(draft, job, before, whole=False)


def _provide_places(draft: TransferDraft, job: JobRecord) -> bool:
    draft.search(job).limit(draft.barring(job), anywhere=False)
    done = PlaceRoom(draft, job).provide()
    if not done:
        draft.reserve_capability(job)
    return done


def _provide(draft: TransferDraft, job: JobRecord, lack: int, *, whole: bool) -> bool:
    """``whole``: all of them or none. False: nothing was done."""
    if job.spec.placement is None:
        return _provide_any(draft, job, lack, whole=whole)
    failed, search = set[str](), draft.search(job)
    for _ in range(MOST_PLACES):
        found = search.only = _near(draft, job, lack, failed)
        if not found or (whole and len(found) < lack):
            return False
        if _provide_any(draft, job, len(found), whole=whole):
            return True
        failed |= found
    return False


def _near(draft: TransferDraft, job: JobRecord, lack: int, failed: Collection[str]) -> frozenset[str]:
    """Nodes that are together, with those that it has, and that might be free for it: those that are idle rather
    than borrowed ones, and these rather than what queues would have to give. A job that runs does not move."""
    search, is_running = draft.search(job), runs(job)
    search.only = None
    lenders = (j for j in draft.borrowers if j is not job)
    lent = [n for j in lenders for n in draft.lent[j.uid] if draft.returns(j, n, job)]
    pools = [[*draft.idle_for(job)], lent]
    if draft.shared:
        needs = wanted(draft.cluster, job.spec, 1) if is_running else least(draft.cluster, job.spec)
        plan, owns = draft.reclaim, draft.reclaim.owns(job, needs)
        above, all_of = list[str](), list[str]()
        for donor in draft.donors(job, needs):
            able = [
                m.node
                for m in draft.remaining(donor)
                if draft.fits(job, m.node, donor.uid)
                and plan.may_lose(donor, draft.fit.use_on(donor, m.node), job, needs, owns, rounded=search.rounded)
            ]
            all_of += able
            spare = {m.node for m in draft.above_min(donor)}
            above += [n for n in able if n in spare]
        pools += [above] if is_running else [above, all_of]
    seen: set[str] = set(failed)
    for i, pool in enumerate(pools):
        pools[i] = [n for n in dict.fromkeys(pool) if n not in seen]
        seen.update(pool)
    own = tuple(m.node for m in survivors(draft.cluster, job)) if is_running else ()
    want = len(own) + lack
    names = gather(pools, want, 1 if is_running else want, gang_of(draft.cluster, job.spec), PastPlaces(own, own))
    return frozenset(names).difference(own) if is_running or len(names) >= want else frozenset()


def _provide_any(draft: TransferDraft, job: JobRecord, lack: int, *, whole: bool) -> bool:
    """Wherever they are; as of ``_provide``."""
    idle = list(islice(draft.idle_for(job), lack))
    allowed, inside = _allowed(draft, job, lack)
    if runs(job):
        if inside and whole:
            return not allowed and _help(draft, job, lack, idle, inside, whole=True)
        if inside:
            lack, inside = (allowed, "") if allowed else (1, inside)
        return _help(draft, job, lack, idle[:lack], inside, whole=whole)
    if _make_start(draft, job, lack, idle, allowed, inside):
        return True
    if inside and allowed > len(idle) and _make_start(draft, job, lack, idle, allowed, ""):
        return True
    draft.reserve_capability(job)
    return False


def _allowed(draft: TransferDraft, job: JobRecord, lack: int) -> tuple[int, str]:
    """How many nodes its queues may have more for it, up to ``lack``; and the queue that is in the way of more."""
    inside = draft.reclaim.barring(job, wanted(draft.cluster, job.spec, lack)) if runs(job) else draft.barring(job)
    allowed = lack
    while inside and allowed and draft.reclaim.barring(job, wanted(draft.cluster, job.spec, allowed)):
        allowed -= 1
    return allowed, inside


def _make_start(
    draft: TransferDraft, job: JobRecord, lack: int, idle: Sequence[str], allowed: int, inside: str
) -> bool:
    """All that a job needs that waits, or nothing. ``inside``: only jobs of this queue are to give nodes up."""
    needs, plan = least(draft.cluster, job.spec), Reclaim(draft.cluster, draft.reclaim)
    free = min(len(idle), allowed)
    draft.search(job).limit(inside, anywhere=len(idle) == lack > free)
    back = _get_back(draft, job, idle[:free], lack - free, plan)
    short = lack - free - len(back)
    room = plan if short <= 0 else make_room(draft, job, needs, short, back, plan)
    if room is None or room.barring(job, needs):
        return False
    room.grant(job, needs)
    draft.decide(job, idle if draft.search(job).anywhere else idle[:free], back, room)
    return True


def _help(draft: TransferDraft, job: JobRecord, lack: int, idle: Sequence[str], inside: str, *, whole: bool) -> bool:
    """As many nodes as there are for one that runs on too few, or all or none (``whole``). ``inside``: as of
    ``_make_start``; the job's queues may have nothing more for it then."""
    plan = Reclaim(draft.cluster, draft.reclaim)
    free = 0 if inside else len(idle)
    draft.search(job).limit(inside, anywhere=len(idle) == lack > free)
    back = _get_back(draft, job, idle[:free], lack - free, plan)
    if plan.barring(job, wanted(draft.cluster, job.spec, free + len(back))):
        draft.search(job).found.difference_update(node for _, node in back)
        back, plan = [], Reclaim(draft.cluster, draft.reclaim)
    short = lack - free - len(back)
    plan.grant(job, wanted(draft.cluster, job.spec, free + len(back)))
    if whole and short:
        more = wanted(draft.cluster, job.spec, short)
        room = make_room(draft, job, more, short, back, plan, whole=False)
        if room is None:
            return False
        room.grant(job, more)
        plan = room
    else:
        plan = fill_up(draft, job, short, back, plan)
    idle = idle[: free + len(back)] if draft.search(job).anywhere else idle[:free]
    draft.take(job, idle)
    draft.decide(job, idle, back, plan)
    return True


def _get_back(draft: TransferDraft, job: JobRecord, idle: Sequence[str], lack: int, plan: Reclaim) -> list[Given]:
    """Borrowed nodes for a job that is to have these idle ones; ``plan``: what queues use, without them then."""
    found = draft.search(job).found = {*idle}
    back = draft.to_give(job, lack)
    for donor, node in back:
        plan.release(donor, draft.fit.use_on(donor, node))
        found.add(node)
    return back


def lend_idle(draft: TransferDraft) -> None:
    """Each idle node to the job with the fewest borrowed ones that can use it."""
    draft.stay_home()
    waits = [(draft.on_top(j), i) for i, j in enumerate(draft.borrowers) if draft.may_grow(j)]
    heapify(waits)
    idle = [draft.idle_for(j) for j in draft.borrowers]
    while waits:
        i = heappop(waits)[1]
        job = draft.borrowers[i]
        one = wanted(draft.cluster, job.spec, 1)
        full = draft.size[job.uid] >= job.spec.nodes.max or draft.reclaim.barring(job, one)
        node = None if full else next(idle[i], None)
        if node is not None:
            draft.take(job, [node])
            draft.reclaim.grant(job, one)
            heappush(waits, (draft.on_top(job), i))


def level(draft: TransferDraft) -> None:
    """Between jobs that borrow: who has fewer, by two at least, gets one of who has most. Of those with equally few
    the one goes first whose queue has least of its part."""
    able = [j for j in draft.borrowers if draft.may_grow(j) and draft.size[j.uid] < j.spec.nodes.max]
    while able:
        fewest = min(map(draft.on_top, able))
        rich = [j for j in draft.borrowers if draft.on_top(j) - fewest >= 2 and draft.lent[j.uid]]
        if not rich:
            return
        poorest = [j for j in able if draft.on_top(j) == fewest]
        poor = min(poorest, key=draft.reclaim.over) if draft.shared else poorest[0]
        found = ((j, draft.newest_lent(j, poor)) for j in sorted(rich, key=draft.on_top, reverse=True))
        able_to = ((j, node) for j, node in found if node is not None and _may_even_out(draft, j, node, poor))
        donor, node = next(able_to, (None, ""))
        if donor is None:
            able.remove(poor)
            continue
        draft.reclaim.release(donor, draft.fit.use_on(donor, node))
        draft.reclaim.grant(poor, wanted(draft.cluster, poor.spec, 1))
        draft.give(donor, node, poor)
        if draft.size[poor.uid] >= poor.spec.nodes.max:
            able.remove(poor)


def _may_even_out(draft: TransferDraft, donor: JobRecord, node: str, poor: JobRecord) -> bool:
    """Between jobs of one queue always. Else no queue gets one from another that is as little above its part."""
    if not draft.shared or donor.spec.queue == poor.spec.queue:
        return True
    use, needs = draft.fit.use_on(donor, node), wanted(draft.cluster, poor.spec, 1)
    may = draft.reclaim.may_return(donor, use, queue_of(poor.spec.queue))
    return may and draft.reclaim.evens_out(donor, use, poor, needs)

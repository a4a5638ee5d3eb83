"""Jobs of queues that have more than their part make room for one that lacks nodes, by the rules of
``fairshare/reclaim.py``: first nodes above their ``min``, then whole jobs are stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from nodeagent.model.job import JobRecord
from nodeagent.plan.fairshare.reclaim import Reclaim
from nodeagent.plan.fairshare.resources import NOTHING as NO_USE
from nodeagent.plan.fairshare.resources import Resources, wanted
from nodeagent.plan.queueing.transferdraft import Given, NodeSearch, TransferDraft


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
    search: NodeSearch
    shrink: list[Given] = field(default_factory=list, init=False)
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
        return self.plan.may_lose(donor, use, self.job, self.needs, self.owns, rounded=self.search.rounded)


def fill_up(draft: TransferDraft, job: JobRecord, lack: int, back: Collection[Given], plan: Reclaim) -> Reclaim:
    """One that runs on too few nodes gets more, one by one, for as long as its queue has less than its part: from
    jobs above their ``min``. No whole one is stopped for it: it has as many as it says that it needs. ``back``,
    ``plan``: as of ``make_room``. Returns what queues use then."""
    one = wanted(draft.cluster, job.spec, 1)
    for _ in range(lack):
        more = make_room(draft, job, one, 1, back, plan, whole=False)
        if more is None:
            break
        more.grant(job, one)
        plan = more
    return plan


def make_room(
    draft: TransferDraft,
    job: JobRecord,
    needs: Resources,
    lack: int,
    back: Collection[Given],
    plan: Reclaim,
    *,
    whole: bool = True,
) -> Reclaim | None:
    """Have jobs of queues that have more than their part give nodes above their ``min``, and where that is too
    little stop some of them (``whole``). ``needs``: what the job would have more; ``back``: borrowed nodes that it
    gets; ``plan``: what queues use before. Returns what they use without what is given; None, and nothing is
    decided, where both is not enough, and in a cluster of one queue."""
    if not draft.shared:
        return None
    claim = _Claim(job, needs, lack, Reclaim(draft.cluster, plan), plan.owns(job, needs), draft.search(job))
    donors = draft.donors(job, needs)
    _shrink(draft, claim, donors, back)
    if whole:
        _stop_some(draft, claim, donors, back)
    if claim.short > 0:
        return None
    _leave_surplus(draft, claim)
    if claim.plan.barring(job, needs):
        return None
    for donor, node in claim.shrink:
        draft.part(donor, node, job)
    for donor, _, _ in claim.stop:
        draft.stop(donor, [m.node for m in draft.remaining(donor, back)], job)
    return claim.plan


def _shrink(draft: TransferDraft, claim: _Claim, donors: Iterable[JobRecord], back: Collection[Given]) -> None:
    """Nodes above the donors' ``min``, until there are enough."""
    for donor in donors:
        if not claim.may_ask(donor):
            continue
        for member in draft.above_min(donor, back):
            if not draft.fits(claim.job, member.node, donor.uid):
                continue
            if not claim.release(donor, draft.fit.use_on(donor, member.node)):
                break
            claim.shrink.append((donor, member.node))
            claim.search.found.add(member.node)
            claim.short -= 1
            if claim.short <= 0:
                return


def _stop_some(draft: TransferDraft, claim: _Claim, donors: Iterable[JobRecord], back: Collection[Given]) -> None:
    """Whole donors, with all that they have left, until there is enough."""
    given = {(donor.uid, node) for donor, node in claim.shrink}
    for donor in donors:
        if claim.short <= 0:
            return
        if not claim.may_ask(donor):
            continue
        rest = [m for m in draft.remaining(donor, back) if (donor.uid, m.node) not in given]
        able = [m.node for m in rest if draft.fits(claim.job, m.node, donor.uid)]
        use = draft.fit.use_of_all(donor, rest)
        if able and claim.release(donor, use):
            claim.stop.append((donor, len(able), use))
            claim.search.found.update(able)
            claim.short -= len(able)


def _leave_surplus(draft: TransferDraft, claim: _Claim) -> None:
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
        claim.plan.grant(donor, draft.fit.use_on(donor, node))
        claim.short += 1

"""Nodes for all places of a job of several roles that waits, or nothing: idle ones, and of what others could leave as
little as will do.

How places are laid out is ``placing/roles.py``'s, who may have to leave something ``transferdraft.py``'s.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.plan.fairshare.reclaim import Reclaim
from nodeagent.plan.fairshare.resources import Resources, least, of_places, together
from nodeagent.plan.nodes.candidates import Candidate, NodeKind, kind_of
from nodeagent.plan.placing.places import Layout
from nodeagent.plan.placing.roles import count_on, lay
from nodeagent.plan.queueing.transferdraft import TransferDraft


@dataclass(frozen=True, slots=True)
class _Source:
    """What a job could leave: one of its nodes, or all of them (``whole``), and what it has there."""

    donor: JobRecord
    nodes: tuple[str, ...]
    use: Resources
    whole: bool = False

    def is_needed(self, layout: Layout) -> bool:
        """Some place needs what the donor would leave."""
        generation = self.donor.generation
        assert generation is not None
        return any(
            device in generation.members[node].devices
            for node in self.nodes
            for place in layout.places.get(node, ())
            for device in place.devices
        )


class PlaceRoom:
    """Of one job. Its search is limited already (``NodeSearch``)."""

    def __init__(self, draft: TransferDraft, job: JobRecord) -> None:
        self._draft, self._cluster, self._job = draft, draft.cluster, job
        self._idle = [*draft.idle_for(job)]
        self._sources = self._all_sources()
        """Those first that are to leave something first."""
        self._laid: dict[int, tuple[Layout, Reclaim] | None] = {}
        """As of ``_layout``."""

    def provide(self) -> bool:
        """False: nothing was done."""
        draft, job = self._draft, self._job
        if not self._enough(len(self._sources)):
            return False
        count = bisect_left(range(len(self._sources)), True, key=self._enough)
        found = self._layout(count)
        assert found is not None
        layout, plan = found
        some = self._needed(count, layout, plan)
        plan.grant(job, of_places(layout.places))
        nodes = {node for source in some if not source.whole for node in source.nodes}
        free = [node for node in layout.places if node in self._idle and node not in nodes]
        draft.decide(job, free, [(one.donor, one.nodes[0]) for one in some if not one.whole], plan)
        for one in reversed(some):
            if one.whole:
                draft.stop(one.donor, one.nodes, job)
        return True

    def _enough(self, count: int) -> bool:
        """What the first sources leave will do. Where a count says so the places need not be laid out."""
        free = [(one.node, kind) for one, kind in self._free(count)]
        room = count_on(self._cluster, self._job.sized_before, free)
        if room.room is False:
            return False
        if room.room and not self._left(count).barring(self._job, room.most):
            return True
        return self._layout(count) is not None

    def _needed(self, count: int, layout: Layout, plan: Reclaim) -> list[_Source]:
        """Of the first sources those without which it would not do. ``plan``: what queues use without what all of them
        leave; without what these leave then."""
        job, needs, some = self._job, of_places(layout.places), list[_Source]()
        for source in reversed(self._sources[:count]):
            plan.grant(source.donor, source.use)
            if source.is_needed(layout) or plan.barring(job, needs):
                plan.release(source.donor, source.use)
                some.append(source)
        return some[::-1]

    def _all_sources(self) -> list[_Source]:
        """What others could leave: what they borrowed, what they have above their ``min``, and all that they have."""
        draft, job, fit = self._draft, self._job, self._draft.fit
        back = draft.to_give(job, len(fit.nodes))
        found = [_Source(donor, (node,), fit.use_on(donor, node)) for donor, node in back]
        if not draft.shared:
            return found
        needs, plan = least(self._cluster, job.sized_before), Reclaim(self._cluster, draft.reclaim)
        for one in found:
            plan.release(one.donor, one.use)
        owns, donors, given = plan.owns(job, needs), draft.donors(job, needs), set[tuple[str, str]]()
        rounded = draft.search(job).rounded

        def leave(source: _Source) -> bool:
            able = plan.may_lose(source.donor, source.use, job, needs, owns, rounded=rounded)
            if able:
                plan.release(source.donor, source.use)
                found.append(source)
            return able

        for donor in donors:
            for member in draft.above_min(donor, back):
                if draft.fits(job, member.node, donor.uid):
                    if not leave(_Source(donor, (member.node,), fit.use_on(donor, member.node))):
                        break
                    given.add((donor.uid, member.node))
        for donor in donors:
            rest = [m for m in draft.remaining(donor, back) if (donor.uid, m.node) not in given]
            if any(draft.fits(job, m.node, donor.uid) for m in rest):
                use = together(fit.use_on(donor, m.node) for m in rest)
                leave(_Source(donor, tuple(m.node for m in rest), use, whole=True))
        return found

    def _free(self, count: int) -> list[tuple[Candidate, NodeKind]]:
        """Idle nodes and those that the first sources leave, with what each has for the job then."""
        gone: dict[str, set[str]] = {}
        for source in self._sources[:count]:
            for node in source.nodes:
                if self._draft.fits(self._job, node, source.donor.uid):
                    gone.setdefault(node, set()).add(source.donor.uid)
        found = list[tuple[Candidate, NodeKind]]()
        for node in dict.fromkeys((*self._idle, *gone)):
            record, leave, booked = self._cluster.nodes[node], gone.get(node, ()), self._draft.fit.used.get(node, {})
            used = {device for uid, devices in booked.items() if uid not in leave for device in devices}
            devices = tuple(d for d in record.facts.devices() if d not in used)
            found.append((Candidate(node, record.incarnation.life, "fit", "", devices), kind_of(record, used)))
        return found

    def _left(self, count: int) -> Reclaim:
        """What queues use without what the first sources leave."""
        plan = Reclaim(self._cluster, self._draft.reclaim)
        for source in self._sources[:count]:
            plan.release(source.donor, source.use)
        return plan

    def _layout(self, count: int) -> tuple[Layout, Reclaim] | None:
        """Where the places would be on idle nodes and on what the first sources leave, and what queues use without
        that; None if not all have room, or if the job's queues may not have so much."""
        if count not in self._laid:
            layout = lay(self._cluster, self._job, self._job.sized_before, [one for one, _ in self._free(count)])
            plan = self._left(count)
            barred = layout.lack or plan.barring(self._job, of_places(layout.places))
            self._laid[count] = None if barred else (layout, plan)
        return self._laid[count]

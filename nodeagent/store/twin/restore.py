"""The step that gives an emptied store, or one that went back in time, what an agent knows.

The twin of ``scripts/restore.lua``; must never judge who is right: the newest complete view is, and then the revision.
"""

from __future__ import annotations

from dataclasses import dataclass

from nodeagent.model.job import JobRecord, Phase
from nodeagent.model.node import NodeRecord
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import Offer, Restored
from nodeagent.store.twin.holders import enter_phase, rebook
from nodeagent.store.twin.state import State
from nodeagent.store.twin.waiting import expect
from nodeagent.store.words import timing_differs


@dataclass(frozen=True, slots=True)
class _Merge:
    """How the records of one offer are taken."""

    late: bool
    """The recovery is over."""
    full: bool
    """A complete view, newer than the store's."""
    rev: int
    known: int

    def takes(self, stored: int | None, offered: int) -> bool:
        """Whether the offered version replaces the stored one (its revision or None)."""
        if not self.full:
            return offered > self.known and (stored is None or offered > stored)
        return stored is None or offered > stored or (stored <= self.rev and offered != stored)


def restore(s: State, o: Offer) -> Restored:
    if s.timing is not None and s.timing != o.timing:
        raise StoreRefusedError("timing", timing_differs(s.timing, o.timing))
    history = bool(s.era) and o.era == s.era  # then the uid was changed by hand
    mine = s.timing is not None and (s.cluster_uid == o.cluster_uid or history)
    if mine:
        s.cluster_uid = o.cluster_uid
    if s.timing is not None and not mine and (s.order > 0 or s.taken == "jobs" or (s.taken and not o.holds)):
        raise StoreRefusedError(
            "foreign",
            "the store is of another cluster, with jobs of its own: this node comes too late to restore what it knew",
        )
    has_all = mine and o.newest <= s.rev and (o.era == s.era or (o.era == s.parent and o.newest <= s.known))
    opens = not mine or o.newest > s.rev
    if opens:
        s.timing, s.cluster_uid = o.timing, o.cluster_uid
        if not mine:
            s.taken = "jobs" if o.holds else "empty"
        s.known = s.rev if mine else 0
        s.least = s.recover = s.served + s.credit_ms + s.lease_ms
    late = not s.recovering
    full = not late and not has_all and o.rev > s.known
    brings = not late and not has_all and bool(o.jobs or o.nodes)
    found = opens or bool((full or brings) and s.parent)
    if found:
        s.begin_era("", max([o.newest, *(j.rev for j in o.jobs), *(n.rev for n in o.nodes)]))
        s.event(
            "StoreRestored",
            by=o.by,
            text=f"the store lacked what node {o.by} knows: it is restored by the agents; nothing is decided meanwhile",
        )
    if found or full:
        expect(s, o, anew=found)
    for name, number in o.numbers.items():
        s.highest[name] = max(s.highest.get(name, 0), number)
    if not late:
        more = max(0, o.served - s.served)
        s.served, s.recover, s.least = s.served + more, s.recover + more, s.least + more
        s.amnesty = max(s.amnesty + more, s.recover)
    if not has_all:
        merge = _Merge(late=late, full=full, rev=o.rev, known=s.known)
        for node in () if late else o.nodes:
            _node(s, merge, node)
        for job in o.jobs:
            _job(s, merge, job, o.by)
    if o.uids is not None and full:
        for uid in sorted(set(s.jobs) - set(o.uids)):
            if s.jobs[uid].rev <= o.rev:
                s.delete_job(s.jobs[uid])
        s.known = o.rev
    s.changes = dict(sorted(s.changes.items(), key=lambda item: item[1]))
    return Restored(era=s.era, known=s.rev if has_all else s.known, recovering=not late)


def _node(s: State, merge: _Merge, new: NodeRecord) -> None:
    old = s.nodes.get(new.id)
    same = old is not None and old.incarnation.life == new.incarnation.life
    if old is not None and same and new.lost and not old.lost:
        old = s.save_node(old.model_copy(update={"lost": True}))
        s.lease[new.id] = min(s.lease.get(new.id, s.served), s.served)
    if old is not None:
        s.changes.setdefault(f"node:{new.id}", old.rev)
        s.lease.setdefault(new.id, s.served)
    if not merge.takes(old.rev if old is not None else None, new.rev):
        return
    if old is not None and same:
        if old.incarnation.start > new.incarnation.start:
            return  # it has come since
        new = new.model_copy(update={"lost": new.lost or old.lost})
    if old is None or old.incarnation != new.incarnation:
        s.seq[new.id] = 0
    if old is not None and not same:
        s.dead[new.id] = (*s.dead.get(new.id, ()), old.incarnation.life)
    s.nodes[new.id] = new
    s.changes[f"node:{new.id}"] = new.rev
    s.changes.pop(f"gone:node:{new.id}", None)
    s.lease.setdefault(new.id, s.served)
    if new.lost or new.left:
        s.lease[new.id] = min(s.lease[new.id], s.served)
    if new.cordon is not None:
        s.cordons[new.id] = new.cordon
    else:
        s.cordons.pop(new.id, None)


def _job(s: State, merge: _Merge, new: JobRecord, by: str) -> None:
    old = s.jobs.get(new.uid)
    if new.head is not None:
        s.highest[new.name] = max(s.highest.get(new.name, 0), new.head.number)
    record = f"job:{new.uid}"
    removed = merge.late and old is None and (s.buried(record) or record in s.changes)
    if (merge.late and old is not None) or removed:
        return
    if not merge.takes(old.rev if old is not None else None, new.rev):
        if old is not None:
            s.changes.setdefault(record, old.rev)
            if old.head is not None:
                s.highest[old.name] = max(s.highest.get(old.name, 0), old.head.number)
            if _named(s, merge, old):
                rebook(s, old, old)
        return
    if not _named(s, merge, new):
        return
    if merge.late:
        new = _closed(s, new, by).model_copy(update={"rev": s.touch(f"job:{new.uid}")})
    s.jobs[new.uid] = new
    s.changes[record] = new.rev
    s.changes.pop(f"gone:{record}", None)
    s.order = max(s.order, new.order)
    rebook(s, old if old is not None else new, new)


def _named(s: State, merge: _Merge, job: JobRecord) -> bool:
    """Whether the job may have its name. Of two, the newer; but one that was never formed goes for one that was."""
    other = s.jobs.get(s.names.get(job.name, ""))
    if other is not None and other.uid != job.uid:
        ran = job.head is not None and other.head is None
        if merge.late or (other.head is not None and job.head is None) or (other.rev > job.rev and not ran):
            return False
        s.delete_job(other)
    s.names[job.name] = job.uid
    return True


def _closed(s: State, job: JobRecord, by: str) -> JobRecord:
    """Its nodes have been silent for longer than their workers can live."""
    head = job.head
    if head is not None:
        update: dict[str, object] = {
            "head": head.model_copy(update={"state": "ended", "holders": {}, "reports": {}, "deadline": 0})
        }
        if head.state == "active":
            update |= {"last_reports": head.reports, "last_number": head.number, "silent": {}}
        job = job.model_copy(update=update)
    if job.phase in ("forming", "running", "pausing"):
        phase: Phase = "paused" if job.phase == "pausing" else "holding"
        job = enter_phase(s, job, phase, f"the store had lost it; node {by} brought it back")
    return job

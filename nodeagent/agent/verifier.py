"""Which jobs this agent will run: only those that the cluster's key signed, as they were submitted, while they
live.

Owns the verdict of each record and what has to be remembered for it: jobs seen while their admission was good count as
known for as long as they live, however old it gets; jobs that have ended never count again, even if written back.
Tells a refusal once, in log and metric; of many at once the log only has how many. Must never touch the store, and a
verdict never stops what runs: it keeps from starting (``plan/``, ``apply.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import structlog

from nodeagent.agent.context import AgentContext
from nodeagent.agent.membership import Membership
from nodeagent.agent.metrics import Metrics
from nodeagent.model.job import SKEW, TERMINAL, Checkpoint, JobRecord
from nodeagent.model.queue import NO_QUEUES, Queues, QueuesRecord
from nodeagent.model.window import NO_WINDOWS, Windows, WindowsRecord
from nodeagent.osutil.clock import Allowance
from nodeagent.plan.cluster import Refusal, RefusalKind
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError
from nodeagent.trust.ledger import Ledger, LedgerEntry, Remembered, pruned
from nodeagent.trust.seal import LIFETIME, Seal

NAMED_MEMBERS = 3
"""Nodes of a gang that a text names."""
SEEN_AGAIN = 3600
"""Seconds after which it is written down anew that a job still lives."""
SIGNATURES_AT_A_TIME = 512
"""Signatures that are looked at before the agent's loop has its turn: some 10 ms."""
NAMED_AT_ONCE, NAMED_PER_SECOND = 64.0, 1.0
"""Refusals that the log names, at once and in the long run: who can write to the store can cause any number."""
LOOK_AGAIN = 60.0
"""Seconds for which what was found of a record holds while it does not change: only signatures from the future and the
hours above depend on the time."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """A record, whether its signatures are good, and its gang has the places of its roles."""

    job: JobRecord
    admits: bool
    controls: bool
    gang: bool
    places: bool
    points: bool


@dataclass(frozen=True, slots=True)
class _Look:
    """One at a view."""

    jobs: Mapping[str, JobRecord]
    unread: Mapping[str, str]
    era: str
    whole: bool
    seasoned: bool
    at: float = 0.0
    """When all records were looked at last."""
    found: dict[str, Refusal] = field(default_factory=dict)

    def same(self, other: _Look) -> bool:
        """The other is at the very same view."""
        return (
            self.jobs is other.jobs
            and self.unread is other.unread
            and (self.era, self.whole, self.seasoned) == (other.era, other.whole, other.seasoned)
        )


class AdmissionVerifier:
    """One agent's verdicts. ``dirty`` is set when there is something to be saved."""

    def __init__(self, node: str, seal: Seal, ledger: Ledger, metrics: Metrics) -> None:
        """Raises OSError where what was remembered cannot be read: without it, what has ended might run again."""
        self._node, self._seal, self._ledger, self._metrics = node, seal, ledger, metrics
        kept = ledger.load()
        self._entries = kept.jobs
        self._judged: dict[str, _Judged] = {}
        self._coming: set[str] = set()
        """Jobs whose records are being read: until all are there, they need not be in a view."""
        self._read_all = True
        self._lines = Allowance(NAMED_AT_ONCE, NAMED_PER_SECOND)
        self._unnamed = 0
        """Refusals since the log has last said of how many it has no line."""
        self._reported: dict[str, RefusalKind] = {}
        self._fits = True
        """This node's key signed the admission of some job of the last view."""
        self._looked: _Look | None = None
        self._again = set[str]()
        """Jobs of which another record was judged since."""
        self._caught_up = False
        """It is settled which jobs went while this agent was away."""
        self._era = ""
        self._present: frozenset[str] = frozenset()
        """Jobs of the last whole view of this era."""
        self._revs = {uid: entry.rev for uid, entry in self._entries.items() if entry.rev and not entry.ended}
        """Highest revision of each job's good control, for as long as the job is remembered: an older one was put back.
        It holds over all eras, since anybody who can write to the store can begin one, and over restarts, as the
        pointers below."""
        self._pointers = {uid: e.pointer for uid, e in self._entries.items() if e.pointer is not None and not e.ended}
        """The newest good checkpoint pointer of each job, likewise. It is written down with the rest, and once an older
        one is found; until then the copy of the jobs on this disk has it."""
        self._cluster_uid = kept.cluster_uid
        self._queues: QueuesRecord | None = None
        self._tree = kept.queues if seal.shares(kept.queues) else NO_QUEUES
        """The newest good tree, over restarts too, and the record that was looked at last."""
        self._windows_seen: WindowsRecord | None = None
        self._windows = kept.windows if seal.windows_signed(kept.windows) else NO_WINDOWS
        """Likewise."""
        self.older_queues: tuple[int, Queues] | None = None
        self.older_windows: tuple[int, Windows] | None = None
        """Where older ones than the newest are in the store: their revision, and the newest."""
        self.dirty = asyncio.Event()
        self._log = structlog.get_logger("trust").bind(node=node)

    async def save(self, now: float) -> None:
        """Write down what changed. Raises OSError."""
        self._entries = pruned(self._entries, self._judged, now)
        self._revs = {uid: rev for uid, rev in self._revs.items() if uid in self._entries}
        self._pointers = {uid: pointer for uid, pointer in self._pointers.items() if uid in self._entries}
        self._entries |= {uid: replace(self._entries[uid], pointer=one) for uid, one in self._pointers.items()}
        self._entries |= {uid: replace(self._entries[uid], rev=rev) for uid, rev in self._revs.items()}
        await self._ledger.save(Remembered(dict(self._entries), self._cluster_uid, self._tree, self._windows))

    def recall(self, jobs: Collection[JobRecord]) -> None:
        """Jobs as this node has them on its disk, before any is read."""
        for job in jobs:
            if self._seal.points(job):
                self._keep_pointer(job)
            if self._seal.controls(job):
                self._revs[job.uid] = max(self._revs.get(job.uid, 0), job.control.rev)

    @property
    def misled(self) -> list[str]:
        """Jobs (uids) whose checkpoint pointer does not count, as of the last look."""
        found: Mapping[str, Refusal] = {} if self._looked is None else self._looked.found
        return [uid for uid, refusal in found.items() if refusal.kind == "checkpoint"]

    def pointer(self, uid: str) -> Checkpoint | None:
        """The newest of this job that an agent has signed, of those that were in its record."""
        return self._pointers.get(uid)

    def void(self, job: JobRecord) -> Checkpoint | None:
        """The record's checkpoint pointer if it does not count."""
        good = self._judge(job).points and _place(job.checkpoint) >= _place(self._pointers.get(job.uid))
        return None if good else job.checkpoint

    async def read(self, jobs: Collection[JobRecord], *, more: bool) -> None:
        """Look at the signatures of these records, before they come into the view, which is looked at in one go.
        ``more``: others follow that come into it together with these."""
        if self._read_all:
            self._coming.clear()
        self._read_all = not more
        self._coming.update(job.uid for job in jobs)
        signatures = 0
        for job in jobs:
            if signatures >= SIGNATURES_AT_A_TIME:
                await asyncio.sleep(0)
                signatures = 0
            self._judge(job)
            signatures += 3 + (len(job.generation.members) if job.generation is not None else 0)

    def look(
        self, jobs: Mapping[str, JobRecord], era: str, now: float, *, whole: bool, seasoned: bool,
        unread: Mapping[str, str] = {},
    ) -> dict[str, Refusal]:  # fmt: skip
        """The refused ones among the jobs of a view. ``whole``: it is everything that the store has; ``seasoned``: and
        whatever others could have given back to it is there; ``unread``: records in the store that cannot be read, and
        why, by key. ``now`` is Unix time. Mappings must not change once they were given: the very same ones are not
        looked at again."""
        look, last = _Look(jobs, unread, era, whole, seasoned, now), self._looked
        if last is not None and last.era == era and last.at <= now < last.at + LOOK_AGAIN:
            if last.same(look) and not self._again:
                return last.found
            look = replace(look, at=last.at)
        else:
            last = None
        self._looked = replace(look, found=self._look(look, last, now))
        self._again.clear()
        return self._looked.found

    def _look(self, look: _Look, last: _Look | None, now: float) -> dict[str, Refusal]:
        """``last``: one whose findings hold, but of records that have changed since."""
        jobs, unread, era, whole, seasoned = look.jobs, look.unread, look.era, look.whole, look.seasoned
        if era != self._era:  # another history: it may lack what this agent has seen, and get it back
            self._era, self._present = era, frozenset()
        fits = any(self._judge(job).admits for job in jobs.values())
        if fits != self._fits:  # the texts are others then
            self._fits, last = fits, None
        unknown = {key.removeprefix("job:") for key in unread if key.startswith("job:")}
        refused = {uid: self._unreadable(uid, jobs.get(uid), unread[f"job:{uid}"], now) for uid in unknown}
        seen: Mapping[str, JobRecord] = {} if last is None else last.jobs
        known: Mapping[str, Refusal] = {} if last is None else last.found
        again = self._again.union(key.removeprefix("job:") for key in (() if last is None else last.unread))
        for uid, job in jobs.items():
            if uid in unknown:
                continue
            found = known.get(uid) if seen.get(uid) is job and uid not in again else self.refusal(job, now)
            if found is not None:
                refused[uid] = found
        if self._unnamed and self._lines.may(now):
            self._log.error(
                "refused: more jobs are not run here, each for a reason of these kinds", count=self._unnamed
            )
            self._unnamed = 0
        for uid in self._judged.keys() - jobs.keys() - self._coming:
            del self._judged[uid]
            self._reported.pop(uid, None)
        if whole:
            for uid in self._present - jobs.keys() - unknown:
                self._ends(uid, now)  # removed
            self._present = frozenset(jobs) | (self._present & unknown)
        if whole and seasoned and not self._caught_up:
            self._caught_up = True
            for uid in [u for u, e in self._entries.items() if not e.ended and u not in jobs and u not in unknown]:
                del self._entries[uid]  # it ended while this agent was away: only a good admission brings it back
                self.dirty.set()
        return refused

    def of_cluster(self, uid: str) -> None:
        """Whose store the queues and windows are read from: those of another cluster are forgotten. ``uid``: empty
        while that is not known."""
        if uid and uid != self._cluster_uid:
            self._cluster_uid, self._tree, self._windows = uid, NO_QUEUES, NO_WINDOWS
            self._queues = self._windows_seen = self.older_queues = self.older_windows = None

    def tree(self, record: QueuesRecord | None) -> Queues:
        """The tree of queues to act on: the newest that the key signed. The very same object until it changes. What was
        written past the agents changes nothing, and is logged once."""
        if record is self._queues or record is None:
            return self._tree
        self._queues, self.older_queues = record, None
        if not self._seal.shares(record.tree):
            self._log.error(
                "refused: the queues in the store are not signed; the last good ones count", by=record.tree.by
            )
        elif record.tree.rev < self._tree.rev:
            self._log.error("refused: older queues were written back into the store", rev=record.tree.rev)
            self.older_queues = record.tree.rev, self._tree
        else:
            if record.tree != self._tree:
                self.dirty.set()
            self._tree = record.tree
        return self._tree

    def windows(self, record: WindowsRecord | None) -> Windows:
        """The maintenance windows to act on, likewise."""
        if record is self._windows_seen or record is None:
            return self._windows
        self._windows_seen, self.older_windows = record, None
        if not self._seal.windows_signed(record.windows):
            self._log.error(
                "refused: the maintenance windows in the store are not signed; the last good ones count",
                by=record.windows.by,
            )
        elif record.windows.rev < self._windows.rev:
            self._log.error(
                "refused: older maintenance windows were written back into the store", rev=record.windows.rev
            )
            self.older_windows = record.windows.rev, self._windows
        else:
            if record.windows != self._windows:
                self.dirty.set()
            self._windows = record.windows
        return self._windows

    def refusal(self, job: JobRecord, now: float) -> Refusal | None:
        """Why this record is not to be run; None if it may."""
        known = self._judge(job)
        entry = self._entries.get(job.uid)
        if job.phase in TERMINAL:
            if known.admits and (entry is None or not entry.ended):
                self._entries.setdefault(job.uid, LedgerEntry(expires=_expiry(job), seen=int(now)))
                self._ends(job.uid, now)
            return None
        kind, text = self._verdict(known, entry, now)
        if kind is None:
            self._revs[job.uid] = job.control.rev
            self._reported.pop(job.uid, None)
            return None
        newest = self._revs.get(job.uid, 0)
        refusal = Refusal(kind, text, known.controls and job.control.rev >= newest, newest)
        self._report(refusal, job.uid, job.name, now)
        return refusal

    def _report(self, refusal: Refusal, uid: str, name: str | None, now: float) -> None:
        if self._reported.get(uid) == refusal.kind:
            return
        self._reported[uid] = refusal.kind
        self._metrics.refused.labels(reason=refusal.kind).inc()
        if self._lines.may(now):
            self._log.error(
                "refused: this job is not run here", job=name, uid=uid, reason=refusal.kind, why=refusal.text
            )
        else:
            self._unnamed += 1

    def _unreadable(self, uid: str, job: JobRecord | None, why: str, now: float) -> Refusal:
        text = (
            f"its record in the store cannot be read, so all stays as it is: {why}. An agent of another version wrote "
            f"it, or somebody else did: correct or remove the key job:{uid}, and past:{uid} if that is there"
        )
        refusal = Refusal("unreadable", text, False)
        self._report(refusal, uid, job.name if job is not None else None, now)
        return refusal

    def due(self, jobs: Mapping[str, JobRecord], now: float) -> list[JobRecord]:
        """Jobs whose admission should be renewed: in the second half of its lifetime, or signed by a clock that is
        far ahead. None whose record cannot be read: of that only an older one is known here."""
        unread: Mapping[str, str] = {} if self._looked is None else self._looked.unread
        return [
            job
            for job in jobs.values()
            if job.phase not in TERMINAL
            and f"job:{job.uid}" not in unread
            and self.refusal(job, now) is None
            and not LIFETIME / 2 <= _expiry(job) - now <= LIFETIME + SKEW
        ]

    def _judge(self, job: JobRecord) -> _Judged:
        """Signatures are looked at once for each record that is read."""
        last = self._judged.get(job.uid)
        if last is None or last.job is not job:
            seal = self._seal
            same_gang = last is not None and _same_gang(last.job, job)
            same_places = last is not None and same_gang and last.job.spec is job.spec
            last = _Judged(
                job,
                last.admits if last is not None and _same_admission(last.job, job) else seal.admits(job),
                last.controls if last is not None and last.job.control is job.control else seal.controls(job),
                last.gang if last is not None and same_gang else seal.gang(job),
                last.places if last is not None and same_places else _has_its_places(job),
                last.points if last is not None and last.job.checkpoint is job.checkpoint else seal.points(job),
            )
            self._judged[job.uid] = last
            self._again.add(job.uid)
        return last

    def _verdict(self, known: _Judged, entry: LedgerEntry | None, now: float) -> tuple[RefusalKind | None, str]:
        job = known.job
        if job.admission is None:
            return "unsigned", f"not submitted through an agent: it has no signature of the cluster's key; {_anew(job)}"
        if not known.admits:
            return "changed", self._changed(job)
        if entry is not None and entry.ended:
            return "ended", f"this job has ended before: an old record was written back; {_anew(job)}"
        if entry is None and job.admission.issued > now + SKEW:
            return "early", (
                f"its signature is from the future as this node's clock has it: set the clocks of this node and of "
                f"{job.admission.by} right"
            )
        if entry is None and now > job.admission.expires:
            return "expired", (
                "its signature has expired as this node's clock has it, and no agent that knows it has renewed it: if "
                f"it is new, the clock of this node or of {job.admission.by} is wrong (timedatectl); else {_anew(job)}"
            )
        self._remember(job, entry, now)
        if known.points:
            self._keep_pointer(job)
        size, generation = job.spec.nodes, job.generation
        if generation is not None and generation.state == "ended":
            generation = None
        if generation is not None and not job.spec.several and not size.min <= len(generation.members) <= size.max:
            text = f"generation {generation.number} has {len(generation.members)} nodes"
            return "size", f"{text}, its file allows {size.min} to {size.max}"
        if generation is not None and not known.places:
            return "size", f"generation {generation.number} does not have places of all the roles of its file"
        if not known.gang:
            return "gang", (
                "its generation was changed in the store: not every member's agent agreed to it as it is; "
                f"form it anew: nodeagentctl stop {job.name}, then submit it again"
            )
        if not known.points:
            return "checkpoint", (
                "the checkpoint that it would go on from was not committed through an agent: somebody changed it in "
                "the store; its nodes put back the newest that they have seen, and its running workers may commit a "
                f"new one, otherwise {_anew(job)}"
            )
        if _place(job.checkpoint) < _place(newest := self._pointers.get(job.uid)):
            if self._entries[job.uid].pointer != newest:
                self.dirty.set()
            return "checkpoint", (
                "an older checkpoint than the newest that was committed was written back into the store, or none: its "
                "nodes put the newest back"
            )
        if not known.controls:
            return "control", f"what is wanted of it was changed in the store, not through an agent; {_remedy(job)}"
        if job.control.rev < (rev := self._revs.get(job.uid, 0)):
            if self._entries[job.uid].rev != rev:
                self.dirty.set()
            return "control", f"an older order of its operators was written back into the store; {_remedy(job)}"
        return None, ""

    def _changed(self, job: JobRecord) -> str:
        if self._fits:
            why = (
                "changed in the store after it was submitted, or signed with another cluster's key: its signature does "
                "not match what it says now"
            )
        else:
            why = (
                "its signature does not match what it says now, and this node's key has signed no job of the store: it "
                f"was changed there after it was submitted, or this node's key is another than the cluster's (see that "
                f"the file of cluster_key on {self._node} is the same as on the other nodes)"
            )
        generation = job.generation
        if generation is not None and generation.state != "ended" and not generation.members.keys() <= {self._node}:
            others = ", ".join(sorted(generation.members.keys() - {self._node})[:NAMED_MEMBERS])
            return f"{why}; it has a generation on other nodes ({others}): see what they say of it before you end it"
        return f"{why}; {_anew(job)}"

    def _remember(self, job: JobRecord, entry: LedgerEntry | None, now: float) -> None:
        expires = _expiry(job)
        if entry is None or expires > entry.expires or now - entry.seen > SEEN_AGAIN:
            last = entry or LedgerEntry(expires=0, seen=0)
            self._entries[job.uid] = replace(last, expires=max(expires, last.expires), seen=int(now))
            self.dirty.set()

    def _keep_pointer(self, job: JobRecord) -> None:
        if job.checkpoint is not None and _place(job.checkpoint) > _place(self._pointers.get(job.uid)):
            self._pointers[job.uid] = job.checkpoint

    def _ends(self, uid: str, now: float) -> None:
        entry = self._entries.get(uid)
        if entry is not None and not entry.ended:
            self._entries[uid] = replace(entry, ended=True, seen=int(now), pointer=None, rev=0)
            self._pointers.pop(uid, None)
            self._revs.pop(uid, None)
            self.dirty.set()


def _place(pointer: Checkpoint | None) -> tuple[int, int]:
    """In the order of commits."""
    return (-1, -1) if pointer is None else (pointer.number, pointer.order)


def _same_admission(old: JobRecord, new: JobRecord) -> bool:
    """What its signature is of is the very same, not only equal."""
    return old.spec is new.spec and old.admission is new.admission and (old.name, old.owner) == (new.name, new.owner)


def _has_its_places(job: JobRecord) -> bool:
    """Of several roles: every place of every role once, with as many workers and, once acknowledged, ports as its
    members have. How many a role has may be changed while the job runs: where the control says otherwise, the gang is
    formed anew."""
    generation = job.generation
    if generation is None or not job.spec.several:
        return True
    members, sizes = generation.members.values(), generation.sizes
    places = [place.name for member in members for place in member.places]
    wanted = [f"{role.name}.{i}" for role in job.spec.roles for i in range(max(1, sizes[role.name]))]
    if sorted(places) != sorted(wanted) or any(m.workers != sum(p.workers for p in m.places) for m in members):
        return False
    return generation.state != "active" or all(len(generation.ports.get(m.node, ())) == m.ports for m in members)


def _same_gang(old: JobRecord, new: JobRecord) -> bool:
    a, b = old.generation, new.generation
    if a is None or b is None:
        return a is b
    same = (
        a.members is b.members
        and a.hosts is b.hosts
        and a.ports is b.ports
        and (a.state == "active") == (b.state == "active")
    )
    return same and (a.token, a.seal, a.address, a.store_hosted) == (b.token, b.seal, b.address, b.store_hosted)


def _expiry(job: JobRecord) -> int:
    return job.admission.expires if job.admission is not None else 0


def _anew(job: JobRecord) -> str:
    return f"if it is yours, submit it again; this one can only be deleted: nodeagentctl delete {job.name}"


def _remedy(job: JobRecord) -> str:
    return f"say anew what is wanted: nodeagentctl resume {job.name}, or stop it"


SAVE_PAUSE = 1.0
"""Seconds between two writes to the disk."""
RENEW_LOOK = 60.0
"""Seconds between two looks at which admissions are to be renewed."""
RENEW_PAUSE = 3600.0
"""Seconds in which one job's is renewed at most once by one agent, whatever its clock shows."""


class SignatureRenewal:
    """Two tasks of one agent, for as long as it runs."""

    def __init__(self, context: AgentContext, membership: Membership, seal: Seal, verifier: AdmissionVerifier) -> None:
        self._store, self._clock, self._snapshot = context.store, context.clock, context.snapshot
        self._membership, self._seal, self._verifier = membership, seal, verifier
        self._renewed: dict[str, float] = {}
        self._log = structlog.get_logger("trust").bind(node=membership.node)

    async def remember(self) -> None:
        """Write down what changed, whenever something has."""
        while True:
            await self._verifier.dirty.wait()
            self._verifier.dirty.clear()
            try:
                await self._verifier.save(self._clock.wall())
            except OSError as error:
                self._log.error("which jobs have ended cannot be written down; trying again", why=str(error))
                self._verifier.dirty.set()
            await asyncio.sleep(SAVE_PAUSE)

    async def renew(self) -> None:
        """Look at all admissions, now and then."""
        while True:
            await asyncio.sleep(RENEW_LOOK)
            if self._membership.joined and self._snapshot.complete and not self._snapshot.recovering:
                await self._renew_due()

    async def _renew_due(self) -> None:
        now, wall = self._clock.now(), self._clock.wall()
        self._renewed = {uid: at for uid, at in self._renewed.items() if now < at + RENEW_PAUSE}
        for job in self._verifier.due(self._snapshot.jobs, wall):
            if job.uid in self._renewed or job.admission is None:
                continue
            self._renewed[job.uid] = now
            anew = self._seal.renewed(job, wall, self._membership.node)
            try:
                self._snapshot.absorb_job(await self._store.renew(job.uid, job.admission.signature, anew))
            except (StoreUnavailableError, StoreRefusedError) as error:
                self._log.debug("admission not renewed", job=job.name, why=str(error))

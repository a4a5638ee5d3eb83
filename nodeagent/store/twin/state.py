"""What the in-memory store holds, its served clock, and the small writes that all steps share.

The twin of ``scripts/_clock.lua`` and ``scripts/_records.lua``. Must never decide what a step allows: that is
``lease``, ``generation`` and ``operator``. Deterministic: no randomness, time only as an argument of ``enter``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

from nodeagent.model.base import RECORD_VERSION
from nodeagent.model.event import Event
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import Cordon, Incarnation, NodeRecord
from nodeagent.model.pod import PodState
from nodeagent.model.timing import RELEASE, Timing, millis
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import Answer, Saved
from nodeagent.store.words import waits_for

PAGE = 256
"""Most records in one beat's reply."""
LOOKED_AT = 2
"""Records that each beat looks for, in turn."""
REQUESTS_KEPT = 1024
EVENTS_KEPT = 10_000
FORGET_MS = 86_400_000
"""A node whose lease ended this much served time ago is forgotten (its cordon is not)."""


ERA_REVISIONS = 1 << 32
"""Revisions of one era."""


def event_order(event_id: str) -> tuple[int, int]:
    """Sort key of a stream id."""
    ms, _, seq = event_id.partition("-")
    return int(ms), int(seq or 0)


class State:
    """Everything the store knows. Attributes are named as the keys in Redis."""

    def __init__(self, cluster_uid: str) -> None:
        self.cluster_uid = cluster_uid
        self.version = RECORD_VERSION
        self.timing: Timing | None = None
        self.run = ""
        self.now = 0
        self.last: int | None = None
        self.served = 0
        self.amnesty = 0
        self.era = ""
        self.parent = ""
        """The era whose view up to ``known`` is this era's too."""
        self.known = 0
        self.recover = 0
        """Served time until which the store is recovering."""
        self.taken: Literal["", "empty", "jobs"] = ""
        """What was in the view of the offer that has said which cluster's this is; one with jobs is for good."""
        self.rev = 0
        self.asked = 0
        """The revision of what an operator wrote last."""
        self.least = 0
        """Served time until which it recovers at least, whoever was heard."""
        self.awaited: frozenset[str] = frozenset()
        """Who may know better than a store that has lost writes, or may have (``waiting.py``)."""
        self.excused = 0
        """How many of them may stay silent."""
        self.regroup = 0
        """For how long they are waited for beyond ``least``, by the config of who joined last; ms."""
        self.stopped = 0
        """Served time at which it was settled last before it was started anew."""
        self.heard: frozenset[str] = frozenset()
        """Who has said what it knows meanwhile."""
        self.saved: dict[str, Saved] = {}
        self.saves = 0
        """How often a save was told on."""
        self.order = 0
        self.nodes: dict[str, NodeRecord] = {}
        self.lease: dict[str, int] = {}
        self.seq: dict[str, int] = {}
        self.dead: dict[str, tuple[str, ...]] = {}
        """Node to its replaced lives: they never come back."""
        self.cordons: dict[str, Cordon] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.sizes: dict[str, tuple[JobSpec, int]] = {}
        """Bytes of a job's spec by uid, and the spec that was measured."""
        self.names: dict[str, str] = {}
        self.highest: dict[str, int] = {}
        self.alloc: dict[str, dict[str, str]] = {}
        self.changes: dict[str, int] = {}
        """Record to revision, in order of revision."""
        self.requests: dict[str, Answer] = {}
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.looked = 0
        """Where a beat looks next whether records are there that should be."""
        self.pods: dict[tuple[str, str], tuple[PodState, int]] = {}

    # --- the served clock

    def enter(self, run: str, now: int) -> None:
        """Advance the served clock: first thing in every step."""
        lease, credit, gap = self.lease_ms, self.credit_ms, self.gap_ms
        step = now - (now if self.last is None else self.last)
        other, self.now = run != self.run, now
        if other or step < 0 or step > gap:
            self.run = run
            self.amnesty = max(self.amnesty, self.served + credit + lease)
        if other and self.timing is not None:
            self.least = self.served + credit + lease
            if self.recovering and self.awaited and not self.parent:
                self.awaited |= self.heard  # what they said may be lost again
                self.recover = max(self.recover, self.least)
            else:
                if not self.recovering:
                    self.parent, self.known, self.stopped = self.era, self.rev, self.served
                self._doubt()
            self.heard = frozenset()
            self.begin_era(self.parent, 0)
        self.served += min(max(step, 0), credit)
        self.last = now
        if not self.recovering:
            self.awaited = self.heard = frozenset()
        if self.version != RECORD_VERSION:
            raise StoreRefusedError(
                "version",
                f"the store's records have version {self.version}, this agent reads {RECORD_VERSION}: "
                "install the version of nodeagent that the other nodes run",
            )

    def _doubt(self) -> None:
        """Nothing shows that writes were lost; but were the newest, only those may know who do not come: more than half
        of the nodes that were live have to be missing for that, or it is for those who are there to tell."""
        live = {
            n for n, node in self.nodes.items() if self.lease.get(n, 0) > self.stopped and not (node.lost or node.left)
        }
        self.awaited = frozenset(live if self.regroup else ())
        self.excused = len(self.awaited) // 2
        self.recover = self.least + (self.regroup if self.awaited else 0)

    def begin_era(self, parent: str, top: int) -> None:
        """Its revisions are above all earlier ones (``top``), so that a later version of a record never has the lower
        one."""
        self.rev = (max(self.rev, top) // ERA_REVISIONS + 1) * ERA_REVISIONS
        self.era, self.parent = f"{self.run}@{self.now}/{self.rev}", parent

    @property
    def recovering(self) -> bool:
        return self.served < self.recover

    @property
    def recovering_for(self) -> str:
        return f"{(self.recover - self.served) / 1000:.1f}"

    def check_settled(self) -> None:
        """First in every step that decides something of a job: none does while the store is recovering."""
        if not self.recovering:
            return
        if self.awaited:
            left = (self.recover - self.served) / 1000
            raise StoreRefusedError("recovering", f"{waits_for(self.awaited, len(self.awaited), left)}; then try again")
        raise StoreRefusedError(
            "recovering",
            "the store was started anew and may lack what was written last: nothing is decided for another "
            f"{self.recovering_for} s, so that every agent can say what it knows; then try again",
        )

    @property
    def lease_ms(self) -> int:
        return millis(self.timing.lease) if self.timing else 0

    @property
    def credit_ms(self) -> int:
        return millis(self.timing.credit) if self.timing else 0

    @property
    def gap_ms(self) -> int:
        return millis(self.timing.gap) if self.timing else 0

    @property
    def limit_ms(self) -> int:
        """After which a silent keeper lends no more."""
        return millis(RELEASE * self.timing.failsafe_limit) if self.timing else 0

    @property
    def shelter(self) -> int:
        """Served time before which nobody lapses."""
        return max(self.amnesty, self.recover)

    def lapsed(self, node: str) -> bool:
        """Left, lost, or silent for its whole lease while the store served; unknown nodes too."""
        record = self.nodes.get(node)
        if record is None or record.left or record.lost:
            return True
        ends = self.lease.get(node)  # without one there is no proof of silence
        return ends is not None and ends <= self.served and self.served >= self.shelter

    def gone(self, node: str, life: str) -> bool:
        """This life can run nothing any more."""
        record = self.nodes.get(node)
        if record is None:
            return self.buried(f"node:{node}")
        return record.incarnation.life != life or self.lapsed(node)

    def not_live(self, node: str, life: str) -> bool:
        """It holds no lease in this life."""
        return node not in self.nodes or self.gone(node, life)

    def buried(self, record: str) -> bool:
        """It was removed by a step. A record that is missing, and was not, somebody took away by hand."""
        return f"gone:{record}" in self.changes

    # --- records

    def touch(self, record: str) -> int:
        """Give a record the next revision."""
        self.rev += 1
        self.changes.pop(record, None)
        self.changes.pop(f"gone:{record}", None)
        self.changes[record] = self.rev
        return self.rev

    def bury(self, record: str) -> None:
        """The record is no more, and this says that it was a step that removed it."""
        self.changes.pop(record, None)
        self.touch(f"gone:{record}")

    def has(self, record: str) -> bool:
        """The record is there."""
        kind, _, key = record.partition(":")
        return key in (self.nodes if kind == "node" else self.jobs)

    def distrust(self, damaged: Iterable[str]) -> None:
        """A record or a key is not as the steps left it: nothing is decided until the agents have given back what they
        know. Whatever is missing by then stays so."""
        found = list(damaged)
        for key in found:
            kind, _, name = key.partition(":")
            if kind in ("job", "node"):
                (self.jobs if kind == "job" else self.nodes).pop(name, None)
        for record in [r for r in self.changes if not r.startswith("gone:") and not self.has(r)]:
            self.bury(record)
        self.awaited = self.heard = frozenset()
        self.known, self.excused = 0, 0
        self.least = self.recover = self.served + self.credit_ms + self.lease_ms
        self.amnesty = max(self.amnesty, self.least)
        self.begin_era("", 0)
        self.event(
            "StoreDamaged",
            text=f"somebody removed or damaged {', '.join(found[:5])} in the store: the agents give it back; "
            "nothing is decided meanwhile",
        )

    def save_node(self, new: NodeRecord) -> NodeRecord:
        """Write a node; a record that did not change keeps its revision."""
        old = self.nodes.get(new.id)
        if old is not None and new == old:
            return old
        new = new.model_copy(update={"rev": self.touch(f"node:{new.id}")})
        self.nodes[new.id] = new
        return new

    def save_job(self, new: JobRecord) -> JobRecord:
        """Write a job; a record that did not change keeps its revision."""
        old = self.jobs.get(new.uid)
        if old is not None and new == old:
            return old
        new = new.model_copy(update={"rev": self.touch(f"job:{new.uid}")})
        self.jobs[new.uid] = new
        return new

    def job(self, uid: str) -> JobRecord:
        job = self.jobs.get(uid)
        if job is None:
            raise StoreRefusedError("not_found", f"there is no job with uid {uid}: list the jobs and try again")
        return job

    def size(self, job: JobRecord) -> int:
        """Bytes of its spec, which is nearly all that can be large of it."""
        spec, size = self.sizes.get(job.uid, (None, 0))
        if spec is not job.spec:
            size = len(job.spec.to_json().encode())
            self.sizes[job.uid] = job.spec, size
        return size

    def delete_job(self, job: JobRecord) -> None:
        """Remove the record, its bookings and its name; the name's highest number stays."""
        nodes = set(job.head.holders) | set(job.head.members) if job.head else set()
        for node in nodes:
            self.book(node, job.uid, frozenset())
        del self.jobs[job.uid]
        self.sizes.pop(job.uid, None)
        if self.names.get(job.name) == job.uid:
            del self.names[job.name]
        self.bury(f"job:{job.uid}")

    def book(self, node: str, uid: str, devices: frozenset[str]) -> None:
        """Make exactly these devices of a node the job's."""
        kept = {d: u for d, u in self.alloc.get(node, {}).items() if u != uid}
        kept.update(dict.fromkeys(sorted(devices), uid))
        if kept:
            self.alloc[node] = kept
        else:
            self.alloc.pop(node, None)

    def current(self, node: str, incarnation: Incarnation) -> NodeRecord:
        """The node's record, if this incarnation is current and has neither left nor been declared lost."""
        record = self.nodes.get(node)
        if record is None:
            raise StoreRefusedError("not_current", f"node {node} is not known to the store: it must join first")
        if record.incarnation != incarnation:
            raise StoreRefusedError(
                "not_current",
                f"node {node} is held by another incarnation (start {record.incarnation.start}, "
                f"at {record.facts.address}): this agent must stop",
            )
        if record.lost:
            raise StoreRefusedError("lost", f"node {node} was declared lost: it must come back with a new life")
        if record.left:
            raise StoreRefusedError("lost", f"node {node} has left: it must join again")
        return record

    # --- requests and events

    def remember(self, request: str, answer: Answer) -> None:
        if request:
            self.requests[request] = answer
            while len(self.requests) > REQUESTS_KEPT:
                del self.requests[next(iter(self.requests))]

    @property
    def newest_event(self) -> str:
        return self.events[-1].id if self.events else "0-0"

    def event(
        self, kind: str, *, job: JobRecord | None = None, node: str = "", generation: int = 0, by: str = "", text: str
    ) -> None:
        """Append to the stream."""
        ms, seq = event_order(self.newest_event)
        new_id = f"{self.now}-0" if self.now > ms else f"{ms}-{seq + 1}"
        self.events.append(
            Event(
                id=new_id,
                kind=kind,
                job=job.name if job else "",
                uid=job.uid if job else "",
                node=node,
                generation=generation,
                by=by,
                text=text,
            )
        )

    def changed_since(self, rev: int) -> Iterator[tuple[str, int]]:
        """Records changed after ``rev``, oldest change first."""
        newer = 0
        for value in reversed(self.changes.values()):
            if value <= rev:
                break
            newer += 1
        return islice(self.changes.items(), len(self.changes) - newer, None)


def terminal(job: JobRecord) -> bool:
    """The job has ended."""
    return job.phase in TERMINAL

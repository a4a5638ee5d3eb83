"""What all agents of a simulation would each work out for themselves from the very same records, worked out once.

Owns the views that agents share, as long as the records in them are the very same objects, and what ``plan/`` made of
them: pure functions of the view, as ``plan/cluster.py`` demands, so it makes no difference who asked first. Likewise
whether the signatures of a record are good, and its line on the disk: of the very same frozen record, under the same
key. Must never give an agent a record that it has not read itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from operator import is_
from typing import Any, Generic, TypeVar, cast

from nodeagent.agent.savedview import SavedRecord, Writing
from nodeagent.agent.snapshot import Snapshot
from nodeagent.model.base import Record
from nodeagent.model.job import JobRecord
from nodeagent.model.queue import NO_QUEUES, Queues, QueuesRecord
from nodeagent.model.timing import Timing
from nodeagent.model.window import NO_WINDOWS, Windows, WindowsRecord
from nodeagent.plan.cluster import Cluster, Notes, Refusal
from nodeagent.store.messages import BeatReply
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.seal import Seal

T = TypeVar("T")
R = TypeVar("R")
VIEWS = 64
"""Mappings kept of each kind: agents that were cut off, or are about to hear of something, have older ones."""
RECORDS = 2048
"""Records of which it is kept what was made of them."""
SLOTS = 64
"""Results kept of each thing: with four, agents of a cluster of 20 nodes work out each view's three times."""
FEW = {"reserved": 4}
"""The same of what an agent compares by identity, to see whether it is at rest: an equal result of long ago is news."""


class SharedNotes(Notes):
    """The newest few results of each thing instead of one."""

    def __init__(self) -> None:
        super().__init__()
        self._slots: dict[str, dict[tuple[int, ...], tuple[tuple[object, ...], Any]]] = {}
        """By what each is, and by the ids of what it was made of, which are nobody else's as long as that is kept; the
        one that was asked for last comes last."""

    def once(self, what: str, of: tuple[object, ...], work: Callable[[T | None], T], size: int = 1) -> T:
        slots, key = self._slots.get(what), (*map(id, of),)
        if slots is None:
            slots = self._slots[what] = {}
        known = slots.pop(key, None)
        if known is None:
            known = of, work(slots[next(reversed(slots))][1] if slots else None)
            slots.pop(key, None)
            while len(slots) >= FEW.get(what, SLOTS):
                del slots[next(iter(slots))]
        slots[key] = known
        made: T = known[1]
        return made


class OfRecords(Generic[R]):
    """What was made of each of the records that were asked for last."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, tuple[Record, R]] = OrderedDict()

    def once(self, record: Record, work: Callable[[], R]) -> R:
        kept = self._made.get(id(record))  # which is nobody else's as long as it is kept
        if kept is not None:
            return kept[1]
        made = work()
        self._made[id(record)] = record, made
        if len(self._made) > RECORDS:
            self._made.popitem(last=False)
        return made


class Shared:
    """Of one simulation."""

    def __init__(self) -> None:
        self.notes = SharedNotes()
        self.gangs, self.lines = OfRecords[bool](), OfRecords[bytes]()
        self._known: OrderedDict[int, object] = OrderedDict()
        self._queues: QueuesRecord | None = None
        self._windows: WindowsRecord | None = None
        """The ones that were read last."""

    def mapping(self, own: Mapping[str, R]) -> Mapping[str, R]:
        """Somebody's mapping with the very same records in the same order; this one if there is none."""
        key = hash(tuple(map(id, own.values())))
        known = self._known.get(key)
        if isinstance(known, Mapping) and list(known) == list(own) and all(map(is_, known.values(), own.values())):
            return cast("Mapping[str, R]", known)
        self._keep(key, own)
        return own

    def names(self, own: frozenset[str]) -> frozenset[str]:
        known = self._known.get(hash(own))
        if known == own:
            return cast("frozenset[str]", known)
        self._keep(hash(own), own)
        return own

    def queues(self, own: QueuesRecord | None) -> QueuesRecord | None:
        if self._queues != own:
            self._queues = own
        return self._queues

    def windows(self, own: WindowsRecord | None) -> WindowsRecord | None:
        if self._windows != own:
            self._windows = own
        return self._windows

    def _keep(self, key: int, what: object) -> None:
        self._known[key] = what
        self._known.move_to_end(key)
        while len(self._known) > 3 * VIEWS:
            self._known.popitem(last=False)


class SharedSeal(Seal):
    """The signatures of a gang are as many as its members."""

    def __init__(self, key: ClusterKey, cluster: str, shared: Shared) -> None:
        super().__init__(key, cluster)
        self._gangs = shared.gangs

    def gang(self, job: JobRecord) -> bool:
        return self._gangs.once(job, lambda: super(SharedSeal, self).gang(job))


class SharedWriting(Writing):
    """An agent's own choice of lines, each made once."""

    def __init__(self, key: ClusterKey, cluster: str, shared: Shared) -> None:
        super().__init__(key, cluster)
        self._made = shared.lines

    def _record(self, kind: str, record: SavedRecord) -> bytes:
        return self._made.once(record, lambda: super(SharedWriting, self)._record(kind, record))


class SharedSnapshot(Snapshot):
    """An agent's copy of the store, the views of which are shared."""

    def __init__(self, timing: Timing, shared: Shared) -> None:
        super().__init__(timing)
        self._shared, self._notes = shared, shared.notes

    def absorb(self, reply: BeatReply, now: float, runs: Collection[str] = ()) -> None:
        super().absorb(reply, now, runs)
        self._lapsed = self._shared.names(self._lapsed)
        self.queues, self.windows = self._shared.queues(self.queues), self._shared.windows(self.windows)

    @property
    def jobs(self) -> Mapping[str, JobRecord]:
        if self._jobs_shown is None:
            self._jobs_shown = self._shared.mapping(dict(self._jobs))
        return self._jobs_shown

    def cluster(
        self,
        now: float,
        refused: Mapping[str, Refusal] | None = None,
        queues: Queues = NO_QUEUES,
        windows: Windows = NO_WINDOWS,
    ) -> Cluster:
        if self._nodes_shown is None:
            self._nodes_shown = self._shared.mapping(dict(sorted(self._nodes.items())))
        return super().cluster(now, refused, queues, windows)

"""The agent's copy of the store: every node and job as last read, and an estimate of the served clock. Asks nothing,
decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from operator import is_

from nodeagent.agent.recovery import Known
from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import NO_QUEUES, Queues, QueuesRecord
from nodeagent.model.timing import Timing, millis
from nodeagent.model.usage import UsageDay
from nodeagent.model.window import NO_WINDOWS, Windows, WindowsRecord
from nodeagent.plan.cluster import Cluster, Notes, Refusal
from nodeagent.plan.nodes.availability import NO_CLOSING, Closing, closed, closing
from nodeagent.plan.nodes.setbacks import marked
from nodeagent.store.errors import waits_for
from nodeagent.store.messages import BeatReply, Unread

MOST_CONCERN = 256
"""Most jobs whose events an agent waits for; of others its heartbeats tell."""

MOST_UNREAD = 4096
"""Most records that cannot be read, of those that the view does not have: who can write to the store can invent
some, and each beat goes through their names. Where jobs are among the surplus, nothing is decided."""

_NONE: frozenset[str] = frozenset()
_NONE_REFUSED: Mapping[str, Refusal] = {}


class Snapshot:
    """Absorbs replies; newer revisions replace older ones, never the other way round.

    While the store recovers from lost writes the view stays as it is, since it may know more than the store. After
    ``read_again`` everything is read anew beside it, and replaces it once it is complete.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._nodes: dict[str, NodeRecord] = {}
        self._jobs: dict[str, JobRecord] = {}
        self.queues: QueuesRecord | None = None
        """As the store has them, whether signed or not; None: it has none."""
        self.windows: WindowsRecord | None = None
        """Likewise."""
        self._closing: tuple[tuple[object, ...], Closing] = ((), NO_CLOSING)
        """What the windows mean, and of which records."""
        self._closed_at = 0
        """Since when (served time)."""
        self._usage: dict[str, UsageDay] = {}
        """By the day, as text."""
        self._lapsed: frozenset[str] = frozenset()
        self._lapsed_at: Mapping[str, int] = {}
        """When (served time) each of them was first read to have lapsed."""
        self._returned: Mapping[str, int] = {}
        """When (served time) nodes were read to have come back from a silence; all live ones after this agent's own."""
        self._silent: frozenset[str] = frozenset()
        """The same, and those that have been silent since, whom an amnesty shelters."""
        self.silent = ""
        """What the store calls these lists."""
        self._next_lapse: int | None = None
        self._served = 0
        self._at = 0.0
        self._anew: Snapshot | None = None
        self._nodes_shown: Mapping[str, NodeRecord] | None = None
        self._jobs_shown: Mapping[str, JobRecord] | None = None
        self._usage_shown: Mapping[str, UsageDay] | None = None
        """Copies as they are in the views that were given out, until they change."""
        self._view: Cluster | None = None
        """The last one given out."""
        self._notes = Notes()
        self.touched = asyncio.Event()
        """Set at each change; cleared when a copy is made."""
        self.wanted = 0
        """The newest revision that somebody waits for until it is on disks."""
        self.unread: dict[str, str] = {}
        """Records (``job:<uid>``, ``node:<id>``) that cannot be read, each with the reason; the view has them as they
        were before, if at all. The very same object until it changes."""
        self._unread_jobs: tuple[Mapping[str, str], frozenset[str]] = (self.unread, _NONE)
        """Jobs (uids) among them, and of which they are."""
        self._unnamed = False
        """There are jobs that cannot be read beyond these."""
        self.beyond: tuple[str, ...] = ()
        """Kinds of records of which the store has more than is read."""
        self.rev = 0
        self._top = 0
        """The highest revision of a job that a reply of this agent's own steps, or a wake, brought."""
        self._ahead: dict[str, int] = {}
        """Those jobs, with the revisions above ``rev``."""
        self.era = ""
        """The era of the store that ``rev`` belongs to."""
        self.cluster_uid = ""
        self.complete = False
        """Everything has been read at least once."""
        self._partial = False
        """Of what has changed a part is still to be read."""
        self.recovering = False
        """The store may still lack what others know: nothing is to be decided or started on this view."""
        self.awaited: tuple[str, ...] = ()
        """Nodes that the store waits for then, the first few by name."""
        self.awaits = 0
        """How many they are."""
        self.recovered_by = 0
        """Served time at which that ends at the latest."""

    @property
    def asked(self) -> tuple[str, int]:
        """Era and revision after which the next beat is to bring changes."""
        source = self._anew or self
        return source.era, source.rev

    @property
    def certain(self) -> bool:
        """A job that is not here does not exist: everything has been read, and the store lacks nothing. Else nothing is
        to be decided."""
        return self.complete and not self.recovering and "jobs" not in self.beyond

    @property
    def newest(self) -> int:
        """The highest revision that was read of that era."""
        source = self._anew or self
        return max(source.rev, source._top)

    @property
    def ahead(self) -> dict[str, int]:
        """Jobs (uids) of the view that are newer than ``asked``, with their revisions."""
        return {} if self._anew is not None else self._ahead

    def absorb(self, reply: BeatReply, now: float, runs: Collection[str] = ()) -> None:
        """Take in a beat's reply received at ``now``. A store with another identity replaces everything. ``runs``: jobs
        that nobody can have removed, since they run here; where the store says so, their record counts as damaged."""
        if reply.served < self._served:  # a store that lost writes: nothing happened later than now
            self._lapsed_at = {name: min(at, reply.served) for name, at in self._lapsed_at.items()}
            self._returned = {name: min(at, reply.served) for name, at in self._returned.items()}
        away = self.complete and now - self._at > self._timing.lease
        if not reply.same:
            back, lapsed = self._came_back(reply), frozenset(reply.lapsed)
            if self._lapsed != lapsed:
                self._lapsed_at = {name: self._lapsed_at.get(name, reply.served) for name in lapsed}
                self._lapsed = lapsed
                self._returns(back if self.complete else (), reply.served)
            self._silent = lapsed | self._silent.intersection(reply.sheltered)
        if away:
            self._returns(self._nodes, reply.served)
        self.silent = reply.silent
        # What this view lacks it lacks until all has been read anew.
        self._goes_beyond(reply.beyond if self._anew is None else {*self.beyond, *reply.beyond})
        self._next_lapse = reply.next_lapse
        self._served, self._at = reply.served, now
        before, after = (self.recovering, self.wanted), (reply.recovering, reply.asked)
        if before != after or (reply.rev, reply.era) != (self.rev, self.era):
            self.touched.set()
        self.recovering, self.wanted = after
        self.awaited, self.awaits, self.recovered_by = reply.awaited, reply.awaits, reply.served + reply.recovers
        if reply.recovering or reply.unfinished:
            return
        if self._anew is not None:
            self._anew.absorb(reply, now, runs)
            if self._anew.complete:
                self._replace(self._anew)
            return
        if reply.cluster_uid != self.cluster_uid and reply.era != self.era:  # one era: one store
            self._clear()
        self._partial = reply.more
        if reply.gone and runs and not {f"job:{uid}" for uid in runs}.isdisjoint(reply.gone):
            reply = self._refuse_removal(reply, runs)
        if reply.unread or self.unread:
            self._read_or_not(reply)
            self._goes_beyond(self.beyond)
        self.cluster_uid = reply.cluster_uid
        if reply.nodes or reply.gone:
            self._nodes_shown = None
        if reply.gone:
            self._jobs_shown = self._usage_shown = None
        for node in reply.nodes:
            self._nodes[node.id] = node
        for job in reply.jobs:
            self.absorb_job(job)
        if reply.queues is not None and (self.queues is None or reply.queues.rev > self.queues.rev):
            self.queues = reply.queues
        if reply.windows is not None and (self.windows is None or reply.windows.rev > self.windows.rev):
            self.windows = reply.windows
        for day in reply.usage:
            self._usage[str(day.day)], self._usage_shown = day, None
        for key in reply.gone:
            kind, _, name = key.partition(":")
            if kind == "usage":
                self._usage.pop(name, None)
            else:
                (self._nodes if kind == "node" else self._jobs).pop(name, None)
        same_era = reply.era == self.era
        self._ahead = {uid: rev for uid, rev in self._ahead.items() if same_era and rev > reply.rev}
        self.rev, self.era = reply.rev, reply.era
        if not reply.more and not self.complete:
            self.complete = True
            self.touched.set()

    @staticmethod
    def _refuse_removal(reply: BeatReply, runs: Collection[str]) -> BeatReply:
        """What runs here was removed by no step."""
        taken = tuple(key for key in reply.gone if key.removeprefix("job:") in runs)
        unread = tuple(Unread(key=key, why="it was removed by hand while its workers run") for key in taken)
        gone = tuple(key for key in reply.gone if key not in taken)
        return reply.model_copy(update={"gone": gone, "unread": reply.unread + unread})

    def _read_or_not(self, reply: BeatReply) -> None:
        read = {f"node:{node.id}" for node in reply.nodes} | {f"job:{job.uid}" for job in reply.jobs} | {*reply.gone}
        read |= {"queues"} if reply.queues is not None else set()
        read |= {"windows"} if reply.windows is not None else set()
        read |= {f"usage:{day.day}" for day in reply.usage}
        if not reply.unread and read.isdisjoint(self.unread):
            return
        unread = {key: why for key, why in self.unread.items() if key not in read}
        for record in reply.unread:
            if len(unread) < MOST_UNREAD or record.key in unread or self._has(record.key):
                unread[record.key] = record.why
            else:
                self._unnamed |= record.key.startswith("job:")
        self.unread = unread

    def _has(self, key: str) -> bool:
        kind, _, name = key.partition(":")
        return name in self._jobs if kind == "job" else kind == "node" and name in self._nodes

    def _goes_beyond(self, kinds: Collection[str]) -> None:
        self.beyond = tuple(sorted({*kinds, "jobs"} if self._unnamed else {*kinds}))

    def _came_back(self, reply: BeatReply) -> Collection[str]:
        """Nodes that renewed a lease that had run out, in the life that they had."""
        news, found = {node.id: node for node in reply.nodes}, list[str]()
        for name in self._lapsed.difference(reply.lapsed):
            old = self._nodes.get(name)
            new = news.get(name, old)
            if old is None or new is None or new.lost or new.left or f"node:{name}" in reply.gone:
                continue
            if new.incarnation.life == old.incarnation.life:
                found.append(name)
        return found

    def _returns(self, back: Iterable[str], served: int) -> None:
        known = {**self._returned, **dict.fromkeys(back, served)}
        self._returned = {n: at for n, at in known.items() if n in self._nodes and n not in self._lapsed}

    def _replace(self, other: Snapshot) -> None:
        for key in other.unread:  # what cannot be read anew stays as it was
            kind, _, name = key.partition(":")
            if kind == "node" and name in self._nodes:
                other._nodes.setdefault(name, self._nodes[name])
            elif kind == "job" and name in self._jobs:
                other._jobs.setdefault(name, self._jobs[name])
            elif kind == "usage" and name in self._usage:
                other._usage.setdefault(name, self._usage[name])
        self._nodes, self._jobs, self.unread = other._nodes, other._jobs, other.unread
        self.queues, self.windows = other.queues or self.queues, other.windows or self.windows
        self._usage = other._usage
        self._nodes_shown = self._jobs_shown = self._usage_shown = None
        self.rev, self.era, self.cluster_uid, self._top = other.rev, other.era, other.cluster_uid, other._top
        self._ahead, self.beyond, self._unnamed = other._ahead, other.beyond, other._unnamed
        self.complete, self._anew = True, None
        self.touched.set()

    def absorb_job(self, job: JobRecord) -> bool:
        """Take in one job's record; false if it is older than what is known."""
        if self._anew is not None:
            self._anew.absorb_job(job)
        known = self._jobs.get(job.uid)
        if known is not None and known.rev > job.rev:
            return False
        self._jobs[job.uid], self._jobs_shown, self._top = job, None, max(self._top, job.rev)
        if job.rev > self.rev:
            self._ahead[job.uid] = job.rev
        self.touched.set()
        return True

    def absorb_jobs(self, jobs: Collection[JobRecord]) -> bool:
        """Take in what a wake brought; false if a beat is needed: it brought nothing, or the view is no whole one."""
        if not jobs or not self.complete or self.recovering or self.rereads:
            return False
        for job in jobs:
            self.absorb_job(job)
        return True

    def concern(self, node: str) -> tuple[str, ...]:
        """Jobs (uids) whose events this node may have to act on: as a member, holder or failsafe member."""
        return tuple(sorted(uid for uid, job in self._jobs.items() if job.concerns(node)))[:MOST_CONCERN]

    def forget_job(self, uid: str) -> None:
        """The job was removed."""
        if self._anew is not None:
            self._anew.forget_job(uid)
        self._jobs.pop(uid, None)
        self._jobs_shown = None
        self.touched.set()

    def read_again(self, era: str) -> None:
        """Read everything again, of this era (empty: whichever the store is in); until then the view stays."""
        self._anew = Snapshot(self._timing)
        self._anew.era = era

    @property
    def rereads(self) -> bool:
        """The view is an old one, until everything has been read again."""
        return self._anew is not None

    def known(self, now: float) -> Known:
        """What could be given back to a store that lost it."""
        view = self.cluster(now)
        # Else others may know more of what could not be read.
        complete = self.complete and not self.unread and "jobs" not in self.beyond
        return Known(
            cluster_uid=self.cluster_uid,
            era=self.era,
            rev=self.rev if complete else 0,
            served=view.served,
            nodes=tuple(self._nodes.values()),
            jobs=tuple(view.jobs.values()),
            usage=tuple(view.usage.values()),
            lapsed=self._silent,
            queues=self.queues,
            windows=self.windows,
            whole=complete,
        )

    def waits(self, now: float) -> str:
        """Whom the store waits for before anything is decided; empty if for nobody."""
        left = max(0, self.recovered_by - self.cluster(now).served) / 1000
        return waits_for(self.awaited, self.awaits, left) if self.awaited else ""

    def forget(self) -> None:
        """Know nothing any more: it was another cluster's."""
        self._clear()
        self.rev, self.era, self.cluster_uid, self._anew = 0, "", "", None

    def _clear(self) -> None:
        self._nodes, self._jobs, self.complete, self.unread, self._unnamed = {}, {}, False, {}, False
        self._usage, self._usage_shown = {}, None
        self._nodes_shown, self._jobs_shown, self._top, self._ahead = None, None, 0, {}
        self.queues = self.windows = None

    @property
    def jobs(self) -> Mapping[str, JobRecord]:
        """By uid: the very same object until one of them changes, which gives another."""
        if self._jobs_shown is None:
            self._jobs_shown = dict(self._jobs)
        return self._jobs_shown

    def cluster(
        self,
        now: float,
        refused: Mapping[str, Refusal] | None = None,
        queues: Queues = NO_QUEUES,
        windows: Windows = NO_WINDOWS,
    ) -> Cluster:
        """The view at ``now``: served time goes on by our own clock, but never by more than one credit. ``queues``: the
        tree that is acted on; ``windows``: likewise; the very same objects until they change."""
        if self._nodes_shown is None:
            self._nodes_shown = dict(self._nodes)
        if self._usage_shown is None:
            self._usage_shown = dict(self._usage)
        served, jobs, refused = self.served(now), self.jobs, refused or _NONE_REFUSED
        if self._unread_jobs[0] is not self.unread:
            uids = frozenset(key.removeprefix("job:") for key in self.unread if key.startswith("job:"))
            self._unread_jobs = self.unread, uids
        unread = self._unread_jobs[1]
        queues_rev = 0 if self.queues is None else self.queues.tree.rev
        windows_rev = 0 if self.windows is None else self.windows.windows.rev
        nodes, until = self._nodes_shown, 0
        if windows.windows:
            found = self._closing_of(windows, nodes, jobs, served)
            nodes, until = closed(self._notes, nodes, found.nodes), found.until
        shown = marked(self._notes, nodes, jobs, served)
        nodes = shown.nodes
        last = self._view  # asked for several times in one moment
        if last is not None and (
            last.rev == self.rev
            and last.nodes is nodes and last.jobs is jobs and last.lapsed is self._lapsed
            and last.queues is queues and last.queues_rev == queues_rev
            and last.windows is windows and last.windows_rev == windows_rev and last.windows_until == until
            and last.left_out_until == shown.until
            and last.usage is self._usage_shown
            and last.served == served and last.refused is refused and last.unread == unread
            and last.next_lapse == self._next_lapse and last.returned is self._returned
            and last.lapsed_at is self._lapsed_at
            and last.partial == self._partial
        ):  # fmt: skip
            return last
        if last is None or last.nodes is not nodes or last.jobs is not jobs:
            self._notes.turn()
        self._view = Cluster(
            served=served,
            rev=self.rev,
            nodes=nodes,
            jobs=jobs,
            usage=self._usage_shown,
            lapsed=self._lapsed,
            queues=queues,
            queues_rev=queues_rev,
            windows=windows,
            windows_rev=windows_rev,
            windows_until=until,
            left_out_until=shown.until,
            timing=self._timing,
            refused=refused,
            unread=unread,
            next_lapse=self._next_lapse,
            lapsed_at=self._lapsed_at,
            returned=self._returned,
            partial=self._partial,
            notes=self._notes,
        )
        return self._view

    def _closing_of(
        self, windows: Windows, nodes: Mapping[str, NodeRecord], jobs: Mapping[str, JobRecord], served: int
    ) -> Closing:
        """The very same object until it changes."""
        of, (known, last) = (windows, nodes, jobs), self._closing
        same = len(known) == len(of) and all(map(is_, known, of))
        if same and (not last.until or self._closed_at <= served < last.until):
            return last
        found = closing(self._notes, windows, nodes, jobs.values(), served)
        if found.nodes == last.nodes:
            found = replace(found, nodes=last.nodes)
        self._closing, self._closed_at = (of, found), served
        return found

    def served(self, now: float) -> int:
        """Served time at ``now``."""
        return self._served + millis(min(max(0.0, now - self._at), self._timing.credit))

    def time_of(self, served: int) -> float:
        """When (our clock) the served clock gets there, at the earliest."""
        return self._at + (served - self._served) / 1000

    @property
    def size(self) -> int:
        """Nodes that are known, gone ones included."""
        return len(self._nodes)

    def one_version(self, version: str) -> bool:
        """Every node that may run has an agent of this version."""
        nodes = (n for n in self._nodes.values() if not n.lost and not n.left)
        return all(node.facts.agent_version == version for node in nodes)

    def node(self, name: str) -> NodeRecord | None:
        return self._nodes.get(name)

    def job(self, uid: str) -> JobRecord | None:
        return self._jobs.get(uid)

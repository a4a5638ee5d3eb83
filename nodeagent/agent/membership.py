"""The node's standing in the cluster: joining, publishing and reading with each beat, losing the lease, leaving.

The lease process renews the lease and grants the pods their time (``nodeagent/lease``); this tells it for which life,
and in which era of the store. Every deadline counts from *before* the beat was sent. Decides nothing about jobs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from heapq import nsmallest
from typing import NoReturn, Protocol

import structlog

from nodeagent.agent.context import AgentContext
from nodeagent.agent.identity import Identity
from nodeagent.agent.otherstore import FindPeer
from nodeagent.agent.pace import BeatRoom, look_period
from nodeagent.agent.recovery import LOGGED_AT_ONCE, LOGGED_PER_SECOND, Known, OfferLog, offer
from nodeagent.agent.room import differ_in_texts_only
from nodeagent.model.facts import PodUsage
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.node import Incarnation, NodeFacts, Readiness
from nodeagent.model.pod import PodState
from nodeagent.model.timing import millis
from nodeagent.osutil.clock import Allowance
from nodeagent.store.base import (
    StepFailedError,
    StoreIdentity,
    StoreRefusedError,
    StoreUnavailableError,
    StoreUnusableError,
)
from nodeagent.store.messages import Beat, BeatReply, Note, OwnJob, Saved

PODS_REFRESH = 5.0
"""Seconds between two publications of all pods, so that their TTL keys live on and show what each uses; in between
those that have changed are published."""

REFUSED_LIMIT = 3.0
"""An id that another life holds is given up after this many leases in which that lease was renewed: then the other one
is alive, not a dead one's rest. The rest of a lease may be long, where the store's clock went back."""

MOST_NOTES = 16
"""Most notes in one beat."""

HOPELESS = frozenset({"key", "timing", "version"})
"""Codes of refusals that this agent can do nothing about. Before its first join it ends with them. Later the store was
changed under it, by hand or by an agent that does not belong there: it counts as away until that is put right."""

MOST_RUNS = 64
"""Most jobs that the store is asked about in one beat."""

MOST_DAMAGED = 16
"""Most records that one beat reports as damaged."""

URGENT_AT_ONCE, URGENT_PER_SECOND = 64.0, 4.0
"""Beats that go at once since a pod's readiness is another, at once and in the long run: beyond them it goes with the
next heartbeat. All agents read each, and a pod's words may be others without end."""

TEXTS_EVERY = 5.0
"""Seconds after a beat that brought other words of the same readiness in which no other goes for words alone."""

OFFERS = 4
"""Most offers to a store that may have lost writes, within one beat."""


class Verify(Protocol):
    """See ``AdmissionVerifier.read``."""

    async def __call__(self, jobs: Collection[JobRecord], *, more: bool) -> None: ...


async def unverified(jobs: Collection[JobRecord], *, more: bool) -> None:
    """The view is nobody's who runs jobs."""


class IdTakenError(Exception):
    """Another agent holds this node's id; the text names both addresses."""


class Membership:
    """This node's standing in the cluster."""

    def __init__(
        self,
        context: AgentContext,
        identity: Identity,
        facts: NodeFacts,
        saved: Callable[[], Saved | None] = lambda: None,
        verify: Verify = unverified,
        *,
        find_peer: FindPeer,
    ) -> None:
        """``identity``: taken. ``saved``: what is on the disk by now. ``verify``: is given each job's record before it
        comes into the view. ``find_peer``: one whose lease runs elsewhere (``OtherStore``)."""
        self.node, self.facts, self._timing = context.node, facts, context.timing
        self._store, self._host, self._clock = context.store, context.host, context.clock
        self._identity, self._snapshot, self._metrics = identity, context.snapshot, context.metrics
        self._process = context.process
        self.joined = False
        self.lost = bool(identity.before)
        """This life was declared lost, or its id is another's, or it is another node's: nothing may run here until
        there is a new life."""
        self.reason = "has not joined yet"
        if identity.before:
            self.reason = f"what ran here as the node {identity.before} has to end first"
        self.fence_at = 0.0
        """Until when this agent may start workers, by what it has read."""
        self.beat_sent = 0.0
        self.away_since: float | None = None
        self.unusable = ""
        """Why the store, which answers, counts as away all the same; empty if it does not."""
        self.next_lapse: float | None = None
        """When (our clock) the next lease of another node runs out, as far as known."""
        self.newest_event = "0-0"
        self.usage: Mapping[str, PodUsage] = {}
        """What the pods use, by job uid: goes along when their states are published, and is no reason to publish
        them."""
        self.from_disk: Known | None = None
        """What was on the disk at the start, until the store has been read: it is given back if the store lost it, and
        compared with what is read."""
        self._evicting = ""
        """The server process that was named last as one that throws keys away."""
        self.regroup = 0.0
        """Seconds for which a store that lost writes waits for others who may know better."""
        self._saved, self._verify, self._find_peer = saved, verify, find_peer
        self._saved_sent: Saved | None = None
        self.notes: list[Note] = []
        """For the event log: they go with the next beat."""
        self._distrusted: set[str] = set()
        """Records (``job:<uid>``) that are not what was read at their revision: the next beat says so."""
        self._first_join: float | None = None
        self._seq = 0
        self._room = BeatRoom()
        self._looks = 0
        self._look_at = 0.0
        """When the next look for damage is due."""
        self._answered = False
        """The newest beat was."""
        self._lock = asyncio.Lock()
        """Held by who beats or joins."""
        self._beats = 0
        """Under way, or waiting for their turn."""
        self._urgent = Allowance(URGENT_AT_ONCE, URGENT_PER_SECOND)
        self._readiness: dict[str, Readiness] = {}
        self._readiness_sent: dict[str, Readiness] | None = None
        self._texts_at = 0.0
        self._facts_sent: NodeFacts | None = None
        self._pods: tuple[PodState, ...] = ()
        self._pods_sent: dict[str, PodState] = {}
        """By job uid."""
        self._pods_at = -math.inf
        """When all of them were sent."""
        self._refused_since: float | None = None
        self._held_until = 0.0
        """When the other life's lease would have ended, as of the first refusal."""
        self._log = structlog.get_logger("lease").bind(node=self.node)
        self._join_lines = Allowance(LOGGED_AT_ONCE, LOGGED_PER_SECOND)
        self._offers = OfferLog(self.node, self._clock)

    @property
    def incarnation(self) -> Incarnation:
        """The node's life, and which start of its agent this is."""
        return self._identity.incarnation

    async def join(self) -> None:
        """Take the node's id. Raises StoreUnavailableError (try again), StoreRefusedError (code ``lease_held``,
        ``recovering``: try again; those of ``HOPELESS``), IdTakenError (somebody else is alive under this
        id)."""
        async with self._lock:  # a beat on its way, and what its refusal says, is of the life before
            await self._join(announced=False)

    async def _join(self, *, announced: bool) -> None:
        """``announced``: the store has just been given what is known here. A node that joins counts as having come."""
        self.next_lapse = None
        facts = self.facts
        try:
            if not announced:
                await self._look_for_two_stores()
            if self._snapshot.complete and not announced:
                await self._offer_view()
            await self._give_back()
            reply = await self._store.join(self.node, self.incarnation, facts, self._timing, millis(self.regroup))
        except StoreUnavailableError as error:
            self._refused_since = None  # no lease runs out while the store serves nobody
            self._unanswered(error)
            self.reason = str(error)
            raise
        except StoreRefusedError as refusal:
            self.reason = str(refusal)
            if refusal.code in HOPELESS:
                self._unusable(refusal)
                raise
            self.unusable = ""
            if refusal.code in ("lost", "not_current"):
                self.lost = True
            elif refusal.code == "lease_held":
                self._give_up_when_hopeless(refusal)
            elif refusal.code == "recovering":
                self._refused_since = None  # nobody renews it: the store only waits whether somebody will
            raise
        self._refused_since = None
        self.joined, self.reason = True, ""
        if self._first_join is None:
            self._first_join = self._clock.now()
        self._facts_sent = facts
        self._readiness_sent, self._pods_at = None, -math.inf
        if self._join_lines.may(self._clock.now()):
            self._log.info("joined", life=self.incarnation.life, start=self.incarnation.start, served=reply.served)

    async def _give_back(self) -> None:
        """What was on the disk, before each try to join: the store may have lost it, and may lose it again."""
        known = self.from_disk
        if known is None or self._snapshot.complete:
            self.from_disk = None
            return
        ms, promised = millis(self.regroup), await self._host.promised([job.uid for job in known.jobs])
        try:
            await offer(self._store, known, self._timing, self.node, self._offers, regroup=ms, promised=promised)
        except StoreRefusedError as refusal:
            if refusal.code != "foreign":
                raise
            self._log.error(
                "the jobs saved on this disk are another cluster's than the store's: they are left", why=str(refusal),
                jobs=sorted(job.name for job in known.jobs)[:20],
            )  # fmt: skip
            self.from_disk = None

    def _give_up_when_hopeless(self, refusal: StoreRefusedError) -> None:
        now = self._clock.now()
        if self._refused_since is None:
            self._refused_since, self._held_until = now, now + refusal.number
        renewed = now + refusal.number > self._held_until + self._timing.lease
        if renewed and now - self._refused_since > self._timing.lease * REFUSED_LIMIT:
            raise IdTakenError(
                f"{refusal}; it has kept renewing for {now - self._refused_since:.0f} s: stop that agent, or give this "
                f"one another node.id"
            ) from refusal

    @property
    def seasoned(self) -> bool:
        """This agent has been in the cluster for so long that all others, had the store been emptied just before it
        came, would have restored it by now."""
        wait = self._timing.lease + self._timing.credit
        return self._first_join is not None and self._clock.now() >= self._first_join + wait

    async def beat(self) -> None:
        """Publish once and read what changed. Raises StoreUnavailableError, or StoreRefusedError when the lease is no
        longer ours."""
        self._has_joined()
        queued = self._beats > 0
        self._beats += 1
        try:
            async with self._lock:
                self._has_joined()  # the beat before may have found that this life is over
                if queued and self.away_since is not None:
                    raise StoreUnavailableError("the beat before was not answered: this one would not be either")
                await self._read_all()
        finally:
            self._beats -= 1

    def _has_joined(self) -> None:
        """Raises StoreUnavailableError. The store knows the life, or the start, before: its refusal of a beat would
        read as the end of this life."""
        if not self.joined:
            raise StoreUnavailableError(f"this agent is not in the cluster: {self.reason}")

    async def _read_all(self) -> None:
        more, offers = True, 0
        self.next_lapse = None  # old news until it is answered: waiting for it would ask without a pause
        while more:
            returns = self.away_since is not None
            try:
                reply = await self._beat()
                more = reply.more or (returns and self._overwritten("mute", False))
            except StoreRefusedError as refusal:
                offers += 1
                if refusal.code != "behind" or offers > OFFERS:
                    raise
                await self._restore()

    async def _restore(self) -> None:
        """The store may have lost writes: offer it what is known here, and go on in the same life. Workers are not
        touched: what was granted is good until its fence."""
        try:
            await self._look_for_two_stores()
            era = await self._offer_view()
        except StoreUnavailableError as error:
            self._unanswered(error)
            raise
        except StoreRefusedError as refusal:
            if refusal.code in HOPELESS:
                self._unusable(refusal)
            else:
                self._answers()
            raise
        self._answers()
        self._snapshot.read_again(era)
        self.joined = False
        await self._join(announced=True)

    async def _look_for_two_stores(self) -> None:
        """Raises StoreUnusableError where the lease of this node, or of one that this agent knows, runs in another
        store than the agent's. With the jobs of that one this one would have them formed anew, beside the gangs that
        run there."""
        known = self._snapshot.known(self._clock.now()) if self._snapshot.complete else self.from_disk
        if known is None and not self._process.elsewhere(None):
            return
        here = await self._store.identity()
        if here.evicts and here.process != self._evicting:
            self._evicting = here.process
            self._log.error(
                "the store's server has thrown keys away for want of memory, perhaps this cluster's: jobs may be lost, "
                "and training may stop: set its maxmemory-policy to noeviction, and a larger maxmemory"
            )
        if there := self._process.elsewhere(here.era):
            self._refuse_second("this node", there, here)
        if known is None or (self._snapshot.complete and here.began(known.era)):
            return  # it has been with that server all the time
        if (peer := await self._find_peer(known, here, self._store.identity)) is not None:
            self._refuse_second(f"node {peer.node}", peer.store, here)

    def _refuse_second(self, who: str, there: str, here: StoreIdentity) -> NoReturn:
        raise StoreUnusableError(
            f"the lease of {who} runs in the store at {there}, and this agent's config leads to another one, at "
            f"{here.place}: all agents must use one Redis: set redis.url and cluster back here; or, to move the "
            "cluster, stop the agents of all nodes first (docs/operations.md, Another Redis)"
        )

    async def _offer_view(self) -> str:
        """What is in memory; the era that the store is in then."""
        known = self._snapshot.known(self._clock.now())
        try:
            ms = millis(self.regroup)
            return await offer(self._store, known, self._timing, self.node, self._offers, regroup=ms)
        except StoreRefusedError as refusal:
            if refusal.code == "foreign":
                self.joined, self.lost, self.reason = False, True, str(refusal)
                self._snapshot.forget()
            raise

    async def _beat(self) -> BeatReply:
        sent = self._clock.now()
        self._seq = max(self._seq + 1, millis(sent))  # grows over restarts of the agent too
        pods = self._pods_due(sent)
        notes = tuple(self.notes[:MOST_NOTES])
        era, rev = self._snapshot.asked
        saved, runs = self._saved(), self._runs()
        beat = Beat(
            node=self.node,
            incarnation=self.incarnation,
            seq=self._seq,
            rev=rev,
            top=self._snapshot.newest,
            era=era,
            facts=self.facts if self._facts_due else None,
            readiness=self._readiness if self._readiness_due(sent) else None,
            saved=saved if saved != self._saved_sent else None,
            pods=tuple(p.model_copy(update={"usage": self.usage.get(p.uid)}) for p in pods) or None,
            notes=notes,
            runs=runs,
            ahead=self._snapshot.ahead,
            damaged=self._damaged(),
            silent=self._snapshot.silent,
            looks=self._look(sent),
            unanswered=self.away_since is not None,
            room=self._room.bytes,
        )
        self._answered = False
        try:
            reply = await self._store.beat(beat)
        except StoreUnavailableError as error:
            self._room.unanswered()
            self._unanswered(error)
            raise
        except StoreRefusedError as refusal:
            if refusal.code in HOPELESS:
                self._unusable(refusal)
                raise
            if refusal.code != "behind":  # else it may be another store than the one of the leases
                self._answers()
            self._distrusted.difference_update(beat.damaged)
            if refusal.code == "stale":  # somebody wrote a larger number: the next beat has the one after that
                self._seq = max(self._seq, int(refusal.number))
            if refusal.code not in ("stale", "behind") and beat.incarnation == self.incarnation:
                self.joined, self.lost, self.reason = False, True, str(refusal)
            raise
        now = self._clock.now()
        self._take_reply(beat, sent, pods, reply)
        self._answered = True
        if reply.more:
            self._room.filled()
        self._metrics.store_roundtrip.observe(now - sent)
        await self._verify(reply.jobs, more=reply.more)
        before = self._snapshot.beyond
        self._snapshot.absorb(reply, now, [job.uid for job in runs])
        if self._snapshot.beyond and self._snapshot.beyond != before:
            self._log.error(
                "the store has more records than an agent reads, and the surplus is not read: see nodeagentctl doctor",
                of=self._snapshot.beyond,
            )
        if self.from_disk is not None and self._snapshot.complete:
            self._compare_with_disk(self.from_disk)
        self.next_lapse = None if reply.next_lapse is None else now + reply.next_lapse / 1000
        self.newest_event = reply.event
        return reply

    def _compare_with_disk(self, known: Known) -> None:
        """A record of the very revision that this node's disk has is the same one, or somebody wrote over it: then the
        disk's is the one to be given back, and all agents restore it. Only an agent of the version that wrote the disk
        can tell."""
        self.from_disk = None
        if known.era != self._snapshot.era or not known.written_by(self.node, self.facts.agent_version):
            return
        for saved in known.jobs:
            read = self._snapshot.job(saved.uid)
            if read is None or read.rev != saved.rev or read == saved:
                continue
            self._log.error(
                "somebody wrote over a job's record in the store: the one on this disk is to be restored",
                job=saved.name, uid=saved.uid,
            )  # fmt: skip
            self._snapshot.absorb_job(saved)
            self.distrust(f"job:{saved.uid}")

    def _look(self, now: float) -> int:
        """The number of the look for damage that this beat is; 0 if it is none. Only one that looks or brings something
        has its number kept, and ends this node's silence: so the one after a beat that was not answered looks, and that
        one is refused if it is still on its way."""
        if self._answered and now < self._look_at and not self._overwritten("mute", False):
            return 0
        self._looks, self._look_at = self._looks + 1, now + look_period(self._snapshot.size, self._timing)
        return self._looks

    def _unusable(self, refusal: StoreRefusedError) -> None:
        """It answers, and cannot be used: as one that is away."""
        if self.unusable != str(refusal):
            self.unusable = str(refusal)
            self._log.error("the store cannot be used; it counts as away until that is put right", why=self.unusable)
        self._unanswered(refusal)

    @property
    def unread(self) -> Mapping[str, str]:
        """Records in the store that cannot be read, by key: why."""
        return self._snapshot.unread

    @property
    def beyond(self) -> tuple[str, ...]:
        """Kinds of records of which the store has more than is read."""
        return self._snapshot.beyond

    def _runs(self) -> tuple[OwnJob, ...]:
        """Jobs that no step can have removed: this life is a member or holder, and nobody has ended them."""
        life, out = self.incarnation.life, []
        for job in self._snapshot.jobs.values():
            generation = job.generation
            if generation is None or job.phase in TERMINAL:
                continue
            holder = generation.holders.get(self.node) or (
                generation.members.get(self.node) if generation.state != "ended" else None
            )
            if holder is not None and holder.life == life:
                stands = f"{generation.number} {generation.id} {generation.state} {job.phase}"
                out.append(OwnJob(uid=job.uid, rev=job.rev, stands=stands))
        return tuple(sorted(out, key=lambda job: job.uid)[:MOST_RUNS])

    def _damaged(self) -> tuple[str, ...]:
        """Records that only damage can have made what they are, where all agents have this version: another one may
        write what this one cannot read."""
        unread = self._distrusted.union(self._snapshot.unread)
        if not unread or self._snapshot.rereads or not self._snapshot.one_version(self.facts.agent_version):
            return ()
        return tuple(nsmallest(MOST_DAMAGED, unread))

    def distrust(self, record: str) -> None:
        """Somebody wrote over this record: the next beat has it restored."""
        self._distrusted.add(record)

    def has_news(self, now: float) -> bool:
        """There is something that the next beat is to tell."""
        up_to_date = self._saved() == self._saved_sent and not self.notes and not self._distrusted
        up_to_date = up_to_date and not self._overwritten("mute", False)  # this agent speaks: each beat puts that right
        return not up_to_date or self._facts_due or self._readiness_due(now) or bool(self._pods_due(now))

    @property
    def _facts_due(self) -> bool:
        return self.facts != self._facts_sent or self._overwritten("facts", self.facts)

    def _readiness_due(self, now: float) -> bool:
        sent = self._readiness_sent
        if sent is None or self._overwritten("readiness", sent):
            return True
        return self._readiness != sent and not self._in_other_words(sent, now)

    def _in_other_words(self, before: Mapping[str, Readiness], now: float) -> bool:
        """The readiness is what it was, in other words, which have to wait."""
        return now - self._texts_at < TEXTS_EVERY and differ_in_texts_only(self._readiness, before)

    def _pods_due(self, now: float) -> tuple[PodState, ...]:
        if now - self._pods_at > PODS_REFRESH:
            return self._pods
        return tuple(pod for pod in self._pods if pod != self._pods_sent.get(pod.uid))

    def _overwritten(self, what: str, ours: object) -> bool:
        """The store has something else of this node than what was sent last: a join that came late put it back."""
        record = self._snapshot.node(self.node)
        return record is not None and record.incarnation == self.incarnation and getattr(record, what) != ours

    def _unanswered(self, error: StoreUnavailableError | StoreRefusedError) -> None:
        self._metrics.store_errors.inc()
        if isinstance(error, StoreUnavailableError):
            self.unusable = str(error) if isinstance(error, StoreUnusableError | StepFailedError) else ""
        if self.away_since is None:
            self.away_since = self._clock.wall()
            left = max(0.0, self.fence_at - self._clock.now())
            self._log.warning("store does not answer", why=str(error), fence_in=round(left, 2))

    def _answers(self) -> None:
        """The store does, whatever it says."""
        if self.away_since is not None:
            self._log.info("store answers again", away=round(self._clock.wall() - self.away_since, 1))
            self._process.alive(cut_off=False)
            self._process.wake()
            self.away_since, self.unusable = None, ""

    def _take_reply(self, beat: Beat, sent: float, pods: tuple[PodState, ...], reply: BeatReply) -> None:
        self._answers()
        if beat.facts is not None:
            self._facts_sent = beat.facts
        if beat.readiness is not None:
            before, self._readiness_sent = self._readiness_sent, beat.readiness
            if before is not None and differ_in_texts_only(beat.readiness, before):
                self._texts_at = sent
        if beat.saved is not None:
            self._saved_sent = beat.saved
        del self.notes[: len(beat.notes)]
        self._distrusted.difference_update(beat.damaged)
        if pods and sent - self._pods_at > PODS_REFRESH:
            self._pods_sent, self._pods_at = {}, sent
        self._pods_sent.update((pod.uid, pod) for pod in pods)
        self.beat_sent = sent
        self.fence_at = sent + self._timing.fence
        self._process.tend(beat.incarnation.life, beat.incarnation.start, reply.era, reply.cluster_uid)

    def measure(self, now: float) -> None:
        """How old the lease is."""
        pulse = self._process.pulse()
        if pulse is not None and pulse.renewed:
            self._metrics.lease_age.observe(max(0.0, now - pulse.renewed))

    def left(self, now: float) -> float:
        """Seconds for which pods may run here if nothing is renewed any more, as the lease process has granted them."""
        pulse = self._process.pulse()
        return max(0.0, pulse.until - now) if pulse is not None else 0.0

    def publish(self, readiness: dict[str, Readiness], pods: tuple[PodState, ...]) -> bool:
        """What the next beat carries. True if others wait for it, so that a beat should go at once."""
        before, now = self._readiness, self._clock.now()
        self._readiness, self._pods = readiness, pods
        return readiness != before and not self._in_other_words(before, now) and self._urgent.may(now)

    @property
    def former(self) -> str:
        """The node that this life is, where the config names another one. Empty otherwise."""
        return self._identity.before

    async def leave_as_former(self) -> None:
        """Give back the former node's lease, which the lease process would renew on: whoever gets that name could not
        join, and jobs would wait for a node that is no more. Only when nothing of it runs here, and nothing is promised
        in its name. Raises StoreUnavailableError and StoreRefusedError: to be tried again."""
        try:
            await self._look_for_two_stores()
            await self._store.leave(self.former, self.incarnation)
        except StoreUnavailableError as error:
            self._unanswered(error)
            self.reason = str(error)
            raise
        except StoreRefusedError as refusal:
            if refusal.code not in ("lost", "not_current"):  # else it is over
                raise

    def renew_life(self) -> None:
        """When it is ``lost``: take a new life. Only when nothing of the old one runs here any more."""
        self._identity.renew()
        self.lost = False

    async def leave(self) -> None:
        """Give the lease back. Only when nothing runs here any more."""
        if self.joined:
            self.joined, self.reason = False, "has left"
            await self._store.leave(self.node, self.incarnation)

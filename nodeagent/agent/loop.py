"""The daemon's loop: observe, plan, apply. Tasks: beats keep the lease, a watch on the event stream wakes,
rounds decide and act.

Owns the order of things and the agent's own view for the API; what a round does is ``rounds.py``'s, decisions are
``plan/``'s, effects ``apply.py``'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from nodeagent.agent.apply import Applier, CommitRequests
from nodeagent.agent.context import AgentContext
from nodeagent.agent.failsafe import FailsafeWatch
from nodeagent.agent.identity import Identity
from nodeagent.agent.membership import HOPELESS, PODS_REFRESH, Membership
from nodeagent.agent.metrics import RestartCounter
from nodeagent.agent.otherstore import OtherStore
from nodeagent.agent.pace import BeatPeriod, WakePace
from nodeagent.agent.published import Advert, Checked, Publisher, unchecked
from nodeagent.agent.questions import Questions
from nodeagent.agent.reach import Reach
from nodeagent.agent.rounds import EndedJobs, OwnPods, ProposalTurns, Rounds
from nodeagent.agent.savedview import Acknowledged, Acknowledger, Disk, Saver, Writing
from nodeagent.agent.stopwatch import Stopwatch
from nodeagent.agent.verifier import AdmissionVerifier, SignatureRenewal
from nodeagent.agent.view import AgentHealth
from nodeagent.agent.watch import EventWatch
from nodeagent.model.facts import PodUsage
from nodeagent.model.health import RepairState
from nodeagent.model.node import NodeFacts, NodeRecord
from nodeagent.osutil.clock import wait_for
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.nodes.members import needed_by
from nodeagent.plan.pods.running import standing
from nodeagent.plan.queueing.queue import in_queue
from nodeagent.pods.base import PodStatus
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.store.base import Store, StoreRefusedError, StoreUnavailableError
from nodeagent.store.messages import Saved
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.ledger import Ledger
from nodeagent.trust.seal import Seal

if TYPE_CHECKING:
    from nodeagent.agent.diagnosis import Diagnosis
    from nodeagent.agent.health import NodeHealth

ROUNDS = 32
"""Most rounds without a pause: each round that changed something is followed by another at once."""

RENEWED = 1.02
"""So many heartbeats after one renewal was sent, the next renewal has usually been answered."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What an agent signs with, and believes by."""

    key: ClusterKey
    seal: Seal
    writing: Writing
    """Of the copy of the view that lies on the disk."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Where an agent keeps what a restart must not forget."""

    view: Disk
    ledger: Ledger
    restarts: Path | None
    """The file of the restarts that were counted; None: in memory alone."""


def _unmeasured(_statuses: Mapping[str, PodStatus], _now: float) -> Mapping[str, PodUsage]:
    return {}


@dataclass(frozen=True, slots=True)
class OwnMachine:
    """What an agent does for its machine beside its pods; by default nothing, where nobody can be asked about it."""

    alive: Callable[[], None] = lambda: None
    """Hears that the agent's loop goes on."""
    usage: Callable[[Mapping[str, PodStatus], float], Mapping[str, PodUsage]] = _unmeasured
    """What the pods use, by job uid, at a time (CLOCK_BOOTTIME)."""
    checked: Checked = unchecked
    diagnosis: Diagnosis | None = None
    """Checks the hardware by work."""
    node_health: NodeHealth | None = None
    """Looks after the node's health."""


class Agent:
    """One node's agent. ``run()`` returns when ``stop`` is set; it raises what trying again cannot repair."""

    def __init__(
        self,
        config: AgentConfig,
        context: AgentContext,
        identity: Identity,
        facts: NodeFacts,
        *,
        trust: Trust,
        disk: OnDisk,
        peers: Questions,
        machine: OwnMachine,
    ) -> None:
        """``identity``: taken. ``facts``: as of this start."""
        self._config, self._node, self._timing = config, context.node, context.timing
        self._store, self._host, self._clock = context.store, context.host, context.clock
        self._snapshot, self._process, self._metrics = context.snapshot, context.process, context.metrics
        self._trust, self._machine, self._undecided = trust, machine, context.undecided
        self._verifier = verifier = AdmissionVerifier(self._node, trust.seal, disk.ledger, self._metrics)
        self._beat_now = asyncio.Event()
        self._wake, self._pace = self._host.changed, WakePace(self._node, self._timing)
        """Set to ask for a round, as the host does with each change of a pod."""
        self._beat_period = BeatPeriod(self._node, self._timing)
        self.saver = Saver(context, disk.view, trust.writing, self._beat_now.set)
        self._membership = membership = Membership(
            context, identity, facts, lambda: self.saver.saved, verifier.read,
            find_peer=OtherStore(self._node, peers, self._clock, self._timing).find_peer,
        )  # fmt: skip
        membership.from_disk, membership.regroup = self.saver.load(), config.saving.regroup
        verifier.recall(membership.from_disk.jobs if membership.from_disk is not None else ())
        self._renewal = SignatureRenewal(context, membership, trust.seal, verifier)
        self._acknowledge = Acknowledger(context, self.saver, self.cluster, config.saving.acknowledge)
        self._failsafe = FailsafeWatch(context, membership, self.cluster)
        self._watch = EventWatch(context, membership, self._pace, refresh=self.refresh, beat_now=self._beat_now)
        self._reach = Reach(self._node, peers=peers, clock=self._clock, cluster=self.cluster, changed=self._wake.set)
        self.advert = Advert(context, membership, config.cluster, trust.key)
        self._publisher = Publisher(context, membership, machine.checked, self._reach)
        stopwatch = Stopwatch(self._node)
        applier = Applier(
            context, membership, seal=trust.seal, verifier=verifier, stopwatch=stopwatch, reach=self._reach
        )
        turns = ProposalTurns(context, applier)
        own = OwnPods(
            context, membership, applier, failsafe=self._failsafe, stopwatch=stopwatch, pace=self._pace,
            commits=CommitRequests(context, membership, trust.seal, verifier),
            standbys=lambda: self._config.jobs.standbys,
        )  # fmt: skip
        self._round = Rounds(
            context, self.cluster, own=own, turns=turns, publisher=self._publisher,
            ended=EndedJobs(context, applier, turns, lambda: self._config.jobs.retention),
            restarts=RestartCounter(self._node, self._metrics, disk.restarts),
        )  # fmt: skip
        self._lag = self._meter_at = 0.0
        self._leaving = False
        self._acting = asyncio.Lock()
        """Held by a round."""
        self.joined = asyncio.Event()
        """Set with the first join."""
        self.tried = asyncio.Event()
        """Set when the first beat is over, whether the store answered or not."""
        self._log = structlog.get_logger("agent").bind(node=self._node)

    # --- tasks ----------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``. Workers are left running, and the lease process looks after the lease: a restart of the
        agent does not disturb them."""
        await self._host.adopt()
        self._publisher.hold()  # before it joins: what it was before is forgotten then
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(t())
                for t in (
                    self._beats, self._watch.run, self._rounds,
                    self._renewal.remember, self._renewal.renew, self.saver.run, self._reach.run,
                )
            ]  # fmt: skip
            await stop.wait()
            for task in running:
                task.cancel()

    def needed_by(self) -> str:
        """Why this agent must not simply end: what still needs it. Empty if nothing does."""
        if self._membership.lost:
            return ""
        if not self._quiet():
            return "workers run here"
        if not self._snapshot.complete and self._process.status()[0] not in ("idle", "left"):
            return "what needs it has not been read yet"
        return needed_by(self.cluster(), self._node, self._membership.incarnation.life)

    @property
    def settled(self) -> bool:
        """The store answers and has all that this agent knows: another one can read it there."""
        now = self._clock.now()
        fresh = now - self._membership.beat_sent <= self._timing.heartbeat + self._timing.store_timeout
        return (fresh or self._may_skip(now)) and self._membership.joined and not self._snapshot.recovering

    async def reports_restart(self) -> bool:
        """Tell the others that this agent ends and is to be back soon. Whether the store answers, and has all that this
        agent knows."""
        self.advert.restarts(self._clock.wall())
        try:
            await self._membership.beat()
        except (StoreRefusedError, StoreUnavailableError):
            return False
        return self._membership.joined and not self._snapshot.recovering

    def publish_health(self) -> None:
        """The verdicts on this node, or its figures, changed: the others hear of it at once."""
        if self.diagnosis is not None:
            self.advert.health(self.diagnosis.facts(self.node_health))
            self._beat_now.set()

    def publish_repair(self, repair_state: RepairState) -> None:
        """The state of the repairs has changed: the others hear of it at once."""
        if self.diagnosis is not None:
            self.publish_health()
        else:
            self.advert.health({"repair_state": repair_state})
            self._beat_now.set()

    async def round_over(self) -> None:
        """Wait until a round that began before is over."""
        async with self._acting:
            return

    async def leave(self) -> None:
        """Stop everything that runs here and give the lease back (an orderly goodbye). Bounded by stuck + kill."""
        self._leaving = True
        self._wake.set()
        try:
            await self._give_back()
        finally:
            self._process.end()

    async def _give_back(self) -> None:
        try:
            async with asyncio.timeout(self._timing.stuck + self._timing.kill):
                await self.round_over()  # it could have started something
                while not self._quiet():
                    for uid in self._host.status():
                        self._host.stop(uid, None)
                    self._host.ping()  # whose answer tells what came of orders that were on their way
                    await asyncio.sleep(self._timing.kill / 4)
        except TimeoutError:
            self._log.error("some workers could not be stopped: the lease is left to lapse")
            return
        if not await self._failsafe.let_promises_end():
            self._log.error("what this node may promise others cannot be ended: the lease is left to lapse")
            return
        try:
            await self._membership.leave()
        except (StoreRefusedError, StoreUnavailableError) as error:  # away, recovering, or it has forgotten this node
            self._log.warning("the lease is left to lapse", why=str(error))

    async def _beats(self) -> None:
        """Every heartbeat: what keeps this node going, and a beat, if it is time for one."""
        asked = True
        while True:
            if self._leaving:
                return
            started = self._clock.now()
            self.advert.date_health()
            if not self._membership.lost:  # or workers that do not end would keep the lease of a life that is over
                cut_off = self._membership.away_since is not None
                self._process.alive(cut_off, self._standing() if cut_off else {})
            self.advert.peer(self._process.address())
            self.advert.date_notice()
            self._host.ping()
            self._failsafe.log()
            if asked or not self._may_skip(started):
                await self._one_beat()
                self.tried.set()
            self._wake.set()
            self._machine.alive()
            self._measure()
            wait = self._timing.heartbeat - (self._clock.now() - started)
            if self._membership.next_lapse is not None:
                wait = min(wait, self._membership.next_lapse - self._clock.now() + 0.002)
            wait = min(wait, self._until_renewed(self._clock.now()))
            pause = self._pace.left(self._clock.now())
            due = self._clock.now() + max(wait, pause, 0.01)
            await asyncio.sleep(pause)  # a beat that is asked for meanwhile waits for this, too
            asked = await wait_for(self._beat_now, max(due - self._clock.now(), 0.001))
            self._lag = max(0.0, self._clock.now() - due)
            self._metrics.heartbeat_late.observe(self._lag)

    def _standing(self) -> dict[str, int]:
        life, host = self._membership.incarnation.life, self._host
        return standing(self.cluster(), self._node, life, host.status(), lambda uid: host.granted(uid).barred)

    def _may_skip(self, now: float) -> bool:
        """Whether this beat may be skipped: the lease process renews the lease, there is nothing to do, to tell or to
        read, and any change that concerns this node would wake it. Not skipped when another node's lease may lapse."""
        snapshot, rests_until = self._snapshot, self._round.rests_until
        period = self._beat_period.period(snapshot.size)
        if period <= self._timing.heartbeat or rests_until is None:
            return False
        if not (self._membership.joined and self._watch.answers and snapshot.complete):
            return False
        pulse = self._process.pulse()
        if pulse is None or now - pulse.renewed > 2 * self._timing.heartbeat:
            return False
        if (
            snapshot.recovering
            or snapshot.rereads
            or self._membership.away_since is not None
            or self._membership.has_news(now)
        ):
            return False
        if self._process.unannounced() > snapshot.rev:
            return False
        ends = [self._membership.beat_sent + period]
        ends += [snapshot.time_of(rests_until)] if rests_until else []
        ends += [self._membership.next_lapse] if self._membership.next_lapse is not None else []
        return now < min(ends)

    def _until_renewed(self, now: float) -> float:
        """Seconds until the lease process has renewed again. In a large cluster the answer to that renewal says whether
        a beat is needed; in a small one this is simply a heartbeat."""
        heartbeat = self._timing.heartbeat
        if self._beat_period.period(self._snapshot.size) <= heartbeat:
            return heartbeat
        pulse = self._process.pulse()
        if pulse is None:
            return heartbeat
        age = now - pulse.renewed
        if age < RENEWED * heartbeat:
            return RENEWED * heartbeat - age
        return heartbeat / 10 if age < 1.5 * heartbeat else heartbeat

    def _measure(self) -> None:
        """Measures the age of the lease, and what the pods use (as often as their states are published). Called after
        the beat, since other nodes wait for the beat."""
        now = self._clock.now()
        self._membership.measure(now)
        if now >= self._meter_at:
            self._meter_at = now + PODS_REFRESH
            self._membership.usage = self._machine.usage(self._host.status(), now)

    async def _one_beat(self) -> None:
        try:
            if not self._membership.joined:
                await self._join()
            await self._membership.beat()
            self._beat_period.beaten()
            self._pace.answered()
            self._round.count()
        except StoreUnavailableError as error:
            self._pace.failed(self._clock.now())
            self._log.debug("no beat", why=str(error))
        except StoreRefusedError as refusal:
            if refusal.code in HOPELESS and not self.joined.is_set():
                raise
            if refusal.code not in ("lease_held", "stale", "recovering"):
                self._log.warning("lease is gone", why=str(refusal))

    async def _join(self) -> None:
        """Join; where the life is over with a new one, and only once nothing of the old one runs here any more."""
        if self._membership.lost:
            self._stop_everything()
            if not self._quiet():
                raise StoreRefusedError("lease_held", "workers of the life that is over still run here")
            if self._membership.former:
                await self._leave_as_former()
            self._membership.renew_life()
            self._process.alive(cut_off=False)
            self.advert.vouch()
        await self._membership.join()
        self.joined.set()

    async def _leave_as_former(self) -> None:
        if not await self._failsafe.let_promises_end():
            raise StoreRefusedError("lease_held", f"what {self._membership.former} may promise others cannot be ended")
        await self._membership.leave_as_former()
        self._failsafe.leaving = self._leaving

    async def _rounds(self) -> None:
        due: float | None = None
        while True:
            await wait_for(self._wake, None if due is None else max(0.001, due - self._clock.now()))
            if not self._membership.joined:
                due = None
                continue
            due = await self._until_settled()

    async def _until_settled(self) -> float | None:
        """Rounds until nothing changes any more; returns when (our clock) to look again."""
        try:
            for _ in range(ROUNDS):
                async with self._acting:
                    if not (self._snapshot.certain and self._membership.joined):
                        return None
                    if self._leaving:  # nobody would wait for the end of what is started now
                        return None
                    changed, due = await self._round.once()
                if not changed:
                    return due
            self._log.error("still changing after many rounds", rounds=ROUNDS)
        except StoreUnavailableError as error:
            self._pace.failed(self._clock.now())
            self._log.debug("no round", why=str(error))  # the lease tells when it went away
        except StoreRefusedError as refusal:
            self._log.warning("store refuses", code=refusal.code, why=str(refusal))
        return self._clock.now() + self._timing.heartbeat

    def _stop_everything(self) -> None:
        for uid, status in self._host.status().items():
            if not status.quiet:
                self._host.stop(uid, None)

    def _quiet(self) -> bool:
        return all(status.quiet for status in self._host.status().values())

    # --- the view, for the API ------------------------------------------------------------------------

    @property
    def config(self) -> AgentConfig:
        return self._config

    def reconfigure(self, config: AgentConfig) -> None:
        """Use this config from now on. Only the keys in ``LIVE`` of ``serve.py`` may differ from the old one."""
        self._config = config

    @property
    def node(self) -> str:
        return self._node

    @property
    def key(self) -> ClusterKey:
        return self._trust.key

    @property
    def seal(self) -> Seal:
        return self._trust.seal

    @property
    def store(self) -> Store:
        return self._store

    @property
    def diagnosis(self) -> Diagnosis | None:
        return self._machine.diagnosis

    @property
    def node_health(self) -> NodeHealth | None:
        return self._machine.node_health

    @property
    def certain(self) -> bool:
        """Whether this agent knows all jobs. Then a job that it does not know does not exist any more."""
        return self._membership.joined and self._membership.seasoned and self._snapshot.certain

    def cluster(self) -> Cluster:
        snapshot = self._snapshot
        refused = self._verifier.look(
            snapshot.jobs, snapshot.era, self._clock.wall(), whole=snapshot.certain,
            seasoned=self._membership.seasoned, unread=snapshot.unread,
        )  # fmt: skip
        self._verifier.of_cluster(snapshot.cluster_uid)
        return snapshot.cluster(
            self._clock.now(), refused, self._verifier.tree(snapshot.queues), self._verifier.windows(snapshot.windows)
        )

    def me(self) -> NodeRecord | None:
        return self._snapshot.node(self._node)

    def why(self, uid: str) -> tuple[str, ...]:
        job, cluster = self._snapshot.job(uid), self.cluster()
        if job is None:
            return ()
        why = self._round.why(cluster, job)
        return (*self._undecided.of(uid), *why)

    def explain(self, uid: str) -> tuple[str, ...]:
        job, cluster = self._snapshot.job(uid), self.cluster()
        if job is None:
            return ()
        if self._undecided.of(uid):
            return self.why(uid)
        more = explain(cluster, job, self._clock.wall()) if in_queue(job) and uid not in cluster.refused else ()
        return more or self.why(uid)

    def pods(self) -> Mapping[str, PodStatus]:
        return self._host.status()

    def health(self) -> AgentHealth:
        now, membership, bridged = self._clock.now(), self._membership, self._failsafe.bridged
        return AgentHealth(
            joined=membership.joined,
            reason=membership.reason,
            lease_left=membership.left(now),
            beat_age=max(0.0, now - membership.beat_sent),
            store_away_since=membership.away_since,
            loop_lag=self._lag,
            lent={uid: end - now for uid, end in bridged.lent.items() if end > now},
            not_lent=bridged.refusals,
            unsaved=self.saver.trouble,
            store_unusable=membership.unusable,
            unread=dict(membership.unread),
            beyond=membership.beyond,
            store_waits=self._snapshot.waits(now) if membership.away_since is None else "",
            unreachable=self._reach.unreachable,
            undecided=self._undecided.now,
        )

    @property
    def era(self) -> str:
        return self._snapshot.era

    @property
    def rev(self) -> int:
        return self._snapshot.rev

    async def acknowledged(self, rev: int, era: str) -> Acknowledged:
        return await self._acknowledge(Saved(era=era, rev=rev))

    async def refresh(self) -> None:
        await self._membership.beat()
        self._wake.set()

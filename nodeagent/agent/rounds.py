"""One round: what this node does by itself, what it publishes, and the next step of each job, as ``plan/`` decides; and
what becomes of jobs that have ended. Of agents that see the same, one goes first.

Owns the order within a round, and nothing between rounds. Must never wait for a store before what this node has to do
by itself is done. A node's own plan is made again only when an input that ``PodPlan`` compares has changed: it must
compare every input of ``plan/pods/pod.py``. Of the view's time it compares only which jobs are next in the queue.
What is decided of one job or one pod is guarded (``undecided.py``); what is about the whole cluster is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from operator import is_

from nodeagent.agent.apply import Applier, CommitRequests
from nodeagent.agent.context import AgentContext
from nodeagent.agent.failsafe import FailsafeWatch
from nodeagent.agent.membership import Membership
from nodeagent.agent.metrics import RestartCounter
from nodeagent.agent.pace import WakePace
from nodeagent.agent.published import Publisher
from nodeagent.agent.stopwatch import Stopwatch
from nodeagent.agent.undecided import Undecided
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes.members import turn
from nodeagent.plan.pods.actions import PodAction, SetFailsafeMembers, asks_the_store
from nodeagent.plan.pods.pod import Guard, plan_pods
from nodeagent.plan.queueing.dependencies import (
    SHELVED_AT_ONCE,
    believed,
    due_for_history,
    history_room,
    keeps_history,
    outlived,
)
from nodeagent.plan.queueing.heldback import line
from nodeagent.plan.queueing.queue import NextUp, next_up
from nodeagent.plan.queueing.reservations import reserved
from nodeagent.plan.steps import Decision, Remove, Words
from nodeagent.pods.base import PodStatus
from nodeagent.spec.agentconfig import RetentionConfig
from nodeagent.store.base import StoreUnavailableError

SLICE = 0.02
"""Seconds that the jobs are decided on without a pause: beats of the same loop wait no longer."""

ENDED_EVERY = 60.0
"""Seconds between two looks at how old the records of ended jobs are, while nothing else changes."""
MORE_AFTER = 1.0
"""Seconds between two steps that keep the history, where one was not enough."""


class Rounds:
    """One agent's rounds."""

    def __init__(
        self,
        context: AgentContext,
        cluster: Callable[[], Cluster],
        *,
        own: OwnPods,
        publisher: Publisher,
        turns: ProposalTurns,
        ended: EndedJobs,
        restarts: RestartCounter,
    ) -> None:
        self._node, self._clock, self._snapshot = context.node, context.clock, context.snapshot
        self._metrics, self._cluster = context.metrics, cluster
        self._own, self._publisher, self._turns, self._undecided = own, publisher, turns, context.undecided
        self._ended, self._restarts = ended, restarts
        self._rested: int | None = None
        """The plan of this node's pods that the last round was made with, if that one found all at rest."""
        self._rests_until = 0
        """Served time (ms) at which one of its decisions is to be made anew; 0 if none is."""
        self._counted: tuple[Mapping[str, JobRecord] | None, int, str] = None, 0, ""
        """The view that was counted last: its jobs, revision and era."""

    async def once(self) -> tuple[bool, float | None]:
        """Whether something changed, and when (our clock) to look again. Raises StoreUnavailableError and
        StoreRefusedError."""
        cluster = self._cluster()
        plan = self._own.plan(cluster)
        if self._at_rest(cluster, plan) and not self._own.puts_back:
            return False, self._own.next_end
        self._rested = None
        changed, rest = await self._own.act(cluster)
        if not rest:
            cluster = self._cluster()
        if await self._publisher.publish(cluster):
            cluster = self._cluster()
        due = self._own.next_end
        ends = [at for at in (cluster.windows_until, cluster.left_out_until) if at]
        slice_began = self._clock.now()
        for job in cluster.jobs.values():
            if self._clock.now() - slice_began > SLICE:
                await asyncio.sleep(0)  # a beat that is due goes first; a view that is old by then costs no safety
                slice_began = self._clock.now()
            decided = self.step(cluster, job)
            if decided is None:
                continue  # as of one with nothing to do: it is tried again in another view
            decision, place = decided
            if decision.step is None:
                rest = rest and decision.steady
                if decision.at:
                    ends.append(decision.at)
                continue
            rest = False
            taken, at = await self._turns.take(cluster, job, decision, place)
            changed |= taken
            if at is not None:
                due = at if due is None else min(due, at)
        changed |= await self._ended.remove(cluster)
        await self._ended.shelve(cluster)
        self._turns.looked()
        self._undecided.keep(cluster.jobs, self._own.pods)
        self.count()
        changed |= await self._own.tell_recoveries(cluster)
        if rest and not changed:
            self._rested, self._rests_until = plan, min(ends, default=0)
        return changed, due

    def step(self, cluster: Cluster, job: JobRecord) -> tuple[Decision, int] | None:
        """The job's next step, and how many others go before this node with it; None if that cannot be decided."""
        return self._undecided.guard("step", job.uid, partial(self._decide, cluster, job))

    def why(self, cluster: Cluster, job: JobRecord) -> Words:
        """What is said of the job's next step; nothing where that cannot be decided."""
        return self._undecided.guard("step", job.uid, lambda: decide(cluster, job, self._clock.wall()).why) or ()

    def _decide(self, cluster: Cluster, job: JobRecord) -> tuple[Decision, int]:
        decision = decide(cluster, job, self._clock.wall())
        return decision, 0 if decision.step is None else turn(cluster, job, self._node)

    @property
    def rests_until(self) -> int | None:
        """Served time (ms) until which there is nothing to do while the view stays the same; 0: for ever. None: there
        is something."""
        return None if self._rested is None else self._rests_until

    def count(self) -> None:
        """Count the jobs' restarts, and the time that devices were in use, as the newest view shows them: of an older
        one than was counted before, some would be counted twice. Nothing where no record has changed since: then what
        was held still is (``Metrics.catch_up``)."""
        if not self._snapshot.complete:
            return
        jobs, rev, era = self._snapshot.jobs, self._snapshot.rev, self._snapshot.era
        if self._counted[0] is not jobs or self._counted[1:] != (rev, era):
            self._counted = jobs, rev, era
            self._restarts.look(jobs)
            self._metrics.devices.count(self._cluster(), self._node)

    def _at_rest(self, cluster: Cluster, plan: int) -> bool:
        """The last round found nothing to do that time alone could change, and sees what this one would see: with many
        jobs, looking at them all twice a second would be most of what an agent does."""
        if self._rested != plan or self._clock.now() >= self._ended.due:
            return False
        if self._rests_until and cluster.served >= self._rests_until:
            return False
        return not self._publisher.is_news(cluster)


class OwnPods:
    """One node's. ``standbys``: how many of them it keeps now."""

    def __init__(
        self,
        context: AgentContext,
        membership: Membership,
        applier: Applier,
        *,
        failsafe: FailsafeWatch,
        commits: CommitRequests,
        stopwatch: Stopwatch,
        pace: WakePace,
        standbys: Callable[[], int],
    ) -> None:
        self._host, self._clock, self._metrics = context.host, context.clock, context.metrics
        self._membership, self._applier, self._failsafe, self._commits = membership, applier, failsafe, commits
        self._stopwatch, self._pace, self._standbys = stopwatch, pace, standbys
        self._plan = PodPlan(context.node, context.undecided)
        self._actions: tuple[PodAction, ...] = ()
        self._promised: Mapping[str, float] = {}

    def plan(self, cluster: Cluster) -> int:
        """Plan for this view; the number of the plan, which is the last one's if nothing changed that it looks at."""
        self._promised = self._failsafe.promised(cluster)
        statuses, standbys = self._host.status(), self._standbys()
        self._actions = self._plan(cluster, self._membership.incarnation, statuses, standbys, self._promised.keys())
        return self._plan.made

    async def act(self, cluster: Cluster) -> tuple[bool, bool]:
        """Carry out what was planned for this view. Whether something changed; and whether there was nothing that this
        node has to do by itself: then no time has passed. Raises StoreUnavailableError and StoreRefusedError."""
        changed = False
        statuses, actions = self._host.status(), self._actions
        self._stopwatch.look(cluster.jobs, statuses, self._clock.now())
        # What this node does by itself comes first: it must not wait for a store that may not answer.
        for action in sorted(actions, key=asks_the_store):
            if asks_the_store(action) and not self._may_ask():
                continue  # what there is to report is reported later
            if isinstance(action, SetFailsafeMembers):
                changed |= await self._failsafe.set_failsafe_members(action, self._applier.pod)
            else:
                changed |= await self._applier.pod(action)
        if not self._may_ask():
            raise StoreUnavailableError("the last call was not answered: the store is asked again in a moment")
        await self._commits.carry()
        wants_commit = any(status.commit is not None for status in statuses.values())
        rest = not (actions or wants_commit or self._commits.pending or self._stopwatch.running)
        return changed, rest

    @property
    def puts_back(self) -> bool:
        """Somebody has turned back what is in the store."""
        return self._commits.pending

    @property
    def next_end(self) -> float | None:
        """When (our clock) the next promise of failsafe time runs out, as of the plan."""
        return min(self._promised.values(), default=None)

    @property
    def pods(self) -> Mapping[str, PodStatus]:
        """Those that are here, by job (uid)."""
        return self._host.status()

    async def tell_recoveries(self, cluster: Cluster) -> bool:
        """Count and tell how long those took that are over now. Whether something changed by that."""
        changed = False
        for recovery in self._stopwatch.over(cluster.jobs):
            self._metrics.recovered(cluster.jobs[recovery.uid].name, recovery.cause, recovery.phases)
        for recovery in self._stopwatch.finished(cluster.jobs, self._clock.now()):
            if not recovery.first:
                self._metrics.stepped(recovery.cause, recovery.phases)
            changed |= await self._applier.give_back(recovery)
        return changed

    def _may_ask(self) -> bool:
        """The store may be asked now: it answered when it was asked last, or that is long enough ago."""
        return not self._pace.left(self._clock.now())


class PodPlan:
    """One node's."""

    def __init__(self, node: str, undecided: Undecided) -> None:
        self._node = node
        self._guard: Guard = partial(undecided.guard, "pod")
        self._of: tuple[tuple[object, ...], tuple[object, ...]] | None = None
        """What the last plan was made of: compared by identity, and by value."""
        self._line = NextUp()
        self._actions: tuple[PodAction, ...] = ()
        self.made = 0
        """How many there have been."""

    def __call__(
        self,
        cluster: Cluster,
        incarnation: Incarnation,
        statuses: Mapping[str, PodStatus],
        standbys: int,
        lent: Collection[str],
    ) -> tuple[PodAction, ...]:
        """As ``plan_pods``; the very same object while all is as it was."""
        self._line = next_up(cluster, line(cluster), self._line)
        same = (cluster.nodes, cluster.jobs, cluster.lapsed, reserved(cluster), *statuses.values())
        equal = (
            incarnation, standbys, frozenset(lent), cluster.refused, cluster.unread, tuple(statuses), self._line.up,
        )  # fmt: skip
        last = self._of
        if last is None or last[1] != equal or not all(map(is_, last[0], same)):
            self._of, self.made = (same, equal), self.made + 1
            self._actions = plan_pods(
                cluster, self._node, incarnation, statuses, standbys, lent, self._line.up, self._guard
            )
        return self._actions


class EndedJobs:
    """Keeps the records of ended jobs: for as long as all nodes keep them, then in the history."""

    def __init__(
        self, context: AgentContext, applier: Applier, turns: ProposalTurns, retention: Callable[[], RetentionConfig]
    ) -> None:
        self._node, self._clock, self._undecided = context.node, context.clock, context.undecided
        self._applier, self._turns, self._retention = applier, turns, retention
        self._remove_at = self._shelve_at = 0.0
        """When (our clock) to look again which of them have been kept long enough, and which go to the history."""

    @property
    def due(self) -> float:
        """When (our clock) there may be something to do, though nothing else changed."""
        return min(self._remove_at, self._shelve_at)

    async def remove(self, cluster: Cluster) -> bool:
        """Those that have been kept long enough, a few at a time; whether one was removed."""
        kept = self._retention()
        self._remove_at = self._clock.now() + ENDED_EVERY
        changed = False
        for job in outlived(cluster, self._clock.wall(), kept.age, kept.jobs):
            why = f"it has ended, and of such jobs {kept.jobs} of each user are kept, for {kept.age:g} s"
            place = self._undecided.guard("removal", job.uid, partial(turn, cluster, job, self._node))
            if place is None:
                continue
            taken, at = await self._turns.take(cluster, job, Decision(Remove(), (why,)), place)
            changed |= taken
            if at is not None:
                self._remove_at = min(self._remove_at, at)
        return changed

    async def shelve(self, cluster: Cluster) -> None:
        """Those that agents have had in their views for long enough go to the history, and old ones from it."""
        now, kept = self._clock.now(), self._retention()
        if now < self._shelve_at:
            return
        self._shelve_at = now + ENDED_EVERY
        if keeps_history(cluster, self._node):
            wall = self._clock.wall()
            due = due_for_history(cluster, wall)
            more = await self._applier.shelve(due, believed(cluster, wall) - kept.age, history_room(kept.jobs))
            if more or len(due) == SHELVED_AT_ONCE:
                self._shelve_at = now + MORE_AFTER


class ProposalTurns:
    """Takes jobs' steps, when it is this agent's turn: decisions seen in the last look at all jobs, and when each was
    seen first."""

    def __init__(self, context: AgentContext, applier: Applier) -> None:
        self._clock, self._patience, self._applier = context.clock, context.timing.turn, applier
        self._before: dict[tuple[object, ...], float] = {}
        self._seen: dict[tuple[object, ...], float] = {}

    def looked(self) -> None:
        """A look at all jobs is over: what was not seen in it has passed."""
        self._before, self._seen = self._seen, {}

    async def take(self, cluster: Cluster, job: JobRecord, decision: Decision, place: int) -> tuple[bool, float | None]:
        """Whether the step was taken (by us), and when (our clock) to try, where it is another's turn before.
        ``place``: how many go before this node. Raises StoreUnavailableError."""
        generation, now = job.generation, self._clock.now()
        name, state = (generation.id, generation.state) if generation else ("", "")
        key = (job.uid, name, state, job.control.rev, type(decision.step))
        self._seen[key] = first = self._before.get(key, now)
        at = first + self._patience * place
        if now < at:
            return False, at
        return await self._applier.job(job, decision, cluster.rev), None

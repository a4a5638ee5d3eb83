"""One round: what this node does by itself, what it publishes, and the next step of each job, as ``plan/`` decides.
A node's own plan is worked out again only when something changed; of agents that see the same, one goes first.

Owns the order within a round, and nothing between rounds. Must never wait for a store before what this node has to do
by itself is done.

Owns the comparison; the plan is ``plan/pod.py``'s, a pure function of what is compared here. Must never compare less
than that function is given; of the view's time it sees only which jobs are next in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from operator import is_

from nodeagent.agent.apply import Applier, CommitRequests
from nodeagent.agent.clock import Clock
from nodeagent.agent.failsafe import FailsafeWatch
from nodeagent.agent.lease import Lease
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.published import kept_verdicts, pod_states, readiness
from nodeagent.agent.stopwatch import Stopwatch
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation, Readiness
from nodeagent.plan.backfill import line, reserved
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.gang import decide
from nodeagent.plan.membership import turn
from nodeagent.plan.pod import Keep, PodAction, Stop, asks_the_store, plan_pods
from nodeagent.plan.queue import NextUp, next_up
from nodeagent.plan.retention import SHELVED_AT_ONCE, due_for_history, history_room, keeps_history, outlived
from nodeagent.plan.steps import Decision, Remove
from nodeagent.pods.base import PodHost, PodStatus
from nodeagent.store.base import StoreUnavailableError

SLICE = 0.02
"""Seconds that the jobs are decided on without a pause: beats of the same loop wait no longer."""

ENDED_EVERY = 60.0
"""Seconds between two looks at how old the records of ended jobs are, while nothing else changes."""
MORE_AFTER = 1.0
"""Seconds between two steps that keep the history, where one was not enough."""


class Rounds:
    """One agent's rounds. ``checked``: readiness with the checks by work in it; ``standbys``: how many the node keeps
    now; ``counted``: the jobs' restarts are to be looked at; ``keep``: for how many seconds records of ended jobs are
    kept, and how many; ``unreachable``: ``Reach``'s; ``may_ask``: whether the store may be asked now."""

    def __init__(
        self,
        node: str,
        *,
        lease: Lease,
        host: PodHost,
        clock: Clock,
        failsafe: FailsafeWatch,
        applier: Applier,
        commits: CommitRequests,
        stopwatch: Stopwatch,
        turns: Turns,
        metrics: Metrics,
        checked: Callable[[dict[str, Readiness], Cluster], dict[str, Readiness]],
        cluster: Callable[[], Cluster],
        standbys: Callable[[], int],
        counted: Callable[[], None],
        keep: Callable[[], tuple[float, int]],
        unreachable: Callable[[], Mapping[str, Mapping[str, float]]],
        may_ask: Callable[[], bool],
    ) -> None:
        self._node, self._lease, self._host, self._clock = node, lease, host, clock
        self._failsafe, self._applier, self._commits, self._stopwatch = failsafe, applier, commits, stopwatch
        self._turns, self._metrics, self._checked = turns, metrics, checked
        self._cluster, self._standbys, self._counted, self._keep = cluster, standbys, counted, keep
        self._unreachable, self._unreached = unreachable, unreachable()
        self._may_ask = may_ask
        self._plan = PodPlan(node)
        self._rested: int | None = None
        """The plan of this node's pods that the last round was made with, if that one found all at rest."""
        self._rests_until = 0
        """Served time (ms) at which one of its decisions is to be made anew; 0 if none is."""
        self._look_at_ended = 0.0
        """When (our clock) to look again which ended jobs have been kept long enough."""
        self._look_at_history = 0.0
        """When (our clock) to look again which of them go to the history."""
        self._ready: dict[str, Readiness] = {}
        self._published: dict[str, Readiness] = {}

    async def once(self) -> tuple[bool, float | None]:
        """Whether something changed, and when (our clock) to look again. Raises StoreUnavailableError and
        StoreRefusedError."""
        unreached = self._unreachable()
        if unreached is self._unreached and self._at_rest():
            return False, self._failsafe.next_end()
        self._rested, self._unreached = None, unreached
        changed, rest = await self._this_node()
        statuses = self._host.status()
        cluster = self._cluster()
        self._ready = readiness(statuses) | kept_verdicts(cluster, self._node, statuses)
        self._published = self._checked(self._ready, cluster)
        if self._lease.publish(self._published, pod_states(cluster, self._node, statuses, unreached)):
            await self._lease.beat()
            cluster = self._cluster()
        due = self._failsafe.next_end()
        ends = [cluster.windows_until] if cluster.windows_until else []
        slice_began = self._clock.now()
        for job in cluster.jobs.values():
            if self._clock.now() - slice_began > SLICE:
                await asyncio.sleep(0)  # a beat that is due goes first; a view that is old by then costs no safety
                slice_began = self._clock.now()
            decision = decide(cluster, job, self._clock.wall())
            if decision.step is None:
                rest = rest and decision.steady
                if decision.at:
                    ends.append(decision.at)
                continue
            rest = False
            at = self._turns.at(cluster, job, decision, self._clock.now())
            if self._clock.now() >= at:
                changed |= await self._applier.job(job, decision)
            else:
                due = at if due is None else min(due, at)
        changed |= await self._remove_outlived(cluster)
        await self._keep_history(cluster)
        self._turns.looked()
        self._counted()
        changed |= await self._publish(cluster)
        if rest and not changed:
            self._rested, self._rests_until = self._plan.made, min(ends, default=0)
        return changed, due

    @property
    def rests_until(self) -> int | None:
        """Served time (ms) until which there is nothing to do while the view stays the same; 0: for ever. None: there
        is something."""
        return None if self._rested is None else self._rests_until

    def _at_rest(self) -> bool:
        """The last round found nothing to do that time alone could change, and sees what this one would see: with many
        jobs, looking at them all twice a second would be most of what an agent does."""
        if self._rested is None:
            return False
        cluster = self._cluster()
        if self._clock.now() >= min(self._look_at_ended, self._look_at_history):
            return False
        if self._rests_until and cluster.served >= self._rests_until:
            return False
        self._planned(cluster, self._host.status())
        return self._plan.made == self._rested and self._checked(self._ready, cluster) == self._published

    def _planned(self, cluster: Cluster, statuses: Mapping[str, PodStatus]) -> tuple[PodAction, ...]:
        lent = self._failsafe.lending()
        return self._plan(cluster, self._lease.incarnation, statuses, self._standbys(), lent)

    async def _this_node(self) -> tuple[bool, bool]:
        """Whether something changed; and whether all is done that this node has to do by itself."""
        changed = False
        statuses, cluster = self._host.status(), self._cluster()
        self._stopwatch.look(cluster.jobs, statuses, self._clock.now())
        actions = self._planned(cluster, statuses)
        # What this node does by itself comes first: it must not wait for a store that may not answer.
        for action in sorted(actions, key=asks_the_store):
            if asks_the_store(action) and not self._may_ask():
                if isinstance(action, Stop):  # what there is to tell is told later
                    await self._applier.pod(replace(action, meanwhile=None))
            elif isinstance(action, Keep):
                changed |= await self._failsafe.replace_keepers(action, self._applier.pod)
            else:
                changed |= await self._applier.pod(action)
        self._ask()
        await self._commits.carry()
        wants_commit = any(status.commit is not None for status in statuses.values())
        return changed, not actions and not wants_commit and not self._stopwatch.running

    def _ask(self) -> None:
        """Before the store is asked. Raises StoreUnavailableError while it is too early for that."""
        if not self._may_ask():
            raise StoreUnavailableError("the last call was not answered: the store is asked again in a moment")

    async def _remove_outlived(self, cluster: Cluster) -> bool:
        """Records of ended jobs that have been kept long enough, a few at a time."""
        now, (keep_for, keep) = self._clock.now(), self._keep()
        self._look_at_ended = now + ENDED_EVERY
        changed = False
        for job in outlived(cluster, self._clock.wall(), keep_for, keep):
            decision = Decision(Remove(), (f"it has ended, and of such jobs {keep} are kept, for {keep_for:g} s",))
            at = self._turns.at(cluster, job, decision, now)
            if now >= at:
                changed |= await self._applier.job(job, decision)
            else:
                self._look_at_ended = min(self._look_at_ended, at)
        return changed

    async def _keep_history(self, cluster: Cluster) -> None:
        """Ended jobs that agents have had in their views for long enough go to the history, and old ones from it."""
        now, (keep_for, keep) = self._clock.now(), self._keep()
        if now < self._look_at_history:
            return
        self._look_at_history = now + ENDED_EVERY
        if keeps_history(cluster, self._node):
            due = due_for_history(cluster, self._clock.wall())
            more = await self._applier.shelve(due, self._clock.wall() - keep_for, history_room(keep))
            if more or len(due) == SHELVED_AT_ONCE:
                self._look_at_history = now + MORE_AFTER

    async def _publish(self, cluster: Cluster) -> bool:
        """How long recoveries took."""
        changed = False
        for recovery in self._stopwatch.over(cluster.jobs):
            self._metrics.recovered(cluster.jobs[recovery.uid].name, recovery.cause, recovery.phases)
        for recovery in self._stopwatch.finished(cluster.jobs, self._clock.now()):
            self._metrics.stepped(recovery.cause, recovery.phases)
            changed |= await self._applier.give_back(recovery)
        return changed


class PodPlan:
    """One node's."""

    def __init__(self, node: str) -> None:
        self._node = node
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
            self._actions = plan_pods(cluster, self._node, incarnation, statuses, standbys, lent, self._line.up)
        return self._actions


class Turns:
    """Decisions seen in the last look at all jobs, and when each was seen first. ``patience``: seconds for each agent
    that goes before."""

    def __init__(self, node: str, patience: float) -> None:
        self._node, self._patience = node, patience
        self._before: dict[tuple[object, ...], float] = {}
        self._seen: dict[tuple[object, ...], float] = {}

    def looked(self) -> None:
        """A look at all jobs is over: what was not seen in it has passed."""
        self._before, self._seen = self._seen, {}

    def at(self, cluster: Cluster, job: JobRecord, decision: Decision, now: float) -> float:
        """When (our clock) to take it."""
        head = job.head
        key = (job.uid, head.id if head else "", head.state if head else "", job.control.rev, type(decision.step))
        self._seen[key] = first = self._before.get(key, now)
        return first + self._patience * turn(cluster, job, self._node)

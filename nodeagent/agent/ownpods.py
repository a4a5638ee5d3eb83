"""What a node does by itself in a round, for its own pods: as ``plan/pod.py`` decides, and what its workers asked for.
And how long its jobs' recoveries took.

Must never wait for a store before what this node has to do by itself is done. The plan is a pure function of what
``PodPlan`` compares, and is made again only when something of that changed: it must never compare less than that
function is given; of the view's time it sees only which jobs are next in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from operator import is_

from nodeagent.agent.apply import Applier, CommitRequests
from nodeagent.agent.clock import WakePace
from nodeagent.agent.failsafe import FailsafeWatch
from nodeagent.agent.lease import Lease
from nodeagent.agent.shared import Shared
from nodeagent.agent.stopwatch import Stopwatch
from nodeagent.model.node import Incarnation
from nodeagent.plan.backfill import line, reserved
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.pod import Keep, PodAction, Stop, asks_the_store, plan_pods
from nodeagent.plan.queue import NextUp, next_up
from nodeagent.pods.base import PodStatus
from nodeagent.store.base import StoreUnavailableError


class OwnPods:
    """One node's. ``standbys``: how many of them it keeps now."""

    def __init__(
        self,
        shared: Shared,
        lease: Lease,
        applier: Applier,
        *,
        failsafe: FailsafeWatch,
        commits: CommitRequests,
        stopwatch: Stopwatch,
        pace: WakePace,
        standbys: Callable[[], int],
    ) -> None:
        self._host, self._clock, self._metrics = shared.host, shared.clock, shared.metrics
        self._lease, self._applier, self._failsafe, self._commits = lease, applier, failsafe, commits
        self._stopwatch, self._pace, self._standbys = stopwatch, pace, standbys
        self._plan = PodPlan(shared.node)
        self._actions: tuple[PodAction, ...] = ()
        self._promised: Mapping[str, float] = {}

    def plan(self, cluster: Cluster) -> int:
        """Plan for this view; the number of the plan, which is the last one's if nothing changed that it looks at."""
        self._promised = self._failsafe.promised(cluster)
        statuses, standbys = self._host.status(), self._standbys()
        self._actions = self._plan(cluster, self._lease.incarnation, statuses, standbys, self._promised.keys())
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
                if isinstance(action, Stop):  # what there is to tell is told later
                    await self._applier.pod(replace(action, meanwhile=None))
            elif isinstance(action, Keep):
                changed |= await self._failsafe.replace_keepers(action, self._applier.pod)
            else:
                changed |= await self._applier.pod(action)
        if not self._may_ask():
            raise StoreUnavailableError("the last call was not answered: the store is asked again in a moment")
        await self._commits.carry()
        wants_commit = any(status.commit is not None for status in statuses.values())
        return changed, not actions and not wants_commit and not self._stopwatch.running

    @property
    def next_end(self) -> float | None:
        """When (our clock) the next promise of failsafe time runs out, as of the plan."""
        return min(self._promised.values(), default=None)

    async def tell_recoveries(self, cluster: Cluster) -> bool:
        """Count and tell how long those took that are over now. Whether something changed by that."""
        changed = False
        for recovery in self._stopwatch.over(cluster.jobs):
            self._metrics.recovered(cluster.jobs[recovery.uid].name, recovery.cause, recovery.phases)
        for recovery in self._stopwatch.finished(cluster.jobs, self._clock.now()):
            self._metrics.stepped(recovery.cause, recovery.phases)
            changed |= await self._applier.give_back(recovery)
        return changed

    def _may_ask(self) -> bool:
        """The store may be asked now: it answered when it was asked last, or that is long enough ago."""
        return not self._pace.left(self._clock.now())


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

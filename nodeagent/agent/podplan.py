"""What this node is to do for its pods, worked out again only when something changed: most rounds look at the very
same view and the very same pods as the one before, and with many jobs the plan is most of such a round.

Owns the comparison; the plan is ``plan/pod.py``'s, a pure function of what is compared here. Must never compare less
than that function is given; of the view's time it sees only which jobs are next in the queue.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import is_

from nodeagent.model.node import Incarnation
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.pod import PodAction, plan_pods
from nodeagent.plan.queue import Line, next_up
from nodeagent.pods.base import PodStatus


class PodPlan:
    """One node's."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._of: tuple[tuple[object, ...], tuple[object, ...]] | None = None
        """What the last plan was made of: compared by identity, and by value."""
        self._line = Line()
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
        self._line = next_up(cluster, self._line)
        same = (cluster.nodes, cluster.jobs, cluster.lapsed, *statuses.values())
        equal = (
            incarnation, standbys, frozenset(lent), cluster.refused, cluster.unread, tuple(statuses), self._line.up,
        )  # fmt: skip
        last = self._of
        if last is None or last[1] != equal or not all(map(is_, last[0], same)):
            self._of, self.made = (same, equal), self.made + 1
            self._actions = plan_pods(cluster, self._node, incarnation, statuses, standbys, lent, self._line.up)
        return self._actions

"""An agent's failsafe, without the rest of the agent: what it tells its lease process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from nodeagent.agent.failsafe import FailsafeWatch
from nodeagent.lease.lending import Table
from nodeagent.model.node import Incarnation
from nodeagent.model.timing import Timing
from nodeagent.plan.cluster import Cluster
from nodeagent.pods.base import PodStatus
from tests.inprocess.lease import Words
from tests.sim.virtual import SimClock
from tests.unit.plan.build import life

TIMING = Timing()


class Bench:
    """One node's, in the life ``life(node)``."""

    def __init__(self, cluster: Cluster, node: str, *pods: PodStatus) -> None:
        self.clock, self.words, self.cluster, self.node = SimClock(), Words(), cluster, node
        self.pods = {pod.uid: pod for pod in pods}
        self.lease = SimpleNamespace(node=node, incarnation=Incarnation(life=life(node), start=1), away_since=None)
        host = SimpleNamespace(status=lambda: self.pods)
        context: Any = SimpleNamespace(timing=TIMING, clock=self.clock, host=host, process=self.words)
        self.failsafe = FailsafeWatch(context, cast("Any", self.lease), lambda: self.cluster)

    def lending(self) -> frozenset[str]:
        """Jobs that this node may not let go of yet."""
        return frozenset(self.failsafe.promised(self.cluster))

    def next_end(self) -> float | None:
        return min(self.failsafe.promised(self.cluster).values(), default=None)

    def order_table(self) -> Table:
        """What the lease process goes by now."""
        return Table("b", self.node, life(self.node), self.words.leaving, self.words.known[-1])


def reported_of(cluster: Cluster, node: str) -> Table:
    """What a node's agent tells of this cluster."""
    bench = Bench(cluster, node)
    bench.failsafe._write(cluster)
    return bench.order_table()

"""What one round of an agent costs in a large cluster with a long queue: the time that it keeps its process from
anything else. The records are in memory, and the agent has no pods, store or network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from benchmarks.scale.records import FREE, crowd, names
from nodeagent.agent.context import AgentContext
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.published import Publisher, unchecked
from nodeagent.agent.rounds import EndedJobs, OwnPods, ProposalTurns, Rounds
from nodeagent.agent.undecided import Undecided
from nodeagent.model.node import Readiness
from nodeagent.model.timing import Timing
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.pods.actions import PodAction, Prepare
from nodeagent.pods.base import PodStatus
from nodeagent.spec.agentconfig import RetentionConfig

ROUNDS = 50


class RoundTimes(NamedTuple):
    """Milliseconds of CPU time."""

    first: float
    rest: float
    """Nothing but time has changed since the round before (median)."""
    changed: float
    """One node's record has (median)."""


def measure(nodes: int, queued: int, gang: int) -> Awaitable[RoundTimes]:
    """Of an agent whose node is free, where ``queued`` jobs wait and jobs of ``gang`` nodes have all other nodes."""
    return _measured(_Measured(replace(crowd(nodes, queued, gang), notes=Notes())), names(nodes))


async def _measured(agent: _Measured, every: list[str]) -> RoundTimes:
    first = await agent.round()
    await agent.round()  # with what the first one got ready
    rest, changed = [], []
    for turn in range(ROUNDS):
        agent.beat()
        rest.append(await agent.round())
        agent.change(every[turn % FREE], str(turn))
        changed.append(await agent.round())
    return RoundTimes(first, statistics.median(rest), statistics.median(changed))


class _Measured:
    """Rounds of one agent over a view that the benchmark changes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._pods: dict[str, PodStatus] = {}
        me = next(iter(cluster.nodes.values()))
        nothing: Callable[..., Awaitable[bool]] = _no
        unread: Any = None
        context = AgentContext(
            me.id, Timing(), store=unread, process=unread, metrics=unread, random_id=lambda: "r",
            host=cast("Any", SimpleNamespace(status=lambda: self._pods)),
            clock=cast("Any", SimpleNamespace(now=time.monotonic, wall=time.time)),
            snapshot=cast("Any", SimpleNamespace(complete=False)), undecided=Undecided(me.id, Metrics().left_undecided),
        )  # fmt: skip
        lease: Any = SimpleNamespace(incarnation=me.incarnation, facts=me.facts, publish=lambda *_: False)
        applier: Any = SimpleNamespace(pod=self._pod, job=nothing, shelve=nothing)
        stubs: dict[str, Any] = {
            "failsafe": SimpleNamespace(promised=lambda _cluster: {}, set_failsafe_members=nothing),
            "commits": SimpleNamespace(carry=nothing, pending=False),
            "stopwatch": SimpleNamespace(
                running=False, look=lambda *_: None, over=lambda *_: (), finished=lambda *_: ()
            ),
            "pace": SimpleNamespace(left=lambda _now: 0.0),
        }
        reach: Any = SimpleNamespace(unreachable={})
        turns = ProposalTurns(context, applier)
        self.rounds = Rounds(
            context, lambda: self.cluster, own=OwnPods(context, lease, applier, standbys=lambda: 2, **stubs),
            publisher=Publisher(context, lease, unchecked, reach), turns=turns,
            ended=EndedJobs(context, applier, turns, RetentionConfig), restarts=unread,
        )  # fmt: skip

    async def _pod(self, action: PodAction) -> bool:
        """What the plan wants ready is ready at once."""
        if isinstance(action, Prepare):
            self._pods[action.uid] = PodStatus(uid=action.uid, phase="ready")
        return True

    async def round(self) -> float:
        began = time.process_time()
        await self.rounds.once()
        return 1000 * (time.process_time() - began)

    def beat(self) -> None:
        """Time passes, and nothing else."""
        self.cluster = replace(self.cluster, served=self.cluster.served + 500)

    def change(self, name: str, text: str) -> None:
        """A node's record changes."""
        record = self.cluster.nodes[name]
        ready = {"run-0": Readiness(state="ready", reason=text)}
        nodes = {**self.cluster.nodes, name: record.model_copy(update={"readiness": ready})}
        self.cluster = replace(self.cluster, nodes=nodes)


async def _no(*_: object) -> bool:
    return False

"""The checker works: each rule of the protocol, broken on purpose, is noticed. A mutant that survives is a hole in
the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nodeagent.model.timing import Timing
from nodeagent.store.twin import generation, restore
from nodeagent.store.twin.state import State
from nodeagent.workers.base import PodStatus
from tests.sim import cluster as cluster_module
from tests.sim.cluster import SimCluster
from tests.sim.machine import SimMachine
from tests.sim.virtual import run_virtual

Mutate = Callable[[pytest.MonkeyPatch], None]


def holders_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A new generation does not wait for those who may still run the old one, once they are no members."""
    patch.setattr(generation, "next_holders", lambda s, job, lost: {})


def ack_before_stopping(patch: pytest.MonkeyPatch) -> None:
    """Nodes acknowledge while their old workers still run."""
    patch.setattr(PodStatus, "quiet", property(lambda status: True))


def lease_shorter_than_the_fence(patch: pytest.MonkeyPatch) -> None:
    """The inequality of the timing is broken: silence counts as death before the shims have stopped the workers."""
    patch.setattr(Timing, "problems", lambda timing: [])
    patch.setattr(cluster_module, "TIMING", cluster_module.TIMING.model_copy(update={"fence": 6.0}))


def guard_asleep(patch: pytest.MonkeyPatch) -> None:
    """Assumption A2 broken: shims act five seconds after their deadline."""

    def grant(
        self: SimMachine,
        until: float,
        seq: int,
        uid: str | None = None,
        real: Callable[..., None] = SimMachine.grant,
    ) -> None:
        self.guard_late = 5.0
        real(self, until, seq, uid)

    patch.setattr(SimMachine, "grant", grant)


def half_a_gang(patch: pytest.MonkeyPatch) -> None:
    """A generation becomes active before all its members acknowledged."""
    patch.setattr(generation, "_not_ready", lambda s, job, head: None)


async def _provoke(seed: int) -> None:
    """A node that falls silent, a scale-in, a drain: the moments at which the rules above matter."""
    async with asyncio.TaskGroup() as tasks:
        cluster = SimCluster(seed, 4, tasks)
        try:
            for node in cluster.nodes.values():
                node.start_agent()
            await cluster.submit("a", 1, 4, 3)
            await cluster.until(lambda: cluster.whole("a"), 90, "whole")
            await asyncio.sleep(3)
            await cluster.scale("a", "scale", target=1)
            await asyncio.sleep(10)
            await cluster.scale("a", "scale", target=3)
            await cluster.until(lambda: cluster.whole("a"), 90, "whole again")
            await asyncio.sleep(3)
            head = cluster.job("a").head
            assert head is not None
            leader, last = head.ordered()[0].node, head.ordered()[-1].node
            cluster.nodes[last].link.cut = True
            await asyncio.sleep(8)
            cluster.nodes[last].link.cut = False
            await cluster.until(lambda: cluster.whole("a"), 90, "whole after the cut")
            head = cluster.job("a").head
            assert head is not None
            leader, last = head.ordered()[0].node, head.ordered()[-1].node
            cluster.nodes[last].freeze_agent()
            cluster.nodes[leader].machine.worker_ends("uid-a", 0, signal=9)
            await cluster.scale("a", "scale", target=1)
            await asyncio.sleep(8)
            cluster.nodes[last].thaw()
            await asyncio.sleep(20)
        finally:
            await cluster.close()


def merged_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """A store that lost writes keeps of each record what it has or was given first, whichever is newer."""
    patch.setattr(restore._Merge, "takes", lambda merge, stored, offered: stored is None)


def deciding_while_recovering(patch: pytest.MonkeyPatch) -> None:
    """A store that lost writes decides at once on what it still has."""
    patch.setattr(State, "recovering", property(lambda state: False))


async def _lose_writes(seed: int) -> None:
    """The gang moves to other nodes in seconds that the store then loses; the old gang comes first, later an agent that
    had seen less than the others comes first to an emptied store."""
    async with asyncio.TaskGroup() as tasks:
        cluster = SimCluster(seed, 4, tasks)
        try:
            for node in cluster.nodes.values():
                node.start_agent()
            await cluster.submit("a", 2, 2, 2)
            await cluster.until(lambda: cluster.whole("a"), 90, "whole")
            first = cluster.job("a").head
            assert first is not None
            old = [cluster.nodes[name] for name in first.members]
            rolling = asyncio.ensure_future(cluster.roll_back_store(8))
            await asyncio.sleep(0.1)
            for node in old:
                node.link.cut = True
            await cluster.until(lambda: cluster.job("a").head != first and cluster.whole("a"), 7, "moved")
            await rolling
            for node in cluster.nodes.values():
                node.link.cut = node not in old
            await asyncio.sleep(2.5)
            for node in cluster.nodes.values():
                node.link.cut = False
            await asyncio.sleep(10)
            second = cluster.job("a").head
            assert second is not None
            ahead = next(n for n in cluster.nodes.values() if n.name not in second.members)
            ahead.link.cut = True
            cluster.nodes[min(second.members)].machine.worker_ends("uid-a", 0, signal=9)
            await asyncio.sleep(2)
            for node in cluster.nodes.values():
                node.link.cut = node is not ahead
            emptying = asyncio.ensure_future(cluster.empty_store())
            await asyncio.sleep(1)
            for node in cluster.nodes.values():
                node.link.cut = False
            await emptying
            await asyncio.sleep(20)
            cluster.checker.check_kept()
        finally:
            await cluster.close()


def _broken(seeds: range) -> bool:
    caught = False
    for seed in seeds:
        for provoke in (_provoke, _lose_writes):
            try:
                run_virtual(provoke(seed))
            except* AssertionError:
                caught = True
            if caught:
                return True
    return False


def test_unchanged_core_is_not_accused() -> None:
    assert not _broken(range(1, 5))


MUTANTS: tuple[Mutate, ...] = (
    holders_forgotten,
    ack_before_stopping,
    lease_shorter_than_the_fence,
    guard_asleep,
    half_a_gang,
    merged_by_arrival,
    deciding_while_recovering,
)


@pytest.mark.parametrize("mutate", MUTANTS)
def test_mutant_is_caught(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert _broken(range(1, 9)), mutate.__doc__

"""Agents that have nothing to do look at nothing twice, and are awake at once when something happens."""

from __future__ import annotations

import asyncio

from tests.sim.cluster import SimCluster
from tests.sim.test_directed import running, simulate


def rested(c: SimCluster) -> list[str]:
    return [n.name for n in c.nodes.values() if n.agent is not None and n.agent._round._rested is not None]


def test_who_is_at_rest_wakes_for_whatever_happens() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 3)
        await running(c, 3)
        await asyncio.sleep(10)
        assert rested(c) == list(c.nodes)

        c.nodes["n1"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.job("j").restarts == 1, 5, "formed again")
        await running(c, 3)
        await asyncio.sleep(10)
        assert rested(c) == list(c.nodes)

        await c.nodes["n2"].power_cut()
        await running(c, 2)
        c.nodes["n2"].power_on()
        await running(c, 3)
        await asyncio.sleep(10)
        await c.operate("j", desired="pause")
        await c.until(lambda: c.job("j").phase == "paused", 10, "paused")

    simulate(3, scenario)


def test_who_only_saw_a_gang_form_is_at_rest_too() -> None:
    """In a large cluster that is who has no part in most jobs, and an agent that is not at rest skips no beat."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        await asyncio.sleep(10)
        generation = c.job("j").generation
        assert generation is not None
        first, second = sorted(generation.members)
        c.nodes[second].freeze_agent()
        c.nodes[first].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: all(n.has_read("uid-j", 2) for n in c.nodes.values() if n.name != second), 3, "it forms")
        c.nodes[second].thaw()
        await running(c, 2)
        await asyncio.sleep(10)
        assert rested(c) == list(c.nodes)

    simulate(4, scenario)

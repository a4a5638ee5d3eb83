"""Calls to the store cost time: what an overloaded store does to a cluster, and that congestion ends with its cause."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.model.world import Token
from tests.groups import seeds
from tests.sim.cluster import SimCluster
from tests.sim.provocations import overloaded
from tests.sim.test_directed import running, simulate

REST = 20.0
"""Seconds over which the calls of a cluster at rest are counted."""


async def calls(cluster: SimCluster, seconds: float) -> float:
    """Calls per second that the store carries out."""
    before = cluster.thread.done
    await asyncio.sleep(seconds)
    return (cluster.thread.done - before) / seconds


def token(cluster: SimCluster) -> Token:
    generation = cluster.job("j").generation
    assert generation is not None
    return generation.token


@pytest.mark.parametrize("seed", seeds([1], [2]))
def test_a_busy_store_works_off_what_piled_up_while_it_stood(seed: int) -> None:
    """The store has half a second of work in each second. It stands for a while, all calls come again and again, and
    what they left is carried out though nobody waits for it; then everything is as before."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 5, 5)
        await c.submit("q", 7, 7, 7)  # never fits
        await running(c, 5)
        await asyncio.sleep(20)
        rate = await calls(c, REST)
        c.thread.cost = 0.5 / rate
        before = token(c)
        busy = await calls(c, REST)
        assert busy < 1.2 * rate, "a store that is half busy makes nobody call more often"
        c.frozen.close()
        await asyncio.sleep(6)
        c.frozen.open()
        await c.until(lambda: c.thread.waiting > 5, 5.0, "much has piled up")
        await c.until(lambda: c.thread.waiting == 0, 20.0, "all of it is worked off")
        await asyncio.sleep(10)
        assert await calls(c, REST) < 1.2 * rate
        assert token(c) == before, "nothing of it has disturbed the training"
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.job("j").restarts == 1 and c.whole("j"), 5.0, "a killed worker is replaced")

    simulate(6, scenario, seed)


@pytest.mark.parametrize("seed", seeds([1], [2]))
def test_an_overload_that_outlasts_a_lease_disturbs_nothing(seed: int) -> None:
    simulate(4, overloaded, seed)

"""Sick hardware on the simulated cluster: who is evicted, who is kept, and that none of it costs the job anything."""

from __future__ import annotations

import asyncio

from tests.sim.cluster import TIMING, SimCluster
from tests.sim.faults import unfit
from tests.sim.test_directed import running, simulate


def test_a_sick_node_is_left_at_no_cost_and_taken_again_when_it_is_well() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        c.nodes["n2"].find(unfit())
        await running(c, 2)
        job = c.job("j")
        assert job.generation is not None
        assert (job.generation.cause.kind, job.generation.cause.node, job.generation.planned) == (
            "hardware",
            "n2",
            True,
        )
        assert not any(entry.counts for entry in job.budget.values())
        c.nodes["n2"].find()
        await running(c, 3, limit=TIMING.cooldown * 2 + 30)
        assert c.job("j").restarts == 2

    simulate(3, scenario)


def test_the_breaker_keeps_what_runs_though_all_become_sick_one_after_the_other() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 4, 4)
        await running(c, 4)
        for node in c.nodes.values():
            node.find(unfit())
            await asyncio.sleep(5.0)
        job = c.job("j")
        assert job.generation is not None
        assert sorted(job.generation.members) == ["n2", "n3", "n4"], (
            "the first to become sick is the only one that goes"
        )
        assert (job.generation.state, job.restarts) == ("active", 1)

    simulate(4, scenario)


def test_what_is_degraded_goes_on() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        for node in c.nodes.values():
            node.find(unfit("degraded"), unfit("app"))
        await asyncio.sleep(5.0)
        assert c.job("j").restarts == 0

    simulate(3, scenario)

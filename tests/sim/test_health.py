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


def test_the_breaker_keeps_what_runs_though_the_nodes_clocks_are_minutes_apart() -> None:
    """All members were evicted at once: their verdicts seemed to have begun one after the other."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 3)
        await running(c, 3)
        for number, node in enumerate(c.nodes.values()):
            right, ahead = node.clock.wall, number * 11 * 60
            node.clock.wall = lambda right=right, ahead=ahead: right() + ahead  # type: ignore[method-assign,misc]
        for node in c.nodes.values():
            now = node.clock.wall()
            node.find(unfit().model_copy(update={"since": now, "seen": now}))
        await asyncio.sleep(20)
        job = c.job("j")
        assert job.generation is not None
        assert job.phase == "running"
        assert len(job.generation.members) >= 2, "one may go before others are known to be unfit, too"

    simulate(3, scenario)


def test_a_verdict_is_as_old_for_others_after_its_agent_has_started_again() -> None:
    async def scenario(c: SimCluster) -> None:
        node = c.nodes["n3"]
        node.find(unfit("degraded"))
        await asyncio.sleep(2)
        (before,) = c.server.state.nodes["n3"].facts.health
        assert before.since_served is not None
        await asyncio.sleep(60)
        await node.kill_agent()
        node.start_agent()
        await asyncio.sleep(5)
        (after,) = c.server.state.nodes["n3"].facts.health
        assert after.since_served is not None
        assert abs(after.since_served - before.since_served) < 2000

    simulate(3, scenario)


def test_what_is_degraded_goes_on() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        for node in c.nodes.values():
            node.find(unfit("degraded"), unfit("app"))
        await asyncio.sleep(5.0)
        assert c.job("j").restarts == 0

    simulate(3, scenario)

"""Nodes that are taken away: with a notice a gang is gone before they are, and nothing is spent."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.model.node import Notice
from nodeagent.plan.nodes.availability import SPARE
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_directed import running, simulate
from tests.sim.test_windows import at_no_cost, members

GRACE = 5.0
"""Of the jobs of a simulation."""


def notify(c: SimCluster, name: str, seconds: float) -> None:
    """Its owner takes the machine away in so many seconds."""
    node = c.nodes[name]
    assert node.agent is not None
    node.agent.advert.notice(Notice(until=node.clock.wall() + seconds, text="to be taken away"))


@pytest.mark.parametrize("seconds", [60.0, GRACE + SPARE, 2.0 + SPARE])
def test_a_gang_is_gone_before_the_machine_is(seconds: float) -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        for node in c.nodes.values():
            node.machine.waits = True
        notify(c, "n3", seconds)
        await c.until(lambda: members(c) == {"n1", "n2"} and c.whole("j"), seconds, "it has left in time")
        generation = c.job("j").generation
        assert generation is not None
        assert (generation.planned, generation.cause.kind, generation.cause.text) == (
            True,
            "drain",
            "node n3 is to be taken away",
        )
        await c.nodes["n3"].power_cut(disk_lost=True)
        await asyncio.sleep(20)
        assert c.whole("j")
        after = c.job("j").generation
        assert after is not None
        assert after.number == generation.number, "nobody misses it"
        assert at_no_cost(c)
        c.nodes["n3"].power_on()
        c.nodes["n3"].start_agent()
        await running(c, 3, limit=TIMING.cooldown + 60)

    simulate(3, scenario)


@pytest.mark.parametrize(("name", "ahead"), [("n1", 120), ("n3", -120)])
def test_no_clock_that_is_wrong_takes_the_time_that_is_left(name: str, ahead: float) -> None:
    """The workers of the whole gang were killed at once, and what was not saved was lost."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        clock = c.nodes[name].clock
        right = clock.wall
        clock.wall = lambda: right() + ahead  # type: ignore[method-assign]
        notify(c, "n3", 120)
        await running(c, 2)
        generation = c.job("j").generation
        assert generation is not None
        assert (generation.planned, generation.grace, generation.cause.kind) == (True, None, "drain")

    simulate(3, scenario)


def test_the_time_that_is_left_goes_by_while_the_store_is_away() -> None:
    """Served time does not."""

    async def scenario(c: SimCluster) -> None:
        notify(c, "n3", 120)
        await asyncio.sleep(10)
        c.frozen.close()
        await asyncio.sleep(60)
        c.frozen.open()
        await asyncio.sleep(2)
        other = c.nodes["n1"].agent
        assert other is not None
        view = other.cluster()
        notice = view.nodes["n3"].facts.notice
        assert notice is not None
        assert abs(notice.until_served - view.served - 48_000) < 2000

    simulate(3, scenario)


def test_a_notice_that_is_taken_back_is_over() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        notify(c, "n3", 120)
        await running(c, 2)
        agent = c.nodes["n3"].agent
        assert agent is not None
        agent.advert.notice(None)
        await running(c, 3, limit=TIMING.cooldown + 20)
        assert at_no_cost(c)

    simulate(3, scenario)


def test_without_a_notice_it_is_a_lost_node_and_costs_no_budget_either() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        await c.nodes["n3"].power_cut()
        await running(c, 2)
        assert at_no_cost(c)

    simulate(3, scenario)

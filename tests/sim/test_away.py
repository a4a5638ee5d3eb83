"""What agents say of themselves while the store is away: since when, on whose time their jobs run, and why not."""

from __future__ import annotations

import asyncio

from nodeagent.api.view import AgentHealth
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_directed import simulate
from tests.sim.test_failsafe import apart, cut, started


def health(c: SimCluster, name: str) -> AgentHealth:
    agent = c.nodes[name].agent
    assert agent is not None
    return agent.health()


def test_agents_tell_whose_time_it_is() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        assert (health(c, "n1").lent, health(c, "n1").not_lent) == ({}, {})
        cut(c, c.nodes)
        await asyncio.sleep(10)
        for name in c.nodes:
            told = health(c, name)
            assert told.store_away_since is not None
            assert told.lease_left == 0
            assert TIMING.heartbeat < told.lent["uid-j"] <= TIMING.fence
            assert told.not_lent == {}
        apart(c, "n3")
        await asyncio.sleep(TIMING.fence + 1)
        assert (health(c, "n1").lent, health(c, "n1").not_lent) == ({}, {"uid-j": "n3 does not answer"})
        assert health(c, "n3").not_lent == {"uid-j": "n1 does not answer"}
        c.net.cut.clear()
        cut(c, c.nodes, False)
        await asyncio.sleep(10)
        told = health(c, "n1")
        assert (told.store_away_since, told.lent, told.not_lent) == (None, {}, {})

    simulate(3, scenario)


def test_an_agent_that_starts_while_the_store_is_away_says_since_when() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        cut(c, ["n1"])
        await c.nodes["n1"].kill_agent()
        c.nodes["n1"].start_agent()
        await asyncio.sleep(5)
        told = health(c, "n1")
        assert not told.joined
        assert told.store_away_since is not None
        cut(c, ["n1"], False)
        await asyncio.sleep(10)
        told = health(c, "n1")
        assert (told.joined, told.store_away_since) == (True, None)

    simulate(3, scenario)

"""Planned restarts of an agent: its node's lease process goes on, until the next start or the end of its patience."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.agent.gauges import node_state
from nodeagent.model.node import Cordon
from nodeagent.spec.agentconfig import AgentConfig
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.machine import GRACE
from tests.sim.test_directed import running, simulate
from tests.sim.test_lost_store import back, pids

WITHOUT_AGENT = AgentConfig().without_agent


async def _stand(c: SimCluster, size: int = 3, minimum: int = 2) -> dict[str, tuple[int, ...]]:
    """A job on ``size`` nodes, n1 among them, that could go on without one."""
    await c.submit("j", minimum, size, size)
    await running(c, size)
    await asyncio.sleep(5)
    return pids(c)


def _state(c: SimCluster, name: str) -> str:
    """As the others see it."""
    agent = next(n.agent for n in c.nodes.values() if n.agent is not None and n.name != name)
    cluster = agent.cluster()
    return node_state(cluster.nodes[name], cluster)[0]


@pytest.mark.parametrize("away", [0.1, 2.0, 10.0, 25.0])
def test_training_goes_on_until_the_next_start(away: float) -> None:
    async def scenario(c: SimCluster) -> None:
        was = await _stand(c)
        generation = c.job("j").generation
        c.nodes["n1"].end_agent()
        await asyncio.sleep(TIMING.heartbeat * 3)
        assert _state(c, "n1") == "restarting"
        await asyncio.sleep(away)
        c.nodes["n1"].start_agent()
        await asyncio.sleep(TIMING.heartbeat * 3)
        assert _state(c, "n1") == "ready"
        await asyncio.sleep(20)
        assert (c.job("j").generation, pids(c)) == (generation, was)

    simulate(3, scenario)


def test_all_agents_at_once_and_again() -> None:
    async def scenario(c: SimCluster) -> None:
        was = await _stand(c)
        generation = c.job("j").generation
        for pause in (8.0, 0.02, 3.0):
            for node in c.nodes.values():
                node.end_agent()
            await asyncio.sleep(pause)
            for node in c.nodes.values():
                node.start_agent()
        await asyncio.sleep(20)
        assert (c.job("j").generation, pids(c)) == (generation, was)

    simulate(4, scenario)


def test_a_fault_meanwhile_waits_for_the_next_start_no_longer_than_a_lease() -> None:
    async def scenario(c: SimCluster) -> None:
        await _stand(c)
        c.nodes["n1"].end_agent()
        await asyncio.sleep(2)
        c.nodes["n1"].machine.worker_ends("uid-j", 0, signal=9)
        await asyncio.sleep(0.5)
        assert await running(c, 2) < TIMING.lease + 1.0
        assert c.job("j").restarts == 1

    simulate(3, scenario)


def test_nobody_comes_back() -> None:
    """Its lease process stops the workers and leaves in good order: the others re-form at once."""

    async def scenario(c: SimCluster) -> None:
        await _stand(c)
        c.nodes["n1"].end_agent()
        took = await c.until(lambda: "n1" not in pids(c), WITHOUT_AGENT + GRACE + 2, "its workers are stopped")
        assert took > WITHOUT_AGENT - 1
        assert await running(c, 2) < 1.0
        assert c.server.state.nodes["n1"].left
        assert c.nodes["n1"].agent is None
        c.nodes["n1"].start_agent()
        await running(c, 3, limit=TIMING.cooldown + 10)
        assert not any(e.counts for e in c.job("j").budget.values())

    simulate(3, scenario)


def test_a_node_that_dies_meanwhile_is_noticed_as_soon_as_ever() -> None:
    async def scenario(c: SimCluster) -> None:
        await _stand(c)
        c.nodes["n1"].end_agent()
        await asyncio.sleep(2)
        await c.nodes["n1"].power_cut()
        assert await running(c, 2) < TIMING.lease + 1

    simulate(3, scenario)


def test_an_agent_that_nobody_counts_on_leaves_at_once() -> None:
    async def scenario(c: SimCluster) -> None:
        await _stand(c)
        c.nodes["n4"].end_agent()
        await c.until(lambda: c.server.state.nodes["n4"].left, TIMING.heartbeat, "it has left")

    simulate(4, scenario)


def test_a_failsafe_member_that_runs_nothing_is_waited_for_too() -> None:
    async def scenario(c: SimCluster) -> None:
        await _stand(c, size=2, minimum=1)
        assert "n3" in c.job("j").failsafe_members
        c.nodes["n3"].end_agent()
        await asyncio.sleep(2)
        assert _state(c, "n3") == "restarting"
        await c.until(lambda: c.server.state.nodes["n3"].left, WITHOUT_AGENT + 2, "it has left")

    simulate(3, scenario)


def test_draining_its_node_moves_its_work_away_and_it_leaves() -> None:
    """How an operator says that it will not be back. It lets go of the job at once, and leaves in its time."""

    async def scenario(c: SimCluster) -> None:
        await _stand(c)
        c.nodes["n1"].end_agent()
        await asyncio.sleep(2)
        await c.cordon("n1", Cordon(reason="will not be back", by="test", at=0.0, drain=True))
        await running(c, 2, limit=8)
        left = AgentConfig().without_agent + TIMING.promise + 2
        await c.until(lambda: c.server.state.nodes["n1"].left, left, "it has left")

    simulate(3, scenario)


@pytest.mark.parametrize("away", [1.0])
def test_the_store_goes_away_meanwhile(away: float) -> None:
    async def scenario(c: SimCluster) -> None:
        was = await _stand(c)
        generation = c.job("j").generation
        c.nodes["n1"].end_agent()
        await asyncio.sleep(2)
        for node in c.nodes.values():
            node.link.cut = True
        await asyncio.sleep(away)
        for node in c.nodes.values():
            node.link.cut = False
        await asyncio.sleep(2)
        c.nodes["n1"].start_agent()
        await asyncio.sleep(10)
        assert (c.job("j").generation, pids(c)) == (generation, was)

    simulate(3, scenario)


@pytest.mark.parametrize("how", ["restarted", "emptied", "rolled back"])
@pytest.mark.parametrize("who", [("n1",), ("n1", "n2", "n3")], ids=["one", "all"])
def test_the_store_loses_what_it_knew_meanwhile(how: str, who: tuple[str, ...]) -> None:
    async def scenario(c: SimCluster) -> None:
        await _stand(c)
        rolling = asyncio.ensure_future(c.roll_back_store(4)) if how == "rolled back" else None
        await asyncio.sleep(1)
        for name in who:
            c.nodes[name].end_agent()
        await asyncio.sleep(1)
        if rolling is not None:
            await rolling
        elif how == "emptied":
            await c.empty_store()
        else:
            c.server.restart()
        await asyncio.sleep(8)
        for name in who:
            c.nodes[name].start_agent()
        await back(c)
        await running(c, 3, limit=90)
        assert not any(e.counts for e in c.job("j").budget.values())

    simulate(3, scenario)

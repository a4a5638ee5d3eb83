"""``systemctl stop`` and shutdowns: the node's work moves away before its agent leaves, and it takes new work when it
is back."""

from __future__ import annotations

import asyncio

from nodeagent.agent import systemd
from nodeagent.agent.loop import Agent
from nodeagent.model.node import Cordon
from nodeagent.spec.agentconfig import AgentConfig
from tests.sim.cluster import SimCluster
from tests.sim.test_directed import running, simulate
from tests.sim.test_failsafe import cut

LIMIT = AgentConfig().drain


def _agent(c: SimCluster, name: str) -> Agent:
    agent = c.nodes[name].agent
    assert agent is not None
    return agent


async def _job_on(c: SimCluster, size: int, minimum: int) -> None:
    await c.submit("j", minimum, size, size)
    await running(c, size)


async def _drained(c: SimCluster, name: str) -> float:
    """Seconds that it took."""
    began = c.nodes[name].clock.now()
    await systemd.drain(_agent(c, name), c.nodes[name].clock)
    return c.nodes[name].clock.now() - began


def test_the_job_goes_on_without_it_before_it_leaves() -> None:
    async def scenario(c: SimCluster) -> None:
        await _job_on(c, 3, 2)
        took = await _drained(c, "n1")
        assert took < LIMIT / 2
        assert _agent(c, "n1").needed_by() == ""
        mark = c.server.state.nodes["n1"].cordon
        assert mark is not None and (mark.by, mark.drain) == (systemd.BY, True)
        await running(c, 2)
        await systemd.come_back(_agent(c, "n1"))
        assert c.server.state.nodes["n1"].cordon is None
        await running(c, 3, limit=90)

    simulate(3, scenario)


def test_who_is_not_missed_goes_at_once_and_unmarked() -> None:
    async def scenario(c: SimCluster) -> None:
        await asyncio.sleep(3)
        assert await _drained(c, "n1") == 0
        assert c.server.state.nodes["n1"].cordon is None

    simulate(2, scenario)


def test_a_persons_words_stay() -> None:
    async def scenario(c: SimCluster) -> None:
        await _job_on(c, 3, 2)
        await c.cordon("n1", Cordon(reason="bad fan", by="root", at=0.0))
        await asyncio.sleep(2)
        await _drained(c, "n1")
        mark = c.server.state.nodes["n1"].cordon
        assert mark is not None and (mark.reason, mark.by, mark.drain) == ("bad fan", "root", True)
        await systemd.come_back(_agent(c, "n1"))
        mark = c.server.state.nodes["n1"].cordon
        assert mark is not None and (mark.reason, mark.by, mark.drain) == ("bad fan", "root", False)

    simulate(3, scenario)


def test_a_store_that_is_away_does_not_hold_it_for_ever() -> None:
    async def scenario(c: SimCluster) -> None:
        await _job_on(c, 3, 2)
        cut(c, c.nodes)
        await asyncio.sleep(2)
        assert LIMIT <= await _drained(c, "n1") < LIMIT + 5
        cut(c, c.nodes, False)

    simulate(3, scenario)

"""Directed schedules: what is on the disks of nodes outlives all memory, and nothing that ended comes back with it."""

from __future__ import annotations

import asyncio

import pytest

from tests.groups import seeds
from tests.sim import saved
from tests.sim.cluster import SimCluster
from tests.sim.saved import acknowledged, dark, joined, off_while_it_ended, stopped, submitted, whole
from tests.sim.test_directed import simulate

SEEDS = seeds([1], [2, 3])


@pytest.mark.parametrize("seed", SEEDS)
def test_no_job_is_lost_when_all_lose_power(seed: int) -> None:
    simulate(4, saved.all_lose_power, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_acknowledged_is_not_lost_with_all_memory_and_a_disk(seed: int) -> None:
    simulate(4, saved.dark_after_an_answer, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_acknowledged_is_not_lost_with_the_store_and_its_agent(seed: int) -> None:
    simulate(4, saved.emptied_after_an_answer, seed)


@pytest.mark.parametrize("delete", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_was_off_brings_no_ended_job_back(seed: int, delete: bool) -> None:
    simulate(4, lambda c: off_while_it_ended(c, delete=delete), seed)


def test_a_node_that_was_off_brings_nothing_back_to_a_store_that_has_all() -> None:
    async def scenario(c: SimCluster) -> None:
        await joined(c)
        await submitted(c)
        await whole(c)
        await asyncio.sleep(3)
        await c.nodes["n4"].power_cut()
        await whole(c)
        await stopped(c, delete=True)
        c.server.restart()
        await asyncio.sleep(10)
        c.server.restart()
        await asyncio.sleep(10)
        c.nodes["n4"].power_on()
        await asyncio.sleep(10)
        assert c.find("j") is None

    simulate(4, scenario)


def test_one_node_alone_waits_for_nobody() -> None:
    async def scenario(c: SimCluster) -> None:
        await joined(c)
        era = c.nodes["n1"].agent.era  # type: ignore[union-attr]
        job = await c.submit("j", 1, 1, 1)
        assert await acknowledged(c, "n1", job.rev, era) == ("n1",)
        await whole(c)
        await dark(c)
        c.nodes["n1"].power_on()
        await whole(c, 15)

    simulate(1, scenario)


def test_nodes_that_do_not_come_back_are_waited_for_within_a_bound() -> None:
    async def scenario(c: SimCluster) -> None:
        await joined(c)
        await submitted(c)
        await whole(c)
        await asyncio.sleep(3)
        await dark(c)
        for name in ("n1", "n2", "n3"):
            c.nodes[name].power_on()
        await asyncio.sleep(40)
        assert c.server.state.recovering
        assert c.server.state.awaited == frozenset({"n4"})
        await whole(c, 40)

    simulate(4, scenario)


def test_a_broken_disk_is_reported_and_not_counted() -> None:
    async def scenario(c: SimCluster) -> None:
        await joined(c)
        await asyncio.sleep(3)
        c.nodes["n1"].disk.broken = True
        assert set(await submitted(c)) == {"n2", "n3"}
        c.nodes["n2"].disk.broken = True
        agent, era, job = c.nodes["n1"].agent, c.server.state.era, c.job("j")
        assert agent is not None
        start = asyncio.get_running_loop().time()
        await c.operate("j", target=2)
        done = await agent.acknowledged(c.job("j").rev, era)
        assert (done.safe, done.wanted) == (False, 2)
        assert asyncio.get_running_loop().time() - start < 2.2
        assert c.job("j").rev > job.rev

    simulate(3, scenario)


def test_a_quiet_cluster_writes_nothing() -> None:
    async def scenario(c: SimCluster) -> None:
        await joined(c)
        await submitted(c)
        await whole(c)
        await asyncio.sleep(10)
        before = {name: node.disk.writes for name, node in c.nodes.items()}
        await asyncio.sleep(120)
        assert {name: node.disk.writes for name, node in c.nodes.items()} == before
        assert max(before.values()) < 15

    simulate(4, scenario)

"""Jobs that borrow idle nodes, and give them back when others need them, whatever happens meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.model.queue import MIN_RUNTIME, Queue
from tests.groups import seeds
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_directed import running, simulate
from tests.sim.test_shares import share

ROUND = TIMING.cooldown + 10.0
"""Seconds within which a job has grown, or one that waited has started."""


def size(c: SimCluster, job: str) -> int:
    generation = c.job(job).generation
    return len(generation.members) if generation is not None and generation.state != "ended" else 0


async def settled(c: SimCluster, /, limit: float = ROUND, **sizes: int) -> None:
    """All of these jobs run whole, on so many nodes each."""

    def ok() -> bool:
        return all(c.whole(job) and size(c, job) == count for job, count in sizes.items())

    await c.until(ok, limit, f"{sizes}")


def spent(c: SimCluster) -> list[str]:
    return [e.text for j in c.server.state.jobs.values() for e in j.budget.values() if e.counts]


@pytest.mark.parametrize("seed", seeds([1], range(2, 6)))
def test_it_grows_into_what_is_idle_and_makes_room_for_who_comes(seed: int) -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("a", 1, 6, 1, auto=True)
        await running(c, 1, "a")
        await settled(c, a=6)
        await c.submit("b", 2, 2, 2)
        await settled(c, a=4, b=2)
        await c.submit("c", 3, 3, 3)
        await settled(c, a=1, b=2, c=3)
        await c.submit("d", 1, 1, 1)
        await asyncio.sleep(ROUND)
        assert (size(c, "a"), size(c, "d")) == (1, 0), "what its target says is its own"
        await c.operate("c", desired="stop")
        await settled(c, a=3, b=2, d=1)
        assert not spent(c)

    simulate(6, scenario, seed, slots=2)


def test_two_that_borrow_share_alike() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("a", 1, 8, 1, auto=True)
        await settled(c, 30, a=6)
        await c.submit("b", 1, 8, 1, auto=True)
        await settled(c, 2 * ROUND, a=3, b=3)
        tokens = [c.job(name).active for name in "ab"]
        await asyncio.sleep(5 * TIMING.cooldown)
        assert [c.job(name).active for name in "ab"] == tokens, "and it stays so"
        assert not spent(c)

    simulate(6, scenario, 3, slots=2)


@pytest.mark.parametrize("seed", seeds([1], range(2, 9)))
def test_whatever_is_lost_meanwhile(seed: int) -> None:
    """A node dies while others give back: in the end everybody has what he is to have."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("a", 1, 8, 2, auto=True)
        await settled(c, 30, a=6)
        await c.submit("b", 2, 2, 2)
        await asyncio.sleep(c.rng.uniform(0, 3))
        victim = c.rng.choice(list(c.nodes.values()))
        await victim.power_cut()
        await settled(c, TIMING.lease + 2 * ROUND, b=2, a=3)
        victim.power_on()
        victim.start_agent()
        await settled(c, 3 * ROUND, b=2, a=4)

    simulate(6, scenario, seed, slots=2)


@pytest.mark.parametrize("seed", seeds([1], range(2, 6)))
def test_a_queue_gets_its_part_back_from_one_that_has_all(seed: int) -> None:
    """First from what an elastic job has above its min; then a whole job makes room, and returns."""

    async def scenario(c: SimCluster) -> None:
        await share(c, Queue(name="a"), Queue(name="b"))
        await c.submit("elastic", 1, 3, 3, queue="a")
        await c.submit("fixed", 3, 3, 3, queue="a")
        await settled(c, elastic=3, fixed=3)
        await c.submit("one", 2, 2, 2, queue="b")
        await settled(c, elastic=1, fixed=3, one=2)
        await asyncio.sleep(MIN_RUNTIME)
        await c.submit("two", 1, 1, 1, queue="b")
        await c.until(lambda: c.job("fixed").phase == "holding", ROUND, "fixed makes room")
        await settled(c, one=2, two=1, elastic=3)
        await c.operate("one", desired="stop")
        await c.operate("two", desired="stop")
        await settled(c, fixed=3, elastic=3)
        assert not spent(c)

    simulate(6, scenario, seed, slots=2)


@pytest.mark.slow
def test_nodes_that_were_made_free_go_to_whom_they_were_made_free_for() -> None:
    """Also where the jobs that made room have their pods ready there still, and the others have waited for long."""

    async def scenario(c: SimCluster) -> None:
        await share(c, Queue(name="a"), Queue(name="b"))
        early, late = [f"a{i}" for i in range(4)], ["b0", "b1"]
        for name in early:
            await c.submit(name, 1, 1, 1, queue="a")
        await settled(c, **dict.fromkeys(early, 1))
        for name in late:
            await c.submit(name, 1, 1, 1, queue="b")
        await asyncio.sleep(MIN_RUNTIME / 2)
        for job in early:
            (node,) = c.checker.running(c.job(job).uid)
            c.nodes[node].machine.worker_ends(c.job(job).uid, 0, signal=9)
        await settled(c, MIN_RUNTIME + ROUND, b0=1, b1=1)
        await asyncio.sleep(2 * MIN_RUNTIME)
        stops = [e for name in early for e in c.job(name).budget.values() if e.kind == "share"]
        assert (len(stops), [size(c, name) for name in late]) == (2, [1, 1]), "and nobody else makes room"

    simulate(4, scenario, slots=2)

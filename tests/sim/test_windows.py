"""Maintenance windows: gangs leave in time by a planned stop, nothing runs on the nodes meanwhile, and they work again
with no further command, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from nodeagent.model.window import Window, Windows
from nodeagent.plan.nodes.availability import MARGIN
from nodeagent.store.keys import prefix
from tests.groups import seeds
from tests.inprocess.server import CLUSTER, HereStore
from tests.sim.cluster import SEAL, TIMING, SimCluster
from tests.sim.invariants import Broken
from tests.sim.test_directed import running, simulate
from tests.sim.test_shares import held

LEAD = MARGIN + 5.0
"""Seconds before a window at which the jobs of a simulation leave its nodes: their grace is 5 s."""
OPEN = 120.0
"""Seconds that a window of these tests lasts."""


async def reserve(c: SimCluster, node: str, seconds: float, rev: int = 0) -> Window:
    """From so many seconds on, signed, as an operator's."""
    start = c.server.state.served + int(seconds * 1000)
    one = Window(
        id=f"w{rev + 1}", nodes=(node,), start=start, end=start + int(OPEN * 1000), starts=0.0, ends=0.0, by="test",
        text="in maintenance from then to then",
    )  # fmt: skip
    found = SEAL.windows(Windows(rev=rev + 1, by="test", windows=(one,)))
    await c.patiently(lambda: HereStore(c.server).windows(rev, found, f"w{rev}", "reserved"))
    return one


def watch(c: SimCluster, one: Window) -> None:
    """After each step of the store: nothing is booked on the window's nodes while it is open."""
    look = c.checker.records

    def check() -> None:
        state = c.server.state
        for job in state.jobs.values() if one.start <= state.served < one.end else ():
            nodes = (
                {*job.generation.holders} | ({*job.generation.members} if job.generation.state != "ended" else set())
                if job.generation
                else ()
            )
            if busy := [node for node in nodes if one.names(node)]:
                raise Broken(f"job {job.name} is on {busy} in a window")

    def records() -> None:
        look()
        c.checker._keeping(check)

    c.checker.records = records  # type: ignore[method-assign]


def members(c: SimCluster, job: str = "j") -> set[str]:
    generation = c.job(job).generation
    return set(generation.members) if generation is not None and generation.state != "ended" else set()


async def opened(c: SimCluster, one: Window) -> None:
    await c.until(lambda: c.server.state.served >= one.start, 1000, "the window is open")


async def over(c: SimCluster, one: Window) -> None:
    await c.until(lambda: c.server.state.served >= one.end, 1000, "the window is over")


def at_no_cost(c: SimCluster) -> bool:
    return not any(entry.counts for job in c.server.state.jobs.values() for entry in job.budget.values())


@pytest.mark.slow
def test_a_gang_moves_to_another_node_in_time() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        before = members(c)
        one = await reserve(c, min(before), 200)
        watch(c, one)
        await asyncio.sleep(200 - LEAD - 5)
        assert members(c) == before, "not earlier than it has to"
        await running(c, 3, limit=5 + 20)
        await c.until(lambda: c.whole("j") and min(before) not in members(c), 20, "it has moved")
        generation = c.job("j").generation
        assert generation is not None
        assert (generation.planned, generation.cause.kind) == (True, "drain")
        assert at_no_cost(c)
        await over(c, one)
        assert c.whole("j")

    simulate(4, scenario)


def test_an_elastic_job_goes_on_smaller_and_grows_again() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        one = await reserve(c, "n1", LEAD + 20)
        watch(c, one)
        await opened(c, one)
        await running(c, 2, limit=1)
        await over(c, one)
        await running(c, 3, limit=TIMING.cooldown + 10)
        assert at_no_cost(c)

    simulate(3, scenario)


def test_a_gang_that_needs_every_node_waits_and_comes_back() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        one = await reserve(c, "n[1-2]", LEAD + 20)
        watch(c, one)
        await opened(c, one)
        assert c.job("j").phase == "holding"
        assert "n1 is in maintenance from" in c.job("j").reason
        assert not held(c.job("j"))
        await over(c, one)
        await running(c, 3, limit=30)
        assert at_no_cost(c)

    simulate(3, scenario)


def test_a_job_that_ends_in_time_starts_before_it_and_others_after_it() -> None:
    async def scenario(c: SimCluster) -> None:
        one = await reserve(c, "n1", LEAD + 300)
        watch(c, one)
        await asyncio.sleep(3)
        await c.submit("long", 1, 1, 1, time_limit=400.0)
        await c.submit("short", 1, 1, 1, time_limit=120.0)
        await running(c, 1, "short")
        assert c.job("long").phase == "queued"
        await over(c, one)
        await running(c, 1, "long")

    simulate(1, scenario)


def test_a_window_that_is_deleted_gives_its_nodes_back_at_once() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1)
        await running(c, 1)
        await reserve(c, "n1", 0)
        await c.until(lambda: c.job("j").phase == "holding", 20, "it has left")
        found = SEAL.windows(Windows(rev=2, by="test"))
        await HereStore(c.server).windows(1, found, "delete", "deleted")
        await running(c, 1)

    simulate(1, scenario)


def test_windows_that_nobody_signed_change_nothing() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1)
        await running(c, 1)
        one = Window(id="w1", nodes=("n1",), start=0, end=10**12, starts=0.0, ends=0.0, by="test", text="x")
        await HereStore(c.server).windows(0, Windows(rev=1, by="test", windows=(one,)), "forged", "by hand")
        await asyncio.sleep(20)
        assert c.whole("j")

    simulate(1, scenario)


@pytest.mark.parametrize("restarts", [False, True])
def test_older_windows_that_somebody_writes_back_close_no_node_and_are_replaced(restarts: bool) -> None:
    """``restarts``: no agent has the newer ones in its memory. They were believed then, and jobs left their nodes."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        await reserve(c, "n1", 10_000)
        key = f"{prefix(CLUSTER)}windows"
        older = c.server.data.hget(key, "windows")
        newest = SEAL.windows(Windows(rev=2, by="test"))
        await HereStore(c.server).windows(1, newest, "delete", "deleted")
        await asyncio.sleep(5)
        if restarts:
            for node in c.nodes.values():
                await node.kill_agent()
        c.server.run(
            "local key = P .. 'windows' redis.call('HSET', key, 'windows', A.text, 'rev', touch('windows'))", text=older
        )
        if restarts:
            for node in c.nodes.values():
                node.start_agent()
        await c.until(lambda: c.server.data.hget(key, "windows") == newest.to_json(), 10, "replaced")
        for node in c.nodes.values():
            assert node.agent is not None and node.agent.cluster().windows == newest

    simulate(2, scenario)


async def kill_an_agent(c: SimCluster) -> None:
    node = c.rng.choice(list(c.nodes.values()))
    await node.kill_agent()
    await asyncio.sleep(c.rng.uniform(0, 3))
    node.start_agent()


async def empty_the_store(c: SimCluster) -> None:
    await c.empty_store()


async def restart_the_store(c: SimCluster) -> None:
    c.server.restart(keep_data=True)


@pytest.mark.parametrize("seed", seeds([1], range(2, 6)))
@pytest.mark.parametrize(
    "fault",
    [kill_an_agent, *(pytest.param(fault, marks=pytest.mark.slow) for fault in (empty_the_store, restart_the_store))],
)
def test_whatever_happens_meanwhile(fault: Callable[[SimCluster], Awaitable[None]], seed: int) -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        one = await reserve(c, "n1", LEAD + 30)
        await asyncio.sleep(c.rng.uniform(5, LEAD + OPEN))
        await fault(c)
        if c.server.state.served < one.start:
            watch(c, one)
            await opened(c, one)
        await c.until(lambda: "n1" not in members(c), 60, "n1 is empty")
        await over(c, one)
        await running(c, 3, limit=TIMING.cooldown + 60)

    simulate(3, scenario, seed)

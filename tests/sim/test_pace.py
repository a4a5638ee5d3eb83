"""Agents of a large cluster that have nothing to do ask the store seldom, and find whatever happens as soon as those of
a small one."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from nodeagent.agent import pace
from nodeagent.agent.watch import AT_ONCE, PER_SECOND
from nodeagent.model.health import Verdict
from nodeagent.model.node import Cordon
from nodeagent.store.messages import Beat, BeatReply
from tests.inprocess.server import HereStore
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_directed import running, simulate

LARGE = 1000
"""Nodes that the agents are to take their cluster for."""
SEEDS = 8
SLOW_TURNS = TIMING.model_copy(update={"turn": 2.0})
"""As in a large gang: a step is taken soon only if those see it whose turn comes first."""
BAD = Verdict(rule="x", severity="fatal", action="reboot", text="is sick", since=1.0, seen=1.0)
Scenario = Callable[[SimCluster], Awaitable[float]]
"""Something happens; the seconds until what follows from it has."""


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Stretches beats as in a cluster of so many nodes, however few there are."""
    return lambda nodes: monkeypatch.setattr(pace, "PER_NODE", nodes * 0.0025 / 4)


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Beats of each node."""
    count, real = Counter[str](), HereStore.beat

    async def beat(store: HereStore, asked: Beat) -> BeatReply:
        count[asked.node] += 1
        return await real(store, asked)

    monkeypatch.setattr(HereStore, "beat", beat)
    return count


async def at_rest(c: SimCluster) -> None:
    """Three of four nodes run a job, and have settled."""
    await c.submit("j", 1, 3, 3)
    await running(c, 3)
    await asyncio.sleep(20)


def member(c: SimCluster, rank: int) -> str:
    generation = c.job("j").generation
    assert generation is not None
    return generation.ordered()[rank].node


async def again(c: SimCluster, limit: float = 20) -> float:
    return await c.until(lambda: c.job("j").restarts == 1, limit, "formed again")


async def worker_dies(c: SimCluster) -> float:
    c.nodes["n1"].machine.worker_ends("uid-j", 0, signal=9)
    return await again(c)


async def idle_node_dies(c: SimCluster) -> float:
    """Until all others know that it has lapsed."""
    (idle,) = c.nodes.keys() - {member(c, rank) for rank in range(3)}
    await c.nodes[idle].power_cut()
    agents = [node.agent for node in c.nodes.values() if node.agent is not None]
    return await c.until(lambda: all(idle in agent.cluster().lapsed for agent in agents), 20, "seen by all")


async def node_dies(c: SimCluster) -> float:
    await c.nodes[member(c, -1)].power_cut()
    return await again(c)


async def hardware_fails(c: SimCluster) -> float:
    """What only one node sees, and tells with a beat: the others have to read it."""
    c.nodes[member(c, -1)].find(BAD)
    return await again(c)


async def job_ends_and_the_next_begins(c: SimCluster) -> float:
    await c.submit("k", 4, 4, 4)
    await asyncio.sleep(10)
    assert c.job("k").phase == "queued"
    for rank in range(3):
        await asyncio.sleep(rank)
        for worker in range(2):
            c.nodes[member(c, rank)].machine.worker_ends("uid-j", worker, code=0)
    return await running(c, 4, "k")


async def node_is_drained(c: SimCluster) -> float:
    await c.cordon(member(c, 0), Cordon(by="ann", reason="out", at=0.0, drain=True))
    return await again(c, 60)


async def store_is_away(c: SimCluster) -> float:
    """Until all have joined a store that was emptied again, and the job goes on."""
    await c.empty_store()
    return await c.until(c.settled, 120, "given back")


def took(scenario: Scenario) -> list[float]:
    found: list[float] = []

    async def run(c: SimCluster) -> None:
        await at_rest(c)
        found.append(await scenario(c))

    for seed in range(SEEDS):
        simulate(4, run, seed=seed, slots=2, timing=SLOW_TURNS)
    return found


def test_who_rests_in_a_large_cluster_beats_seldom(large: Callable[[int], None], beats: Counter[str]) -> None:
    large(LARGE)
    found: list[int] = []

    async def scenario(c: SimCluster) -> None:
        await at_rest(c)
        beats.clear()
        await asyncio.sleep(60)
        found.extend(beats[name] for name in c.nodes)

    simulate(4, scenario)
    assert all(60 / 2.5 <= count <= 60 / 1.5 for count in found), found


def test_who_rests_in_a_small_cluster_beats_each_heartbeat(beats: Counter[str]) -> None:
    found: list[int] = []

    async def scenario(c: SimCluster) -> None:
        await at_rest(c)
        beats.clear()
        await asyncio.sleep(60)
        found.extend(beats[name] for name in c.nodes)

    simulate(4, scenario)
    assert all(count >= 0.9 * 60 / TIMING.heartbeat for count in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        worker_dies,
        node_dies,
        store_is_away,
        idle_node_dies,
        hardware_fails,
        job_ends_and_the_next_begins,
        node_is_drained,
    ],
)
def test_nothing_that_happens_waits_for_a_beat_that_is_late(large: Callable[[int], None], scenario: Scenario) -> None:
    small = took(scenario)
    large(LARGE)
    stretched = took(scenario)
    assert statistics.mean(stretched) <= statistics.mean(small) + TIMING.heartbeat


@pytest.mark.parametrize("every", [0.005, 0.05])
def test_events_without_end_make_no_agent_beat_without_end(beats: Counter[str], every: float) -> None:
    """Whoever can write to the store can add as many as it bears. Those of a busy cluster are read as they come."""
    flood, found = 40.0, list[int]()

    async def scenario(c: SimCluster) -> None:
        await c.until(c.settled, 30, "settled")
        before, now = beats["n1"], asyncio.get_running_loop().time
        until = now() + flood
        while now() < until:
            c.server.run("return event({ kind = 'X', text = 'x' })")
            await asyncio.sleep(every)
        found.append(beats["n1"] - before)

    simulate(2, scenario)
    assert found[0] < flood / TIMING.heartbeat + AT_ONCE + PER_SECOND * flood * 1.1
    assert found[0] > 0.9 * min(flood / every, AT_ONCE + PER_SECOND * flood)

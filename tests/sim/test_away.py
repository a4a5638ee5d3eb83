"""What agents say of themselves while the store is away: since when, on whose time their jobs run, and why not."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from nodeagent.agent.pace import SHARE
from nodeagent.agent.view import AgentHealth
from nodeagent.store.base import StoreUnavailableError
from tests.inprocess.server import HereStore
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.network import LinkedStore
from tests.sim.test_directed import simulate
from tests.sim.test_failsafe import apart, cut, started
from tests.sim.test_overload import token


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
            reported = health(c, name)
            assert reported.store_away_since is not None
            assert reported.lease_left == 0
            assert TIMING.heartbeat < reported.lent["uid-j"] <= TIMING.fence
            assert reported.not_lent == {}
        apart(c, "n3")
        await asyncio.sleep(TIMING.fence + 1)
        assert (health(c, "n1").lent, health(c, "n1").not_lent) == ({}, {"uid-j": "n3 does not answer"})
        assert health(c, "n3").not_lent == {"uid-j": "n1 does not answer"}
        c.net.cut.clear()
        cut(c, c.nodes, False)
        await asyncio.sleep(10)
        reported = health(c, "n1")
        assert (reported.store_away_since, reported.lent, reported.not_lent) == (None, {}, {})

    simulate(3, scenario)


@pytest.mark.parametrize("stall", [0.62, 1.2])
def test_a_store_that_stalls_again_and_again_renews_every_lease(stall: float) -> None:
    """Each stall is longer than the store's timeout, so that most answers are late."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 3, 3)
        before = token(c)
        for _ in range(30):
            c.frozen.close()
            await asyncio.sleep(stall)
            c.frozen.open()
            await asyncio.sleep(0.02)
            for node in c.nodes.values():
                assert node.lease.core is not None
                assert node.lease.clock.now() - node.lease.core.last < TIMING.fence
        await asyncio.sleep(10)
        assert token(c) == before

    simulate(3, scenario)


def test_an_agent_that_starts_while_the_store_is_away_says_since_when() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        cut(c, ["n1"])
        await c.nodes["n1"].kill_agent()
        c.nodes["n1"].start_agent()
        await asyncio.sleep(5)
        reported = health(c, "n1")
        assert not reported.joined
        assert reported.store_away_since is not None
        cut(c, ["n1"], False)
        await asyncio.sleep(10)
        reported = health(c, "n1")
        assert (reported.joined, reported.store_away_since) == (True, None)

    simulate(3, scenario)


def test_no_call_follows_at_once_on_one_that_was_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: defaultdict[LinkedStore, list[float]] = defaultdict(list)
    failed: defaultdict[LinkedStore, list[float]] = defaultdict(list)
    call = LinkedStore._call

    async def counted(store: LinkedStore, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = asyncio.get_running_loop().time
        if not isinstance(store._real, HereStore):  # a lease process's
            return await call(store, real, args, kwargs)
        begun[store].append(now())
        try:
            return await call(store, real, args, kwargs)
        except StoreUnavailableError:
            failed[store].append(now())
            raise

    monkeypatch.setattr(LinkedStore, "_call", counted)

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        cut(c, c.nodes)
        await asyncio.sleep(1)
        c.nodes["n2"].machine.worker_ends("uid-j", 0, code=1, signal=None)  # there is something to tell
        await asyncio.sleep(20)
        cut(c, c.nodes, False)
        await asyncio.sleep(10)

    simulate(3, scenario)
    least = SHARE * (TIMING.fence - TIMING.heartbeat - 2 * TIMING.store_timeout) / 2
    assert sum(map(len, failed.values())) > 60
    for store, ends in failed.items():
        after = [min((at - end for at in begun[store] if at >= end), default=1.0) for end in ends]
        assert min(after) >= 0.99 * least, sorted(after)[:5]

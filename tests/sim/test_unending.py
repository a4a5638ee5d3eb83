"""What does not even end with root's SIGKILL keeps its devices, whatever becomes of its job and of its node's agent."""

from __future__ import annotations

import asyncio

from nodeagent.pods.base import PodStatus
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_directed import running, simulate


def test_its_devices_are_given_to_nobody_before_it_ends() -> None:
    """They were the next job's as soon as the pod's own job had let go, which it does at once."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("a", 1, 1, 1)
        await running(c, 1, "a")
        node, generation = c.nodes["n1"], c.job("a").generation
        assert generation is not None
        devices = generation.members["n1"].devices
        assert len(devices) == 2 == c.slots // 2
        node.machine.unending["uid-a"] = PodStatus(uid="uid-a", phase="stuck", held=devices)
        await c.operate("a", desired="stop")
        await c.until(lambda: c.job("a").phase == "stopped" and not _holds(c, "a"), 20, "its job has let go")
        for name in ("b", "c"):
            await c.submit(name, 1, 1, 1)
        await running(c, 1, "b")
        other = c.job("b").generation
        assert other is not None
        assert not {*other.members["n1"].devices} & {*devices}
        for _ in range(2):
            await asyncio.sleep(20)
            assert c.job("c").phase == "queued"
            assert c.server.state.nodes["n1"].facts.held == dict.fromkeys(devices, "uid-a")
            await node.kill_agent()
            await asyncio.sleep(TIMING.heartbeat)
            node.start_agent()
        node.machine.unending.clear()
        node.machine.changed.set()
        await running(c, 1, "c")

    simulate(1, scenario)


def test_the_gang_goes_on_without_the_node_on_which_it_does_not_end() -> None:
    """Its shim had died, and workers hang in the kernel: the pod was reported as neither lost nor ended."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("a", 1, 2, 2)
        await running(c, 2, "a")
        first = c.job("a").generation
        assert first is not None
        machine = c.nodes["n1"].machine
        machine.unending["uid-a"] = PodStatus(uid="uid-a", phase="stuck", held=first.members["n1"].devices)
        machine.changed.set()
        await running(c, 1, "a")
        now = c.job("a").generation
        assert now is not None and now.number > first.number
        assert "n1" not in now.members
        assert c.job("a").budget[str(first.number)].kind == "pod_failed"

    simulate(2, scenario)


def _holds(c: SimCluster, name: str) -> bool:
    generation = c.job(name).generation
    return generation is not None and "n1" in generation.holders

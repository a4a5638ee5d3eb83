"""What must survive when memory does not: everybody loses power, or the store its data right after an answer."""

from __future__ import annotations

import asyncio

from tests.inprocess.server import HereStore
from tests.sim.cluster import SEAL, SimCluster


async def joined(c: SimCluster) -> None:
    def read() -> bool:
        agents = [node.agent for node in c.nodes.values()]
        return len(c.server.state.nodes) == len(c.nodes) and all(a is not None and a.era for a in agents)

    await c.until(read, 5, "all have joined and read")


async def whole(c: SimCluster, limit: float = 120.0) -> None:
    await c.until(lambda: c.find("j") is not None and c.whole("j"), limit, "j is whole")


async def acknowledged(c: SimCluster, node: str, rev: int, era: str) -> tuple[str, ...]:
    """As the API does after a write; the nodes that have it on their disks."""
    agent = c.nodes[node].agent
    assert agent is not None
    done = await agent.acknowledged(rev, era)
    assert done.safe, f"{done}\n{c.describe()}"
    return done.nodes


async def submitted(c: SimCluster, node: str = "n1") -> tuple[str, ...]:
    """``j`` is submitted through the agent of a node, and acknowledged."""
    agent = c.nodes[node].agent
    assert agent is not None
    era = agent.era
    job = await c.submit("j", 2, 3, 3)
    return await acknowledged(c, node, job.rev, era)


async def stopped(c: SimCluster, node: str = "n1", *, delete: bool = False) -> None:
    """``j`` is stopped through the agent of a node, which is acknowledged; and that has happened."""
    agent = c.nodes[node].agent
    assert agent is not None
    era, job = agent.era, c.job("j")
    control = job.control.model_copy(update={"desired": "stop", "delete": delete, "rev": job.control.rev + 1})
    after = await HereStore(c.server).control(
        job.uid, job.control.rev, SEAL.control(job.uid, control), "stop", "JobStopRequested", "stop"
    )
    await acknowledged(c, node, after.rev, era)
    if delete:
        await c.until(lambda: c.find("j") is None, 60, "j is gone")
        c.checker.submitted.clear()
    else:
        await c.until(lambda: c.job("j").phase == "stopped", 60, "j has stopped")


async def dark(c: SimCluster) -> None:
    """Every machine loses power, and the store its data."""
    for node in c.nodes.values():
        await node.power_cut()
    c.checker.store_loses()
    c.server.restart(keep_data=False)


async def all_lose_power(c: SimCluster) -> None:
    """In the middle of training, a moment after a generation was formed."""
    await joined(c)
    await submitted(c)
    await whole(c)
    c.nodes[min(c.job("j").generation.members)].machine.worker_ends("uid-j", 0, signal=9)  # type: ignore[union-attr]
    await c.until(lambda: c.job("j").restarts == 1, 10, "formed again")
    await asyncio.sleep(c.rng.choice((0.0, 0.1, 0.5, 3.0)))
    before = c.job("j")
    assert before.active is not None
    await dark(c)
    for node in sorted(c.nodes.values(), key=lambda _: c.rng.random()):
        await asyncio.sleep(c.rng.uniform(0.0, 5.0))
        node.power_on()
    await whole(c)
    after = c.job("j")
    assert after.active is not None
    assert after.active.number > before.active.number
    assert after.uid == before.uid
    c.checker.check_kept()


async def dark_after_an_answer(c: SimCluster) -> None:
    """The submit was acknowledged a moment ago. One of those that have it never comes back."""
    await joined(c)
    await asyncio.sleep(c.rng.uniform(0.0, 3.0))
    saved = await submitted(c)
    await dark(c)
    gone = c.rng.choice(saved)
    for name, node in c.nodes.items():
        if name != gone:
            node.power_on()
    await c.until(lambda: c.find("j") is not None, 10, "j is known again")
    c.checker.check_kept()
    await whole(c, 120)


async def emptied_after_an_answer(c: SimCluster) -> None:
    """The store loses everything a moment after the submit was acknowledged, and so does the agent that took it."""
    await joined(c)
    await asyncio.sleep(c.rng.uniform(0.0, 3.0))
    await submitted(c)
    c.checker.store_loses()
    c.server.restart(keep_data=False)
    await c.nodes["n1"].power_cut()
    await c.until(lambda: c.find("j") is not None, 10, "j is known again")
    c.checker.check_kept()
    await whole(c)


async def off_while_it_ended(c: SimCluster, *, delete: bool = True) -> None:
    """n4 was off while the job ended, and is the first to be back when all others and the store had lost power."""
    await joined(c)
    await submitted(c)
    await whole(c)
    await asyncio.sleep(3)
    await c.nodes["n4"].power_cut()
    await c.until(lambda: c.find("j") is not None and c.whole("j"), 60, "whole without n4")
    await stopped(c, delete=delete)
    await asyncio.sleep(3)
    await dark(c)
    c.nodes["n4"].power_on()
    await asyncio.sleep(c.rng.uniform(5.0, 40.0))
    for name in ("n1", "n2", "n3"):
        c.nodes[name].power_on()
    await asyncio.sleep(30)
    job = c.find("j")
    assert (job is None) if delete else (job is not None and job.phase == "stopped"), c.describe()
    assert not any(n.machine.running("uid-j") for n in c.nodes.values())

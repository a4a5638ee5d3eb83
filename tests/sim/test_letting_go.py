"""A node whose agent is stuck, or cut off from the store, lets a waiting job go; its agent, lease process or shim dies
at each step of that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import get_args

import pytest

from nodeagent.model.node import Cordon
from nodeagent.spec.agentconfig import AgentConfig
from tests.sim.cluster import TIMING, Node, SimCluster
from tests.sim.network import Loss
from tests.sim.test_directed import acknowledged, running, simulate

pytestmark = pytest.mark.slow
UID = "uid-j"


def ended(node: Node) -> bool:
    """None of its workers is left."""
    pod = node.machine.pods.get(UID)
    return pod is None or not pod.alive


def members(cluster: SimCluster) -> set[str]:
    generation = cluster.job("j").generation
    return set(generation.members) if generation is not None else set()


def there(cluster: SimCluster, node: Node) -> bool:
    record = cluster.server.state.nodes[node.name]
    return not (record.left or record.lost)


STEPS: dict[str, Callable[[SimCluster, Node], bool]] = {
    "silent": lambda _c, node: node.lease.core is not None and node.lease.core.asks(node.clock.now()),
    "waited for": lambda c, _node: c.job("j").phase == "forming",
    "decided": lambda _c, node: UID in node.lease.withdrawn.jobs,
    "its time taken back": lambda _c, node: node.machine.grants[UID].barred > 0 and node.machine.grants[UID].until == 0,
    "stopped": lambda _c, node: ended(node),
    "let go": lambda c, node: node.name not in c.job("j").generation.holders,  # type: ignore[union-attr]
    "formed again": lambda c, _node: c.job("j").restarts == 1 and c.job("j").phase == "running",
}


async def agent_dies(node: Node) -> None:
    await node.kill_agent()
    await asyncio.sleep(1)
    node.thaw()
    node.start_agent()


async def lease_process_dies(node: Node) -> None:
    node.lease.kill()


async def shim_dies(node: Node) -> None:
    if UID in node.machine.pods:
        node.machine.kill_shim(UID)


@pytest.mark.parametrize("dies", [agent_dies, lease_process_dies, shim_dies], ids=lambda one: one.__name__)
@pytest.mark.parametrize("step", STEPS)
def test_any_node_may_die_at_any_step_and_the_gang_is_whole_again(
    step: str, dies: Callable[[Node], Awaitable[None]]
) -> None:
    """The checker sees that nothing runs twice; the spare takes the node's place."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        generation = c.job("j").generation
        assert generation is not None
        stuck, other = (c.nodes[member.node] for member in generation.ordered()[:2])
        stuck.freeze_agent()
        if step != "silent":
            other.machine.worker_ends(UID, 0, signal=9)
        await c.until(lambda: STEPS[step](c, stuck), 2 * TIMING.lease, step)
        await dies(stuck)
        if step == "silent":
            other.machine.worker_ends(UID, 0, signal=9)
        await c.until(lambda: c.job("j").restarts == 1 and c.whole("j"), 2 * TIMING.lease + 2, "whole again")
        stuck.thaw()
        stuck.start_agent()
        await c.until(lambda: there(c, stuck), 30.0, "the node is there again")
        await running(c, 3)

    simulate(4, scenario)


# --- its agent lives, and the store answers its lease process alone


def kinds(cluster: SimCluster) -> list[str]:
    return [event.kind for event in cluster.server.state.events if event.kind in ("AgentSilent", "AgentBack")]


@pytest.mark.parametrize("lost", [one for one in get_args(Loss) if one != "nothing"])
def test_a_job_does_not_wait_for_an_agent_that_is_cut_off(lost: Loss) -> None:
    """Before, it waited for as long as that lasted. The checker sees that nothing runs twice."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        generation = c.job("j").generation
        assert generation is not None
        stuck, other = (c.nodes[member.node] for member in generation.ordered()[:2])
        life = c.server.state.nodes[stuck.name].incarnation.life
        stuck.link.agent_loses = lost
        other.machine.worker_ends(UID, 0, signal=9)
        await c.until(lambda: c.job("j").restarts == 1 and c.whole("j"), 2 * TIMING.lease + 2, "whole again")
        await asyncio.sleep(AgentConfig().without_agent + TIMING.lease)
        record = c.server.state.nodes[stuck.name]
        assert record.mute and there(c, stuck), "it keeps its lease"
        assert kinds(c) == ["AgentSilent"], "beats whose answers are lost take nothing back"
        stuck.link.restore()
        await c.until(lambda: not c.server.state.nodes[stuck.name].mute, 3.0, "its agent is back")
        await asyncio.sleep(TIMING.lease)
        assert kinds(c) == ["AgentSilent", "AgentBack"]
        assert c.server.state.nodes[stuck.name].incarnation.life == life
        await running(c, 3)

    simulate(4, scenario)


def test_a_gang_trains_on_with_a_member_whose_agent_is_cut_off() -> None:
    """Its lease holds, and its agent looks after its workers: nothing is to be gained by their end."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        before = c.job("j").generation
        assert before is not None
        stuck = c.nodes[before.ordered()[0].node]
        stuck.link.agent_loses = "requests"
        await asyncio.sleep(2 * AgentConfig().without_agent)
        assert c.server.state.nodes[stuck.name].mute
        await running(c, 3)
        now = c.job("j").generation
        assert now is not None and now.number == before.number

    simulate(3, scenario)


@pytest.mark.parametrize("busy", [False, True], ids=["nothing else runs there", "another job trains there"])
def test_a_member_whose_agent_is_cut_off_as_it_acknowledges_is_replaced(busy: bool) -> None:
    """Its acknowledgement is there, and it never reads that all are: it starts nothing, and the others' workers waited
    for its own until their own time was over, which cost their budget. Where another job trained there, without end."""

    async def scenario(c: SimCluster) -> None:
        if busy:
            await c.submit("k", 3, 3, 3)
            await running(c, 3, "k")
        await c.submit("j", 2, 2, 2)
        await c.until(lambda: bool(acknowledged(c)), 30, "one has acknowledged")
        stuck = c.nodes[acknowledged(c)[0]]
        trains, life = stuck.machine.running("uid-k"), c.server.state.nodes[stuck.name].incarnation.life
        stuck.link.agent_loses = "large replies"
        await c.until(lambda: c.job("j").phase == "running", 5, "it is active")
        await asyncio.sleep(TIMING.heartbeat)
        assert not stuck.machine.pods[UID].alive
        await running(c, 2, limit=2 * TIMING.lease + 2)
        now = c.job("j").generation
        assert now is not None and stuck.name not in now.members
        assert not any(entry.counts for entry in c.job("j").budget.values())
        await asyncio.sleep(AgentConfig().without_agent)
        stuck.link.restore()
        await c.until(lambda: not c.server.state.nodes[stuck.name].mute, 5.0, "its agent is back")
        assert there(c, stuck) and c.server.state.nodes[stuck.name].incarnation.life == life, "the node stayed"
        assert stuck.machine.running("uid-k") == trains, "who does not wait trains on"

    simulate(3, scenario, slots=8)


@pytest.mark.parametrize("busy", [False, True], ids=["nothing else runs there", "another job trains there"])
def test_a_fault_that_a_cut_off_agent_cannot_report_is_found(busy: bool) -> None:
    """The other workers wait for the one that failed, and do not fail themselves."""

    async def scenario(c: SimCluster) -> None:
        if busy:
            await c.submit("k", 3, 3, 3)
            await running(c, 3, "k")
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        generation = c.job("j").generation
        assert generation is not None
        stuck = c.nodes[generation.ordered()[0].node]
        trains = stuck.machine.running("uid-k")
        stuck.link.agent_loses = "requests"
        stuck.machine.peers = lambda *_about: None
        await asyncio.sleep(2 * TIMING.lease)
        await running(c, 3)
        stuck.machine.worker_ends(UID, 0, signal=9)
        await running(c, 2, limit=TIMING.lease + 2)
        assert not any(entry.counts for entry in c.job("j").budget.values())
        await asyncio.sleep(AgentConfig().without_agent)
        assert there(c, stuck) and stuck.machine.running("uid-k") == trains

    simulate(3, scenario, slots=8)


FAR = 0.4
"""Seconds each way: an answer is too late for an agent, and good for its lease process."""


@pytest.mark.parametrize("lost", ["nothing", "requests"])
def test_a_job_does_not_wait_without_end_for_a_node_that_is_far_from_the_store(lost: Loss) -> None:
    """Before, it waited for as long as that lasted: the lease held, and a late answer was no reason."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        generation = c.job("j").generation
        assert generation is not None
        far, other = (c.nodes[member.node] for member in generation.ordered()[:2])
        far.link.far, far.link.agent_loses = FAR, lost
        await asyncio.sleep(2 * TIMING.lease)
        other.machine.worker_ends(UID, 0, signal=9)
        limit = AgentConfig().without_agent + 3 * TIMING.lease
        await c.until(lambda: far.name not in members(c) and c.whole("j"), limit, "whole again without it")
        assert sum(entry.counts for entry in c.job("j").budget.values()) == 1
        far.link.restore()
        await c.until(lambda: there(c, far) and not c.server.state.nodes[far.name].mute, 5.0, "its agent is back")

    simulate(4, scenario)


def test_a_store_that_is_far_from_all_ends_nothing() -> None:
    """No answer is in time for any agent: no mark wakes them all, no node leaves, no worker ends."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        before = c.job("j").generation
        assert before is not None
        for node in c.nodes.values():
            node.link.far = FAR
        await asyncio.sleep(2 * AgentConfig().without_agent)
        for node in c.nodes.values():
            node.link.restore()
        await asyncio.sleep(2 * TIMING.lease)
        await running(c, 3)
        now = c.job("j").generation
        assert now is not None and now.number == before.number
        assert kinds(c) == []

    simulate(3, scenario)


def test_a_store_that_answers_nobody_for_a_while_makes_no_agent_count_as_cut_off() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        c.frozen.close()
        await asyncio.sleep(3 * TIMING.lease)
        c.frozen.open()
        await asyncio.sleep(3 * TIMING.lease)
        await running(c, 3)
        assert kinds(c) == []

    simulate(3, scenario)


def test_a_node_whose_agent_is_cut_off_can_be_drained() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        generation = c.job("j").generation
        assert generation is not None
        stuck = c.nodes[generation.ordered()[0].node]
        stuck.link.agent_loses = "requests"
        await asyncio.sleep(TIMING.lease)
        await c.cordon(stuck.name, Cordon(reason="test", by="test", at=0.0, drain=True))

        def drained() -> bool:
            now = c.job("j").generation
            return now is not None and stuck.name not in {*now.members, *now.holders} and c.whole("j")

        await c.until(drained, 2 * TIMING.lease + 2, "drained")
        assert ended(stuck)

    simulate(4, scenario)

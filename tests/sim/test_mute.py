"""A node whose agent is silent: jobs that would be given work there go on without it, and others' workers there train
on."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.model.node import Cordon
from nodeagent.spec.agentconfig import AgentConfig
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_directed import acknowledged, running, simulate

ENOUGH = TIMING.lease + 0.5
"""Seconds of silence after which nobody waits for an agent."""


def members(c: SimCluster, job: str) -> set[str]:
    generation = c.job(job).generation
    return set(generation.members) if generation is not None else set()


async def spare_that_falls_silent(c: SimCluster, minimum: int) -> str:
    """``j`` trains on three nodes, and has to leave one of them for its spare, on which ``k`` trains and whose agent
    hangs from now on. Returns the spare."""
    await c.submit("k", 1, 1, 1)
    await running(c, 1, "k")
    (spare,) = members(c, "k")
    await c.cordon(spare, Cordon(reason="test", by="test", at=0.0))
    await c.submit("j", minimum, 3, 3)
    await running(c, 3)
    await c.cordon(spare, None)

    def is_warm() -> bool:
        ready = c.server.state.nodes[spare].readiness.get(c.job("j").uid)
        return ready is not None and ready.state == "ready" and not ready.warming

    await c.until(is_warm, 30, "the spare is warm")
    c.nodes[spare].freeze_agent()
    leaves = sorted(members(c, "j"))[-1]
    await c.cordon(leaves, Cordon(reason="test", by="test", at=0.0, drain=True))
    await c.until(lambda: spare in members(c, "j"), 1.0, "it forms with the spare")
    return spare


def number(c: SimCluster) -> int:
    """Of the newest generation of ``j``."""
    generation = c.job("j").generation
    return generation.number if generation is not None else 0


def trains_undisturbed(c: SimCluster, spare: str, pids: tuple[int, ...], life: str) -> bool:
    record = c.server.state.nodes[spare]
    same = c.nodes[spare].machine.pods["uid-k"].pids == pids and not (record.left or record.lost)
    return same and record.incarnation.life == life and c.job("k").restarts == 0


@pytest.mark.parametrize("minimum", [2, 3])
def test_a_gang_that_only_misses_its_acknowledgement_takes_nothing_from_another_job_there(minimum: int) -> None:
    """Before, the whole node left for it, and the other job's worker ended."""

    async def scenario(c: SimCluster) -> None:
        spare = await spare_that_falls_silent(c, minimum)
        pids, life = c.nodes[spare].machine.pods["uid-k"].pids, c.server.state.nodes[spare].incarnation.life
        if minimum == 2:
            await running(c, 2, limit=ENOUGH)
        else:
            await c.until(lambda: c.job("j").phase == "holding", ENOUGH, "it holds")
            assert f"{spare} gets no new work: its agent is silent or cut off from the store" in c.job("j").reason
        formed = number(c)
        await asyncio.sleep(10)
        assert number(c) == formed, "it is not tried again meanwhile"
        assert trains_undisturbed(c, spare, pids, life)
        assert c.server.state.nodes[spare].mute
        c.nodes[spare].thaw()
        await running(c, 3, limit=TIMING.cooldown + 6 if minimum == 2 else 1.0)
        assert spare in members(c, "j") and not c.job("j").setbacks
        assert trains_undisturbed(c, spare, pids, life)
        assert not any(entry.counts for entry in c.job("j").budget.values())
        assert not c.server.state.nodes[spare].mute

    simulate(4, scenario)


@pytest.mark.parametrize("back", [0.5, 2.0])
def test_a_moment_without_an_agent_is_no_silence(back: float) -> None:
    """As a restart is."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        before = number(c)
        for name in sorted(members(c, "j")):
            await c.nodes[name].kill_agent()
            await asyncio.sleep(back)
            c.nodes[name].start_agent()
            await asyncio.sleep(1)
        assert number(c) == before
        assert not any(event.kind == "AgentSilent" for event in c.server.state.events)

    simulate(3, scenario)


def test_a_member_that_acknowledges_and_never_starts_is_replaced_when_its_agents_grace_is_over() -> None:
    """Nobody can tell from a record that its workers run: that they do is not reported. But its agent is silent, so its
    node leaves, and the others, whose workers wait for its own, go on at no cost."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await c.until(lambda: bool(acknowledged(c)), 30, "one has acknowledged")
        (stuck, *_) = acknowledged(c)
        c.nodes[stuck].freeze_agent()
        await c.until(lambda: c.job("j").phase == "running", 5, "it is active")
        await asyncio.sleep(ENOUGH)
        assert not c.nodes[stuck].machine.pods["uid-j"].alive
        await running(c, 2, limit=AgentConfig().without_agent + 5)
        assert stuck not in members(c, "j")
        assert not any(entry.counts for entry in c.job("j").budget.values())

    simulate(3, scenario)


def test_a_gang_that_trains_does_not_grow_while_a_members_agent_is_silent() -> None:
    """It would have to go on without that node, which trains."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 4, 4)
        await running(c, 2)
        await asyncio.sleep(TIMING.cooldown)
        silent = sorted(members(c, "j"))[-1]
        c.nodes[silent].freeze_agent()
        await asyncio.sleep(ENOUGH)
        before = number(c)
        for name in ("n3", "n4"):
            c.add(name).start_agent()
        await asyncio.sleep(TIMING.cooldown + 4)
        assert number(c) == before
        c.nodes[silent].thaw()
        await running(c, 4, limit=TIMING.cooldown)
        assert silent in members(c, "j")

    simulate(2, scenario)

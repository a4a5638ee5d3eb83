"""Gangs that grow: who trains goes on until the newcomer is warm, then leaves with notice, whatever happens meanwhile;
nothing of it costs the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nodeagent.model.job import Setback
from nodeagent.model.jobspec import RestartLimits
from nodeagent.model.world import Generation
from nodeagent.pods.base import StartOrder
from tests.sim.cluster import TIMING, Node, SimCluster
from tests.sim.test_directed import running, simulate

SOON = 2.0
"""Seconds in which a gang forms that waits for no grace (5 s here)."""


def generation(c: SimCluster) -> Generation:
    found = c.job("j").generation
    assert found is not None
    return found


async def leaving(c: SimCluster) -> Generation:
    """Two nodes train and are asked to leave for a third one, which is as warm as it will be. They take all of their
    grace, each waiting for the others."""
    await c.submit("j", 1, 4, 2)
    await running(c, 2)
    for node in c.nodes.values():
        node.machine.waits = True
    c.add("n3").start_agent()
    await c.scale("j", "scale", target=3)
    await c.until(lambda: generation(c).state == "forming", 30, "it grows")
    assert (set(generation(c).holders), set(generation(c).members)) == ({"n1", "n2"}, {"n1", "n2", "n3"})
    assert generation(c).planned
    pod = c.nodes["n3"].machine.pods["uid-j"].status()
    assert (pod.phase, pod.warming) == ("ready", False)
    await c.until(lambda: c.nodes["n1"].machine.pods["uid-j"].killing, 2, "n1 has been told")
    return generation(c)


def nothing_spent(c: SimCluster) -> bool:
    return not any(entry.counts for entry in c.job("j").budget.values())


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_a_worker_that_dies_as_it_leaves_is_not_waited_for(seed: int) -> None:
    """1: its node had asked it to leave; 2, 5: it had not yet, and took the death for a failure of what runs."""

    async def scenario(c: SimCluster) -> None:
        asked = await leaving(c)
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        assert await running(c, 3) < SOON
        assert (generation(c).token, generation(c).cause) == (asked.token, asked.cause), "what was going on, sooner"
        assert nothing_spent(c)

    simulate(2, scenario, seed)


def test_a_node_that_is_lost_as_it_leaves_is_not_waited_for() -> None:
    async def scenario(c: SimCluster) -> None:
        await leaving(c)
        await c.nodes["n2"].power_cut()
        assert await running(c, 2) < TIMING.lease + SOON
        assert (set(generation(c).members), generation(c).cause.kind, generation(c).cause.node) == (
            {"n1", "n3"},
            "node_lost",
            "n2",
        )
        assert nothing_spent(c)

    simulate(2, scenario)


def test_without_the_newcomer_the_others_go_on_and_still_have_their_grace() -> None:
    async def scenario(c: SimCluster) -> None:
        asked = await leaving(c)
        await c.nodes["n3"].power_cut()
        await c.until(lambda: generation(c).token != asked.token, TIMING.lease + SOON, "formed without it")
        assert (set(generation(c).members), generation(c).planned, generation(c).cause.kind) == (
            {"n1", "n2"},
            True,
            "scale",
        )
        assert c.nodes["n1"].machine.running("uid-j") is not None
        await running(c, 2, limit=40)
        assert nothing_spent(c)
        for node in c.nodes.values():
            node.machine.waits = False
        c.nodes["n3"].power_on()
        c.nodes["n3"].start_agent()
        await running(c, 3, limit=TIMING.cooldown + 20)
        assert nothing_spent(c)

    simulate(2, scenario)


@pytest.mark.parametrize("after", [0.0, 8.0])
def test_a_shrink_that_overtakes_it_has_the_last_word(after: float) -> None:
    async def scenario(c: SimCluster) -> None:
        await leaving(c)
        await asyncio.sleep(after)
        for node in c.nodes.values():
            node.machine.waits = False
        await c.scale("j", "scale", target=1)
        await running(c, 1, limit=60)
        assert c.job("j").control.target == 1
        assert nothing_spent(c)
        formed = generation(c).token
        await asyncio.sleep(TIMING.cooldown + 10)
        assert generation(c).token == formed, "and it stays so"

    simulate(2, scenario)


def test_a_node_that_never_acknowledges_stops_a_gang_less_and_less_often() -> None:
    """Its agent beats, and its pod says that it is ready. Before, the gang was stopped for it after each cool-down."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 3)
        await running(c, 2, limit=90)
        mute = c.add("n3")
        mute.machine.promise = lambda *_args, **_more: None  # type: ignore[method-assign]
        mute.start_agent()
        await c.until(lambda: bool(c.job("j").setbacks), 120, "it did not acknowledge")
        await running(c, 2)
        since = generation(c).number
        await asyncio.sleep(500)
        (late,) = c.job("j").setbacks
        assert (late.node, late.times) == ("n3", 4), "tried again after 1, 2 and 4 minutes"
        assert generation(c).number == since + 2 * (late.times - 1)
        assert set(generation(c).members) == {"n1", "n2"} and c.whole("j")
        assert nothing_spent(c)
        c.add("n4").start_agent()
        await running(c, 3, limit=TIMING.cooldown + 20)
        assert set(generation(c).members) == {"n1", "n2", "n4"}, "another one may join meanwhile"

    simulate(2, scenario)


def test_a_job_that_needs_it_tries_at_once_and_then_less_and_less_often() -> None:
    async def scenario(c: SimCluster) -> None:
        mute = c.nodes["n2"].machine
        promise, mute.promise = mute.promise, lambda *_args, **_more: None  # type: ignore[method-assign]
        await c.submit("j", 2, 2, 2)
        await c.until(lambda: any(one.times == 3 for one in c.job("j").setbacks), 300, "it is tried three times")
        (late,) = c.job("j").setbacks
        assert c.job("j").phase == "holding" and generation(c).number == 3
        assert late.at > 2 * 1000 * TIMING.form_margin + 60_000, "the second time at once, the third after a minute"
        mute.promise = promise  # type: ignore[method-assign]
        await running(c, 2, limit=125 + TIMING.form_margin)
        c.nodes["n1"].machine.worker_ends("uid-j", 0, signal=9)
        assert await running(c, 2) < SOON, "it is as good as any other now"
        assert not c.job("j").setbacks

    simulate(2, scenario)


def breaks(node: Node, hurt: Callable[[], bool] = lambda: True) -> None:
    """From now on workers die a second after each start there, while ``hurt`` says so."""
    machine, start = node.machine, node.machine.start

    def dies(uid: str, order: StartOrder) -> None:
        start(uid, order)
        machine.later(1.0, lambda: machine.worker_ends(uid, 0, code=1, error="No such file") if hurt() else None)

    machine.start = dies  # type: ignore[method-assign]


async def spoiled(c: SimCluster, seconds: float) -> tuple[int, Setback]:
    """Generations that a node costs a gang of two in this time, and what its job remembers of it then."""
    since = generation(c).number
    await asyncio.sleep(seconds)
    (one,) = (one for one in c.job("j").setbacks if one.node == "n3")
    return generation(c).number - since, one


def test_a_broken_newcomer_ends_no_job_and_is_tried_less_and_less_often() -> None:
    """Before, the gang was formed anew with it until the budget was spent, within minutes."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 3, restarts=RestartLimits(max=0))
        await running(c, 2, limit=90)
        bad = c.add("n3")
        breaks(bad)
        bad.start_agent()
        await c.until(lambda: bool(c.job("j").setbacks), 120, "it failed")
        assert (generation(c).cause.kind, generation(c).cause.node) == ("join_failed", "n3")
        await running(c, 2)
        more, one = await spoiled(c, 500)
        assert (one.kind, one.times, more) == ("failed", 4, 2 * 3), "tried again after 1, 2 and 4 minutes"
        assert set(generation(c).members) == {"n1", "n2"} and c.whole("j")
        assert nothing_spent(c)
        c.add("n4").start_agent()
        await running(c, 3, limit=TIMING.cooldown + 20)
        assert set(generation(c).members) == {"n1", "n2", "n4"}, "another one may join meanwhile"

    simulate(2, scenario)


def test_a_program_that_fails_with_more_workers_pays_after_a_few_newcomers() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 9, 9)
        await running(c, 2, limit=90)
        for i in range(3, 8):
            bad = c.add(f"n{i}")
            breaks(bad)
            bad.start_agent()
        await c.until(lambda: len(c.job("j").setbacks) == 5, 900, "all have failed")
        entries = sorted(c.job("j").budget.items(), key=lambda each: int(each[0]))
        newcomers = [one for _, one in entries if one.node in c.nodes.keys() - {"n1", "n2"} and one.exit]
        assert len({one.node for one in newcomers if not one.counts}) == 3, "these are free, however often each"
        assert {one.node for one in newcomers if one.counts} >= {newcomers[-1].node}
        assert all(one.counts == (one.kind == "worker_failed") for one in newcomers)
        await running(c, 2)

    simulate(2, scenario)


def test_a_program_that_fails_by_itself_spends_its_budget_as_ever() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 3, restarts=RestartLimits(max=2))
        await running(c, 2, limit=90)
        c.add("n3").start_agent()
        await running(c, 3, limit=90)
        for node in c.nodes.values():
            breaks(node)
        c.nodes["n3"].machine.worker_ends("uid-j", 0, code=1)
        await c.until(lambda: c.job("j").phase == "failed", 60, "its budget is spent")
        assert [entry.kind for entry in c.job("j").budget.values() if entry.counts][-1] in (
            "worker_failed",
            "collective",
        )

    simulate(2, scenario)


@pytest.mark.parametrize("how", ["power", "hang"])
def test_a_node_that_is_lost_again_and_again_stops_a_gang_less_and_less_often(how: str) -> None:
    """Before, after each cool-down: 243 generations in an hour."""

    async def flaps(node: Node) -> None:
        while True:
            await asyncio.sleep(40)
            if how == "hang":
                node.lease.gate.close()
                node.gate.close()
                await asyncio.sleep(4)
                node.gate.open()
                node.lease.gate.open()
            else:
                await node.power_cut()
                await asyncio.sleep(5)
                node.power_on()

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 3)
        await running(c, 2, limit=90)
        bad = c.add("n3")
        bad.start_agent()
        await running(c, 3, limit=90)
        flapping = asyncio.create_task(flaps(bad))
        more, one = await spoiled(c, 500)
        flapping.cancel()
        assert (one.kind, more <= 3 * one.times, one.times <= 5) == ("lost", True, True), (one, more)
        assert nothing_spent(c)

    simulate(2, scenario)


def test_a_node_that_is_lost_once_comes_back_after_the_cool_down() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 3)
        await running(c, 3, limit=90)
        await c.nodes["n3"].power_cut()
        await running(c, 2, limit=TIMING.lease + SOON)
        assert not c.job("j").setbacks
        c.nodes["n3"].power_on()
        await running(c, 3, limit=TIMING.cooldown + 20)

    simulate(3, scenario)

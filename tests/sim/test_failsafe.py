"""Directed schedules with the store away: healthy training goes on where it may, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from nodeagent.model.timing import RELEASE
from tests.inprocess.server import HereStore
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_directed import running, simulate

STOPPED = TIMING.fence + TIMING.kill + 0.1
"""Seconds within which workers without granted time are gone."""


def cut(c: SimCluster, names: Iterable[str], on: bool = True) -> None:
    """Cut (or join) these nodes' links to the store."""
    for name in names:
        c.nodes[name].link.cut = on


def apart(c: SimCluster, name: str) -> None:
    """This node hears no other agent and is not heard."""
    c.net.cut |= {pair for other in c.nodes for pair in ((name, other), (other, name))}


def pids(c: SimCluster) -> dict[str, tuple[int, ...]]:
    return {n.name: n.machine.pods["uid-j"].pids for n in c.nodes.values() if n.machine.running("uid-j") is not None}


def alive(c: SimCluster) -> list[str]:
    return [n.name for n in c.nodes.values() if n.machine.running("uid-j") is not None]


def members(c: SimCluster) -> list[str]:
    generation = c.job("j").generation
    assert generation is not None
    return [m.node for m in generation.ordered()]


async def started(c: SimCluster, minimum: int, size: int) -> None:
    """The job runs, its failsafe members are settled, nobody has just started."""
    await c.submit("j", minimum, size, size)
    await running(c, size)
    await asyncio.sleep(5)


def test_a_deleted_job_that_may_run_on_failsafe_time_keeps_no_other_back() -> None:
    """Its removal was refused for a day, and no agent came to the jobs behind it in all that time."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 3, 3)
        for name in members(c):
            await c.nodes[name].power_cut()
        await asyncio.sleep(15)
        await c.operate("j", desired="stop", delete=True)
        await asyncio.sleep(5)
        assert c.job("j").phase == "stopped"
        await c.submit("k", 1, 1, 1)
        await running(c, 1, "k")
        await asyncio.sleep(10)
        assert c.find("j") is not None, "one of those nodes may still keep it running"

    simulate(5, scenario)


def test_a_failsafe_members_agent_that_has_read_nothing_yet_does_not_leave() -> None:
    """A second restart while the store was away gave its promises up, and healthy gangs elsewhere stopped."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 2)
        job = c.job("j")
        assert job.generation is not None
        (keeper,) = set(job.failsafe_members) - set(job.generation.members)
        before = pids(c)
        cut(c, c.nodes)
        await asyncio.sleep(5)
        for _ in range(2):
            c.nodes[keeper].end_agent()
            await c.nodes[keeper].ended()
            c.nodes[keeper].start_agent()
            await asyncio.sleep(3)
        await asyncio.sleep(5)
        assert pids(c) == before

    simulate(4, scenario)


@pytest.mark.slow
def test_an_hour_without_the_store_disturbs_nobody() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before = pids(c)
        cut(c, c.nodes)
        for _ in range(60):
            await asyncio.sleep(60)
            assert pids(c) == before
        cut(c, c.nodes, False)
        await asyncio.sleep(10)
        assert pids(c) == before
        job = c.job("j")
        assert (job.restarts, job.phase, len(job.budget)) == (0, "running", 0)

    simulate(4, scenario)


@pytest.mark.parametrize("emptied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_agents_killed_and_started_again_without_the_store_disturb_nobody(emptied: bool) -> None:
    """Also where the store has lost everything when it comes back."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before = pids(c)
        cut(c, c.nodes)
        emptying = asyncio.ensure_future(c.empty_store()) if emptied else None
        for node in c.nodes.values():
            await asyncio.sleep(c.rng.uniform(0.0, 1.0))
            await node.kill_agent()
        await asyncio.sleep(15)
        for node in c.nodes.values():
            node.start_agent()
        await asyncio.sleep(15)
        assert pids(c) == before
        cut(c, c.nodes, False)
        await asyncio.sleep(TIMING.lease + 10)
        if emptying is not None:
            await emptying
        assert pids(c) == before
        assert (c.job("j").restarts, c.job("j").phase, len(c.job("j").budget)) == (0, "running", 0)

    for seed in range(3):
        simulate(4, scenario, seed)


def test_lease_processes_killed_again_and_again_without_the_store_disturb_nobody() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before = pids(c)
        cut(c, c.nodes)
        for _ in range(30):
            await asyncio.sleep(c.rng.uniform(0.3, 2.0))
            c.rng.choice(list(c.nodes.values())).lease.kill()
        assert pids(c) == before
        cut(c, c.nodes, False)
        await asyncio.sleep(10)
        assert pids(c) == before

    for seed in range(3):
        simulate(4, scenario, seed)


def test_without_store_and_agents_for_longer_than_their_patience_the_workers_stop() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        cut(c, c.nodes)
        for node in c.nodes.values():
            await node.kill_agent()
        await asyncio.sleep(28)
        assert len(alive(c)) == 3
        await asyncio.sleep(12)
        assert alive(c) == []
        for node in c.nodes.values():
            node.start_agent()
        cut(c, c.nodes, False)
        await c.until(lambda: c.whole("j"), 60, "whole again")

    simulate(4, scenario)


def test_a_cluster_of_one_node_bridges_it_too_and_hands_over_once_it_has_company() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 1, 1)
        before = pids(c)
        cut(c, c.nodes)
        await asyncio.sleep(30)
        assert pids(c) == before
        cut(c, c.nodes, False)
        c.add("n2").start_agent()
        await c.until(lambda: set(c.job("j").failsafe_members) == {"n1", "n2"}, 15, "the newcomer keeps as well")
        await c.nodes["n1"].power_cut()
        await c.until(lambda: c.whole("j") and members(c) == ["n2"], TIMING.lease + 5, "n2 has taken over")

    simulate(1, scenario)


def test_a_store_that_goes_away_again_while_agents_give_it_back_what_it_lost_disturbs_nobody() -> None:
    """Some have told it what they know and have yet to join again."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before = pids(c)
        emptying = asyncio.ensure_future(c.empty_store())

        def joined() -> list[bool]:
            return [n.agent is not None and n.agent.health().joined for n in c.nodes.values()]

        await c.until(lambda: not all(joined()), 3, "some have told it what it lost")
        cut(c, c.nodes)
        await asyncio.sleep(30)
        assert not all(joined()), "it went away before they could"
        assert pids(c) == before
        cut(c, c.nodes, False)
        await emptying
        await asyncio.sleep(15)
        assert (pids(c), joined()) == (before, [True] * len(c.nodes))

    simulate(4, scenario)


def test_one_node_cut_off_from_the_store_alone_is_stopped_and_replaced() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        victim = members(c)[1]
        cut(c, [victim])
        await c.until(lambda: victim not in alive(c), STOPPED, "its fence acted")
        await running(c, 3)
        assert victim not in members(c)

    simulate(4, scenario)


def test_a_node_that_loses_store_and_peers_stops_by_its_fence() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        victim = members(c)[1]
        cut(c, c.nodes)
        apart(c, victim)
        await c.until(lambda: victim not in alive(c), STOPPED, "its fence acted")

    simulate(4, scenario)


def test_all_members_cut_off_while_a_spare_is_served_never_makes_two_generations() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before, generation = pids(c), c.job("j").generation
        cut(c, members(c))
        await asyncio.sleep(30)
        assert pids(c) == before, "they lend each other time"
        outside = c.nodes["n4"].agent
        assert outside is not None
        assert "nodeagentctl forget" in outside.why("uid-j")[0]
        cut(c, c.nodes, False)
        await asyncio.sleep(10)
        assert pids(c) == before, "and go on when the store is back: nobody was declared lost"
        after = c.job("j").generation
        assert generation is not None and after is not None and after.token == generation.token

    simulate(5, scenario)


@pytest.mark.slow
def test_members_that_come_back_one_by_one_go_on_though_one_would_be_enough() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 1, 3)
        before = pids(c)
        cut(c, members(c))
        await asyncio.sleep(30)
        for name in members(c):
            cut(c, [name], False)
            await asyncio.sleep(TIMING.store_timeout)
        await asyncio.sleep(10)
        assert pids(c) == before, "the first to be back waited for the others"
        assert c.job("j").restarts == 0

    for seed in range(5):
        simulate(5, scenario, seed)


@pytest.mark.parametrize("seed", range(8))
def test_a_worker_that_dies_without_the_store_is_replaced_when_it_is_back(seed: int) -> None:
    """By whichever member is served first. Where that is a victim, who failed first is not known yet when the gang is
    formed anew, and the history keeps it so; the culprit's own end is in the reports as soon as it is heard."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        first, culprit, last = members(c)
        cut(c, c.nodes)
        await asyncio.sleep(10)
        c.nodes[culprit].machine.worker_ends("uid-j", 0, signal=9)
        await asyncio.sleep(10)
        cut(c, c.nodes, False)
        await c.until(lambda: c.job("j").restarts == 1 and c.whole("j"), 15, "replaced")
        await asyncio.sleep(5)
        job = c.job("j")
        (entry,) = job.budget.values()
        assert (job.restarts, len(members(c)), entry.counts) == (1, 3, True)
        assert (entry.kind, entry.node) in [("worker_failed", culprit), ("collective", first), ("collective", last)]
        assert job.last_reports[culprit].exits[0].signal == 9

    simulate(4, scenario, seed)


def test_a_promise_outlives_the_failsafe_members_return_to_the_store() -> None:
    """n3, a failsafe member that is no member, is served again while the members still run on the time that it lent."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 2)
        assert set(c.job("j").failsafe_members) == {"n1", "n2", "n3"}
        cut(c, ["n1", "n2", "n3"])
        await asyncio.sleep(8)
        assert alive(c) == ["n1", "n2"]
        cut(c, ["n3"], False)
        await c.until(lambda: c.whole("j") and set(members(c)) == {"n3", "n4"}, 15, "re-formed without them")

    simulate(4, scenario)


def test_failsafe_members_gone_for_good_hold_the_job_until_an_operator_says_so() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 1, 2)
        kept = sorted(c.job("j").failsafe_members)
        for name in kept:
            await c.nodes[name].power_cut()
        await asyncio.sleep(30)
        assert alive(c) == []
        await HereStore(c.server).forget(kept[0], "ann")
        await c.until(lambda: c.whole("j"), 15, "goes on on the nodes that are left")

    simulate(5, scenario)


def test_the_name_of_a_job_that_may_run_on_elsewhere_is_not_free() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        cut(c, members(c))
        await asyncio.sleep(10)
        await c.operate("j", desired="stop")
        await c.until(lambda: c.job("j").phase == "stopped", 10, "the others take it for stopped")
        assert c.job("j").failsafe_members, "but it is kept"
        cut(c, c.nodes, False)
        await c.until(
            lambda: not alive(c) and not c.job("j").failsafe_members, 15, "it is stopped, and nobody keeps it"
        )

    simulate(5, scenario)


def test_a_failsafe_member_whose_change_of_failsafe_members_is_under_way_lends_nothing_under_the_old_ones() -> None:
    """n1, the only failsafe member, asks the store to have n2 as one too, and is cut off before it hears that it was
    done."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 1, 1)
        first = c.nodes["n1"]
        c.add("n2").start_agent()
        for _ in range(500_000):  # finer than the request's way to the store
            await asyncio.sleep(0.00002)
            if first.agent is not None and "n2" in first.agent.cluster().nodes:
                break
        first.link.cut_replies = True
        await c.until(lambda: set(c.job("j").failsafe_members) == {"n1", "n2"}, 1, "the store has done it")
        cut(c, ["n1"])
        await c.until(lambda: c.whole("j") and members(c) == ["n2"], TIMING.lease + 15, "n2 has taken over")

    simulate(1, scenario)


def test_one_failsafe_member_that_answers_at_the_address_of_another_answers_for_itself_only() -> None:
    """Found by strangers: it said yes for a failsafe member that had let go, and two generations ran."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        assert set(c.job("j").failsafe_members) == {"n1", "n2", "n3"}
        cut(c, ("n1", "n2"))
        c.net.ends["n3"] = c.net.ends["n2"]
        await c.until(lambda: alive(c) in (["n3"], []), STOPPED + TIMING.failsafe, "n1 and n2 stop: n3 never said yes")
        await c.until(lambda: c.whole("j") and "n3" in members(c), 90, "re-formed on those that the store hears")

    simulate(5, scenario)


@pytest.mark.slow
def test_a_failsafe_member_is_given_up_only_when_the_slowest_clock_has_counted_the_limit() -> None:
    """Found by strangers: the asker counts the limit with its own clock, the store with its."""
    limit = 600.0

    async def scenario(c: SimCluster) -> None:
        for node in c.nodes.values():
            node.clock.rate = 0.982
        await started(c, 2, 2)
        away = set(members(c))
        failsafe_members = set(c.job("j").failsafe_members)
        cut(c, away | failsafe_members)
        rest = [c.add(f"x{number}") for number in range(2)]
        for node in rest:
            node.start_agent()
        await asyncio.sleep(TIMING.lease + 5)
        await c.operate("j", desired="stop")
        await c.until(lambda: c.job("j").phase == "stopped", 60, "the store knows it as ended")
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(limit - 30)
        assert set(alive(c)) == away, "they run on failsafe time"

        def free() -> bool:
            return not c.server.run("return still_held(job_read(A.uid))", uid="uid-j")

        await c.until(lambda: free() or not alive(c), limit, "one or the other")
        assert not free(), "the name was free while the job ran"
        await c.until(free, limit, "and it is free in the end")
        assert asyncio.get_running_loop().time() - began < RELEASE * limit + 2 * TIMING.lease

    simulate(3, scenario, timing=TIMING.model_copy(update={"failsafe_limit": limit}))

"""Directed schedules: the store is emptied, or goes back in time, under training."""

from __future__ import annotations

import asyncio

from tests.sim import provocations
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_directed import running, simulate

RECOVERY = TIMING.credit + TIMING.lease


async def recovery_reported(cluster: SimCluster) -> None:
    """Until the report of how long it took is in the job's record, which does not change any more then."""

    def reported() -> bool:
        generation = cluster.job("j").generation
        return generation is not None and bool(generation.reports)

    await cluster.until(reported, 3, "the recovery is reported")


def pids(cluster: SimCluster, job: str = "j") -> dict[str, tuple[int, ...]]:
    return {
        n.name: n.machine.pods[f"uid-{job}"].pids for n in cluster.nodes.values() if n.machine.running(f"uid-{job}")
    }


async def back(cluster: SimCluster) -> None:
    """The store was given everything back, and takes decisions."""
    await cluster.until(lambda: cluster.server.state.jobs, 3, "the jobs are back")
    await cluster.until(lambda: not cluster.server.state.recovering, 10, "the store has recovered")
    cluster.checker.check_kept()


def test_an_emptied_store_disturbs_nothing() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await c.submit("q", 5, 5, 5)
        await running(c, 3)
        before, was, uid = c.job("j"), pids(c), c.server.state.cluster_uid
        await c.empty_store()
        await asyncio.sleep(20)
        assert pids(c) == was
        after = c.job("j")
        assert (after.generation, after.restarts, after.budget) == (before.generation, 0, {})
        assert c.server.state.cluster_uid == uid
        assert c.job("q").phase == "queued"
        assert not any(n.lost for n in c.server.state.nodes.values())
        c.checker.check_kept()
        await c.operate("j", target=2)
        await running(c, 2)
        generation = c.job("j").generation
        assert generation is not None
        assert generation.number == 2

    simulate(4, scenario)


def test_an_emptied_store_while_one_agent_is_down_disturbs_nothing() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        generation, was = c.job("j").generation, pids(c)
        await c.nodes["n2"].kill_agent()
        await asyncio.sleep(0.2)
        await c.empty_store()
        c.nodes["n2"].start_agent()
        await asyncio.sleep(15)
        assert (c.job("j").generation, pids(c)) == (generation, was)

    simulate(3, scenario)


def test_an_agent_that_restarts_may_be_the_first_in_an_emptied_store() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        generation, was, uid = c.job("j").generation, pids(c), c.server.state.cluster_uid
        await c.nodes["n2"].kill_agent()
        for other in ("n1", "n3"):
            c.nodes[other].link.cut = True
        emptying = asyncio.ensure_future(c.empty_store())
        await asyncio.sleep(0.01)
        c.nodes["n2"].disk.kept = None  # else it would give back what it kept there
        c.nodes["n2"].start_agent()
        await c.until(lambda: "n2" in c.server.state.nodes, 1, "n2 has begun a new cluster")
        assert c.server.state.cluster_uid != uid
        for other in ("n1", "n3"):
            c.nodes[other].link.cut = False
        await emptying
        await asyncio.sleep(15)
        assert (c.job("j").generation, pids(c), c.server.state.cluster_uid) == (generation, was, uid)

    simulate(3, scenario)


def test_an_agent_that_began_a_cluster_does_not_claim_the_next_emptied_store() -> None:
    """Random faults of this kind only, seed 50026: all others were refused, and forgot their jobs."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        generation, was = c.job("j").generation, pids(c)
        await c.nodes["n3"].kill_agent()
        for other in ("n1", "n2"):
            c.nodes[other].link.cut = True
        emptying = [asyncio.ensure_future(c.empty_store())]
        c.nodes["n3"].disk.kept = None
        c.nodes["n3"].start_agent()
        await c.until(lambda: "n3" in c.server.state.nodes, 1, "n3 has begun a new cluster")
        await asyncio.sleep(1)
        emptying.append(asyncio.ensure_future(c.empty_store()))
        await c.until(lambda: "n3" in c.server.state.nodes, 1, "and gives that back")
        for other in ("n1", "n2"):
            c.nodes[other].link.cut = False
        await c.until(lambda: c.server.state.jobs, 3, "the job is back")
        await asyncio.gather(*emptying)
        await asyncio.sleep(15)
        assert (c.job("j").generation, pids(c)) == (generation, was)

    simulate(3, scenario)


def test_a_store_emptied_in_the_middle_of_forming() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.job("j").phase == "forming", 3, "forming")
        await c.empty_store()
        await running(c, 3, limit=RECOVERY + 5)
        assert c.job("j").restarts == 1

    simulate(3, scenario)


def test_a_generation_that_the_store_forgot_goes_on() -> None:
    """Five seconds are lost, and in them the job re-formed."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        rolling = asyncio.ensure_future(c.roll_back_store(5))
        await asyncio.sleep(1)
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await running(c, 3)
        await recovery_reported(c)
        before, was = c.job("j"), pids(c)
        assert before.restarts == 1
        await rolling
        assert c.job("j").restarts == 0, "the store went back"
        await asyncio.sleep(15)
        assert pids(c) == was
        after = c.job("j")
        assert (after.generation, after.restarts, after.budget) == (before.generation, 1, before.budget)
        await c.operate("j", target=2)
        await running(c, 2)

    simulate(4, scenario)


def test_a_job_submitted_in_the_lost_seconds_is_not_lost() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.until(lambda: len(c.server.state.nodes) == 2, 5, "all joined")
        rolling = asyncio.ensure_future(c.roll_back_store(5))
        await asyncio.sleep(0.1)
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        was = pids(c)
        await rolling
        assert not c.server.state.jobs
        await back(c)
        await asyncio.sleep(10)
        assert pids(c) == was

    simulate(2, scenario)


def test_the_lost_life_does_not_come_back_with_an_older_store() -> None:
    """n1 and n2 were cut off and replaced in the lost seconds; they reach the older store first, in which they are
    still the gang. They must not go on beside the newer one."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        first = c.job("j").generation
        assert first is not None
        old = list(first.members)
        rolling = asyncio.ensure_future(c.roll_back_store(8))
        await asyncio.sleep(0.1)
        for name in old:
            c.nodes[name].link.cut = True

        def moved() -> bool:
            generation = c.job("j").generation
            return c.whole("j") and generation is not None and not set(generation.members) & set(old)

        await c.until(moved, 7, "moved to the other nodes")
        await recovery_reported(c)
        second, was = c.job("j").generation, pids(c)
        await rolling
        others = [n for n in c.nodes.values() if n.name not in old]
        for node in c.nodes.values():
            node.link.cut = node in others
        await asyncio.sleep(1.5)
        for node in others:
            node.link.cut = False
        await asyncio.sleep(15)
        assert (c.job("j").generation, pids(c)) == (second, was)

    simulate(4, scenario)


def test_the_store_emptied_again_and_again() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        generation, was = c.job("j").generation, pids(c)
        for pause in (0.1, 0.6, 1.0, 2.0, 5.0):
            await c.empty_store()
            await asyncio.sleep(pause)
        await back(c)
        await asyncio.sleep(5)
        assert (c.job("j").generation, pids(c)) == (generation, was)

    simulate(3, scenario)


def test_an_emptied_store_is_given_back_after_a_long_silence() -> None:
    """Nobody reached it for a minute: the workers stopped at their fence, the job is not lost."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        for node in c.nodes.values():
            node.link.cut = True
        emptying = asyncio.ensure_future(c.empty_store())
        await asyncio.sleep(60)
        for node in c.nodes.values():
            node.link.cut = False
        await emptying
        await running(c, 3)
        assert not any(e.counts for e in c.job("j").budget.values())

    simulate(3, scenario)


def test_a_store_that_only_an_older_view_reached_waits_for_the_others() -> None:
    """Random seed 21214: all others were cut off, and ran a newer generation on the time that they lent each other."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1)
        await running(c, 1)
        await asyncio.sleep(5)
        old = c.job("j").generation
        assert old is not None
        assert set(old.members) == {"n1"}
        assert {"n1", "n3"} < set(c.job("j").failsafe_members)
        c.nodes["n3"].link.cut = True
        await c.nodes["n1"].power_cut()
        await c.until(lambda: c.job("j").generation != old and c.whole("j"), 30, "moved")
        await recovery_reported(c)
        moved, was = c.job("j").generation, pids(c)
        for name in ("n2", "n4"):
            c.nodes[name].link.cut = True
        emptying = asyncio.ensure_future(c.empty_store())
        c.nodes["n3"].link.cut = False
        await asyncio.sleep(30)
        assert c.job("j").generation == old, "it knows no better"
        alone = c.nodes["n3"].agent
        assert alone is not None
        assert "waits for nodes that may know it: n1, n2, n4;" in alone.health().store_waits
        assert pids(c) == was
        for name in ("n2", "n4"):
            c.nodes[name].link.cut = False
        await emptying
        start = asyncio.get_running_loop().time()
        await c.until(lambda: not c.server.state.recovering, 2, "the newer view says that n1 is gone: all are there")
        assert asyncio.get_running_loop().time() - start < 1.5
        await asyncio.sleep(10)
        assert alone.health().store_waits == ""
        assert (c.job("j").generation, pids(c)) == (moved, was)

    simulate(4, scenario)


def test_a_node_that_died_with_the_store_is_waited_for_within_a_bound() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        await asyncio.sleep(5)
        await c.nodes["n2"].power_cut()
        await c.empty_store()
        await asyncio.sleep(50)
        assert c.server.state.awaited == {"n2"}
        assert "n2" in c.nodes["n1"].agent.health().store_waits  # type: ignore[union-attr]
        generation = c.job("j").generation
        await running(c, 2, limit=30)
        after = c.job("j")
        assert (after.generation != generation, after.restarts) == (True, 1)
        assert not any(e.counts for e in after.budget.values())

    simulate(3, scenario)


def test_an_emptied_store_to_which_all_come_back_waits_no_longer_than_ever() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        await c.nodes["n5"].power_cut()
        await asyncio.sleep(10)  # it has been silent for long: nobody waits for it
        await c.empty_store()
        start = asyncio.get_running_loop().time()
        await c.until(lambda: not c.server.state.recovering, 10, "the store has recovered")
        assert asyncio.get_running_loop().time() - start <= RECOVERY + 0.1
        # and again, from a view that was read while everybody was sheltered
        await c.empty_store()
        await asyncio.sleep(1)
        await c.empty_store()
        start = asyncio.get_running_loop().time()
        await c.until(lambda: not c.server.state.recovering, 10, "the store has recovered")
        assert asyncio.get_running_loop().time() - start <= RECOVERY + 0.1

    simulate(5, scenario)


def test_a_machine_that_comes_back_without_its_disk_is_not_waited_for() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        was = pids(c)
        await c.nodes["n3"].power_cut(disk_lost=True)
        await c.empty_store()
        await asyncio.sleep(10)
        assert c.server.state.awaited == {"n3"}
        c.nodes["n3"].power_on()
        await c.until(lambda: not c.server.state.recovering, 2, "it has nothing to say")
        await c.until(lambda: c.server.state.nodes["n3"].incarnation.life != "", 10, "it joins")
        await asyncio.sleep(10)
        assert pids(c) == was

    simulate(3, scenario)


def test_a_newer_view_that_declares_a_node_lost_waits_for_the_lease_that_the_store_has_granted_since() -> None:
    simulate(4, provocations.back_before_its_loss_is_known)

"""Directed schedules: the store is emptied, or goes back in time, under training."""

from __future__ import annotations

import asyncio

from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_directed import running, simulate

RECOVERY = TIMING.credit + TIMING.lease


async def recovery_told(cluster: SimCluster) -> None:
    """Until the report of how long it took is in the job's record, which does not change any more then."""

    def told() -> bool:
        head = cluster.job("j").head
        return head is not None and bool(head.reports)

    await cluster.until(told, 3, "the recovery is reported")


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
        assert (after.head, after.restarts, after.budget) == (before.head, 0, {})
        assert c.server.state.cluster_uid == uid
        assert c.job("q").phase == "queued"
        assert not any(n.lost for n in c.server.state.nodes.values())
        c.checker.check_kept()
        await c.operate("j", target=2)
        await running(c, 2)
        head = c.job("j").head
        assert head is not None
        assert head.number == 2

    simulate(4, scenario)


def test_an_emptied_store_while_one_agent_is_down_disturbs_nothing() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        head, was = c.job("j").head, pids(c)
        await c.nodes["n2"].kill_agent()
        await asyncio.sleep(0.2)
        await c.empty_store()
        c.nodes["n2"].start_agent()
        await asyncio.sleep(15)
        assert (c.job("j").head, pids(c)) == (head, was)

    simulate(3, scenario)


def test_an_agent_that_restarts_may_be_the_first_in_an_emptied_store() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        head, was, uid = c.job("j").head, pids(c), c.server.state.cluster_uid
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
        assert (c.job("j").head, pids(c), c.server.state.cluster_uid) == (head, was, uid)

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
        await recovery_told(c)
        before, was = c.job("j"), pids(c)
        assert before.restarts == 1
        await rolling
        assert c.job("j").restarts == 0, "the store went back"
        await asyncio.sleep(15)
        assert pids(c) == was
        after = c.job("j")
        assert (after.head, after.restarts, after.budget) == (before.head, 1, before.budget)
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
        first = c.job("j").head
        assert first is not None
        old = list(first.members)
        rolling = asyncio.ensure_future(c.roll_back_store(8))
        await asyncio.sleep(0.1)
        for name in old:
            c.nodes[name].link.cut = True

        def moved() -> bool:
            head = c.job("j").head
            return c.whole("j") and head is not None and not set(head.members) & set(old)

        await c.until(moved, 7, "moved to the other nodes")
        await recovery_told(c)
        second, was = c.job("j").head, pids(c)
        await rolling
        others = [n for n in c.nodes.values() if n.name not in old]
        for node in c.nodes.values():
            node.link.cut = node in others
        await asyncio.sleep(1.5)
        for node in others:
            node.link.cut = False
        await asyncio.sleep(15)
        assert (c.job("j").head, pids(c)) == (second, was)

    simulate(4, scenario)


def test_the_store_emptied_again_and_again() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        head, was = c.job("j").head, pids(c)
        for pause in (0.1, 0.6, 1.0, 2.0, 5.0):
            await c.empty_store()
            await asyncio.sleep(pause)
        await back(c)
        await asyncio.sleep(5)
        assert (c.job("j").head, pids(c)) == (head, was)

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

"""Records of ended jobs go by themselves, and stay away."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.plan.queueing import dependencies
from nodeagent.spec.agentconfig import JobsConfig, RetentionConfig
from tests.sim.cluster import SimCluster
from tests.sim.test_directed import running, simulate
from tests.sim.test_lost_store import back


async def end_jobs(c: SimCluster, count: int) -> None:
    """e0, e1, ... run and are stopped, one after the other."""
    for i in range(count):
        await c.submit(f"e{i}", 1, 1, 1)
        await running(c, 1, f"e{i}")
        await c.operate(f"e{i}", desired="stop")
        await c.until(lambda i=i: c.job(f"e{i}").phase == "stopped", 20, "it has ended")


def keep(c: SimCluster, jobs: int) -> None:
    """So many ended jobs are kept from now on, on all nodes."""
    for node in c.nodes.values():
        assert node.agent is not None
        config = node.agent.config
        kept = JobsConfig(retention=RetentionConfig(jobs=jobs))
        node.agent.reconfigure(config.model_copy(update={"jobs": kept}))


def names(c: SimCluster) -> set[str]:
    return {job.name for job in c.server.state.jobs.values()}


def test_agents_remove_the_oldest_records_of_ended_jobs_for_good() -> None:
    async def scenario(c: SimCluster) -> None:
        await end_jobs(c, 4)
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        await asyncio.sleep(10)
        assert names(c) == {"e0", "e1", "e2", "e3", "j"}

        keep(c, 1)
        c.checker.submitted -= {f"uid-e{i}" for i in range(3)}
        await c.until(lambda: names(c) == {"e3", "j"}, 65, "the others are removed")

        await c.empty_store()
        await back(c)
        await asyncio.sleep(5)
        assert names(c) == {"e3", "j"}, "agents gave back what had been removed"
        await running(c, 2)

    simulate(3, scenario)


@pytest.mark.slow
def test_all_but_the_newest_ended_jobs_go_to_the_history_and_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "IN_VIEW", 1)

    async def scenario(c: SimCluster) -> None:
        await end_jobs(c, 4)
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        c.checker.submitted -= {f"uid-e{i}" for i in range(3)}
        await c.until(lambda: names(c) == {"e3", "j"}, 140, "the others go to the history")
        assert sorted(job.name for job in c.server.state.past.values()) == ["e0", "e1", "e2"]
        for node in c.nodes.values():
            assert node.agent is not None
            await c.until(lambda a=node.agent: {j.name for j in a.cluster().jobs.values()} == {"e3", "j"}, 5, "views")
            assert not node.agent.cluster().refused

        keep(c, 2)
        await c.until(
            lambda: [job.name for job in c.server.state.past.values()] == ["e2"], 65, "the oldest are removed"
        )

        await c.empty_store()
        await back(c)
        await asyncio.sleep(65)
        assert names(c) == {"e3", "j"}, "of the history no agent has anything to give back"
        assert not c.server.state.past
        await running(c, 2)

    simulate(3, scenario)

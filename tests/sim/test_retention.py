"""Records of ended jobs go by themselves, and stay away."""

from __future__ import annotations

import asyncio

from nodeagent.spec.agentconfig import JobsConfig, RetentionConfig
from tests.sim.cluster import SimCluster
from tests.sim.test_directed import running, simulate
from tests.sim.test_lost_store import back


def names(c: SimCluster) -> set[str]:
    return {job.name for job in c.server.state.jobs.values()}


def test_agents_remove_the_oldest_records_of_ended_jobs_for_good() -> None:
    async def scenario(c: SimCluster) -> None:
        for i in range(4):
            await c.submit(f"e{i}", 1, 1, 1)
            await running(c, 1, f"e{i}")
            await c.operate(f"e{i}", desired="stop")
            await c.until(lambda i=i: c.job(f"e{i}").phase == "stopped", 20, "it has ended")
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        await asyncio.sleep(10)
        assert names(c) == {"e0", "e1", "e2", "e3", "j"}

        for node in c.nodes.values():
            assert node.agent is not None
            config = node.agent.config
            jobs = JobsConfig(retention=RetentionConfig(jobs=1))
            node.agent.reconfigure(config.model_copy(update={"jobs": jobs}))
        c.checker.submitted -= {f"uid-e{i}" for i in range(3)}
        await c.until(lambda: names(c) == {"e3", "j"}, 65, "the others are removed")

        await c.empty_store()
        await back(c)
        await asyncio.sleep(5)
        assert names(c) == {"e3", "j"}, "agents gave back what had been removed"
        await running(c, 2)

    simulate(3, scenario)

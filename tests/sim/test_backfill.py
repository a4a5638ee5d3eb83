"""A large gang behind running jobs, and small jobs that come again and again: it starts when time limits said that it
would, the small ones fill the gap where they have ended by then, and agents that die in between change nothing of it.
"""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from nodeagent.model.job import TERMINAL
from nodeagent.plan.queueing import heldback
from nodeagent.plan.queueing.queue import GIVE_WAY
from tests.groups import seeds
from tests.sim import faults
from tests.sim.cluster import SimCluster
from tests.sim.test_directed import simulate
from tests.sim.test_queue import end_all_that_runs

NODES, TAKEN = 7, 3
LIMIT, SHORT = 90.0, 15.0
"""Seconds: the time limits of the job that holds what the gang lacks, and of small ones that end before."""
GRACE = 5.0
"""Seconds, of every job of a simulation."""


async def small_jobs(c: SimCluster) -> None:
    """One every few seconds: by turns without a time limit, with one that is too long, and with a short one."""
    for i in count():
        limit = (None, 10 * LIMIT, SHORT)[i % 3]
        await c.patiently(lambda i=i, limit=limit: c.submit(f"s{i}", 1, 1, 1, time_limit=limit))  # type: ignore[misc]
        await asyncio.sleep(c.rng.uniform(2.0, 4.0))


@pytest.mark.parametrize("seed", seeds([1], [2]))
def test_a_stream_of_small_jobs_does_not_push_a_large_gang_back(seed: int) -> None:
    async def scenario(c: SimCluster) -> None:
        loop = asyncio.get_running_loop()
        await c.submit("service", 1, 1, 1)  # one that the gang can do without, while no other node is down
        await c.submit("a", TAKEN, TAKEN, TAKEN, time_limit=LIMIT)
        await c.until(lambda: c.whole("a") and c.whole("service"), 30, "both run")
        latest = loop.time() + LIMIT + GRACE + GIVE_WAY
        await c.submit("big", NODES - 1, NODES - 1, NODES - 1)
        stream = asyncio.ensure_future(small_jobs(c))
        promised: set[int] = set()
        try:
            while c.job("big").phase != "running":
                assert loop.time() < latest, c.describe()
                for job in c.server.state.jobs.values():
                    early = job.name.startswith("s") and job.name != "service" and job.first_active is not None
                    assert not early or job.spec.time_limit == SHORT, f"{job.name} is before the gang"
                for node in c.nodes.values():
                    view = node.agent.cluster() if node.agent is not None else None
                    if view is not None and (job_ := view.jobs.get("uid-big")) is not None:
                        found = heldback.start_estimate(view, job_)
                        promised |= {found.start} if found is not None and found.start is not None else set()
                if c.rng.random() < 0.02:
                    await faults.restart_agent(c)
                await asyncio.sleep(0.2)
        finally:
            stream.cancel()
        ended = [job for job in c.server.state.jobs.values() if job.spec.time_limit == SHORT and job.phase in TERMINAL]
        assert len(ended) >= TAKEN, "the gap was used"
        first = c.job("big").first_active
        assert promised and first is not None and first <= max(promised) + 1000 * GIVE_WAY

    simulate(NODES, scenario, slots=2, seed=seed)


@pytest.mark.slow
def test_where_no_limit_says_when_it_gets_the_nodes_all_the_same() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("a", 2, 2, 2)
        await c.submit("b", 2, 2, 2)
        await c.until(lambda: c.whole("a") and c.whole("b"), 30, "both run")
        await c.submit("big", NODES, NODES, NODES)
        for i in range(6):
            await c.submit(f"s{i}", 1, 1, 1, time_limit=SHORT)
        await asyncio.sleep(60)
        assert {c.job(f"s{i}").phase for i in range(6)} == {"queued"}, "two nodes are idle, and kept"
        end_all_that_runs(c)
        await c.until(lambda: c.whole("big"), 60, "big runs")
        assert {c.job(f"s{i}").phase for i in range(6)} == {"queued"}
        end_all_that_runs(c)
        await c.until(lambda: all(c.job(f"s{i}").phase in TERMINAL for i in range(6)), 200, "the small ones ran")

    simulate(NODES, scenario, slots=2)

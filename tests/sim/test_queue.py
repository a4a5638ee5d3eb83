"""A long queue: every job gets its turn, and no node prepares more pods than could start soon."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.model.job import TERMINAL
from nodeagent.plan.pods.prepare import UNFIT_KEPT
from nodeagent.plan.queueing.queue import GIVE_WAY, NEXT
from tests.sim.cluster import SimCluster
from tests.sim.test_directed import simulate

NODES, JOBS = 24, 30
MOST = 2 * NEXT + UNFIT_KEPT
"""Pods on a node for jobs that wait: the next, those that were slow, those whose check failed."""


def prepared(c: SimCluster) -> int:
    """Most pods that any node has without a worker, of jobs that wait."""
    waiting = {job.uid for job in c.server.state.jobs.values() if job.phase == "queued"}
    return max(len(waiting.intersection(node.machine.pods)) for node in c.nodes.values())


def end_all_that_runs(c: SimCluster) -> None:
    for job in list(c.server.state.jobs.values()):
        if job.phase == "running" and c.whole(job.name):
            for node in c.nodes.values():
                pod = node.machine.pods.get(job.uid)
                for local in sorted(pod.alive) if pod is not None else ():
                    node.machine.worker_ends(job.uid, local, code=0)


async def until_all_have_ended(c: SimCluster, names: set[str], limit: float) -> None:
    """Each job that runs ends within half a second. At no moment are more pods prepared than can be of use."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit
    while not all(c.job(name).phase in TERMINAL for name in names):
        assert loop.time() < end, {name: c.job(name).phase for name in names}
        await asyncio.sleep(0.1)
        assert prepared(c) <= MOST
        end_all_that_runs(c)
    assert {c.job(name).phase for name in names} == {"succeeded"}


@pytest.mark.slow
def test_every_job_of_a_long_queue_gets_its_turn_and_few_pods_are_prepared() -> None:
    async def scenario(c: SimCluster) -> None:
        for i in range(JOBS):
            await c.submit(f"j{i}", *((20, 20, 20) if i % 5 == 0 else (4, 6, 6)))
        await until_all_have_ended(c, {f"j{i}" for i in range(JOBS)}, 600)

    simulate(NODES, scenario, slots=2)


def test_jobs_that_cannot_have_enough_nodes_prepare_none() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("big", 10, 10, 10)
        await c.until(lambda: c.whole("big"), 30, "big runs")
        for i in range(5):
            await c.submit(f"j{i}", 4, 4, 4)
        await asyncio.sleep(10)
        assert prepared(c) == 0
        end_all_that_runs(c)
        await until_all_have_ended(c, {"big", *(f"j{i}" for i in range(5))}, 300)

    simulate(12, scenario, slots=2)


@pytest.mark.slow
def test_pods_that_never_get_ready_keep_no_other_job_from_its_turn() -> None:
    async def scenario(c: SimCluster) -> None:
        hung = [f"h{i}" for i in range(2 * NEXT)]
        for node in c.nodes.values():
            node.machine.never_ready = frozenset(f"uid-{name}" for name in hung)
        for name in [*hung, *(f"j{i}" for i in range(8))]:
            await c.submit(name, 2, 4, 4)
        await until_all_have_ended(c, {f"j{i}" for i in range(8)}, 900)
        assert {c.job(name).phase for name in hung} == {"queued"}

    simulate(6, scenario, slots=2)


def test_pods_of_one_user_that_never_get_ready_keep_anothers_job_waiting_for_one_turn_only() -> None:
    async def scenario(c: SimCluster) -> None:
        hung = [f"h{i}" for i in range(3 * NEXT)]
        for node in c.nodes.values():
            node.machine.never_ready = frozenset(f"uid-{name}" for name in hung)
        for name in hung:
            await c.submit(name, 2, 2, 2, owner=7)
        await c.submit("other", 1, 1, 1, owner=8)
        await c.until(lambda: c.whole("other"), GIVE_WAY + 15, "the other user's job runs")

    simulate(2, scenario, slots=2)

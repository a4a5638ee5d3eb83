"""Random schedules: production agents under random faults; invariants after every step, liveness once faults stop.

Replay a failure with ``NODEAGENT_SIM_SEED=<seed> pytest tests/sim/test_random.py``; run more with
NODEAGENT_SIM_COUNT.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from nodeagent.model.job import TERMINAL
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.faults import FAULTS
from tests.sim.virtual import run_virtual

COUNT = int(os.environ.get("NODEAGENT_SIM_COUNT", "12"))
FIRST = int(os.environ.get("NODEAGENT_SIM_SEED", "1"))
SEEDS = range(FIRST, FIRST + (1 if "NODEAGENT_SIM_SEED" in os.environ else COUNT))
SIZES = (3, 4, 6, 10, 24)


async def _storm(cluster: SimCluster, seconds: float) -> None:
    """Faults at random moments, several at once."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    async with asyncio.TaskGroup() as faults:
        while loop.time() < end:
            await asyncio.sleep(cluster.rng.expovariate(0.5))
            fault = cluster.rng.choice(FAULTS)
            faults.create_task(fault(cluster), name=fault.__name__)  # type: ignore[arg-type]


async def _heal(cluster: SimCluster) -> None:
    """Everything is mended: what was cut is joined, what was stopped goes on, everybody is wanted again."""
    cluster.net.cut.clear()
    for node in cluster.nodes.values():
        node.link.cut = node.link.cut_replies = False
        node.link.loss = node.link.slow = node.machine.guard_late = 0.0
        node.thaw()
        node.find()
        node.power_on()
        await cluster.cordon(node.name, None)
    for job in list(cluster.server.state.jobs.values()):
        if job.phase not in TERMINAL:
            await cluster.operate(job.name, desired="run")


def _lively(cluster: SimCluster) -> bool:
    """Every job has ended, or is whole on as many nodes as its target and the machines allow, and no scale is left
    open. Who was scaled in by name does not come back by itself."""
    for job in cluster.server.state.jobs.values():
        if job.phase in TERMINAL:
            continue
        if not cluster.whole(job.name) or job.head is None:
            return False
        scale = job.control.scale
        if scale is not None and scale.state == "pending":
            return False
        away = job.control.leaving - set(job.head.members)
        free = len(cluster.nodes) - len(away)
        if not min(job.control.target, free) <= len(job.head.members) <= job.control.target:
            return False
    return True


async def _run(seed: int) -> int:
    async with asyncio.TaskGroup() as tasks:
        size = SIZES[seed % len(SIZES)]
        cluster = SimCluster(seed, size, tasks)
        try:
            for node in cluster.nodes.values():
                node.start_agent()
            await cluster.submit("a", max(1, size // 2), size, size)
            await cluster.submit("b", 1, max(2, size // 2), max(1, size // 2))
            await cluster.until(lambda: _lively(cluster), 90, "both jobs whole at first")
            await _storm(cluster, 60)
            await _heal(cluster)
            limit = TIMING.cooldown * 3 + TIMING.form_margin * 2 + 60
            await cluster.until(lambda: _lively(cluster), limit, "both jobs whole after the storm")
            cluster.checker.check_kept()
            return cluster.checker.checks
        finally:
            await cluster.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedule(seed: int) -> None:
    try:
        assert run_virtual(_run(seed)) > 100
    except BaseException:
        print(f"\nreplay: NODEAGENT_SIM_SEED={seed} pytest tests/sim/test_random.py")
        raise

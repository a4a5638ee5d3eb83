"""A large cluster with many jobs, one thing after the other: nodes lost at once, the store away, half of the cluster
cut off, all jobs scaled. Small with every change; with 200 nodes in ``make sim``."""

from __future__ import annotations

import asyncio

import pytest

from tests.sim.cluster import TIMING, SimCluster
from tests.sim.test_directed import simulate
from tests.sim.test_failsafe import cut

PER_JOB = 9
"""Nodes that a job is to have; for each job there is one more."""
SETTLED = TIMING.lease + TIMING.form_margin + 2 * TIMING.cooldown
"""Seconds within which every job has its nodes again."""


async def whole(c: SimCluster, size: int, what: str, limit: float = SETTLED) -> None:
    """Every job, on so many nodes."""

    def ok() -> bool:
        generations = [j.generation for j in c.server.state.jobs.values()]
        return all(h is not None and len(h.members) == size for h in generations) and all(
            map(c.whole, c.server.state.names)
        )

    await c.until(ok, limit, f"all jobs whole on {size} nodes: {what}")


def generations(c: SimCluster) -> dict[str, int]:
    """Each job's newest generation."""
    return {j.name: j.generation.number for j in c.server.state.jobs.values() if j.generation is not None}


async def all_at_once(c: SimCluster) -> None:
    jobs = [f"j{i}" for i in range(len(c.nodes) // (PER_JOB + 1))]
    for name in jobs:
        await c.submit(name, 4, PER_JOB, PER_JOB)
    await whole(c, PER_JOB, "at first", 60)

    for node in c.rng.sample(list(c.nodes.values()), len(jobs) // 2):
        await node.power_cut()
    await whole(c, PER_JOB, "after nodes were lost")
    for node in c.nodes.values():
        node.power_on()
    await asyncio.sleep(TIMING.lease)

    before = generations(c)
    cut(c, c.nodes)
    await asyncio.sleep(20)
    assert all(map(c.whole, jobs))
    cut(c, c.nodes, False)
    await asyncio.sleep(TIMING.lease)
    assert generations(c) == before

    away = c.rng.sample(list(c.nodes), len(c.nodes) // 2)
    cut(c, away)
    c.net.cut.update((a, b) for a in away for b in c.nodes if b not in away)
    await asyncio.sleep(20)
    cut(c, away, False)
    c.net.cut.clear()
    await whole(c, PER_JOB, "after half of the cluster was cut off")

    for target in (4, PER_JOB):
        for name in jobs:
            assert await c.scale(name, "scale", target=target)
        await whole(c, target, "scaled")


@pytest.mark.parametrize("size", [20, pytest.param(200, marks=[pytest.mark.large, pytest.mark.timeout(3600)])])
def test_a_large_cluster_with_many_jobs(size: int) -> None:
    simulate(size, all_at_once, slots=2)


def end_well(c: SimCluster, nodes: list[str]) -> None:
    """All workers of these nodes exit 0."""
    for node in nodes:
        machine = c.nodes[node].machine
        for local in list(machine.pods["uid-j"].alive):
            machine.worker_ends("uid-j", local, code=0)


async def one_over_all(c: SimCluster) -> None:
    """It is paused and resumed, has a fault after some members have succeeded, and succeeds: one member later than all
    others."""
    size = len(c.nodes)
    await c.submit("j", 1, size, size)
    await whole(c, size, "at first", 60)
    await c.operate("j", desired="pause")
    await c.until(lambda: c.job("j").phase == "paused", 30, "all have let go")
    await c.operate("j", desired="run")
    await whole(c, size, "resumed")
    first, *others = sorted(c.nodes)
    early = others[: size // 3]
    end_well(c, early)
    await asyncio.sleep(TIMING.lease)
    assert c.job("j").phase == "running"
    before = generations(c)
    c.nodes[first].machine.worker_ends("uid-j", 0, code=1)
    await c.until(lambda: generations(c) != before and c.whole("j"), SETTLED, "formed again after the fault")
    end_well(c, [*others[: size - 2]])
    await asyncio.sleep(TIMING.lease)
    assert c.job("j").phase == "running"
    end_well(c, sorted(c.nodes))
    took = await c.until(lambda: c.job("j").phase == "succeeded", 5, "the last ones have ended well")
    assert took <= TIMING.heartbeat + 1
    await c.until(lambda: not c.job("j").generation.holders, 5, "all have let go")  # type: ignore[union-attr]
    assert {report.state for report in c.job("j").last_reports.values()} == {"succeeded"}


@pytest.mark.parametrize("size", [8, pytest.param(90, marks=[pytest.mark.large, pytest.mark.timeout(3600)])])
def test_a_job_over_all_nodes_ends(size: int) -> None:
    simulate(size, one_over_all, slots=2)

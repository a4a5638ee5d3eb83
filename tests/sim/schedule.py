"""One random schedule: a cluster and jobs drawn from its seed, a storm of faults, and then everything is mended.

The same seed always gives the same schedule. Invariants are checked all along; once the faults have stopped, every job
must come to its end or be whole again, as large as it is to be and its nodes allow.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.queue import Queue
from nodeagent.plan.nodes.setbacks import grows_at, left_out
from tests.sim.cluster import TIMING, SimCluster, started
from tests.sim.faults import FAULTS
from tests.sim.test_shares import share
from tests.sim.virtual import run_virtual

WORKERS = 2
"""Of each job on each of its nodes."""


@dataclass(frozen=True)
class Sizes:
    """Of one job."""

    low: int
    high: int
    target: int


@dataclass(frozen=True)
class Shape:
    """What a seed's cluster is: mostly small, since most mistakes need few nodes; one in 100 has 50 to 200,
    and costs as much as fifty of the others."""

    nodes: int
    jobs: tuple[Sizes, ...]
    slots: int
    """Workers that a node takes: enough for all jobs at once, or for one only. Either way there are enough nodes for
    all jobs at their largest."""
    pause: float
    """Mean seconds between two faults."""


def shape(seed: int) -> Shape:
    rng = random.Random(f"shape {seed}")
    low, high = rng.choices([(3, 8), (9, 24), (25, 49), (50, 200)], [72, 22, 5, 1])[0]
    nodes = rng.randint(low, high)
    pause = rng.choice([1.0, 2.0, 2.0, 4.0])
    if rng.random() < 0.6:
        count = rng.choice([1, 2, 2, 2, 3])
        return Shape(nodes, tuple(_sizes(rng, nodes) for _ in range(count)), WORKERS * count, pause)
    count = rng.randint(1, min(10, nodes))
    parts = [nodes // count] * count
    return Shape(nodes, tuple(_sizes(rng, part) for part in parts), WORKERS, pause)


def _sizes(rng: random.Random, most: int) -> Sizes:
    high = rng.choice([most, rng.randint(1, most)])
    low = rng.choice([1, max(1, high // 2), rng.randint(1, high)])
    return Sizes(low, high, rng.choice([high, rng.randint(low, high)]))


async def _storm(cluster: SimCluster, seconds: float, pause: float) -> None:
    """Faults at random moments, several at once."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    async with asyncio.TaskGroup() as faults:
        while loop.time() < end:
            await asyncio.sleep(cluster.rng.expovariate(1 / pause))
            fault = cluster.rng.choice(FAULTS)
            faults.create_task(fault(cluster), name=fault.__name__)  # type: ignore[arg-type]


async def heal(cluster: SimCluster) -> None:
    """Everything is mended: what was cut is joined, what was stopped goes on, everybody is wanted again."""
    cluster.net.cut.clear()
    for node in cluster.nodes.values():
        node.link.restore()
        node.machine.guard_late = node.machine.start_late = 0.0
        node.thaw()
        node.find()
        node.power_on()
        await cluster.cordon(node.name, None)
    await _read_anew(cluster)
    for job in list(cluster.server.state.jobs.values()):
        if job.phase not in TERMINAL:
            await cluster.operate(job.name, desired="run")


async def _read_anew(cluster: SimCluster) -> None:
    """Where a job's record was written over and no step has had to read it since: who reads everything notices."""
    if cluster.server.state.uids - cluster.server.state.jobs.keys():
        node = next(iter(cluster.nodes.values()))
        await node.kill_agent()
        node.start_agent()


async def unscale(cluster: SimCluster, name: str, had: Mapping[str, int]) -> None:
    """Every role that was scaled beyond its file's places and beyond those that it had (``had``) gets the file's again:
    there may be no room for more. Of several that were, the scale-out that is pending goes first, since no other role
    is scaled meanwhile."""
    while (job := cluster.find(name)) is not None and job.phase not in TERMINAL:
        file = {role.name: role.places for role in job.spec.roles}
        large = [r.name for r in job.sized.roles if r.places > max(file[r.name], had.get(r.name, 0))]
        if not large:
            return
        growing = job.control.growing
        first = growing.role if growing is not None and growing.role in large else large[0]
        if not await cluster.scale(name, "scale", timeout=0.0, role=first, target=file[first]):
            raise AssertionError(f"{name}: {first} cannot be scaled back: {job.control}")


def _lively(cluster: SimCluster) -> bool:
    """Every job has ended, or is whole on as many nodes as its target and the machines allow, and no scale is left
    open. Who was scaled in by name does not come back by itself, nor soon who was no good to the job."""
    return all(job.phase in TERMINAL or _fine(cluster, job) for job in cluster.server.state.jobs.values())


def _fine(cluster: SimCluster, job: JobRecord) -> bool:
    if not cluster.whole(job.name) or job.generation is None:
        return False
    scale = job.control.scale
    if scale is not None and scale.state == "pending":
        return False
    members, nodes = job.generation.members, job.spec.role.nodes
    wanted = nodes.max if nodes.auto else job.control.target
    if len(members) >= (job.control.target if not nodes.auto else wanted):
        return len(members) == wanted
    state = cluster.server.state
    if grows_at(job, state.served):
        return True
    out = {*members, *job.control.leaving, *left_out(job, state.nodes, state.served)}
    return not any(_has_room(cluster, n) for n in cluster.nodes if n not in out)


def _has_room(cluster: SimCluster, node: str) -> bool:
    """For one more job."""
    generations = [job.generation for job in cluster.server.state.jobs.values() if job.generation is not None]
    there = sum(
        node in (generation.holders if generation.state == "ended" else generation.members)
        for generation in generations
    )
    return WORKERS * (there + 1) <= cluster.slots


async def _run(seed: int, teams: bool) -> int:
    drawn = shape(seed)
    async with started(seed, drawn.nodes, drawn.slots) as cluster:
        if teams:
            await share(cluster, Queue(name="a"), Queue(name="b", weight=2.0))
        for i, job in enumerate(drawn.jobs):
            auto, queue = teams and i % 3 != 1, "ab"[i % 2] if teams else ""
            target = job.low if auto else job.target
            await cluster.submit(f"j{i}", job.low, job.high, target, auto=auto, queue=queue)
        await cluster.until(lambda: _lively(cluster), 90, "all jobs whole at first")
        await _storm(cluster, 60, drawn.pause)
        await heal(cluster)
        limit = TIMING.cooldown * 3 + TIMING.form_margin * 2 + 60
        await cluster.until(lambda: _lively(cluster), limit, "all jobs whole after the storm")
        cluster.checker.check_kept()
        await asyncio.sleep(TIMING.lease)  # an entry is put right when the gang runs again
        cluster.checker.check_blame()
        return cluster.checker.checks


def run(seed: int, *, teams: bool = False) -> int:
    """The whole schedule; returns how often something was checked. ``teams``: the jobs are in two queues, and most of
    them borrow what is idle. Raises an exception group of what went wrong."""
    return run_virtual(_run(seed, teams))

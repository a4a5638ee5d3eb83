"""Many jobs in several queues: every job gets its turn, no queue ever exceeds its capability, and those that all want
more have their parts by weight."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.queue import Amount, Queue, Queues
from tests.inprocess.server import HereStore
from tests.sim.cluster import SEAL, SimCluster
from tests.sim.invariants import Broken
from tests.sim.test_directed import simulate
from tests.sim.test_queue import end_all_that_runs

WORKERS = 2
"""Slots of each pod; a node has as many."""


async def share(c: SimCluster, *queues: Queue) -> None:
    """The tree, signed, as an operator's."""
    tree = SEAL.queues(Queues(rev=1, by="test", queues=queues))
    await c.patiently(lambda: HereStore(c.server).queues(0, tree, "tree", "queues made"))


def held(job: JobRecord) -> int:
    """Slots that are booked for a job."""
    generation = job.generation
    if generation is None:
        return 0
    nodes: dict[str, set[str]] = {n: {*h.devices} for n, h in generation.holders.items()}
    for n, m in generation.members.items() if generation.state != "ended" else ():
        nodes.setdefault(n, set()).update(m.devices)
    return sum(len(devices) for devices in nodes.values())


def in_use(c: SimCluster) -> Counter[str]:
    """Slots by queue, those below it included."""
    found: Counter[str] = Counter()
    record = c.server.state.queues
    for job in c.server.state.jobs.values() if record is not None else ():
        for queue in record.tree.path(job.spec.queue) if record is not None else ():
            found[queue.name] += held(job)
    return found


def watch(c: SimCluster) -> Counter[str]:
    """After each step of the store: no queue uses more than it may (the checker keeps the first time that one does).
    Returns the most that each has used."""
    most: Counter[str] = Counter()
    look = c.checker.records

    def check() -> None:
        record = c.server.state.queues
        for name, use in in_use(c).items() if record is not None else ():
            most[name] = max(most[name], use)
            cap = record.tree.by_name[name].capability.slots if record is not None else None
            if cap is not None and use > cap:
                raise Broken(f"queue {name} uses {use} slots of {cap}")

    def records() -> None:
        look()
        c.checker._keeping(check)

    c.checker.records = records  # type: ignore[method-assign]
    return most


async def until_all_have_ended(c: SimCluster, names: list[str], limit: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + limit
    while not all(c.job(name).phase in TERMINAL for name in names):
        assert loop.time() < end, {name: (c.job(name).phase, c.job(name).reason) for name in names}
        await asyncio.sleep(2)  # so that several run at a time
        end_all_that_runs(c)
    assert {c.job(name).phase for name in names} == {"succeeded"}


CAPPED = (
    Queue(name="research", weight=2, capability=Amount(slots=10)),
    Queue(name="speech", parent="research"),
    Queue(name="vision", parent="research", weight=3, capability=Amount(slots=8)),
    Queue(name="product", priority=1, capability=Amount(slots=6)),
)


async def submit_all(c: SimCluster, seed: int, count: int) -> list[str]:
    """Jobs of all sizes, in all queues."""
    drawn, names = random.Random(seed), []
    for i in range(count):
        low, queue = drawn.randint(1, 3), drawn.choice(["speech", "vision", "product", ""])
        high = low + drawn.randint(0, 4)
        await c.submit(f"j{i}", low, high, high, queue=queue)
        names.append(f"j{i}")
    return names


@pytest.mark.parametrize(
    ("seed", "jobs"), [(5, 6), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((5, 12), (1, 20)))]
)
def test_no_queue_exceeds_its_capability_and_every_job_gets_its_turn(seed: int, jobs: int) -> None:
    async def scenario(c: SimCluster) -> None:
        most = watch(c)
        await share(c, *CAPPED)
        await until_all_have_ended(c, await submit_all(c, seed, jobs), 600)
        assert (most["research"], most["product"]) == (10, 6), "all that may be used is"

    simulate(12, scenario, slots=WORKERS)


async def kill_agents(c: SimCluster) -> None:
    node = c.rng.choice([*c.nodes.values()])
    await node.kill_agent()
    await asyncio.sleep(c.rng.random())
    node.start_agent()


async def cut_power(c: SimCluster) -> None:
    node = c.rng.choice([*c.nodes.values()])
    await node.power_cut()
    await asyncio.sleep(5 * c.rng.random())
    node.power_on()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("fault", [kill_agents, cut_power])
def test_nor_under_faults(fault: Callable[[SimCluster], Awaitable[None]], seed: int) -> None:
    async def scenario(c: SimCluster) -> None:
        watch(c)
        await share(c, *CAPPED)
        names = await submit_all(c, seed, 16)
        for _ in range(6):
            await asyncio.sleep(2 * c.rng.random())
            end_all_that_runs(c)
            await fault(c)
        await until_all_have_ended(c, names, 900)

    simulate(10, scenario, seed=seed, slots=WORKERS)


@pytest.mark.slow
def test_those_who_all_want_more_have_their_parts_by_weight() -> None:
    """Six nodes, weights of 1, 1 and 4: while all of them wait for more, each has its part, to one node."""
    parts = {"a": 1, "b": 1, "c": 4}

    async def scenario(c: SimCluster) -> None:
        await share(c, *(Queue(name=name, weight=weight) for name, weight in parts.items()))
        names = []
        for i in range(12):
            for name in sorted(parts, reverse=True):
                names.append(f"{name}{i}")
                await c.submit(f"{name}{i}", 1, 1, 1, queue=name)
        looks = 0
        while not all(c.job(name).phase in TERMINAL for name in names):
            waiting = Counter(c.job(name).spec.queue for name in names if c.job(name).phase == "queued")
            use = in_use(c)
            if len(waiting) == len(parts) and use.total() == 6 * WORKERS:
                looks += 1
                for name, part in parts.items():
                    assert abs(use[name] / WORKERS - part) <= 1, use
            if use.total() == 6 * WORKERS or not waiting:
                end_one(c)
            await asyncio.sleep(0.2)
        assert looks >= 10

    simulate(6, scenario, slots=WORKERS)


def end_one(c: SimCluster) -> None:
    """Of the jobs that run the oldest ends, so that the nodes come free one by one."""
    for job in sorted(c.server.state.jobs.values(), key=lambda job: job.order):
        if job.phase == "running" and c.whole(job.name):
            for node in c.nodes.values():
                pod = node.machine.pods.get(job.uid)
                for local in sorted(pod.alive) if pod is not None else ():
                    node.machine.worker_ends(job.uid, local, code=0)
            return


def test_an_agent_acts_on_no_queues_that_were_changed_past_it() -> None:
    """Somebody who can write to Redis gives himself a larger part: nobody follows."""

    async def scenario(c: SimCluster) -> None:
        await share(c, Queue(name="a", capability=Amount(slots=2)))
        record = c.server.state.queues
        assert record is not None
        more = record.tree.model_copy(update={"queues": (Queue(name="a"),), "rev": 2})
        await asyncio.sleep(2)
        await HereStore(c.server).queues(1, more, "forged", "by hand")
        await c.submit("one", 1, 4, 4, queue="a")
        await c.until(lambda: c.whole("one"), 90, "one runs")
        assert held(c.job("one")) == 2

    simulate(4, scenario, slots=WORKERS)

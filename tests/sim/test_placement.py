"""Jobs that ask something of their nodes, under random faults: no hard constraint is ever broken (``invariants.py``
looks at each generation), and who can run runs again."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from nodeagent.model.constraints import Constraints, Match
from nodeagent.model.jobspec import Nodes, Role, Together
from tests.groups import seeds
from tests.sim.cluster import TIMING, SimCluster, started
from tests.sim.roles import storm
from tests.sim.schedule import heal
from tests.sim.test_directed import simulate
from tests.sim.virtual import run_virtual

SCHEDULES = int(os.environ.get("SCHEDULES", "12"))
LEVELS = ("zone", "rack")
SLOTS = 4
H100 = Match(label="gpu", values=("h100",))


def label(cluster: SimCluster, racks: int) -> None:
    """Racks of equal size, two to a zone; every second node of a rack has another GPU."""
    cluster.topology = LEVELS
    for i, name in enumerate(cluster.nodes):
        rack, gpu = i % racks, "h100" if (i // racks) % 2 == 0 else "a100"
        cluster.labels[name] = {"zone": f"z{rack // 2}", "rack": f"r{rack}", "gpu": gpu}


def drawn(rng: random.Random) -> tuple[int, int, list[dict[str, object]]]:
    """(racks, nodes of each, jobs), of which each fits as long as nobody is missing."""
    racks, each = rng.randint(2, 4), rng.randint(2, 5)
    half = max(1, each // 2)
    kinds: list[tuple[int, dict[str, object], Constraints | None]] = [
        (each, {"placement": Together(within="rack")}, None),
        (half, {"placement": Together(within="rack")}, Constraints(require=(H100,))),
        (each // 2 * 2, {"placement": Together(segments=2)}, None),
        (each, {}, Constraints(exclude=(Match(label="rack", values=("r0",)),), prefer=(H100,))),
        (racks, {}, Constraints(spread="rack")),
        (each, {}, None),
    ]
    jobs = []
    for size, fields, asked in rng.sample(kinds, 2):
        step = 2 if "placement" in fields and fields["placement"] == Together(segments=2) else 1
        low = rng.choice([size, step])
        role = Role(
            command=("train",), nodes=Nodes(min=low, max=size, target=size), workers_per_node=2, placement=asked
        )  # fmt: skip
        jobs.append({"roles": (role,), **fields})
    return racks, each, jobs


async def save(cluster: SimCluster, names: list[str]) -> None:
    """Each second, as if it were written out in the end: who is stopped on purpose may go on elsewhere."""
    step = 0
    while True:
        await asyncio.sleep(1.0)
        step += 1
        for name in names:
            job = cluster.find(name)
            if job is not None and job.generation is not None and cluster.whole(name):
                cluster.nodes[job.generation.ordered()[0].node].machine.commit_request(job.uid, step, "-snapshot")


async def _run(seed: int) -> None:
    racks, each, jobs = drawn(random.Random(f"placement {seed}"))
    names = [f"j{i}" for i in range(len(jobs))]
    async with started(seed, racks * each, SLOTS, prepare=lambda c: label(c, racks)) as cluster:
        for name, job in zip(names, jobs, strict=True):
            await cluster.submit(name, 1, 1, 1, **job)  # type: ignore[arg-type]
        await cluster.until(lambda: all(map(cluster.whole, names)), 90, "whole at first")
        saving = cluster.tasks.create_task(save(cluster, names))
        await storm(cluster)
        await heal(cluster)
        limit = TIMING.cooldown * 3 + TIMING.form_margin * 2 + 60
        ended = ("failed", "stopped")
        await cluster.until(
            lambda: all(cluster.whole(n) or cluster.job(n).phase in ended for n in names), limit, "whole again"
        )
        saving.cancel()


@pytest.mark.parametrize(
    "seed",
    seeds([], sorted({*range(1, SCHEDULES + 1), 14, 35})),
)
def test_random_schedule(seed: int) -> None:
    run_virtual(_run(seed))


def members(c: SimCluster, name: str = "j") -> list[str]:
    generation = c.job(name).generation
    return [] if generation is None else [m.node for m in generation.ordered()]


def test_a_gang_starts_in_one_rack_gets_a_neighbour_for_a_lost_node_and_moves_when_the_rack_is_too_small() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2, placement=Together(within="rack"))
        await c.until(lambda: c.whole("j"), 30, "whole")
        first = members(c)
        racks = {n: own["rack"] for n, own in c.labels.items()}
        home = racks[first[0]]
        assert {racks[n] for n in first} == {home}
        await c.nodes[first[0]].power_cut()
        await c.until(lambda: c.whole("j") and first[0] not in members(c), 30, "a neighbour has taken its place")
        second = members(c)
        assert second[1] == first[1]
        assert {racks[n] for n in second} == {home}
        await c.nodes[second[0]].power_cut()
        await c.until(lambda: c.whole("j") and second[0] not in members(c), 60, "it has moved as a whole")
        assert {racks[n] for n in members(c)} == {"r1" if home == "r0" else "r0"}

    simulate(6, scenario, prepare=lambda c: label(c, 2))


def test_who_asks_for_what_no_node_has_waits_with_the_reason_until_one_comes() -> None:
    async def scenario(c: SimCluster) -> None:
        asked = Constraints(require=(Match(label="gpu", values=("b200",)),))
        role = Role(command=("train",), nodes=Nodes(min=1, max=1, target=1), workers_per_node=2, placement=asked)
        await c.submit("j", 1, 1, 1, roles=(role,))
        await asyncio.sleep(5)
        agent = c.nodes["n1"].agent
        assert agent is not None
        assert "needs 1 node with gpu=b200: none of the 2 known nodes is such" in agent.explain("uid-j")
        c.labels["n3"] = {"gpu": "b200"}
        c.add("n3").start_agent()
        await c.until(lambda: c.whole("j"), 30, "whole")
        assert members(c) == ["n3"]

    simulate(2, scenario)


@pytest.mark.parametrize("saved", [True, False])
def test_a_gang_that_was_paused_goes_on_in_one_rack_if_its_last_steps_are_on_disk(saved: bool) -> None:
    """Racks r0: n1, n3, n5; r1: n2, n4, n6. Of each two nodes are taken when the gang starts, and become free."""

    async def scenario(c: SimCluster) -> None:
        racks = {n: own["rack"] for n, own in c.labels.items()}
        for i, rack in enumerate(["r0", "r0", "r1", "r1"]):
            inside = Constraints(require=(Match(label="rack", values=(rack,)),))
            role = Role(command=("x",), nodes=Nodes(min=1, max=1, target=1), workers_per_node=4, placement=inside)
            await c.submit(f"old{i}", 1, 1, 1, roles=(role,))
            await c.until(lambda i=i: c.whole(f"old{i}"), 30, "the racks are half full")
        role = Role(command=("x",), nodes=Nodes(min=2, max=2, target=2), workers_per_node=4)
        await c.submit("j", 2, 2, 2, roles=(role,))
        await c.until(lambda: c.whole("j"), 90, "whole")
        apart = members(c)
        assert len({racks[n] for n in apart}) == 2
        c.nodes[apart[0]].machine.commit_request("uid-j", 7, "-snapshot" if saved else "")
        await c.until(lambda: c.job("j").checkpoint is not None, 10, "its steps are saved")
        for i in range(4):
            await c.operate(f"old{i}", desired="stop")
        await c.operate("j", desired="pause")
        await c.until(lambda: c.job("j").phase == "paused", 30, "paused")
        await asyncio.sleep(15)
        ready = {name for name, node in c.nodes.items() if "uid-j" in node.machine.pods}
        await c.operate("j", desired="run")
        took = await c.until(lambda: c.whole("j"), 30, "it goes on")
        assert took < 2, "it waits for nothing to get ready"
        assert ready == {*members(c), *apart}
        assert len({racks[n] for n in members(c)}) == (1 if saved else 2)
        generation = c.job("j").generation
        assert generation is not None
        assert ("closer together" in generation.cause.text) == saved

    simulate(6, scenario, prepare=lambda c: label(c, 2))

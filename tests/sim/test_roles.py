"""Jobs of several roles under random faults: whole or not at all, and ended by the role that completes them."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Literal

import pytest

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.jobspec import Nodes, RestartLimits, Role
from nodeagent.plan.faults import all_succeeded, spent
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.faults import FAULTS
from tests.sim.schedule import heal
from tests.sim.test_directed import simulate
from tests.sim.virtual import run_virtual

SCHEDULES = int(os.environ.get("SCHEDULES", "12"))
STORM = 40.0
"""Seconds of faults."""
SLOTS = 4


def role(
    name: str, *, nodes: int = 0, replicas: int = 0, workers: int = 1, restart: Literal["gang", "alone"] = "gang"
) -> Role:
    size = nodes or replicas
    return Role(
        name=name, command=("train",), nodes=Nodes(min=nodes or 1, max=size, target=size), replicas=replicas or None,
        workers_per_node=workers, restart=restart,
    )  # fmt: skip


def drawn(rng: random.Random) -> tuple[int, tuple[Role, ...]]:
    """(nodes, roles), of which there is room for all."""
    nodes = rng.randint(2, 5)
    trainers = role("trainer", nodes=rng.randint(1, nodes), workers=rng.randint(1, 2))
    servers = role("server", replicas=rng.randint(1, nodes), restart="alone")
    return nodes, rng.choice([(servers, trainers), (trainers, servers)])


def end(cluster: SimCluster, job: JobRecord, name: str, most: int = 99) -> None:
    """So many workers of a role end well."""
    assert job.head is not None
    for member in job.head.ordered():
        for rank in sorted(member.ranks_of(name))[:most]:
            cluster.nodes[member.node].machine.worker_ends(job.uid, rank - member.first_rank, code=0)
            most -= 1


def restart_alone(cluster: SimCluster) -> None:
    """Some server fails, and is started again by its shim."""
    job = cluster.find("j")
    if job is None or job.head is None or job.head.state != "active":
        return
    member = cluster.rng.choice(job.head.ordered())
    ranks = sorted(member.ranks_of("server"))
    machine = cluster.nodes[member.node].machine
    if ranks and machine.running(job.uid) == job.head.token and not machine.frozen.closed:
        machine.worker_restarts(job.uid, cluster.rng.choice(ranks) - member.first_rank)


async def storm(cluster: SimCluster) -> None:
    """Faults at random moments, for ``STORM`` seconds; servers fail now and then, and are started again alone."""
    loop = asyncio.get_running_loop()
    over = loop.time() + STORM
    async with asyncio.TaskGroup() as faults:
        while loop.time() < over:
            await asyncio.sleep(cluster.rng.expovariate(0.5))
            faults.create_task(cluster.rng.choice(FAULTS)(cluster))  # type: ignore[arg-type]
            if cluster.rng.random() < 0.3:
                restart_alone(cluster)


def _fine(cluster: SimCluster) -> bool:
    """It is whole, with as many places of each role as are wanted of it by now."""
    job = cluster.job("j")
    scale = job.control.scale
    if not cluster.whole("j") or job.head is None or (scale is not None and scale.state == "pending"):
        return False
    return job.head.sizes == {one.name: one.places for one in job.sized.roles}


def _ended(cluster: SimCluster) -> bool:
    """Its trainers have ended it; in each generation that is whole they end, since a late fault may re-form it."""
    if cluster.whole("j"):
        end(cluster, cluster.job("j"), "trainer")
    return cluster.job("j").phase == "succeeded"


async def _run(seed: int) -> None:
    nodes, roles = drawn(random.Random(f"roles {seed}"))
    async with asyncio.TaskGroup() as tasks:
        cluster = SimCluster(seed, nodes, tasks, SLOTS)
        try:
            for node in cluster.nodes.values():
                node.start_agent()
            await cluster.submit("j", 1, 1, 1, roles=roles, completes="trainer")
            await cluster.until(lambda: cluster.whole("j"), 90, "whole at first")
            await storm(cluster)
            await heal(cluster)
            lost = cluster.checker.forgotten
            await cluster.until(lambda: cluster.find("j") is not None or lost, 60, "an emptied store is given back")
            if cluster.find("j") is None:  # perhaps no agent that was there knew the job
                await asyncio.sleep(30)
            if cluster.find("j") is None:
                await cluster.until(lambda: not cluster.checker.running("uid-j"), 60, "what nobody knows is stopped")
                return
            if cluster.job("j").phase not in TERMINAL:
                await cluster.operate("j", desired="run")
            scale = cluster.job("j").control.scale
            if scale is not None and scale.state == "set":  # while it was paused: there may never be room
                await cluster.scale("j", "scale", role=scale.role, target=scale.before)
            ended = ("failed", "stopped")
            limit = TIMING.cooldown * 3 + TIMING.form_margin * 2 + 60
            await cluster.until(lambda: _fine(cluster) or cluster.job("j").phase in ended, limit, "whole again")
            if cluster.job("j").phase not in ended:
                await cluster.until(lambda: _ended(cluster), 60, "its trainers ended it")
                await cluster.until(lambda: not cluster.checker.running("uid-j"), 30, "its servers are stopped")
        finally:
            await cluster.close()


@pytest.mark.parametrize("seed", range(1, SCHEDULES + 1))
def test_random_schedule(seed: int) -> None:
    run_virtual(_run(seed))


ROLES = (role("server", replicas=2), role("trainer", nodes=2))


def test_the_last_worker_of_the_role_completes_the_job() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1, roles=ROLES, completes="trainer")
        await c.until(lambda: c.whole("j"), 30, "whole")
        end(c, c.job("j"), "server", 1)
        end(c, c.job("j"), "trainer", 1)
        await asyncio.sleep(5)
        assert (c.job("j").phase, all_succeeded(c.job("j"))) == ("running", False)
        end(c, c.job("j"), "trainer")
        await c.until(lambda: c.job("j").phase == "succeeded", 10, "the trainers have ended it")
        await c.until(lambda: not c.checker.running("uid-j"), 10, "the other server is stopped")

    simulate(3, scenario)


def test_a_server_that_fails_takes_the_gang_along() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1, roles=ROLES, completes="trainer")
        await c.until(lambda: c.whole("j"), 30, "whole")
        before = c.job("j")
        assert before.head is not None
        node = next(m for m in before.head.ordered() if m.ranks_of("server"))
        local = min(node.ranks_of("server")) - node.first_rank
        c.nodes[node.node].machine.worker_ends("uid-j", local, signal=9)
        await c.until(lambda: c.whole("j") and c.job("j").restarts == 1, 20, "formed anew")
        head = c.job("j").head
        assert head is not None and {n: m.places for n, m in head.members.items()} == {
            n: m.places for n, m in before.head.members.items()
        }

    simulate(2, scenario)


def test_services_that_restart_alone_disturb_nobody_until_the_budget_is_spent() -> None:
    async def scenario(c: SimCluster) -> None:
        limits = RestartLimits(max=3, window=1000.0)
        alone = (role("server", replicas=2, restart="alone"), ROLES[1])
        await c.submit("j", 1, 1, 1, roles=alone, completes="trainer", restarts=limits)
        await c.until(lambda: c.whole("j"), 30, "whole")

        async def fails(name: str) -> None:
            head = c.job("j").head
            assert head is not None
            member = next(m for m in head.ordered() for p in m.places if p.name == name)
            local = next(r for r in member.ranks_of("server") if member.place_of(r).name == name) - member.first_rank  # type: ignore[union-attr]
            c.nodes[member.node].machine.worker_restarts("uid-j", local)
            await asyncio.sleep(2)

        await fails("server.0")
        await fails("server.1")
        assert (c.job("j").restarts, spent(c.job("j"), c.server.state.served)) == (0, 2)
        assert await c.scale("j", "scale", role="server", target=1)
        await c.until(lambda: len(places(c)) == 3, 30, "a planned stop keeps what was spent")
        assert spent(c.job("j"), c.server.state.served) == 2
        await fails("server.0")
        assert c.job("j").phase == "running"
        await fails("server.0")
        await c.until(lambda: c.job("j").phase == "failed", 20, "the budget is spent")
        assert c.job("j").reason.startswith("restart budget spent: 3 restarts within 1000 s; last: server.0, rank ")

    simulate(2, scenario)


def places(c: SimCluster) -> list[str]:
    """Of the generation that is active and whole."""
    head = c.job("j").head if c.whole("j") else None
    return sorted(p.name for m in head.ordered() for p in m.places) if head is not None else []


def test_a_role_is_scaled_alone_by_a_planned_stop() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1, roles=ROLES, completes="trainer")
        await c.until(lambda: c.whole("j"), 30, "whole")
        for size in (3, 1):
            assert await c.scale("j", "scale", role="trainer", target=size)
            wanted = ["server.0", "server.1", *(f"trainer.{i}" for i in range(size))]
            await c.until(lambda wanted=wanted: places(c) == wanted, 30, f"{size} trainers")
        job = c.job("j")
        await c.until(lambda: (s := c.job("j").control.scale) is not None and s.state == "met", 5, "met")
        assert (job.control.target, job.control.sizes, job.restarts) == (3, {"trainer": 1}, 2)
        assert not any(spend.counts for spend in job.budget.values())
        end(c, job, "trainer")
        await c.until(lambda: c.job("j").phase == "succeeded", 10, "the only trainer has ended it")

    simulate(3, scenario)


def test_a_role_that_has_no_room_is_rolled_back_while_the_gang_goes_on() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1, roles=ROLES, completes="trainer")
        await c.until(lambda: c.whole("j"), 30, "whole")
        assert await c.scale("j", "scale", role="trainer", target=3, timeout=5.0)
        assert not await c.scale("j", "scale", role="server", target=1), "one scale-out at a time"
        await c.until(lambda: (s := c.job("j").control.scale) is not None and s.state != "pending", 30, "rolled back")
        job = c.job("j")
        assert job.control.scale is not None
        assert (job.control.scale.state, job.control.target, job.restarts) == ("rolled_back", 4, 0)
        assert "scale of trainer to 3 timed out after 5s: no node has room for trainer.2" in job.control.scale.reason
        assert len(places(c)) == 4

    simulate(2, scenario)


def test_a_worker_that_fails_during_a_scale_out_costs_no_place() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1, roles=ROLES, completes="trainer")
        await c.until(lambda: c.whole("j"), 30, "whole")
        assert await c.scale("j", "scale", role="trainer", target=3, timeout=60.0)
        node = next(iter(c.job("j").head.members.values()))  # type: ignore[union-attr]
        c.nodes[node.node].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.whole("j") and c.job("j").restarts == 1, 20, "formed anew, as it was")
        assert len(places(c)) == 4

    simulate(2, scenario)


def test_too_few_nodes_hold_it_whole() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1, roles=ROLES, completes="trainer")
        await c.until(lambda: c.whole("j"), 30, "whole")
        await c.nodes["n2"].power_cut()
        await c.until(lambda: c.job("j").phase == "holding" and not c.checker.running("uid-j"), 30, "it holds, whole")
        await asyncio.sleep(30)
        assert c.job("j").phase == "holding"
        c.nodes["n2"].power_on()
        await c.until(lambda: c.whole("j"), 60, "it goes on")

    simulate(2, scenario)

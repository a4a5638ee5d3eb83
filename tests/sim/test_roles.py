"""Jobs of several roles: whole or not at all, and ended by the role that completes them.

A few random schedules (``roles.py``) here; ``python -m tests.sim.many --roles`` runs more. Replay one with
``NODEAGENT_SIM_SEED=<seed> pytest tests/sim/test_roles.py``.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest

from nodeagent.model.jobspec import RestartLimits
from nodeagent.model.world import Member
from nodeagent.plan.failure.budget import restarts_spent
from nodeagent.plan.failure.faults import all_succeeded
from tests.groups import seeds
from tests.sim import provocations, roles
from tests.sim.cluster import SimCluster
from tests.sim.roles import ROLES, WHOLE, end, role, start_whole
from tests.sim.schedule import unscale
from tests.sim.test_directed import simulate
from tests.sim.test_random import REPLAY

SEEDS = [int(os.environ[REPLAY])] if REPLAY in os.environ else [*range(1, 13)]


@pytest.mark.parametrize("seed", seeds(SEEDS[:2], SEEDS[2:]))
def test_random_schedule(seed: int) -> None:
    seen = roles.run(seed)
    assert seen.checks > 100
    assert seen.forgotten or seen.ended


def test_what_seeds_stand_for() -> None:
    """Enough of each kind."""
    kinds: Counter[str] = Counter()
    for seed in range(1, 301):
        shape = roles.drawn(seed)
        after = {one.name: one.after for one in shape.roles}
        kinds["trainers after servers"] += "server" in after["trainer"]
        kinds["servers after trainers"] += "trainer" in after["server"]
        kinds["a chain"] += any(after[before] for befores in after.values() for before in befores)
        kinds["all have to end"] += not shape.completes
        kinds["a third role"] += len(shape.roles) > 2
        kinds["a role is started again as a whole"] += any(one.policies == roles.WHOLE for one in shape.roles)
        kinds["workers end in the storm"] += shape.ending > 0
        assert sum(one.places * int(one.workers_per_node) for one in shape.roles) <= shape.nodes * roles.SLOTS
    assert min(kinds.values()) > 30, kinds


def test_the_last_worker_of_the_role_completes_the_job() -> None:
    async def scenario(c: SimCluster) -> None:
        await start_whole(c, completes="trainer")
        end(c, c.job("j"), "server", 1)
        end(c, c.job("j"), "trainer", 1)
        await asyncio.sleep(5)
        assert (c.job("j").phase, all_succeeded(c.job("j"))) == ("running", False)
        end(c, c.job("j"), "trainer")
        await c.until(lambda: c.job("j").phase == "succeeded", 10, "the trainers have ended it")
        await c.until(lambda: not c.checker.running("uid-j"), 10, "the other server is stopped")

    simulate(3, scenario)


def test_roles_stop_in_the_reverse_of_their_order() -> None:
    simulate(4, provocations.roles_stop_in_order)


def test_a_node_that_dies_as_its_trainer_leaves_is_not_waited_for() -> None:
    """A server stops once the dead node's lease is over: that is long before half of the grace."""

    async def scenario(c: SimCluster) -> None:
        await start_whole(c, (role("server", replicas=1), role("trainer", nodes=1, after=("server",))), grace=60.0)
        job = c.job("j")
        assert job.generation is not None
        (serves,) = (c.nodes[m.node] for m in job.generation.ordered() if m.ranks_of("server"))
        (trains,) = (c.nodes[m.node] for m in job.generation.ordered() if m.ranks_of("trainer"))
        trains.machine.waits = True
        await c.operate("j", restart=1)
        await asyncio.sleep(10)
        assert serves.machine.running("uid-j") == job.generation.token, "it waits for the trainer"
        await trains.power_cut()
        await c.until(lambda: serves.machine.running("uid-j") != job.generation.token, 12, "the server has stopped")

    simulate(4, scenario)


def test_a_server_that_fails_takes_the_gang_along() -> None:
    async def scenario(c: SimCluster) -> None:
        await start_whole(c, completes="trainer")
        before = c.job("j")
        assert before.generation is not None
        node = next(m for m in before.generation.ordered() if m.ranks_of("server"))
        local = min(node.ranks_of("server")) - node.first_rank
        c.nodes[node.node].machine.worker_ends("uid-j", local, signal=9)
        await c.until(lambda: c.whole("j") and c.job("j").restarts == 1, 20, "formed anew")
        generation = c.job("j").generation
        assert generation is not None and {n: m.places for n, m in generation.members.items()} == {
            n: m.places for n, m in before.generation.members.items()
        }

    simulate(2, scenario)


def test_services_that_restart_alone_disturb_nobody_until_the_budget_is_spent() -> None:
    async def scenario(c: SimCluster) -> None:
        limits = RestartLimits(max=3, window=1000.0)
        alone = (role("server", replicas=2, restart="alone"), ROLES[1])
        await start_whole(c, alone, completes="trainer", restarts=limits)

        async def fails(name: str) -> None:
            generation = c.job("j").generation
            assert generation is not None
            member = next(m for m in generation.ordered() for p in m.places if p.name == name)
            local = next(r for r in member.ranks_of("server") if member.place_of(r).name == name) - member.first_rank  # type: ignore[union-attr]
            c.nodes[member.node].machine.worker_restarts("uid-j", local)
            await asyncio.sleep(2)

        await fails("server.0")
        await fails("server.1")
        assert (c.job("j").restarts, restarts_spent(c.job("j"), c.server.state.served)) == (0, 2)
        assert await c.scale("j", "scale", role="server", target=1)
        await c.until(lambda: len(places(c)) == 3, 30, "a planned stop keeps what was spent")
        assert restarts_spent(c.job("j"), c.server.state.served) == 2
        await fails("server.0")
        assert c.job("j").phase == "running"
        await fails("server.0")
        await c.until(lambda: c.job("j").phase == "failed", 20, "the budget is spent")
        assert c.job("j").reason.startswith("restart budget spent: 3 restarts within 1000 s; last: server.0, rank ")

    simulate(2, scenario)


TRAINERS = (ROLES[0], role("trainer", nodes=3, workers=2, policies=WHOLE))


def trainers(c: SimCluster) -> list[Member]:
    """Members with trainers, by rank."""
    generation = c.job("j").generation
    assert generation is not None
    return [m for m in generation.ordered() if m.ranks_of("trainer")]


def fail(c: SimCluster, member: Member, after: float = 0.0) -> None:
    """A trainer of this member fails, after so many seconds."""
    machine, local = c.nodes[member.node].machine, min(member.ranks_of("trainer")) - member.first_rank
    machine.later(after, lambda: machine.role_fails("uid-j", local))


def rounds(c: SimCluster) -> list[int]:
    """Of the trainers on each node that has some."""
    return [c.nodes[m.node].machine.pods["uid-j"].runs.get("trainer", 0) for m in trainers(c)]


def pids(c: SimCluster, name: str) -> dict[int, int]:
    """Rank to pid of the role's workers."""
    found = dict[int, int]()
    for member in c.job("j").generation.ordered():  # type: ignore[union-attr]
        pod = c.nodes[member.node].machine.pods["uid-j"]
        found |= {rank: pod.pids[rank - member.first_rank] for rank in member.ranks_of(name)}
    return found


@pytest.mark.parametrize("apart", [None, 0.0, 0.005, 0.05])
def test_a_role_is_started_again_on_all_its_nodes_and_disturbs_nobody(apart: float | None) -> None:
    """``apart``: so many seconds later a worker of it fails on another node, too."""

    async def scenario(c: SimCluster) -> None:
        limits = RestartLimits(max=3, window=1000.0)
        await start_whole(c, TRAINERS, completes="server", restarts=limits)
        servers, before = pids(c, "server"), pids(c, "trainer")
        fail(c, trainers(c)[0])
        if apart is not None:
            fail(c, trainers(c)[2], apart)
        await c.until(lambda: c.whole("j") and min(rounds(c)) > 0, 10, "all of it runs again")
        await asyncio.sleep(5)
        assert rounds(c) in ([1, 1, 1], [2, 2, 2] if apart == 0.05 else [1, 1, 1])
        job, after = c.job("j"), pids(c, "trainer")
        assert (job.restarts, restarts_spent(job, c.server.state.served)) == (0, rounds(c)[0])
        assert pids(c, "server") == servers and all(after[rank] != before[rank] for rank in before)

    simulate(3, scenario)


def test_a_node_that_is_lost_while_a_role_is_down_has_the_gang_formed_anew() -> None:
    async def scenario(c: SimCluster) -> None:
        await start_whole(c, TRAINERS, completes="server")
        first, _, third = trainers(c)
        c.nodes[third.node].freeze_agent()
        c.nodes[third.node].lease.gate.close()
        fail(c, first)
        await asyncio.sleep(1)
        assert c.job("j").generation.reports[first.node].rounds == {"trainer": 1}  # type: ignore[union-attr]
        await c.until(lambda: c.job("j").restarts == 1 and c.job("j").phase == "running", 60, "formed anew")
        c.nodes[third.node].thaw()
        await c.until(lambda: c.whole("j"), 60, "whole")
        job = c.job("j")
        assert [entry.kind for entry in job.budget.values()] == ["node_lost"]
        assert rounds(c) == [0, 0, 0] and not any(r.rounds for r in job.generation.reports.values())  # type: ignore[union-attr]

    simulate(4, scenario)


def test_an_operator_who_restarts_the_job_meanwhile_wins() -> None:
    async def scenario(c: SimCluster) -> None:
        await start_whole(c, TRAINERS, completes="server")
        first, second, _ = trainers(c)
        c.nodes[second.node].freeze_agent()
        fail(c, first)
        await asyncio.sleep(1)
        await c.operate("j", restart=1)
        await asyncio.sleep(1)
        c.nodes[second.node].thaw()
        await c.until(lambda: c.whole("j") and c.job("j").restarts == 1, 60, "formed anew")
        assert rounds(c) == [0, 0, 0]

    simulate(3, scenario)


def test_who_had_ended_well_is_started_again_with_the_others() -> None:
    async def scenario(c: SimCluster) -> None:
        jobs = (role("server", nodes=3), TRAINERS[1])
        await start_whole(c, jobs, completes="trainer")
        end(c, c.job("j"), "trainer", 2)
        await asyncio.sleep(2)
        done, other = trainers(c)[:2]
        assert c.job("j").generation.reports[done.node].completed  # type: ignore[union-attr]
        fail(c, other)
        await c.until(lambda: c.whole("j") and rounds(c) == [1, 1, 1], 10, "all of it runs again")
        await asyncio.sleep(2)
        assert not c.job("j").generation.reports[done.node].completed  # type: ignore[union-attr]
        end(c, c.job("j"), "trainer")
        await c.until(lambda: c.job("j").phase == "succeeded", 10, "all of it has ended well")

    simulate(3, scenario)


def test_where_a_pod_is_over_the_gang_is_formed_anew() -> None:
    async def scenario(c: SimCluster) -> None:
        await start_whole(c, TRAINERS, completes="trainer")
        done = next(m for m in trainers(c) if not m.ranks_of("server"))
        other = next(m for m in trainers(c) if m is not done)
        for local in range(done.workers):
            c.nodes[done.node].machine.worker_ends("uid-j", local, code=0)
        await asyncio.sleep(2)
        assert c.job("j").generation.reports[done.node].state == "succeeded"  # type: ignore[union-attr]
        fail(c, other)
        await c.until(lambda: c.whole("j") and c.job("j").restarts == 1, 20, "formed anew")
        cause = c.job("j").generation.cause  # type: ignore[union-attr]
        assert (cause.kind, cause.node) == ("worker_failed", other.node)
        assert f"trainer cannot be started again alone: {done.node} has ended well" in cause.text

    simulate(3, scenario)


def places(c: SimCluster) -> list[str]:
    """Of the generation that is active and whole."""
    generation = c.job("j").generation if c.whole("j") else None
    return sorted(p.name for m in generation.ordered() for p in m.places) if generation is not None else []


def test_a_role_is_scaled_alone_by_a_planned_stop() -> None:
    async def scenario(c: SimCluster) -> None:
        await start_whole(c, completes="trainer")
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
        await start_whole(c, completes="trainer")
        assert await c.scale("j", "scale", role="trainer", target=3, timeout=5.0)
        assert not await c.scale("j", "scale", role="server", target=1), "one scale-out at a time"
        await c.until(lambda: (s := c.job("j").control.scale) is not None and s.state != "pending", 30, "rolled back")
        job = c.job("j")
        assert job.control.scale is not None
        assert (job.control.scale.state, job.control.target, job.restarts) == ("rolled_back", 4, 0)
        assert "scale of trainer to 3 timed out after 5s: no node has room for trainer.2" in job.control.scale.reason
        assert len(places(c)) == 4

    simulate(2, scenario)


def test_all_roles_that_were_scaled_while_it_was_paused_are_scaled_back() -> None:
    """As the schedules do, that would otherwise wait for room that there never is."""

    async def scenario(c: SimCluster) -> None:
        await start_whole(c, completes="trainer")
        await c.operate("j", desired="pause")
        await c.until(lambda: c.job("j").phase == "paused", 30, "paused")
        assert await c.scale("j", "scale", role="trainer", target=3)
        assert await c.scale("j", "scale", role="server", target=9)
        await c.operate("j", desired="run")
        await asyncio.sleep(5)
        assert c.job("j").phase == "holding"
        await unscale(c, "j", c.job("j").generation.sizes)  # type: ignore[union-attr]
        await c.until(lambda: len(places(c)) == 4, 30, "it goes on as large as its file has it")

    simulate(2, scenario)


def test_a_worker_that_fails_during_a_scale_out_costs_no_place() -> None:
    async def scenario(c: SimCluster) -> None:
        await start_whole(c, completes="trainer")
        assert await c.scale("j", "scale", role="trainer", target=3, timeout=60.0)
        node = next(iter(c.job("j").generation.members.values()))  # type: ignore[union-attr]
        c.nodes[node.node].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.whole("j") and c.job("j").restarts == 1, 20, "formed anew, as it was")
        assert len(places(c)) == 4

    simulate(2, scenario)


def test_too_few_nodes_hold_it_whole() -> None:
    async def scenario(c: SimCluster) -> None:
        await start_whole(c, completes="trainer")
        await c.nodes["n2"].power_cut()
        await c.until(lambda: c.job("j").phase == "holding" and not c.checker.running("uid-j"), 30, "it holds, whole")
        await asyncio.sleep(30)
        assert c.job("j").phase == "holding"
        c.nodes["n2"].power_on()
        await c.until(lambda: c.whole("j"), 60, "it goes on")

    simulate(2, scenario)

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
from nodeagent.plan.failure.faults import all_succeeded, restarts_spent
from tests.sim import roles
from tests.sim.cluster import SimCluster
from tests.sim.roles import end, role
from tests.sim.schedule import unscale
from tests.sim.test_directed import simulate
from tests.sim.test_random import REPLAY

SEEDS = [int(os.environ[REPLAY])] if REPLAY in os.environ else [*range(1, 13)]


@pytest.mark.parametrize("seed", SEEDS)
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
        kinds["workers end in the storm"] += shape.ending > 0
        assert sum(one.places * int(one.workers_per_node) for one in shape.roles) <= shape.nodes * roles.SLOTS
    assert min(kinds.values()) > 30, kinds


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


def test_all_roles_that_were_scaled_while_it_was_paused_are_scaled_back() -> None:
    """As the schedules do, that would otherwise wait for room that there never is."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1, roles=ROLES, completes="trainer")
        await c.until(lambda: c.whole("j"), 30, "whole")
        await c.operate("j", desired="pause")
        await c.until(lambda: c.job("j").phase == "paused", 30, "paused")
        assert await c.scale("j", "scale", role="trainer", target=3)
        assert await c.scale("j", "scale", role="server", target=9)
        await c.operate("j", desired="run")
        await asyncio.sleep(5)
        assert c.job("j").phase == "holding"
        await unscale(c, "j", c.job("j").head.sizes)  # type: ignore[union-attr]
        await c.until(lambda: len(places(c)) == 4, 30, "it goes on as large as its file has it")

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

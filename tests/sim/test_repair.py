"""Nodes that repair themselves: nothing is lost, nothing counts, and never more of them are away than may be."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.model.node import Cordon
from tests.groups import seeds
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.repairs import Repairs, Watch, repairing
from tests.sim.test_directed import running, simulate

HOUR = 3600.0


async def repairers(c: SimCluster, size: int) -> tuple[dict[str, Repairs], Watch]:
    """A job on all nodes, each of which repairs itself."""
    wards, watch = repairing(c)
    for node in c.nodes.values():
        await node.kill_agent()
        node.start_agent()
    await c.submit("j", 2, size, size)
    await running(c, size)
    return wards, watch


def test_a_node_is_drained_rebooted_verified_and_back_by_itself() -> None:
    async def scenario(c: SimCluster) -> None:
        wards, watch = await repairers(c, 3)
        wards["n2"].fall_sick(0.0)
        await running(c, 2)
        await running(c, 3, limit=TIMING.cooldown + 120)
        assert (watch.reboots, watch.wrong) == (["n2"], [])
        assert not any(entry.counts for entry in c.job("j").budget.values())
        assert wards["n2"].verdicts == ()
        kinds = [e.kind for e in c.server.state.events if e.node == "n2"]
        seen = [kind for kind in kinds if kind.startswith(("Repair", "Verify", "Readmitted"))]
        assert seen == ["RepairStarted", "RepairDone", "VerifyPassed", "Readmitted"]

    simulate(3, scenario)


@pytest.mark.parametrize("seed", seeds([1], [2, 3]))
def test_of_many_sick_nodes_one_is_away_at_a_time(seed: int) -> None:
    """Their faults are an hour apart, so the breaker is closed; agents die and are restarted meanwhile."""

    async def scenario(c: SimCluster) -> None:
        wards, watch = await repairers(c, 5)
        for i, name in enumerate(("n1", "n2", "n3")):
            wards[name].fall_sick(i * HOUR)
        await running(c, 2)

        async def disturb() -> None:
            while True:
                await asyncio.sleep(c.rng.uniform(2.0, 15.0))
                node = c.rng.choice(list(c.nodes.values()))
                if c.rng.random() < 0.5:
                    await node.kill_agent()
                    await asyncio.sleep(c.rng.uniform(0.0, 1.0))
                    node.start_agent()
                else:
                    node.link.cut = True
                    await asyncio.sleep(c.rng.uniform(0.1, 1.0))
                    node.link.cut = False

        noise = c.tasks.create_task(disturb())
        await c.until(lambda: not any(w.verdicts for w in wards.values()), 900, "every node is well")
        noise.cancel()
        for node in c.nodes.values():
            node.link.cut = False
            node.start_agent()
        await running(c, 5, limit=TIMING.cooldown * 2 + 60)
        assert watch.wrong == []
        assert sorted(set(watch.reboots)) == ["n1", "n2", "n3"]
        assert not any(entry.counts for entry in c.job("j").budget.values() if entry.kind == "hardware")

    simulate(5, scenario, seed)


@pytest.mark.slow
def test_faults_of_all_at_once_and_nodes_in_a_persons_hands_are_not_repaired() -> None:
    async def scenario(c: SimCluster) -> None:
        wards, watch = await repairers(c, 4)
        await c.cordon("n1", Cordon(reason="disk", by="op", at=0.0))
        wards["n1"].fall_sick(HOUR)
        await asyncio.sleep(10.0)
        assert watch.reboots == []
        await c.cordon("n1", None)
        await c.until(lambda: not wards["n1"].verdicts, 200, "n1 is well")
        await running(c, 4, limit=TIMING.cooldown + 60)
        for ward in wards.values():
            ward.fall_sick(0.0)
        await asyncio.sleep(60.0)
        assert (watch.reboots, watch.wrong) == (["n1"], [])
        assert c.job("j").phase == "running"

    simulate(4, scenario)

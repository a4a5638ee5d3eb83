"""One job over all nodes, one fault after the other: each makes it run again exactly once, and costs nobody else
anything. Small with every change; with a hundred nodes in ``make sim``: half a minute of CPU. A thousand nodes would
be half an hour."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from nodeagent.model.world import Generation
from tests.sim.cluster import RECOVERED, TIMING, SimCluster
from tests.sim.test_directed import running, simulate

LONGEST = TIMING.lease + TIMING.form_margin
"""Seconds of virtual time until a job is whole again: a lost node's lease ends, and all acknowledge."""


def generation(c: SimCluster) -> Generation:
    found = c.job("j").generation
    assert found is not None
    return found


def lives(c: SimCluster) -> Mapping[str, str]:
    """Of the nodes that are neither lost nor gone: who has been fenced comes back with another one."""
    there = c.server.state.nodes.values()
    return {node.id: node.incarnation.life for node in there if not node.lost and not node.left}


async def runs_again(c: SimCluster, size: int, restarts: int) -> None:
    """It is whole on so many nodes, and stays so: it has been restarted so often, once for each fault. A generation
    that never ran may have been proposed beside. That no two run at once is looked at after each step (``Checker``)."""
    await c.until(lambda: c.job("j").restarts == restarts, LONGEST, f"it runs again on {size} nodes")
    await running(c, size, limit=LONGEST)
    await asyncio.sleep(TIMING.lease)
    assert (c.job("j").restarts, c.whole("j"), len(generation(c).members)) == (restarts, True, size), c.describe()


async def one_fault_after_the_other(c: SimCluster) -> None:
    size = len(c.nodes)
    await c.submit("j", 1, size, size)
    await running(c, size, limit=60)
    names, before = sorted(c.nodes), lives(c)
    assert len(before) == size

    c.nodes[names[size // 2]].machine.worker_ends("uid-j", 0, signal=9)
    await runs_again(c, size, 1)
    assert (generation(c).cause.kind, generation(c).cause.node) == ("worker_failed", names[size // 2])

    gone = names[-1]
    await c.nodes[gone].power_cut()
    await runs_again(c, size - 1, 2)
    assert (generation(c).cause.kind, generation(c).cause.node) == ("node_lost", gone)

    assert await c.scale("j", "scale", target=size - 3)
    await runs_again(c, size - 3, 3)

    runs, number = dict(c.checker.running("uid-j")), generation(c).number
    await c.empty_store()
    await c.until(lambda: c.settled() and c.whole("j"), RECOVERED, "the store has everything again")
    await asyncio.sleep(TIMING.lease)
    assert (generation(c).number, c.whole("j")) == (number, True)
    assert c.checker.running("uid-j") == runs, "nobody has stopped for it"

    assert lives(c) == {name: life for name, life in before.items() if name != gone}
    assert [entry.node for entry in c.job("j").budget.values() if entry.counts] == [names[size // 2]]


@pytest.mark.parametrize("size", [10, pytest.param(100, marks=[pytest.mark.large, pytest.mark.timeout(3600)])])
def test_a_job_over_all_nodes_has_one_fault_after_the_other(size: int) -> None:
    simulate(size, one_fault_after_the_other, slots=2)

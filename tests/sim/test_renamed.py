"""A machine whose node gets another name: nothing of the old node runs when the new one joins."""

from __future__ import annotations

import asyncio

from tests.sim.cluster import TIMING, SimCluster
from tests.sim.machine import GRACE, SimMachine
from tests.sim.test_directed import WITHOUT_AGENT, running, simulate
from tests.sim.test_failsafe import cut


class Renamed(dict[str, SimMachine]):
    """Machines by their first names; asked for by the others, too."""

    def __missing__(self, name: str) -> SimMachine:
        return self[name.replace("m", "n")]


async def restarted(c: SimCluster, configured: str) -> None:
    """The agent of n1, with this name in its config."""
    await c.nodes["n1"].kill_agent()
    c.nodes["n1"].configured = configured
    c.nodes["n1"].start_agent()


def test_what_the_old_node_ran_ends_before_the_new_one_joins() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        assert (first := c.job("j").generation) is not None
        assert "n1" in first.members
        machine, life = c.nodes["n1"].machine, c.server.state.nodes["n1"].incarnation.life
        quiet = list[bool]()

        def joined() -> bool:
            if "n9" not in c.server.state.nodes:
                quiet[:] = [not pod.live for pod in machine.pods.values()]
                return False
            return True

        await restarted(c, "n9")
        await c.until(joined, 5, "it joins under its new name")
        assert quiet == [True]
        assert c.server.state.nodes["n9"].incarnation.life != life
        assert c.server.state.nodes["n1"].left
        await running(c, 2)
        assert (last := c.job("j").generation) is not None
        assert "n1" not in last.members

    simulate(3, scenario)


def test_workers_that_cannot_be_ended_keep_the_old_node_no_longer_than_one_without_an_agent() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        await restarted(c, "n9")
        host = c.nodes["n1"]._host
        assert host is not None
        host.stop = lambda *_: None  # type: ignore[method-assign]
        await asyncio.sleep(WITHOUT_AGENT - 5)
        assert c.server.state.nodes["n1"].mute
        assert c.nodes["n1"].machine.pods["uid-j"].live
        await c.until(lambda: "n9" in c.server.state.nodes, 5 + GRACE + TIMING.lease, "it joins, once they are stopped")
        await running(c, 2)

    simulate(3, scenario)


def test_a_name_that_is_taken_back_in_time_costs_nothing() -> None:
    """As long as the new node has no life, what runs is the old one's."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        before = c.job("j").generation
        node = c.nodes["n1"]
        await node.kill_agent()
        node.configured = "n9"
        node.start_agent()
        await restarted(c, "n1")  # before it has done anything
        await asyncio.sleep(TIMING.lease + 1)
        assert c.job("j").generation == before
        assert "n9" not in c.server.state.nodes

    simulate(3, scenario)


def test_two_nodes_that_swap_their_names_both_join() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        lives = {node: record.incarnation.life for node, record in c.server.state.nodes.items()}
        for node, other in (("n1", "n2"), ("n2", "n1")):
            await c.nodes[node].kill_agent()
            c.nodes[node].configured = other
        for node in ("n1", "n2"):
            c.nodes[node].start_agent()

        def swapped() -> bool:
            now = c.server.state.nodes
            return all(now[node].incarnation.life != lives[node] and not now[node].left for node in ("n1", "n2"))

        await c.until(swapped, 2 * TIMING.lease, "each joins under the other's name")
        await running(c, 2)
        generation = c.job("j").generation
        cut(c, c.nodes)  # and they lend each other time as before
        await asyncio.sleep(4 * TIMING.lease)
        cut(c, c.nodes, False)
        await asyncio.sleep(TIMING.lease)
        assert c.job("j").generation == generation

    simulate(2, scenario)


def test_nodes_that_all_get_other_names_at_once_go_on_by_themselves() -> None:
    """All failsafe members of the job end with their names: they leave, and nobody waits for their consent."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        c.checker.machines = Renamed(c.checker.machines)
        for node in c.nodes.values():
            await node.kill_agent()
            node.configured = node.name.replace("n", "m")
        for node in c.nodes.values():
            node.start_agent()

        def again() -> bool:
            generation = c.job("j").generation
            runs = c.job("j").phase == "running" and all(n.machine.pods["uid-j"].live for n in c.nodes.values())
            return runs and generation is not None and sorted(generation.members) == ["m1", "m2", "m3"]

        await c.until(again, 2 * TIMING.lease, "it runs on the nodes of the new names")

    simulate(3, scenario)

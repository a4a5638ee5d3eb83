"""Directed schedules: agents whose config leads to another Redis than that of the others."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from nodeagent.agent.savedview import SETTLE
from tests.inprocess.server import Server
from tests.sim.cluster import TIMING, Node, SimCluster
from tests.sim.parts import WatchedServer
from tests.sim.test_directed import running, simulate
from tests.sim.test_lost_store import pids

REGROUP = 60.0
"""``saving.regroup``, as agents have it by default."""
WHILE = 15.0
LONG = 2 * REGROUP
"""Seconds after which a store would decide, whom it waits for or not."""


def another(cluster: SimCluster, *, copied: bool = False) -> Server:
    """A server beside the cluster's own; ``copied``: with its data as they are now."""
    own = cluster.server
    server = WatchedServer(lambda: own.now() / 1000, cluster.stepped)
    for _ in range(100):
        server.restart()
    if copied:
        server.put_back(cluster.server.kept())
    return server


async def submitted(cluster: SimCluster, least: int, most: int) -> None:
    """The job ``j``, which runs if it can; all agents have it on their disks."""
    await cluster.submit("j", least, most, most)
    if least < most:
        await running(cluster, most)
    await asyncio.sleep(3 * SETTLE)


async def restarted(node: Node, server: Server) -> None:
    """Its agent ends as a restart asks it to, and comes back with this server in its config."""
    node.end_agent()
    await node.ended()
    node.server = server
    node.start_agent()


def why(node: Node) -> str:
    assert node.agent is not None
    return node.agent.health().store_unusable


def moves(cluster: SimCluster, other: Server) -> None:
    """What its jobs do is in that store's records from now on."""
    cluster.checker.store_loses()
    cluster.server = cluster.checker.server = other


async def stays_out(cluster: SimCluster, node: Node, other: Server) -> None:
    """It gives that store nothing, and says where the cluster is."""
    before = cluster.job("j").generation, pids(cluster), other.state.run
    await asyncio.sleep(LONG)
    assert (cluster.job("j").generation, pids(cluster), other.state.run) == before, "no step was done there"
    assert "all agents must use one Redis" in why(node)


def test_an_idle_node_with_another_redis_runs_nothing_there_while_the_others_live_by_their_own() -> None:
    """It had given its lease back at its restart. It gave the empty store all jobs, and ran them a second time."""

    async def scenario(c: SimCluster) -> None:
        await submitted(c, 1, 3)
        idle = next(node for node in c.nodes.values() if not node.machine.running("uid-j"))
        await restarted(idle, other := another(c))
        await stays_out(c, idle, other)
        await idle.kill_agent()
        idle.server = c.server
        idle.start_agent()
        await c.until(lambda: idle.agent is not None and idle.agent.settled, 3, "it is back with its own")

    simulate(4, scenario)


def test_a_copy_of_the_store_is_another_one() -> None:
    """As a replica that was promoted. It has the same records and era; only its process is another one."""

    async def scenario(c: SimCluster) -> None:
        await submitted(c, 1, 3)
        idle = next(node for node in c.nodes.values() if not node.machine.running("uid-j"))
        await restarted(idle, other := another(c, copied=True))
        await stays_out(c, idle, other)

    simulate(4, scenario)


def test_agents_that_are_asked_are_few_where_one_has_answered() -> None:
    """An agent that waits asks the one that it knows to be elsewhere, not all of them again and again."""

    async def scenario(c: SimCluster) -> None:
        await submitted(c, 1, 3)
        idle = [node for node in c.nodes.values() if not node.machine.running("uid-j")]
        sent = [c.net.sent]
        for _ in range(3):
            await asyncio.sleep(WHILE)
            sent.append(c.net.sent)
            if len(sent) == 2:
                await restarted(idle[0], another(c))
        usual, _, waits = (after - before for before, after in pairwise(sent))
        assert waits - usual < 3 * 2 * WHILE / TIMING.heartbeat, "a question or two and their answers with each try"

    simulate(5, scenario)


def test_a_cluster_moves_to_another_redis_when_all_nodes_do() -> None:
    async def scenario(c: SimCluster) -> None:
        await submitted(c, 1, 3)
        other = another(c)
        for node in c.nodes.values():
            await node.power_cut()
        await asyncio.sleep(TIMING.lease)
        moves(c, other)
        for node in c.nodes.values():
            node.server = other
            node.power_on()
        await c.until(lambda: "uid-j" in other.state.jobs, 2, "the jobs are there")
        await c.until(lambda: len(pids(c)) == 3, 30, "the job goes on")

    simulate(4, scenario)


def test_a_node_that_was_off_while_the_cluster_moved_does_not_begin_anew_in_the_former_redis() -> None:
    """That one still runs, with all records: there the others' leases would lapse, and their jobs be formed anew."""

    async def scenario(c: SimCluster) -> None:
        await submitted(c, 1, 3)
        other, late = another(c), next(n for n in c.nodes.values() if not n.machine.running("uid-j"))
        former = c.server
        for node in c.nodes.values():
            await node.power_cut()
        moves(c, other)
        for node in c.nodes.values():
            if node is not late:
                node.server = other
                node.power_on()
        await c.until(lambda: len(pids(c)) == 3, LONG, "the job goes on")
        was, life = pids(c), former.state.nodes[late.name].incarnation
        late.power_on()
        await asyncio.sleep(LONG)
        assert (pids(c), former.state.nodes[late.name].incarnation) == (was, life), "it has not joined there"
        assert "all agents must use one Redis" in why(late)

    simulate(4, scenario)


def test_idle_nodes_move_one_after_the_other_when_the_last_one_has_left_the_former_redis() -> None:
    async def scenario(c: SimCluster) -> None:
        await submitted(c, 5, 5)
        other = another(c)
        for name in ("n1", "n2"):
            await restarted(c.nodes[name], other)
            await asyncio.sleep(10)
            assert not other.state.nodes
        await restarted(c.nodes["n3"], other)
        await c.until(lambda: set(other.state.nodes) == {"n1", "n2", "n3"}, 5, "all of them join the new one")
        assert other.state.jobs["uid-j"].phase == "queued"

    simulate(3, scenario)


def test_peers_that_do_not_answer_keep_nobody_waiting() -> None:
    async def scenario(c: SimCluster) -> None:
        await submitted(c, 5, 5)
        other, last = another(c), c.nodes["n3"]
        for node in c.nodes.values():
            await node.power_cut()
        last.server = other
        last.power_on()
        await c.until(lambda: "uid-j" in other.state.jobs, 3, "it gives back what it knows")

    simulate(3, scenario)


def test_a_node_of_another_cluster_is_no_reason_to_wait() -> None:
    """It was set up anew, with a wrong address, and has founded a cluster of its own there."""

    async def scenario(c: SimCluster) -> None:
        await submitted(c, 1, 2)
        stray = next(node for node in c.nodes.values() if not node.machine.running("uid-j"))
        await stray.power_cut(disk_lost=True)
        stray.server = another(c)
        stray.power_on()
        await c.until(lambda: stray.agent is not None and stray.agent.settled, 10, "it is in its own cluster")
        was = pids(c)
        await c.empty_store()
        await c.until(lambda: c.server.state.jobs and not c.server.state.recovering, 70, "the store has recovered")
        assert pids(c) == was

    simulate(3, scenario)

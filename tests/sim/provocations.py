"""Moments at which the rules of the protocol matter: what a broken one needs to show itself. All on four nodes whose
agents have just started."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.model.constraints import NODE, Constraints, Match
from nodeagent.model.job import Quota
from nodeagent.model.jobspec import Nodes, RestartLimits, Role
from nodeagent.model.node import Cordon
from nodeagent.model.queue import MIN_RUNTIME, Amount, Queue, Queues
from nodeagent.store import client
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.keys import prefix
from tests.inprocess.server import CLUSTER
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.machine import HIDDEN
from tests.sim.roles import WHOLE, end, role
from tests.sim.teams import Returns
from tests.sim.test_directed import acknowledged
from tests.sim.test_failsafe import cut, members, pids, started
from tests.sim.test_growth import breaks
from tests.sim.test_mute import ENOUGH, spare_that_falls_silent, trains_undisturbed
from tests.sim.test_shares import share
from tests.sim.test_signatures import forged, write

SHORT_ACK = 15
"""Commands that an acknowledgement in its usual case takes; the whole step takes more."""


async def falls_silent_and_scales(cluster: SimCluster) -> None:
    """A node that falls silent, a scale-in, a drain: the moments at which the rules above matter."""
    await cluster.submit("a", 1, 4, 3)
    await cluster.until(lambda: cluster.whole("a"), 90, "whole")
    await asyncio.sleep(3)
    await cluster.scale("a", "scale", target=1)
    await asyncio.sleep(10)
    await cluster.scale("a", "scale", target=3)
    await cluster.until(lambda: cluster.whole("a"), 90, "whole again")
    await asyncio.sleep(3)
    generation = cluster.job("a").generation
    assert generation is not None
    leader, last = generation.ordered()[0].node, generation.ordered()[-1].node
    cluster.nodes[last].link.cut = True
    await asyncio.sleep(8)
    cluster.nodes[last].link.cut = False
    await cluster.until(lambda: cluster.whole("a"), 90, "whole after the cut")
    generation = cluster.job("a").generation
    assert generation is not None
    leader, last = generation.ordered()[0].node, generation.ordered()[-1].node
    cluster.nodes[last].freeze_agent()
    cluster.nodes[leader].machine.worker_ends("uid-a", 0, signal=9)
    await cluster.scale("a", "scale", target=1)
    await asyncio.sleep(8)
    cluster.nodes[last].thaw()
    await asyncio.sleep(20)


async def scaled_in_while_its_agent_restarts(cluster: SimCluster) -> None:
    """The others form anew without a node whose agent has just been killed, and comes back to workers that run."""
    await cluster.submit("a", 1, 4, 4, grace=0.05)
    await cluster.until(lambda: cluster.whole("a"), 90, "whole")
    await asyncio.sleep(3)
    for _ in range(3):
        generation = cluster.job("a").generation
        assert generation is not None
        node = cluster.nodes[generation.ordered()[-1].node]
        await node.kill_agent()
        await cluster.scale("a", "scalein", nodes=[node.name])
        node.start_agent()
        await asyncio.sleep(8)
    await cluster.until(lambda: cluster.whole("a"), 90, "whole again")


async def scaled_in_while_it_is_ordered_to_start(cluster: SimCluster) -> None:
    """The others form anew without a node whose shim is busy, and has yet to read the order to start."""
    late = list(cluster.nodes.values())[-1]
    late.machine.start_late = 0.75
    await cluster.submit("a", 1, 4, 4, grace=0.05)
    await cluster.until(lambda: any(pod.ordered for pod in late.machine.pods.values()), 90, "it is on its way")
    await cluster.scale("a", "scalein", nodes=[late.name])
    await asyncio.sleep(8)
    await cluster.until(lambda: cluster.whole("a"), 90, "whole again")


async def back_before_its_loss_is_known(cluster: SimCluster) -> None:
    """Random seed 52: a node trained on the time that its failsafe members lent, was declared lost meanwhile, and
    reached the emptied store first. It got a lease there before the one node came that knew of its successor."""
    may = Constraints(require=(Match(label=NODE, values=("n1", "n2")),))  # others are failsafe members only
    where = Role(command=("train",), nodes=Nodes(min=1, max=1, target=1), workers_per_node=2, placement=may)
    await cluster.submit("j", 1, 1, 1, roles=(where,))
    await cluster.until(lambda: cluster.whole("j"), 90, "whole")
    await asyncio.sleep(5)
    first, failsafe_members = (
        cluster.job("j").generation,
        [cluster.nodes[name] for name in cluster.job("j").failsafe_members],
    )
    assert first is not None
    (old,) = (node for node in failsafe_members if node.name in first.members)
    (successor,) = (node for node in cluster.nodes.values() if node not in failsafe_members)
    old.link.cut = True
    await asyncio.sleep(0.7)
    for node in (
        failsafe_members
    ):  # their leases end later: while a failsafe member is live the job is formed anew without the old node
        node.link.cut = True
    await cluster.operate("j", restart=1)

    def formed_anew() -> bool:
        generation = cluster.job("j").generation
        return generation is not None and set(generation.members) == {successor.name} and not generation.missing

    await cluster.until(formed_anew, 30, "the successor waits for a failsafe member only")
    assert set(pids(cluster)) == {old.name}
    successor.link.cut = True
    emptying = asyncio.ensure_future(cluster.empty_store())
    for node in failsafe_members:
        node.link.cut = False
    await asyncio.sleep(TIMING.credit + TIMING.lease + 1)
    assert set(pids(cluster)) == {old.name}, "it has a lease again"
    old.link.cut, successor.link.cut = True, False
    await emptying
    await cluster.until(lambda: set(pids(cluster)) == {successor.name}, 10, "moved, and never two at once")


async def store_loses_writes(cluster: SimCluster, same_process: bool = False) -> None:
    """The gang moves to other nodes in seconds that the store then loses; the old gang comes first, later an agent that
    had seen less than the others comes first to an emptied store."""
    await cluster.submit("a", 2, 2, 2)
    await cluster.until(lambda: cluster.whole("a"), 90, "whole")
    first = cluster.job("a").generation
    assert first is not None
    old = [cluster.nodes[name] for name in first.members]
    rolling = asyncio.ensure_future(cluster.roll_back_store(8, same_process))
    await asyncio.sleep(0.1)
    for node in old:
        node.link.cut = True
    await cluster.until(lambda: cluster.job("a").generation != first and cluster.whole("a"), 7, "moved")
    await rolling
    for node in cluster.nodes.values():
        node.link.cut = node not in old
    await asyncio.sleep(2.5)
    for node in cluster.nodes.values():
        node.link.cut = False
    await asyncio.sleep(10)
    second = cluster.job("a").generation
    assert second is not None
    ahead = next(n for n in cluster.nodes.values() if n.name not in second.members)
    ahead.link.cut = True
    cluster.nodes[min(second.members)].machine.worker_ends("uid-a", 0, signal=9)
    await asyncio.sleep(2)
    for node in cluster.nodes.values():
        node.link.cut = node is not ahead
    emptying = asyncio.ensure_future(cluster.empty_store())
    await asyncio.sleep(1)
    for node in cluster.nodes.values():
        node.link.cut = False
    await emptying
    await asyncio.sleep(20)
    cluster.checker.check_kept()


async def a_commit_comes_late(cluster: SimCluster) -> None:
    """A commit is still on its way to the store when the same nodes form anew."""
    await cluster.submit("a", 3, 3, 3)
    await cluster.until(lambda: cluster.whole("a"), 90, "whole")
    generation = cluster.job("a").generation
    assert generation is not None
    leader, last = (cluster.nodes[generation.ordered()[at].node] for at in (0, -1))
    leader.machine.commit_request("uid-a", 1)
    await cluster.until(lambda: cluster.job("a").checkpoint is not None, 10, "committed")
    leader.link.slow = 8.0
    leader.machine.commit_request("uid-a", 2)
    await asyncio.sleep(0.05)
    leader.link.slow = 0.0
    last.machine.worker_ends("uid-a", 0, signal=9)
    await asyncio.sleep(40)
    pointer, active = cluster.job("a").checkpoint, cluster.job("a").active
    assert pointer is not None and active is not None and active.number > generation.number
    assert pointer.number <= generation.number


async def part_of_the_members(c: SimCluster) -> None:
    """Two members of three are cut off from the store, their third failsafe member is not."""
    await started(c, 1, 3)
    cut(c, members(c)[:2])
    await asyncio.sleep(20)


async def all_failsafe_members(c: SimCluster) -> None:
    """All members are cut off, a spare, which would be enough, is not."""
    await started(c, 1, 3)
    cut(c, members(c))
    await asyncio.sleep(20)


async def back_one_by_one(c: SimCluster) -> None:
    """A failsafe member that is no member comes back to the store at once after it lent."""
    await started(c, 2, 2)
    failsafe_members = sorted(c.job("j").failsafe_members)
    (outside,) = set(failsafe_members) - set(members(c))
    cut(c, failsafe_members)
    await asyncio.sleep(8)
    cut(c, [outside], False)
    await asyncio.sleep(10)


async def forgetful(c: SimCluster) -> None:
    """The agent of that failsafe member is started anew in the same moment, and so knows nothing of its promise."""
    await started(c, 2, 2)
    failsafe_members = sorted(c.job("j").failsafe_members)
    (outside,) = set(failsafe_members) - set(members(c))
    cut(c, failsafe_members)
    await asyncio.sleep(8)
    await c.nodes[outside].kill_agent()
    cut(c, [outside], False)
    c.nodes[outside].start_agent()
    await asyncio.sleep(10)


async def its_lease_process_forgets(c: SimCluster) -> None:
    """A failsafe member's lease process and agent are killed when it has lent, and it is at once asked for another
    job."""
    await started(c, 1, 2)
    first, failsafe_members = set(members(c)), sorted(c.job("j").failsafe_members)
    (outside,) = set(failsafe_members) - first
    for name in c.nodes:
        await c.cordon(name, None if name == outside else Cordon(reason="test", by="test", at=0.0))
    await c.submit("k", 1, 1, 1)
    await c.until(lambda: c.whole("k"), 90, "whole")
    for name in c.nodes:
        await c.cordon(name, None)
    await asyncio.sleep(5)
    cut(c, failsafe_members)
    await asyncio.sleep(8)
    c.net.cut |= {(name, outside) for name in first}
    await c.nodes[outside].kill_agent()
    c.nodes[outside].lease.kill()
    await asyncio.sleep(0.15)
    cut(c, [outside], False)
    c.nodes[outside].start_agent()
    await asyncio.sleep(10)


async def boots_after_it_lent(c: SimCluster) -> None:
    """A failsafe member that is no member is switched off and on, and is back at the store at once."""
    await started(c, 1, 2)
    failsafe_members = sorted(c.job("j").failsafe_members)
    (outside,) = set(failsafe_members) - set(members(c))
    cut(c, failsafe_members)
    await asyncio.sleep(8)
    await c.nodes[outside].power_cut()
    cut(c, [outside], False)
    c.nodes[outside].power_on()
    await asyncio.sleep(10)


async def leaves_after_it_lent(c: SimCluster) -> None:
    """A failsafe member's agent is dead for so long that its lease process leaves, and reaches the store to do so."""
    await started(c, 1, 2)
    failsafe_members = sorted(c.job("j").failsafe_members)
    (outside,) = set(failsafe_members) - set(members(c))
    node = c.nodes[outside]
    await node.kill_agent()
    cut(c, failsafe_members)
    await c.until(lambda: node.lease.state == "giving up", 40, "it gives up")
    cut(c, [outside], False)
    await asyncio.sleep(10)


async def lets_go_as_it_is_asked(c: SimCluster) -> None:
    """A failsafe member's lease process is stopped between looking at the table and promising, for the first time;
    meanwhile its agent, which has read no promise, leaves, and dies right after it."""
    await started(c, 1, 1)
    (member,) = members(c)
    one, last = sorted(set(c.job("j").failsafe_members) - {member})
    cut(c, [member])
    await asyncio.sleep(0.9)
    cut(c, [one, last])
    node = c.nodes[last]
    for _ in range(20_000):
        if node.lease.promising:
            break
        await asyncio.sleep(0.0001)
    assert node.lease.promising and node.agent is not None
    node.lease.gate.close()
    cut(c, [last], False)
    await node.agent._give_back()
    await node.kill_agent()
    node.lease.gate.open()
    await asyncio.sleep(10)


async def one_alone(c: SimCluster) -> None:
    """One member alone is cut off: replaced as soon as its lease has lapsed."""
    await started(c, 2, 3)
    victim = members(c)[1]
    cut(c, [victim])
    await c.until(lambda: c.whole("j") and victim not in members(c), TIMING.lease + 1.5, "replaced")


async def forged_and_stolen(c: SimCluster) -> None:
    """A job that nobody signed, and the record of one that has ended, are written into the store."""
    stolen = await c.submit("a", 1, 4, 2)
    await c.until(lambda: c.whole("a"), 90, "whole")
    await c.operate("a", desired="stop", delete=True)
    await c.until(lambda: c.find("a") is None, 30, "deleted")
    await asyncio.sleep(5)
    write(c, stolen)
    write(c, forged("f"))
    await asyncio.sleep(20)
    for node in c.nodes.values():
        assert not node.machine.pods, f"{node.name} has prepared {sorted(node.machine.pods)}"


async def wakes_when_it_was_given_up(c: SimCluster) -> None:
    """An agent that is stuck holds an old view, and acts on it when it wakes; the job was restarted meanwhile. Its
    workers have no peers whose end would end them."""
    await started(c, 1, 1)
    for turn in range(1, 7):
        node = c.nodes[members(c)[0]]
        node.freeze_agent()
        await asyncio.sleep(c.rng.uniform(2.0, 4.0))
        await c.operate("j", restart=turn)
        await asyncio.sleep(c.rng.uniform(0.0, 4.5))
        node.thaw()
        await asyncio.sleep(c.rng.uniform(0.5, 12.0))


async def its_shim_hangs_while_its_agent_is_stuck(c: SimCluster) -> None:
    """So nobody says that its workers have ended, or ends them before their time is over."""
    await started(c, 1, 1)
    node = c.nodes[members(c)[0]]
    node.freeze_agent()
    node.machine.hang_shim("uid-j")
    await c.until(lambda: c.whole("j") and node.name not in members(c), 60, "re-formed elsewhere")


async def one_of_two_jobs_waits_for_a_stuck_node(c: SimCluster) -> None:
    """A node's agent is stuck. A job that runs there loses a worker elsewhere, and goes on without the node; another
    job goes on there."""
    await c.submit("k", 4, 4, 4)
    await started(c, 2, 3)
    await c.until(lambda: c.whole("k"), 60, "whole")
    node = c.nodes[members(c)[1]]
    ran = node.machine.running("uid-k")
    node.freeze_agent()
    await asyncio.sleep(TIMING.lease + TIMING.heartbeat)
    c.nodes[members(c)[0]].machine.worker_ends("uid-j", 0, signal=9)
    await c.until(lambda: c.whole("j") and node.name not in members(c), TIMING.heartbeat + 2, "without the node")
    node.thaw()
    await asyncio.sleep(10)
    assert node.machine.running("uid-k") == ran, "the job that did not wait"


async def one_of_two_jobs_stands_still_on_a_node_that_is_cut_off(c: SimCluster) -> None:
    """A node's agent is cut off as it acknowledges a generation, and never reads that all have. That gang forms anew
    without the node; another job trains on there. It is back at any time."""
    await c.submit("k", 4, 4, 4)
    await c.until(lambda: c.find("k") is not None and c.whole("k"), 90, "whole")
    ran = {name: node.machine.running("uid-k") for name, node in c.nodes.items()}
    for turn in range(1, 4):
        name = f"j{turn}"
        await c.submit(name, 3, 3, 3)
        await c.until(lambda: bool(acknowledged(c, name)), 30, "one has acknowledged")  # noqa: B023
        node = c.nodes[acknowledged(c, name)[0]]
        node.link.agent_loses = "large replies"
        await c.until(lambda: c.job(name).phase == "running", 5, "it is active")  # noqa: B023
        if turn > 1:
            await asyncio.sleep(c.rng.uniform(TIMING.lease - 1, TIMING.lease + 2))
            node.link.restore()
        await c.until(lambda: c.whole(name), 2 * TIMING.lease + 2, "whole")  # noqa: B023
        node.link.restore()
        await asyncio.sleep(TIMING.lease)
        assert {one: c.nodes[one].machine.running("uid-k") for one in ran} == ran, "the job that trains"
        await c.operate(name, desired="stop", delete=True)
        await c.until(lambda: c.find(name) is None, 30, "deleted")  # noqa: B023


async def lets_go_after_it_lent(c: SimCluster) -> None:
    """Members and failsafe members are cut off from the store with stuck agents, and one runs on. One that has lent it
    time is back before its lease is over, and is to let go. No worker notices that its peers have ended."""
    for node in c.nodes.values():
        node.machine.peers = lambda uid, token, name: None
    await started(c, 1, 2)
    for turn in range(1, 4):
        await c.until(lambda: c.whole("j") and len(c.job("j").failsafe_members) == 3, 60, "whole")
        failsafe_members, back = sorted(c.job("j").failsafe_members), members(c)[1]
        c.nodes[back].freeze_agent()
        await asyncio.sleep(1)
        for name in failsafe_members:
            c.nodes[name].freeze_agent()
        cut(c, failsafe_members)
        await c.operate("j", restart=turn)
        await asyncio.sleep(2.2)
        cut(c, [back], False)
        await asyncio.sleep(8)
        cut(c, failsafe_members, False)
        for name in failsafe_members:
            c.nodes[name].thaw()
        await asyncio.sleep(12)


async def its_lease_process_dies_as_it_leaves(c: SimCluster) -> None:
    """Its goodbye is on its way to the store for seconds; meanwhile it is back, and so is the agent that was stuck."""
    await started(c, 1, 1)
    for _ in range(6):
        await c.until(lambda: c.whole("j"), 60, "whole")
        node = c.nodes[members(c)[0]]
        before = node.lease.leaves_sent
        node.freeze_agent()
        await c.until(lambda: node.lease.state == "giving up", 60, "it gives up")  # noqa: B023
        node.link.slow = 6.0
        await c.until(lambda: node.lease.leaves_sent > before, 60, "it says goodbye")  # noqa: B023
        node.link.slow = 0.0
        node.lease.kill()
        node.thaw()
        await asyncio.sleep(12)


async def the_store_goes_back_while_agents_are_dead(c: SimCluster) -> None:
    """It loses the generation that runs. Whoever has read of it has no agent; their lease processes live on."""
    await started(c, 1, 1)
    first = next(iter(members(c)))
    alone = "n3" if first != "n3" else "n2"
    cut(c, [alone])
    rolling = asyncio.ensure_future(c.roll_back_store(20))
    await c.nodes[first].power_cut(disk_lost=True)
    await c.until(lambda: members(c) != [first] and c.whole("j"), 19, "moved")
    for node in c.nodes.values():
        if node.name not in (first, alone):
            await node.kill_agent()
    await rolling
    cut(c, [alone], False)
    c.nodes[first].power_on()
    await asyncio.sleep(25)
    for node in c.nodes.values():
        node.power_on()
    await asyncio.sleep(20)


async def an_old_view_comes_first(cluster: SimCluster) -> None:
    """The job has moved while a failsafe member was cut off. Then the store is emptied and that one alone reaches it,
    for longer than a recovery takes: the others run on without the store, on the time that they lend each other."""
    await started(cluster, 1, 1)
    old = cluster.job("j").generation
    assert old is not None
    first = next(iter(old.members))
    alone = max(name for name in cluster.job("j").failsafe_members if name != first)
    others = [name for name in cluster.nodes if name not in (first, alone)]
    cut(cluster, [alone])
    await cluster.nodes[first].power_cut()
    await cluster.until(lambda: cluster.job("j").generation != old and cluster.whole("j"), 30, "moved")
    await asyncio.sleep(5)
    moved, was = cluster.job("j").generation, pids(cluster)
    cut(cluster, others)
    emptying = asyncio.ensure_future(cluster.empty_store())
    await asyncio.sleep(cluster.rng.uniform(0.0, 1.0))
    cut(cluster, [alone], False)
    await asyncio.sleep(cluster.rng.uniform(15, 40))
    cut(cluster, others, False)
    await emptying
    await asyncio.sleep(10)
    assert (cluster.job("j").generation, pids(cluster)) == (moved, was), cluster.describe()


async def the_store_goes_back_and_one_alone_comes(cluster: SimCluster) -> None:
    """The job moves while one that was no part of it is cut off; then the store loses these writes (a fail-over, say),
    and only that one reaches it, which misses nothing: the others run on, on the time that they lend each other."""
    await started(cluster, 1, 1)
    old = cluster.job("j").generation
    assert old is not None
    first = next(iter(old.members))
    alone = next(name for name in cluster.nodes if name != first)
    others = [name for name in cluster.nodes if name not in (first, alone)]
    cut(cluster, [alone])
    await cluster.nodes[first].power_cut()
    await asyncio.sleep(cluster.rng.uniform(0.0, 2.0))
    going_back = asyncio.ensure_future(cluster.roll_back_store(15))
    await cluster.until(lambda: cluster.job("j").generation != old and cluster.whole("j"), 10, "moved")
    await asyncio.sleep(4)
    moved, was = cluster.job("j").generation, pids(cluster)
    cut(cluster, others)
    await going_back
    cut(cluster, [alone], False)
    await asyncio.sleep(cluster.rng.uniform(15, 40))
    cut(cluster, others, False)
    await asyncio.sleep(10)
    assert (cluster.job("j").generation, pids(cluster)) == (moved, was), cluster.describe()


async def peers_hide_why_they_fail(cluster: SimCluster) -> None:
    """Four nodes go, one after the other, the first a moment after the start, and are back before the next one does;
    the workers of the others do not say why they failed. Then a worker is killed, twice."""
    for node in cluster.nodes.values():
        node.machine.farewells = HIDDEN
    await cluster.submit("a", 2, 3, 3, restarts=RestartLimits(max=2, window=3600.0, backoff_max=0.0))
    await cluster.until(lambda: cluster.whole("a"), 90, "whole")
    for _ in range(4):
        before = cluster.job("a").generation
        assert before is not None
        node = cluster.nodes[cluster.rng.choice(sorted(before.members))]
        await node.power_cut()
        await cluster.until(lambda: cluster.job("a").generation != before and cluster.whole("a"), 20, "on without it")  # noqa: B023
        assert not any(entry.counts for entry in cluster.job("a").budget.values()), cluster.describe()
        node.power_on()
        await cluster.until(
            lambda: cluster.whole("a") and len(cluster.job("a").generation.members) == 3,  # type: ignore[union-attr]
            60,
            "whole again",
        )
    for kills in (1, 2):
        before = cluster.job("a").generation
        assert before is not None
        cluster.nodes[min(before.members)].machine.worker_ends("uid-a", 1, signal=9)
        await cluster.until(lambda: cluster.job("a").generation != before and cluster.whole("a"), 20, "formed again")  # noqa: B023
        await asyncio.sleep(1)
        paid = [e for e in cluster.job("a").budget.values() if e.counts]
        assert len(paid) == kills, cluster.describe()
    cluster.checker.check_blame()


async def fails_back_with_writes_lost(cluster: SimCluster) -> None:
    """As ``store_loses_writes``, by a primary that was a replica in between: the same process."""
    await store_loses_writes(cluster, same_process=True)


async def one_address_for_two(cluster: SimCluster) -> None:
    """A failsafe member is reached at the address of another as well, which alone hears the store, and lets go."""
    await cluster.submit("a", 2, 3, 3)
    await cluster.until(lambda: cluster.whole("a"), 90, "whole")
    await asyncio.sleep(5)
    failsafe_members = sorted(cluster.job("a").failsafe_members)
    for name in failsafe_members[:2]:
        cluster.nodes[name].link.cut = True
    cluster.net.ends[failsafe_members[2]] = cluster.net.ends[failsafe_members[1]]
    await asyncio.sleep(30)


async def a_shim_hangs(cluster: SimCluster) -> None:
    """It carries out nothing, a stop among others, and tells nothing: its host kills it, and the others go on."""
    await cluster.submit("a", 1, 4, 3)
    await cluster.until(lambda: cluster.whole("a"), 90, "whole")
    await asyncio.sleep(3)
    generation = cluster.job("a").generation
    assert generation is not None
    cluster.nodes[generation.ordered()[-1].node].machine.hang_shim("uid-a")
    await cluster.scale("a", "scale", target=4)
    await cluster.until(lambda: cluster.whole("a") and cluster.job("a").generation != generation, 90, "whole again")


async def a_process_outside_its_group(c: SimCluster) -> None:
    """A worker of each member has started a process that left its group and session: a planned stop, a killed worker, a
    fence and a killed shim end it all the same."""
    await started(c, 1, 3)
    for how in ("stop", "worker", "fence", "shim"):
        await c.until(lambda: c.whole("j") and len(members(c)) == 3, 90, "whole")
        await asyncio.sleep(3)
        before, last = c.job("j").generation, members(c)[-1]
        for name in members(c):
            c.nodes[name].machine.leave_group("uid-j", 0)
        if how == "stop":
            await c.operate("j", restart=1)
        elif how == "worker":
            c.nodes[last].machine.worker_ends("uid-j", 0, signal=9)
        elif how == "shim":
            c.nodes[last].machine.kill_shim("uid-j")
        else:
            cut(c, [last])
        await c.until(lambda: c.job("j").generation != before and c.whole("j"), 90, "formed again")  # noqa: B023
        await asyncio.sleep(3)
        cut(c, [last], False)


async def overloaded(cluster: SimCluster) -> None:
    """Each call takes so long that the store can carry out a third of what comes at rest, for longer than a lease: all
    ask less often, no training is disturbed, and it ends with its cause."""
    await cluster.submit("a", 2, 4, 4)
    await cluster.until(lambda: cluster.whole("a"), 90, "whole")
    await asyncio.sleep(20)
    thread, seconds = cluster.thread, 15.0
    begun = thread.done
    await asyncio.sleep(20)
    rate, before = (thread.done - begun) / 20, cluster.job("a").last_number
    thread.cost, begun = 3 / rate, thread.done
    await asyncio.sleep(seconds)
    came = thread.waiting + thread.done - begun
    assert thread.waiting > 0 and came < 0.82 * rate * seconds, f"{came} calls came; at rest {rate * seconds:g} do"
    thread.cost = 0.1 / rate
    await cluster.until(lambda: thread.waiting == 0, 20.0, "what has piled up is worked off")
    await asyncio.sleep(10)
    begun = thread.done
    await asyncio.sleep(20)
    assert (thread.done - begun) / 20 < 1.1 * rate, "as many calls as before"
    assert cluster.job("a").last_number == before, "no training was disturbed"
    cluster.nodes["n2"].machine.worker_ends("uid-a", 0, signal=9)
    await cluster.until(lambda: cluster.job("a").restarts == 1 and cluster.whole("a"), 5.0, "replaced")


async def removals_that_an_agent_sleeps_through(cluster: SimCluster) -> None:
    """While an agent is stuck a job is removed, and so many records after it that the mark of this removal is too."""
    await started(cluster, 1, 1)
    asleep = cluster.nodes[next(name for name in cluster.nodes if name not in members(cluster))]
    asleep.freeze_agent()
    await cluster.operate("j", desired="stop", delete=True)
    await cluster.until(lambda: cluster.find("j") is None, 30, "deleted")
    cluster.server.run("for i = 1, 1200 do bury('job:old' .. i) end return { 1 }")
    asleep.thaw()
    await asyncio.sleep(20)
    await cluster.submit("b", 4, 4, 4)
    await cluster.until(lambda: cluster.whole("b"), 90, "it goes on")
    for node in cluster.nodes.values():
        assert node.agent is not None
        left = [job.name for job in node.agent.cluster().jobs.values()]
        assert left == ["b"], f"{node.name} still has {left}"


async def users_submit_as_long_as_they_may(cluster: SimCluster) -> None:
    """None of them near a limit of his own, and more together than an agent reads; then agents start anew, and a worker
    fails."""
    await started(cluster, 2, 3)
    refused = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "MOST_JOBS", 8)
        for number in range(10):
            try:
                await cluster.submit(f"w{number}", 9, 9, 9, quota=Quota(jobs=1000, bytes=1 << 30))
            except StoreRefusedError as refusal:
                assert refusal.code == "full", refusal
                refused = True
        for node in cluster.nodes.values():
            await node.kill_agent()
            node.start_agent()
        await asyncio.sleep(20)
        before = pids(cluster)
        cluster.nodes[members(cluster)[-1]].machine.worker_ends("uid-j", 0, signal=9)
        await cluster.until(lambda: pids(cluster) != before and cluster.whole("j"), 60, "the worker is replaced")
    assert refused, "there was room for all of them"


async def trainers_end_one_by_one(cluster: SimCluster) -> None:
    """Of a job whose trainers come after its servers, each trainer ends by itself, a while after the one before."""
    servers, trainers = role("server", replicas=3), role("trainer", nodes=3, workers=2, after=("server",))
    await cluster.submit("j", 1, 1, 1, roles=(servers, trainers), completes="trainer")
    await cluster.until(lambda: cluster.whole("j"), 90, "whole")
    for _ in range(6):
        end(cluster, cluster.job("j"), "trainer", 1)
        await asyncio.sleep(2)
    await cluster.until(lambda: cluster.job("j").phase == "succeeded", 10, "the last one has ended")


async def a_role_is_started_again(cluster: SimCluster) -> None:
    """On three nodes, of which one's agent is stuck just then, and another's worker fails a moment later."""
    servers, trainers = role("server", replicas=2), role("trainer", nodes=3, workers=2, policies=WHOLE)
    await cluster.submit("j", 1, 1, 1, roles=(servers, trainers), completes="server")
    await cluster.until(lambda: cluster.whole("j"), 90, "whole")
    generation = cluster.job("j").generation
    assert generation is not None
    first, second, third = (cluster.nodes[m.node] for m in generation.ordered() if m.ranks_of("trainer"))
    local = {m.node: min(m.ranks_of("trainer")) - m.first_rank for m in generation.ordered() if m.ranks_of("trainer")}
    third.freeze_agent()
    first.machine.role_fails("uid-j", local[first.name])
    await asyncio.sleep(0.2)
    second.machine.role_fails("uid-j", local[second.name])
    await asyncio.sleep(TIMING.lease)
    assert not cluster.whole("j"), "it waits for the third"
    third.thaw()
    await cluster.until(lambda: cluster.whole("j"), 10, "all of it is started again")
    pods = [node.machine.pods["uid-j"] for node in (first, second, third)]
    assert cluster.job("j").restarts == 0 and [pod.runs["trainer"] for pod in pods] == [1, 1, 1]


async def roles_stop_in_order(cluster: SimCluster) -> None:
    """On nodes that each have a server and a trainer, which comes after all servers."""
    servers, trainers = role("server", nodes=4), role("trainer", nodes=4, after=("server",))
    await cluster.submit("j", 1, 1, 1, roles=(servers, trainers), grace=60.0)
    await cluster.until(lambda: cluster.whole("j"), 90, "whole")
    for turn in (1, 2, 3):
        number = cluster.job("j").last_number
        for node in cluster.nodes.values():
            node.machine.left_in_order.clear()
        await cluster.operate("j", restart=turn)
        await cluster.until(
            lambda: cluster.job("j").last_number > number and cluster.whole("j"),  # noqa: B023
            20,
            "formed anew",
        )
        left = sorted((at, name) for node in cluster.nodes.values() for at, name in node.machine.left_in_order)
        assert [name for _, name in left] == ["trainer"] * 4 + ["server"] * 4, cluster.describe()


async def the_next_fault_comes_before_the_verdict(cluster: SimCluster) -> None:
    """A member is fenced, and says so last, so that the budget pays for a victim. In the moment in which the gang runs
    again the shim of another dies, and who would put that right is stuck: once the next generation is formed, nobody
    can."""
    await cluster.submit("j", 2, 3, 3)
    await cluster.until(lambda: cluster.whole("j"), 90, "whole")
    await asyncio.sleep(TIMING.early)  # so that what peers end with ends no job
    generation = cluster.job("j").generation
    assert generation is not None
    first, other, fenced = (cluster.nodes[member.node] for member in generation.ordered())
    fenced.freeze_agent()
    fenced.lease.gate.close()

    def waits_for_it() -> bool:
        generation = cluster.job("j").generation
        return generation is not None and generation.state == "forming" and [*generation.missing] == [fenced.name]

    await cluster.until(waits_for_it, TIMING.lease, "all others have acknowledged the next generation")
    first.freeze_agent()
    other.machine.kill_shim("uid-j")
    fenced.thaw()
    await asyncio.sleep(1)
    first.thaw()
    await cluster.until(lambda: cluster.job("j").restarts == 2 and cluster.whole("j"), 90, "whole again")
    await asyncio.sleep(TIMING.lease)
    cluster.checker.check_blame()
    paid = [entry.kind for entry in cluster.job("j").budget.values() if entry.counts]
    assert paid == ["pod_failed"], cluster.describe()


async def loses_one_node_and_then_another(cluster: SimCluster) -> None:
    """Of a job with an elastic role, which goes on with three places of four, and not with two."""
    servers, trainers = role("server", replicas=2), role("trainer", replicas=4, workers=3, least=3)  # one on a node
    await cluster.submit("j", 1, 1, 1, roles=(servers, trainers), completes="trainer")

    def runs_with(count: int) -> bool:
        generation = cluster.job("j").generation
        return generation is not None and cluster.whole("j") and generation.sizes == {"server": 2, "trainer": count}

    await cluster.until(lambda: runs_with(4), 90, "whole")
    generation = cluster.job("j").generation
    assert generation is not None
    first = next(m.node for m in generation.ordered() if any(place.name == "trainer.0" for place in m.places))
    await cluster.nodes[first].power_cut()
    await cluster.until(lambda: runs_with(3), 60, "it goes on with three")
    second = cluster.job("j").generation.ordered()[0].node  # type: ignore[union-attr]
    await cluster.nodes[second].power_cut()
    await cluster.until(lambda: cluster.job("j").phase == "holding", 60, "two are too few")
    await asyncio.sleep(20)
    assert cluster.job("j").phase == "holding" and not cluster.checker.running("uid-j")
    cluster.nodes[first].power_on()
    await cluster.until(lambda: runs_with(3), 90, "three again")
    cluster.nodes[second].power_on()
    await cluster.until(lambda: runs_with(4), 90, "it has grown again")


async def nodes_that_others_may_not_take_back(cluster: SimCluster) -> None:
    """Two jobs have borrowed a node each: one is of a queue that is not reclaimable, the other's has no more than its
    guarantee. A third queue needs a node, and goes without. Half of each node is another job's."""
    kept, own = Queue(name="kept", reclaimable=False), Queue(name="own", guarantee=Amount(nodes=2))
    queues = kept, own, Queue(name="needy"), kept.model_copy(update={"name": "half"})
    Returns(cluster, Queues(queues=queues))
    await share(cluster, *queues)
    await cluster.submit("h", 4, 4, 4, queue="half")
    await cluster.until(lambda: cluster.whole("h"), 90, "half of all nodes is in use")
    for name, queue in (("a", "kept"), ("b", "own")):
        await cluster.submit(name, 1, 2, 1, auto=True, queue=queue)

    def borrow() -> bool:
        generations = [cluster.job(name).generation for name in "ab"]
        return all(generation is not None and len(generation.members) == 2 for generation in generations)

    await cluster.until(borrow, 90, "each has two nodes")
    await cluster.submit("c", 1, 1, 1, queue="needy")
    await asyncio.sleep(2 * MIN_RUNTIME)


async def a_large_gang_forms_again(cluster: SimCluster) -> None:
    """A worker of a gang of 40 nodes dies. What that costs the store is part of the rules: a wake brings a member what
    has happened, so that nobody has to ask, and once many have acknowledged the others do so by the short way."""
    size = len(cluster.nodes)
    await cluster.submit("a", 1, size, size)
    await cluster.until(lambda: cluster.whole("a"), 10, "whole")
    await asyncio.sleep(5)
    before = cluster.server.costs.copy()
    cluster.nodes["n7"].machine.worker_ends("uid-a", 0, signal=9)
    await cluster.until(lambda: cluster.job("a").restarts == 1 and cluster.whole("a"), 5, "formed again")
    cost = cluster.server.costs - before
    beats = sum(times for (step, _), times in cost.items() if step == "beat")
    assert beats < size, f"{beats} beats of {size} nodes, for three wakes"
    short = sum(times for (step, commands), times in cost.items() if step == "ack" and commands <= SHORT_ACK)
    assert short >= size // 4, f"{short} of {size} acknowledgements took the short way: {cost}"


async def its_record_denies_a_nodes_life(cluster: SimCluster) -> None:
    """Somebody writes another life, and the newest revision, into the record of the job's one node, which is stuck; the
    job is to move. Its workers have no peers whose end would end them."""
    await started(cluster, 1, 1)
    (only,) = members(cluster)
    node = cluster.nodes[only]
    node.freeze_agent()
    node.lease.gate.close()
    cluster.checker.store_loses()
    cluster.damaged = True
    cluster.server.spoil(f"node:{only}", "life", "x")
    cluster.server.spoil(f"node:{only}", "rev", str(cluster.server.state.rev))
    await cluster.cordon(only, Cordon(reason="test", by="test", at=0.0, drain=True))
    await asyncio.sleep(8)
    node.thaw()
    await cluster.until(lambda: cluster.whole("j") and only not in members(cluster), 60, "moved")


async def _somebody_writes(cluster: SimCluster, field: str, text: str) -> None:
    """Into the record of the job, whose revision stays."""
    value = cluster.server.value("job:uid-j")
    assert isinstance(value, dict)
    await cluster.damage_store({"job:uid-j": {**value, field: text}})


async def its_record_names_a_node_that_there_is_not(cluster: SimCluster) -> None:
    """Somebody writes it among the members of the job that runs, and then a worker dies."""
    await started(cluster, 2, 3)
    text = '{"node":"x","life":"x","devices":["cpu0"],"group_rank":5,"first_rank":9,"workers":1}'
    await _somebody_writes(cluster, "member:x", text)
    cluster.nodes[members(cluster)[-1]].machine.worker_ends("uid-j", 0, signal=9)
    await cluster.until(lambda: cluster.find("j") is not None and cluster.job("j").restarts == 1, 60, "replaced")


async def its_record_says_that_it_has_failed(cluster: SimCluster) -> None:
    """Somebody writes that; a node without a copy on its disk reads the whole record: it would remember for days that
    the job has ended, and not run it."""
    await started(cluster, 2, 3)
    before = pids(cluster)
    spare = next(node for name, node in cluster.nodes.items() if name not in members(cluster))
    await _somebody_writes(cluster, "phase", "failed")
    await asyncio.sleep(10)
    await spare.power_cut(disk_lost=True)
    spare.power_on()
    await asyncio.sleep(10)
    assert pids(cluster) == before, "nothing that runs is hurt"
    await cluster.nodes[members(cluster)[-1]].power_cut()
    await cluster.until(lambda: spare.name in members(cluster) and cluster.whole("j"), 60, "replaced")


async def its_record_lacks_a_member(cluster: SimCluster) -> None:
    """Somebody removes one, which is to leave the gang later, and is stuck by then."""
    await started(cluster, 2, 3)
    last = members(cluster)[-1]
    value = cluster.server.value("job:uid-j")
    assert isinstance(value, dict)
    await cluster.damage_store({"job:uid-j": {f: text for f, text in value.items() if f != f"member:{last}"}})
    await asyncio.sleep(10)
    cluster.nodes[last].freeze_agent()
    await cluster.scale("j", "scalein", nodes=[last])
    await asyncio.sleep(8)
    cluster.nodes[last].thaw()
    await cluster.until(lambda: cluster.whole("j") and last not in members(cluster), 60, "it left")


async def its_control_is_another_one(cluster: SimCluster) -> None:
    """The same with what operators want of the job; a node without a copy on its disk reads it then."""
    await started(cluster, 2, 2)
    await _somebody_writes(cluster, "control", '{"rev":99,"target":2,"restart":0}')
    await asyncio.sleep(20)
    node = next(node for name, node in cluster.nodes.items() if name not in members(cluster))
    await node.power_cut(disk_lost=True)
    node.power_on()
    await cluster.until(lambda: node.agent is not None and node.agent.certain, 20, "it has read everything")
    assert node.agent is not None
    assert node.agent.cluster().refused == {}


async def its_record_may_not_be_large_enough(cluster: SimCluster) -> None:
    """Somebody writes that the job takes no node, and a worker dies at once: each proposal is refused."""
    await started(cluster, 2, 3)
    await _somebody_writes(cluster, "max", "0")
    cluster.nodes[members(cluster)[-1]].machine.worker_ends("uid-j", 0, signal=9)
    await cluster.until(lambda: cluster.find("j") is not None and cluster.job("j").restarts == 1, 60, "replaced")


async def its_checkpoint_is_turned_back(cluster: SimCluster) -> None:
    """Somebody writes a pointer that nobody signed, and that none comes after, as a step would; then a worker dies."""
    await started(cluster, 2, 3)
    leader = cluster.nodes[members(cluster)[0]].machine
    leader.commit_request("uid-j", 1)
    await cluster.until(lambda: leader.pods["uid-j"].commit_request is None, 10, "committed")
    newest = cluster.job("j").checkpoint
    cluster.checker.store_loses()
    cluster.server.run(
        "local j = job_read(A.uid) j.checkpoint = A.text job_save(j)",
        uid="uid-j", text='{"name":"evil","step":9,"number":999999,"order":1}',
    )  # fmt: skip
    cluster.nodes[members(cluster)[-1]].machine.worker_ends("uid-j", 0, signal=9)
    await cluster.until(lambda: cluster.whole("j") and cluster.job("j").restarts == 1, 60, "replaced")
    assert cluster.job("j").checkpoint == newest


async def its_highest_number_is_where_lua_counts_no_more(cluster: SimCluster) -> None:
    """Somebody writes the last number that Lua tells from the next one as the highest of a job that runs."""
    await started(cluster, 2, 3)
    cluster.checker.store_loses()
    cluster.damaged = True
    cluster.server.spoil("highest", "j", str(2**53 - 1))
    for times in (1, 2):
        cluster.nodes[members(cluster)[0]].machine.worker_ends("uid-j", 0, signal=9)
        await cluster.until(lambda: cluster.whole("j") and cluster.job("j").restarts == times, 60, "re-formed")  # noqa: B023
    generation = cluster.job("j").generation
    assert generation is not None and generation.number < 10, "nobody has counted on from there"


async def its_node_dies_while_no_gap_is_short(cluster: SimCluster) -> None:
    """Somebody has every pause between two steps count as one of the store's: then no silence is a node's."""
    await started(cluster, 2, 3)
    cluster.checker.store_loses()
    cluster.damaged = True
    cluster.server.spoil("meta", "gap", "0")
    await asyncio.sleep(10)
    cut(cluster, members(cluster)[:1])
    await cluster.until(lambda: cluster.whole("j") and cluster.job("j").restarts == 1, 60, "re-formed")


async def its_record_counts_ahead(cluster: SimCluster) -> None:
    """Somebody writes a number of beats that is far ahead into a member's record."""
    await started(cluster, 2, 3)
    await _written_into(cluster, members(cluster)[0], "seq", "999999999")


async def its_record_calls_its_life_dead(cluster: SimCluster) -> None:
    """Somebody writes a member's life among the dead ones of its record."""
    await started(cluster, 2, 3)
    name = members(cluster)[0]
    await _written_into(cluster, name, "dead", cluster.server.state.nodes[name].incarnation.life)


async def _written_into(cluster: SimCluster, name: str, field: str, text: str) -> None:
    """What it says of the node counts for nothing, not even when all agents join again."""
    cluster.checker.store_loses()
    cluster.damaged = True
    before = pids(cluster)
    cluster.server.spoil(f"node:{name}", field, text)
    cluster.server.take("names")
    await asyncio.sleep(8)
    assert pids(cluster) == before, "nothing that runs is hurt"
    cluster.nodes[name].machine.worker_ends("uid-j", 0, signal=9)
    await cluster.until(lambda: cluster.whole("j") and cluster.job("j").restarts == 1, 60, "re-formed")


async def it_is_marked_as_removed(cluster: SimCluster) -> None:
    """Somebody marks a job that runs as removed, beside its record, before an agent of it starts anew."""
    await started(cluster, 2, 3)
    cluster.checker.store_loses()
    cluster.damaged = True
    cluster.server.data.zadd(f"{prefix(CLUSTER)}changes", 3, "gone:job:uid-j")
    before = pids(cluster)
    node = cluster.nodes[members(cluster)[0]]
    await node.kill_agent()
    node.start_agent()
    await asyncio.sleep(15)
    assert pids(cluster) == before, "nothing that runs is hurt"


async def its_record_is_moved_into_the_history(cluster: SimCluster) -> None:
    """Somebody renames the record of a job that runs to where the history keeps those of jobs that have ended."""
    await started(cluster, 2, 3)
    cluster.server.spoil("past:uid-j", "uid")
    await cluster.damage_store({"past:uid-j": cluster.server.value("job:uid-j"), "job:uid-j": None})
    await cluster.until(lambda: cluster.find("j") is not None and cluster.whole("j"), 60, "given back")
    cluster.nodes[members(cluster)[0]].machine.worker_ends("uid-j", 0, signal=9)
    await cluster.until(lambda: cluster.whole("j") and cluster.job("j").restarts == 1, 60, "re-formed")


async def an_older_record_is_there_when_an_agent_starts(cluster: SimCluster) -> None:
    """Somebody writes back what a job's record was some generations ago, and an agent that has just started reads that,
    and offers it as what it knows."""
    await started(cluster, 2, 3)
    older = cluster.server.value("job:uid-j")
    assert older is not None
    for times in (1, 2):
        cluster.nodes[members(cluster)[0]].machine.worker_ends("uid-j", 0, signal=9)
        await cluster.until(lambda: cluster.job("j").restarts == times and cluster.whole("j"), 60, "re-formed")  # noqa: B023
    restarted, before = cluster.nodes[members(cluster)[0]], cluster.job("j").generation
    await cluster.damage_store({"job:uid-j": older})
    await restarted.kill_agent()
    restarted.start_agent()
    await asyncio.sleep(15)
    assert cluster.job("j").generation == before, cluster.describe()


async def the_agent_of_a_spare_hangs(cluster: SimCluster) -> None:
    """Another job trains on it, and the gang that is to move there misses its acknowledgement."""
    spare = await spare_that_falls_silent(cluster, 2)
    pids, life = cluster.nodes[spare].machine.pods["uid-k"].pids, cluster.server.state.nodes[spare].incarnation.life
    await cluster.until(lambda: cluster.whole("j") and spare not in members(cluster), ENOUGH, "it goes on without it")
    formed = cluster.job("j").restarts
    await asyncio.sleep(TIMING.cooldown + 4)
    assert cluster.job("j").restarts == formed and cluster.whole("j"), cluster.describe()
    assert trains_undisturbed(cluster, spare, pids, life), cluster.describe()
    cluster.nodes[spare].thaw()
    await cluster.until(lambda: cluster.whole("j") and spare in members(cluster), TIMING.cooldown + 6, "it takes it")
    assert trains_undisturbed(cluster, spare, pids, life), cluster.describe()


async def a_node_never_acknowledges(cluster: SimCluster) -> None:
    """A node whose agent beats and whose pod is ready, and that never promises anything: it holds up the gang that
    grows with it, once a minute and less."""
    await cluster.submit("j", 1, 5, 5)
    await cluster.until(lambda: cluster.find("j") is not None and cluster.whole("j"), 90, "it runs")
    mute = cluster.add("n9")
    mute.machine.promise = lambda *_args, **_more: None  # type: ignore[method-assign]
    mute.start_agent()
    await cluster.until(lambda: _forms_with(cluster, "n9"), 120, "it is tried")
    before = cluster.job("j").generation
    await asyncio.sleep(110)
    after = cluster.job("j").generation
    assert before is not None and after is not None
    assert after.number <= before.number + 3, cluster.describe()


async def a_newcomer_is_broken(cluster: SimCluster) -> None:
    """What starts there dies, and the job that grows onto it allows no restart."""
    await cluster.submit("j", 1, 5, 5, restarts=RestartLimits(max=0))
    await cluster.until(lambda: cluster.find("j") is not None and cluster.whole("j"), 90, "it runs")
    bad = cluster.add("n9")
    breaks(bad)
    bad.start_agent()
    await cluster.until(lambda: _forms_with(cluster, "n9"), 120, "it is tried")
    await asyncio.sleep(50)
    generation = cluster.job("j").generation
    assert cluster.whole("j") and generation is not None and "n9" not in generation.members, cluster.describe()


def _forms_with(cluster: SimCluster, node: str) -> bool:
    generation = cluster.job("j").generation
    return generation is not None and generation.state == "forming" and node in generation.members

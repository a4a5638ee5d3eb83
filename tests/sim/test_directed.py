"""Directed schedules on the simulated cluster: one fault each, and what must come of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from nodeagent.agent.undecided import Undecided
from nodeagent.model.jobspec import RestartLimits
from nodeagent.model.node import Cordon
from nodeagent.model.timing import Timing
from nodeagent.model.world import PodReport, Token
from nodeagent.spec.agentconfig import AgentConfig
from tests.sim.cluster import TIMING, SimCluster, started
from tests.sim.machine import GRACE
from tests.sim.virtual import run_virtual

WITHOUT_AGENT = AgentConfig().without_agent


def simulate(
    size: int,
    scenario: Callable[[SimCluster], Awaitable[None]],
    seed: int = 1,
    slots: int = 4,
    timing: Timing | None = None,
    prepare: Callable[[SimCluster], None] | None = None,
) -> None:
    """Run one scenario on ``size`` joined nodes. ``prepare``: before their agents start."""

    async def main() -> None:
        async with started(seed, size, slots, timing, prepare) as cluster:
            await scenario(cluster)

    run_virtual(main())


async def running(cluster: SimCluster, size: int, job: str = "j", limit: float = 30.0) -> float:
    """Until the job is whole on ``size`` nodes."""

    def ok() -> bool:
        generation = cluster.job(job).generation
        return cluster.whole(job) and generation is not None and len(generation.members) == size

    return await cluster.until(ok, limit, f"{job} whole on {size} nodes")


def acknowledged(cluster: SimCluster, job: str = "j") -> list[str]:
    """The members that have acknowledged the generation that forms."""
    generation = cluster.job(job).generation
    if generation is None or generation.state != "forming":
        return []
    return [node for node in generation.members if node not in generation.missing]


def test_starts_whole() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        assert c.job("j").restarts == 0

    simulate(4, scenario)


def test_worker_killed() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        generation = c.job("j").generation
        assert generation is not None
        first = generation.members["n2"].first_rank
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        took = await running(c, 3)
        assert took < 1.0
        job = c.job("j")
        assert job.generation is not None
        cause = job.generation.cause
        assert (job.restarts, cause.kind, cause.node, cause.rank) == (1, "worker_failed", "n2", first)
        (event,) = [event for event in c.server.state.events if event.kind == "WorkerFailed"]
        assert (event.node, event.text) == ("n2", f"rank {first} failed: SIGKILL (9)")
        assert [e.counts for e in job.budget.values()] == [True]

    simulate(4, scenario)


def test_a_job_that_cannot_be_decided_is_shown() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        agent = c.nodes["n1"].agent
        assert agent is not None
        assert agent.health().undecided == {}
        Undecided.failed(agent._undecided, "pod", "uid-j", KeyError("a value of the job"))
        assert agent.health().undecided == {"uid-j": "KeyError"}
        (why,) = agent.explain("uid-j")
        assert (why,) == agent.why("uid-j")
        assert why.startswith("this agent cannot decide what its pod here is to do, and leaves the job as it is")
        assert "a value of the job" not in why

    simulate(4, scenario)


@pytest.mark.parametrize("name", ["n1", "n2"])
def test_a_shim_that_dies_between_its_promise_and_the_acknowledgement_costs_no_time(name: str) -> None:
    """Group rank 0's next one read the promise from the disk, and held no address for it: 15 s."""

    async def scenario(c: SimCluster) -> None:
        machine, died = c.nodes[name].machine, list[int]()
        promise = machine.promise

        def then_die(uid: str, token: Token, rendezvous: bool, ports: int = 0) -> None:
            promise(uid, token, rendezvous, ports)
            if not died:
                died.append(token.number)
                asyncio.get_running_loop().call_soon(machine.kill_shim, uid)

        machine.promise = then_die  # type: ignore[method-assign]
        await c.submit("j", 3, 3, 3)
        await running(c, 3, limit=10)
        assert died == [1]

    simulate(3, scenario)


def test_a_node_whose_ports_somebody_holds_leads_no_gang_and_takes_part() -> None:
    """Before, the gang was never formed again while they were held."""

    async def scenario(c: SimCluster) -> None:
        def first() -> str:
            generation = c.job("j").generation
            return next(m.node for m in generation.ordered()) if generation is not None else ""

        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        before = first()
        c.nodes[before].machine.squatted = True
        c.nodes["n3"].machine.worker_ends("uid-j", 0, signal=9)
        assert await running(c, 3, limit=5) < 2.0
        assert first() != before
        for node in c.nodes.values():
            node.machine.squatted = True
        c.nodes["n3"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: "no free port" in c.job("j").reason and c.job("j").phase == "holding", 30, "it holds")
        number = c.job("j").generation.number  # type: ignore[union-attr]
        await asyncio.sleep(60)
        assert c.job("j").phase == "holding" and c.job("j").generation.number == number  # type: ignore[union-attr]
        c.nodes["n2"].machine.squatted = False
        await running(c, 3, limit=30)
        assert first() == "n2" and [e.counts for e in c.job("j").budget.values()] == [True, True]

    simulate(3, scenario)


def test_memory_that_others_fill_costs_no_restart_and_its_node_is_left_out_for_longer_each_time() -> None:
    """Its pods have two of four slots on each node."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2, restarts=RestartLimits(max=1))
        await running(c, 2)
        for _ in range(3):
            c.nodes["n1"].machine.worker_starves("uid-j", 0, held=4, total=8)
            assert await running(c, 2, limit=300) < 300
        entries = list(c.job("j").budget.values())
        assert [(e.kind, e.counts, e.node) for e in entries] == [("crowded", False, "n1")] * 3
        assert entries[2].at - entries[1].at >= 60_000, "the second time, for a minute"
        c.nodes["n1"].machine.worker_starves("uid-j", 0, held=5, total=8)
        await running(c, 2)
        assert [e.counts for e in c.job("j").budget.values()] == [False, False, False, True]

    simulate(2, scenario)


def test_what_is_still_ordered_to_start_is_not_quiet() -> None:
    """A shim was busy, its agent promised that nothing ran, and then it carried out the start: two generations."""

    async def scenario(c: SimCluster) -> None:
        machine = c.nodes["n3"].machine
        machine.start_late = 0.75
        await c.submit("j", 2, 3, 3)
        await c.until(lambda: any(pod.ordered is not None for pod in machine.pods.values()), 30, "it is on its way")
        await c.operate("j", target=2)
        await running(c, 2)
        await asyncio.sleep(5)
        assert machine.running("uid-j") is None

    simulate(3, scenario)


def test_a_gang_that_asks_to_be_re_formed_at_each_start_backs_off_for_free() -> None:
    """In a minute: at once, at once, then after 0.5, 1, 2, 4, 8, 16 and 30 s."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2, restarts=RestartLimits(max=1))
        starts, reason = 0, ""
        end = asyncio.get_running_loop().time() + 60
        while asyncio.get_running_loop().time() < end:
            job = c.job("j")
            if c.whole("j") and job.generation is not None and job.generation.number > starts:
                starts = job.generation.number
                c.nodes["n1"].machine.worker_ends("uid-j", 0, code=101)
            if job.phase == "holding":
                reason = job.reason
            await asyncio.sleep(0.05)
        job = c.job("j")
        assert 7 <= starts <= 10
        assert f"asked to be re-formed {starts} times" in reason
        assert job.phase == "holding"
        assert {(e.kind, e.counts) for e in job.budget.values()} == {("reform", False)}
        await running(c, 2)

    simulate(2, scenario)


def reports(cluster: SimCluster) -> dict[str, PodReport]:
    generation = cluster.job("j").generation
    return {} if generation is None else generation.reports


def test_a_hang_is_judged_when_every_pod_has_reported() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        generation = c.job("j").generation
        assert generation is not None
        c.nodes["n2"].machine.hang("uid-j", suspects=True, stopped=0)

        def all_reported() -> bool:  # the last report may be answered at once
            return len(reports(c)) == 3 or c.job("j").phase == "forming" or c.job("j").restarts == 1

        reported = await c.until(all_reported, 5.0, "the others were asked")
        assert reported < 2.0
        took = await c.until(lambda: c.job("j").restarts == 1, 5.0, "formed again")
        assert took < 1.0
        await running(c, 3)
        job = c.job("j")
        assert job.generation is not None
        cause = job.generation.cause
        assert (job.restarts, cause.kind, cause.node) == (1, "hang", "n2")
        assert cause.rank == generation.members["n2"].first_rank
        assert [(e.kind, e.counts) for e in job.budget.values()] == [("hang", True)]
        await asyncio.sleep(10)
        assert c.job("j").restarts == 1

    simulate(3, scenario)


def test_a_pod_that_gets_on_again_takes_back_what_it_reported() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        first, second = (c.nodes[n].machine for n in ("n1", "n2"))
        first.hang("uid-j", suspects=False)  # it has been asked before, so it is not asked again
        second.hang("uid-j", suspects=False)
        await c.until(lambda: len(reports(c)) == 2, 5.0, "both have told")
        second.pods["uid-j"].stall = None
        second.touch()
        await asyncio.sleep(5)
        assert reports(c)["n2"] == PodReport(state="running")
        assert c.job("j").restarts == 0
        assert (first.looks, second.looks) == (0, 0)

    simulate(2, scenario)


def test_node_lost_is_replaced_by_the_spare_and_costs_nothing() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        await asyncio.sleep(5)
        generation = c.job("j").generation
        assert generation is not None
        spare = next(n for n in c.nodes if n not in generation.members)
        leader = generation.ordered()[0].node
        await c.nodes[leader].power_cut()
        took = await running(c, 3)
        assert took < TIMING.lease + 1.0
        job = c.job("j")
        assert job.generation is not None
        assert job.generation.ordered()[0].node == spare
        assert job.generation.cause.kind == "node_lost"
        assert not any(e.counts for e in job.budget.values())

    simulate(4, scenario)


@pytest.mark.parametrize(("count", "stall"), [(2, 3.4), (4, 2.6)])
def test_idle_nodes_that_come_and_go_keep_no_gang_from_recovering(count: int, stall: float) -> None:
    """Its workers hang when a node is lost, as NCCL's may. The gang stood still for as long as there were such nodes:
    at each moment one of them was about to lapse, or had just come back."""

    async def stalls(c: SimCluster, name: str, first: float) -> None:
        node = c.nodes[name]
        await asyncio.sleep(first)
        while True:
            for gate in (node.lease.gate, node.gate):
                gate.close()
            await asyncio.sleep(stall)
            for gate in (node.gate, node.lease.gate):
                gate.open()
            await asyncio.sleep(0.3)

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        generation = c.job("j").generation
        assert generation is not None
        for node in c.nodes.values():
            node.machine.peers = lambda *_: None
        names = [f"x{i}" for i in range(count)]
        for name in names:
            c.add(name).start_agent()
        await asyncio.sleep(5)
        async with asyncio.TaskGroup() as group:
            late = [group.create_task(stalls(c, name, i * (stall + 0.3) / count)) for i, name in enumerate(names)]
            await asyncio.sleep(8.9)
            await c.nodes[generation.ordered()[1].node].power_cut()
            took = await running(c, 2, limit=60)
            for task in late:
                task.cancel()
        spread = TIMING.lease - TIMING.heartbeat - TIMING.store_timeout
        assert took < TIMING.lease + spread + 2 * TIMING.heartbeat
        after = c.job("j").generation
        assert after is not None
        assert (after.number, after.cause.kind) == (2, "node_lost")

    simulate(4, scenario)


def test_a_warm_spare_keeps_its_place_when_a_node_joins() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 1, 1)
        await running(c, 1)
        generation = c.job("j").generation
        assert generation is not None
        (member,) = generation.members
        (spare,) = set(c.nodes) - {member}
        pods = c.nodes[spare].machine.pods
        await c.until(lambda: "uid-j" in pods and pods["uid-j"].status().phase == "ready", 10, "a spare is ready")
        pod = pods["uid-j"]
        c.add("n0").start_agent()  # the first of all by its name
        await c.until(lambda: "n0" in c.server.state.nodes, 5, "it joins")
        await asyncio.sleep(5)
        assert pods.get("uid-j") is pod, "it was not thrown away"
        assert "uid-j" not in c.nodes["n0"].machine.pods, "one spare is enough"
        await c.nodes[member].power_cut()
        await running(c, 1)
        generation = c.job("j").generation
        assert generation is not None
        assert set(generation.members) == {spare}

    simulate(2, scenario)


def test_agent_restart_disturbs_nothing() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        generation = c.job("j").generation
        pids = c.nodes["n1"].machine.pods["uid-j"].pids
        await c.nodes["n1"].kill_agent()
        await asyncio.sleep(1.2)
        c.nodes["n1"].start_agent()
        await asyncio.sleep(10)
        assert c.job("j").generation == generation
        assert c.whole("j")
        assert c.nodes["n1"].machine.pods["uid-j"].pids == pids

    simulate(2, scenario)


def test_frozen_agent_disturbs_nothing_until_its_patience_is_over() -> None:
    """Then its node leaves, and what it ran goes on without it."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 2, 2)
        await running(c, 2)
        generation, life = c.job("j").generation, c.server.state.nodes["n2"].incarnation.life
        c.nodes["n2"].freeze_agent()
        await asyncio.sleep(WITHOUT_AGENT - 2)
        assert c.job("j").generation == generation
        await running(c, 1, limit=GRACE + 5)
        assert not any(e.counts for e in c.job("j").budget.values())
        c.nodes["n2"].thaw()
        await running(c, 2, limit=TIMING.cooldown + 10)
        assert c.server.state.nodes["n2"].incarnation.life != life

    simulate(2, scenario)


@pytest.mark.parametrize("before", [0.0, 1.0, 10.0])
def test_a_fault_elsewhere_does_not_wait_for_a_silent_agent(before: float) -> None:
    """Its lease process sees that the job waits for it, and leaves."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        c.nodes["n2"].freeze_agent()
        await asyncio.sleep(before)
        generation = c.job("j").generation
        assert generation is not None
        other = next(name for name in generation.members if name != "n2")
        c.nodes[other].machine.worker_ends("uid-j", 0, signal=9)
        await asyncio.sleep(0.1)
        await running(c, 3, limit=TIMING.lease + 0.5)  # with the spare
        generation = c.job("j").generation
        assert generation is not None and "n2" not in generation.members
        c.nodes["n2"].thaw()
        await asyncio.sleep(10)

    simulate(4, scenario)


def test_lease_process_killed_again_and_again() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 2, 2)
        await running(c, 2)
        generation = c.job("j").generation
        for _ in range(100):
            c.nodes["n2"].lease.kill()
            await asyncio.sleep(c.rng.uniform(0.0, 0.7))
        assert c.job("j").generation == generation

    simulate(2, scenario)


def test_agent_and_lease_process_dead_is_a_lost_node() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 2, 2)
        await running(c, 2)
        c.nodes["n2"].lease.end()
        await c.nodes["n2"].kill_agent()
        assert await running(c, 1, limit=6) > TIMING.fence
        c.nodes["n2"].start_agent()
        await running(c, 2, limit=TIMING.cooldown + 10)

    simulate(2, scenario)


def test_frozen_machine_never_steps_beside_the_next_generation() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 3)
        await running(c, 3)
        c.nodes["n3"].freeze_machine()
        await running(c, 2, limit=6)
        await asyncio.sleep(10)
        c.nodes["n3"].thaw()
        await running(c, 3, limit=TIMING.cooldown + 10)

    simulate(3, scenario)


def test_shim_killed() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        c.nodes["n2"].machine.kill_shim("uid-j")
        await running(c, 2)
        kinds = [e.kind for e in c.job("j").budget.values()]
        assert kinds == ["pod_failed"]

    simulate(2, scenario)


def test_scale_up_and_down() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 4, 2)
        await running(c, 2)
        await c.scale("j", "scale", target=4)
        await running(c, 4)
        await c.scale("j", "scale", target=1)
        await running(c, 1)
        assert [e.counts for e in c.job("j").budget.values()] in ([], [False, False])

    simulate(4, scenario)


def test_a_scale_out_is_all_or_nothing() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 6, 2)
        await running(c, 2)
        generation = c.job("j").generation
        assert await c.scale("j", "scaleout", count=3, timeout=20.0)
        c.nodes["n1"].freeze_agent()  # it may be the one that would have rolled back: any other does
        await c.nodes["n2"].kill_agent()
        c.nodes["n1"].thaw()
        c.nodes["n2"].start_agent()
        took = await c.until(lambda: c.job("j").control.target == 2, 30, "rolled back")
        assert 18 < took < 23
        job = c.job("j")
        assert job.control.scale is not None
        assert job.control.scale.reason.startswith("scale to 5 timed out after 20s: 4 of 5 nodes fit")
        await asyncio.sleep(60)
        assert c.job("j").generation == generation, "not one worker was disturbed"
        assert await c.scale("j", "scaleout", count=3, timeout=20.0)
        await asyncio.sleep(5)
        assert c.job("j").generation == generation
        c.add("n5").start_agent()
        await running(c, 5)
        await c.until(lambda: c.job("j").control.growing is None, 5, "settled")
        assert c.job("j").control.scale.state == "met"  # type: ignore[union-attr]
        assert c.job("j").restarts == 1, "all of them joined at once"

    simulate(4, scenario)


def test_a_named_node_leaves_and_comes_back_last() -> None:
    async def scenario(c: SimCluster) -> None:
        def gang() -> set[str]:
            generation = c.job("j").generation
            return set() if generation is None else set(generation.members)

        await c.submit("j", 1, 4, 3)
        await running(c, 3)
        leaves, stays, dies = sorted(gang())
        (spare,) = set(c.nodes) - gang()
        assert await c.scale("j", "scalein", nodes=[leaves])
        await running(c, 2)
        assert gang() == {stays, dies}
        await asyncio.sleep(60)
        assert c.job("j").restarts == 1
        await c.nodes[dies].power_cut()
        await c.until(lambda: gang() == {stays, spare}, 10, "the spare takes the place")
        await running(c, 2)
        assert await c.scale("j", "scaleout", count=1)
        await running(c, 3)
        assert gang() == {leaves, stays, spare}

    simulate(4, scenario)


def test_newcomer_of_a_full_job_disturbs_nothing() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        generation = c.job("j").generation
        c.add("n9").start_agent()
        await asyncio.sleep(60)
        assert c.job("j").generation == generation
        assert c.nodes["n9"].machine.pods["uid-j"].phase == "ready"

    simulate(2, scenario)


def test_below_target_joins_after_the_cool_down() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 2, limit=70)
        c.add("n3").start_agent()
        took = await running(c, 3)
        assert took >= TIMING.cooldown * 0.9
        generation = c.job("j").generation
        assert generation is not None
        assert generation.cause.kind == "join"

    simulate(2, scenario)


def test_fewer_than_min_holds_and_goes_on() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 3, 3, 3)
        await running(c, 3)
        await c.nodes["n2"].power_cut()
        await c.until(lambda: c.job("j").phase == "holding", 10, "holding")
        await c.until(lambda: not any(n.machine.running("uid-j") for n in c.nodes.values()), 10, "all stopped")
        c.nodes["n2"].power_on()
        await running(c, 3, limit=20)

    simulate(3, scenario)


def test_resumed_while_its_workers_save_it_forms_when_they_have() -> None:
    """``resume`` killed those that had not saved yet, and their steps since the last checkpoint were lost."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        for node in c.nodes.values():
            node.machine.waits = True  # until their grace of 5 s is over
        await c.operate("j", desired="pause")
        await asyncio.sleep(1)
        await c.operate("j", desired="run")
        await asyncio.sleep(3)
        assert all(n.machine.running("uid-j") is not None for n in c.nodes.values()), "they are not cut off"
        first = c.job("j").active
        await c.until(lambda: c.whole("j") and c.job("j").active != first, 10, "it goes on")

    simulate(2, scenario)


def test_pause_resume_restart_stop() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        await c.operate("j", desired="pause")
        await c.until(lambda: c.job("j").phase == "paused", 20, "paused")
        assert not any(n.machine.running("uid-j") for n in c.nodes.values())
        await c.operate("j", desired="run")
        await running(c, 2)
        number = c.job("j").generation
        assert number is not None
        await c.operate("j", restart=1)
        await c.until(lambda: c.job("j").generation != number, 20, "restarted")
        await running(c, 2)
        await c.operate("j", desired="stop")
        await c.until(lambda: c.job("j").phase == "stopped", 20, "stopped")
        await c.until(lambda: not c.nodes["n1"].machine.pods and not c.nodes["n2"].machine.pods, 20, "pods retired")

    simulate(2, scenario)


def test_drain_moves_the_work_away() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 2)
        await running(c, 2)
        await c.cordon("n1", Cordon(reason="fan", by="test", at=0.0, drain=True))

        def moved() -> bool:
            generation = c.job("j").generation
            return c.whole("j") and generation is not None and "n1" not in generation.members

        await c.until(moved, 20, "n1 is empty")
        assert not any(e.counts for e in c.job("j").budget.values())

    simulate(3, scenario)


def test_two_jobs_share_nodes() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("a", 2, 2, 2)
        await c.submit("b", 2, 2, 2)
        await running(c, 2, "a")
        await running(c, 2, "b")
        await c.submit("x", 2, 2, 2)
        await asyncio.sleep(30)
        assert c.job("x").phase == "queued"
        await c.operate("a", desired="stop")
        await running(c, 2, "x", limit=60)

    simulate(2, scenario)


def test_store_restart_without_disturbance() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2)
        await running(c, 2)
        generation = c.job("j").generation
        c.server.restart()
        await asyncio.sleep(10)
        c.clock_step += 3600
        await asyncio.sleep(10)
        c.clock_step -= 7200
        await asyncio.sleep(10)
        assert c.job("j").generation == generation
        assert c.whole("j")

    simulate(2, scenario)


def test_a_node_with_another_checkpoint_folder_is_passed_over_until_it_sees_the_right_one() -> None:
    async def scenario(c: SimCluster) -> None:
        c.nodes["n1"].machine.folder = "its own"
        await c.submit("j", 2, 3, 3, checkpoint_dir="/ckpt")
        await running(c, 2)
        generation = c.job("j").generation
        assert generation is not None
        assert set(generation.members) == {"n2", "n3"}
        text = (
            "n1 cannot run it: checkpoint_dir /ckpt there is not the folder that n2 sees; it must be one shared folder"
        )
        for node in c.nodes.values():
            assert node.agent is not None
            agent = node.agent
            await c.until(lambda agent=agent: text in " ".join(agent.why("uid-j")), 5, "every agent says why")
        c.nodes["n1"].machine.mount("shared")
        await running(c, 3, limit=TIMING.cooldown + 5)
        c.nodes["n3"].machine.mount("its own")
        await asyncio.sleep(30)
        assert await running(c, 3) == 0, "healthy training goes on"
        assert c.job("j").restarts == 1

    simulate(3, scenario)


def test_a_member_whose_checkpoint_folder_went_with_its_shim_is_left_out() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3, checkpoint_dir="/ckpt")
        await running(c, 3)
        c.nodes["n2"].machine.folder = "its own"
        c.nodes["n2"].machine.kill_shim("uid-j")
        await running(c, 2, limit=10)
        generation = c.job("j").generation
        assert generation is not None
        assert set(generation.members) == {"n1", "n3"}
        assert "n2 cannot run it: checkpoint_dir /ckpt there" in generation.cause.text

    simulate(3, scenario)


def test_a_cut_between_two_members_is_reported_and_nothing_follows() -> None:
    """One way, for 20 s, while both reach the store: no answer comes back either."""

    def reported(c: SimCluster) -> dict[str, set[str]]:
        pods = c.server.state.pods
        return {node: set(pod.unreachable) for (_, node), pod in pods.items() if pod.unreachable}

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        before = c.job("j").generation
        await asyncio.sleep(10)
        assert reported(c) == {}
        c.net.cut.add(("n1", "n3"))
        await c.until(lambda: reported(c) == {"n1": {"n3"}, "n3": {"n1"}}, 5, "both say so")
        await asyncio.sleep(15)
        assert reported(c) == {"n1": {"n3"}, "n3": {"n1"}}
        c.net.cut.clear()
        await c.until(lambda: reported(c) == {}, 5, "both take it back")
        assert (c.job("j").generation, c.job("j").phase) == (before, "running")

    simulate(3, scenario)


def test_a_failure_for_a_lost_peer_names_the_pair_that_is_cut() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        c.net.cut.add(("n1", "n3"))
        await c.until(lambda: any(p.unreachable for p in c.server.state.pods.values()), 5, "it is noticed")
        c.nodes["n1"].machine.worker_ends("uid-j", 0, code=1, error="RuntimeError: Connection closed by peer [n3]:1")
        await c.until(lambda: bool(c.job("j").budget), 10, "the failure is written down")
        (entry,) = c.job("j").budget.values()
        assert "lost its peers" in entry.text
        assert "; n1 cannot reach n3 at " in entry.text
        c.net.cut.clear()
        await running(c, 3)

    simulate(3, scenario)


@pytest.mark.parametrize("lost", [True, False])
def test_a_job_that_is_stopped_while_it_forms_pays_for_its_own_faults_only(lost: bool) -> None:
    """A node loses its power, and the others' workers fail for it. Before its lease has lapsed the job is stopped."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        await asyncio.sleep(TIMING.early)
        if lost:
            await c.nodes["n2"].power_cut()
        else:
            c.nodes["n2"].freeze_agent()
        c.nodes["n1"].machine.worker_ends("uid-j", 0, code=1, error="ValueError: step 12 failed")
        await c.until(lambda: bool(c.job("j").budget and c.job("j").silent), 3, "the failure is written down")
        await c.operate("j", desired="stop")
        await c.until(lambda: c.job("j").phase == "stopped", 3, "stopped")
        assert [entry.counts for entry in c.job("j").budget.values()] == [True], "n2 may answer still"
        c.nodes["n2"].thaw()
        await c.until(lambda: not c.job("j").silent, TIMING.lease * 3, "judged")
        (entry,) = c.job("j").budget.values()
        assert (entry.kind, entry.counts) == (("node_lost", False) if lost else ("worker_failed", True))

    simulate(4, scenario)

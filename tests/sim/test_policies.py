"""Jobs with random policies under random faults: they end as a policy says, or as without one, and by nothing else."""

from __future__ import annotations

import asyncio
import os
import random
import re

import pytest

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.jobspec import Policy, Role
from nodeagent.plan.failure.policies import ENDS, answer
from nodeagent.plan.failure.timeouts import next_due
from nodeagent.spec.consistency import policy_mistakes
from tests.groups import seeds
from tests.sim.cluster import TIMING, SimCluster, started
from tests.sim.roles import ROLES, SLOTS, end, restart_alone, role, start_whole, storm
from tests.sim.schedule import heal
from tests.sim.test_directed import running, simulate
from tests.sim.virtual import run_virtual

SCHEDULES = int(os.environ.get("SCHEDULES", "6"))
SAYS = re.compile(r"a policy of the job says (\w+) for (\w+): ")
LATE = 5_000
"""Milliseconds of served time within which agents that are well act on a policy that is due."""
POOL = tuple(
    Policy.model_validate(plain)
    for plain in (
        {"on": ["WorkerFailed"], "do": "RestartJob"},
        {"on": ["WorkerFailed"], "exit_code": 7, "do": "CompleteJob"},
        {"on": ["WorkerFailed"], "exit_code": 137, "do": "AbortJob"},
        {"on": ["PodFailed"], "do": "AbortJob"},
        {"on": ["NodeLost", "PodEvicted"], "do": "AbortJob"},
        {"on": ["PodEvicted"], "do": "TerminateJob"},
        {"on": ["*"], "do": "RestartJob"},
        {"on": ["*"], "do": "AbortJob", "timeout": 9},
        {"on": ["NodeLost"], "do": "FailJob", "timeout": 14},
        {"on": ["PodPending"], "do": "AbortJob", "timeout": 11},
        {"on": ["PodPending"], "do": "TerminateJob", "timeout": 25},
        {"on": ["Unknown"], "do": "AbortJob", "timeout": 12},
        {"on": ["PodRunning"], "do": "AbortJob", "timeout": 33},
        {"on": ["PodRunning"], "do": "CompleteJob", "timeout": 45},
        {"on": ["TaskCompleted"], "do": "CompleteJob"},
        {"on": ["TaskCompleted"], "do": "TerminateJob"},
    )
)


def some(rng: random.Random, most: int) -> tuple[Policy, ...]:
    return tuple(rng.sample(POOL, rng.randint(0, most)))


def verdict(job: JobRecord) -> tuple[str, str] | None:
    """(action, event) of the policy that has brought the job where it is; None: none has. It must be one of the job's,
    and have made of the job what it says."""
    found = SAYS.match(job.reason)
    if found is None or (job.phase not in TERMINAL and job.phase not in ("pausing", "paused")):
        return None
    action, event = found.groups()
    own = [policy for one in job.spec.roles for policy in one.policies or ()]
    assert any(p.do == action and p.names(event, p.exit_code) for p in (*job.spec.policies, *own)), job.reason  # type: ignore[arg-type]
    became = "paused" if job.phase == "pausing" else job.phase
    assert became == ENDS[action], job.reason  # type: ignore[index]
    return action, event


def of_trainers(job: JobRecord) -> str:
    """What the trainers' completion makes of the job."""
    action = answer(job.spec, ("trainer",), "TaskCompleted")
    return "succeeded" if action is None else ENDS[action]


async def _ends(cluster: SimCluster) -> None:
    """A person resumes what a policy has paused, and after a while the trainers end whenever they are whole."""
    job, until = cluster.job("j"), cluster.server.state.served + 50_000
    nobody_until = 0
    """The latest served time at which no agent could decide: all have started since the store was disturbed."""
    while job.phase not in TERMINAL:
        due, served = next_due(job), cluster.server.state.served
        if not any(node.agent is not None and node.agent.health().joined for node in cluster.nodes.values()):
            nobody_until = served
        late = due is not None and served > max(due.at, nobody_until) + LATE
        assert not late, f"{due} is late: {cluster.describe()}"
        if job.phase == "paused" and not cluster.checker.running("uid-j"):
            assert verdict(job) is not None, "nobody else pauses it any more"
            await cluster.operate("j", desired="run")
        if cluster.whole("j") and cluster.server.state.served >= until:
            end(cluster, job, "trainer")
        await asyncio.sleep(0.5)
        job = cluster.job("j")
    found = verdict(job)
    others = ("restart budget spent: ", "failed within 30 s of its first start")
    assert found is not None or job.phase == of_trainers(job) or job.reason.startswith(others), job.reason


async def _watch(cluster: SimCluster) -> None:
    """Also under faults, what a policy makes of the job is what it says."""
    while True:
        job = cluster.find("j")
        if job is not None:
            verdict(job)
        await asyncio.sleep(0.25)


def drawn(rng: random.Random) -> tuple[int, tuple[Role, ...]]:
    """Nodes, and the roles, for all of which there is room."""
    nodes = rng.randint(2, 5)
    trainers = role("trainer", nodes=rng.randint(1, nodes), workers=rng.randint(1, 2))
    servers = role("server", replicas=rng.randint(1, nodes), restart="alone")
    return nodes, rng.choice([(servers, trainers), (trainers, servers)])


async def _run(seed: int) -> None:
    rng = random.Random(f"policies {seed}")
    nodes, roles = drawn(rng)
    own = {name: rng.choice([None, some(rng, 2)]) for name in ("server", "trainer")}
    roles = tuple(one.model_copy(update={"policies": own[one.name]}) for one in roles)
    async with started(seed, nodes, SLOTS) as cluster:
        job = await cluster.submit("j", 1, 1, 1, roles=roles, completes="trainer", policies=some(rng, 4))
        assert list(policy_mistakes(job.spec)) == []
        await cluster.until(lambda: cluster.whole("j") or verdict(cluster.job("j")) is not None, 90, "whole at first")
        watching = cluster.tasks.create_task(_watch(cluster))
        await storm(cluster, lambda: restart_alone(cluster) if cluster.rng.random() < 0.3 else None)
        await heal(cluster)
        lost = cluster.checker.forgotten
        await cluster.until(lambda: cluster.find("j") is not None or lost, 60, "an emptied store is given back")
        if cluster.find("j") is None:
            watching.cancel()
            return
        scale = cluster.job("j").control.scale
        if scale is not None and scale.state != "met":  # there may never be room
            await cluster.scale("j", "scale", role=scale.role, target=scale.before)
        await asyncio.sleep(TIMING.lease)
        async with asyncio.timeout(TIMING.cooldown * 3 + TIMING.form_margin * 2 + 120):
            await _ends(cluster)
        await cluster.until(lambda: not cluster.checker.running("uid-j"), 30, "nothing of it runs on")
        watching.cancel()


@pytest.mark.parametrize("seed", seeds([1], range(2, SCHEDULES + 1)))
def test_random_schedule(seed: int) -> None:
    run_virtual(_run(seed))


def test_a_job_that_waits_too_long_is_paused_and_waits_anew_when_it_is_resumed() -> None:
    async def scenario(c: SimCluster) -> None:
        pending = Policy(on=("PodPending",), do="AbortJob", timeout=10)
        await c.nodes["n3"].power_cut()
        await c.submit("j", 3, 3, 3, policies=(pending,))
        first = await c.until(lambda: c.job("j").phase == "paused", 30, "nobody has three nodes for it")
        assert verdict(c.job("j")) == ("AbortJob", "PodPending") and first > 9
        await asyncio.sleep(5)
        assert c.job("j").phase == "paused", "nobody else resumes it"
        await c.operate("j", desired="run")
        await c.until(lambda: c.job("j").phase == "holding", 5, "it waits again")
        again = await c.until(lambda: c.job("j").phase == "paused", 30, "as long as before")
        assert again > 8
        await c.operate("j", desired="run")
        await asyncio.sleep(5)
        c.nodes["n3"].power_on()
        await running(c, 3)
        await asyncio.sleep(20)
        assert c.job("j").phase == "running", "what had lasted has ended"

    simulate(3, scenario)


def test_a_role_that_is_done_completes_the_job() -> None:
    async def scenario(c: SimCluster) -> None:
        done = Policy(on=("TaskCompleted",), do="CompleteJob")
        roles = (ROLES[0], ROLES[1].model_copy(update={"policies": (done,)}))
        await start_whole(c, roles)
        end(c, c.job("j"), "trainer", 1)
        await asyncio.sleep(5)
        assert c.job("j").phase == "running"
        end(c, c.job("j"), "trainer")
        await c.until(lambda: c.job("j").phase == "succeeded", 10, "its trainers have ended it")
        assert verdict(c.job("j")) == ("CompleteJob", "TaskCompleted")
        await c.until(lambda: not c.checker.running("uid-j"), 10, "the servers are stopped")

    simulate(3, scenario)


def test_a_lost_node_that_does_not_come_back_ends_the_job_after_a_while() -> None:
    async def scenario(c: SimCluster) -> None:
        lost = Policy(on=("NodeLost",), do="TerminateJob", timeout=20)
        roles = (ROLES[0].model_copy(update={"policies": (lost,)}), role("trainer", nodes=2))
        await start_whole(c, roles)
        await c.nodes["n2"].power_cut()
        await c.until(lambda: c.job("j").phase == "holding", 20, "it waits for another node")
        await asyncio.sleep(10)
        c.nodes["n2"].power_on()
        await c.until(lambda: c.whole("j"), 20, "it came back in time")
        await asyncio.sleep(25)
        assert c.job("j").phase == "running"
        await c.nodes["n2"].power_cut()
        await c.until(lambda: c.job("j").phase == "stopped", 40, "it did not")
        assert verdict(c.job("j")) == ("TerminateJob", "NodeLost")

    simulate(2, scenario)

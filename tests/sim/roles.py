"""Random schedules of a job of several roles: drawn from a seed, hit by faults while its trainers end one by one, and
then mended. It must be whole again or at its end, and end exactly when all workers that complete it have exited 0
(``invariants.py``); roles start in their order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from nodeagent.model.job import TERMINAL, JobRecord, Phase
from nodeagent.model.jobspec import Nodes, Policy, Role
from nodeagent.store.base import StoreRefusedError
from tests.sim.cluster import TIMING, SimCluster, started
from tests.sim.faults import FAULTS, Fault
from tests.sim.machine import SimMachine
from tests.sim.schedule import heal, unscale
from tests.sim.virtual import run_virtual

STORM = 40.0
"""Seconds of faults."""
SLOTS = 4
JOB = "j"
WHOLE = (Policy(on=("WorkerFailed",), do="RestartTask"),)
"""Of a role that is started again as a whole, while the others go on."""


@dataclass(frozen=True)
class Roles:
    """What a seed's cluster and its job are."""

    nodes: int
    roles: tuple[Role, ...]
    completes: str
    """As in the job; empty: all roles have to end."""
    ending: float
    """How likely it is that some worker ends well, at each fault."""

    @property
    def jobs(self) -> tuple[str, ...]:
        """Names of the jobs."""
        return (JOB,)


@dataclass
class Seen:
    """What a schedule came to."""

    checks: int = 0
    ended: Counter[Phase] = field(default_factory=Counter)
    """Phase in which the job was when all was mended: it may have ended in the storm."""
    forgotten: bool = False
    """The store lost the job, and nobody was left who knew it."""
    ended_in_storm: int = 0
    """Workers that ended well during the faults."""


def role(
    name: str, *, nodes: int = 0, replicas: int = 0, workers: int = 1, restart: Literal["gang", "alone"] = "gang",
    after: tuple[str, ...] = (), least: int = 0, policies: tuple[Policy, ...] | None = None,
) -> Role:  # fmt: skip
    """One with as many places as ``nodes`` or ``replicas`` says; elastic with ``least``."""
    size = nodes or replicas
    places = Nodes(min=least or size, max=size, target=size)
    return Role(
        name=name, command=("train",), nodes=places if nodes else Nodes(min=1, max=size, target=size),
        replicas=None if nodes else places, workers_per_node=workers, restart=restart, after=after,
        policies=policies,
    )  # fmt: skip


ROLES = (role("server", replicas=2), role("trainer", nodes=2))
"""Those of most directed schedules."""


def drawn(seed: int) -> Roles:
    """There is room for all places."""
    rng = random.Random(f"roles {seed}")
    nodes = rng.randint(2, 5)
    order = rng.choice(["none", "none", "servers first", "trainers first"])
    trainers = role(
        "trainer", nodes=rng.randint(1, nodes), workers=rng.randint(1, 2),
        after=("server",) if order == "servers first" else (),
    )  # fmt: skip
    servers = role(
        "server", replicas=rng.randint(1, nodes), restart=rng.choice(["alone", "alone", "gang"]),
        after=("trainer",) if order == "trainers first" else (),
    )  # fmt: skip
    roles = [servers, trainers]
    if rng.random() < 0.5:
        both = rng.choice([("trainer",), ("server",), ("server", "trainer")])
        roles.append(role("judge", replicas=rng.randint(1, nodes), after=both if rng.random() < 0.8 else ()))
    rng.shuffle(roles)
    roles = [_whole(seed, _elastic(seed, one)) for one in roles]
    return Roles(
        nodes, tuple(roles), rng.choice(["trainer", "trainer", "trainer", ""]), rng.choice([0.0, 0.1, 0.3, 0.6])
    )


def _elastic(seed: int, one: Role) -> Role:
    """Half of those with more than one place can go on with fewer."""
    rng = random.Random(f"roles {seed}: elastic {one.name}")
    if one.places == 1 or rng.random() < 0.5:
        return one
    size = one.size.model_copy(update={"min": rng.randint(1, one.places - 1), "max": one.places + rng.randint(0, 1)})
    if one.replicas is None:
        return one.model_copy(update={"nodes": size})
    return one.model_copy(update={"replicas": size, "nodes": Nodes(min=1, max=size.max, target=size.target)})


def _whole(seed: int, one: Role) -> Role:
    """A third of them are started again as a whole."""
    if random.Random(f"roles {seed}: whole {one.name}").random() < 2 / 3:
        return one
    return one.model_copy(update={"restart": "gang", "policies": WHOLE})


def end(cluster: SimCluster, job: JobRecord, name: str, most: int = 99) -> int:
    """So many workers of a role (empty: of any) that can, end well; returns how many did."""
    assert job.generation is not None
    ended = 0
    for member in job.generation.ordered():
        machine = cluster.nodes[member.node].machine
        if machine.running(job.uid) != job.generation.token:
            continue
        ranks = member.ranks_of(name) if name else range(member.first_rank, member.first_rank + member.workers)
        alive = machine.pods[job.uid].alive
        for local in [rank - member.first_rank for rank in sorted(ranks) if rank - member.first_rank in alive]:
            if ended < most:
                machine.worker_ends(job.uid, local, code=0)
                ended += 1
    return ended


def end_one(cluster: SimCluster, completes: str) -> int:
    """Some worker that completes the job ends, if its generation is active; returns how many did."""
    job = cluster.find(JOB)
    if job is None or job.generation is None or job.generation.state != "active":
        return 0
    return end(cluster, job, completes or cluster.rng.choice(job.spec.roles).name, 1)


def restart_alone(cluster: SimCluster) -> None:
    """Some server fails, and is started again by its shim."""
    job = cluster.find(JOB)
    if job is None or job.generation is None or job.generation.state != "active":
        return
    alone = [one.name for one in job.spec.roles if one.restart == "alone"]
    member = cluster.rng.choice(job.generation.ordered())
    ranks = sorted(rank for name in alone for rank in member.ranks_of(name))
    machine = cluster.nodes[member.node].machine
    if ranks and machine.running(job.uid) == job.generation.token and not machine.frozen.closed:
        machine.worker_restarts(job.uid, cluster.rng.choice(ranks) - member.first_rank)


def restart_whole(cluster: SimCluster, most: int = 2) -> None:
    """Some workers of a role that is started again as a whole fail, at most so many, within a moment: some of them
    because of the first one."""
    job = cluster.find(JOB)
    roles = [one.name for one in job.spec.roles if one.policies == WHOLE] if job is not None else []
    if job is None or job.generation is None or job.generation.state != "active" or not roles:
        return
    token, name = job.generation.token, cluster.rng.choice(roles)
    workers = [(m, rank) for m in job.generation.ordered() for rank in sorted(m.ranks_of(name))]
    for member, rank in cluster.rng.sample(workers, min(len(workers), cluster.rng.randint(1, most))):
        machine, local = cluster.nodes[member.node].machine, rank - member.first_rank

        def fails(machine: SimMachine = machine, local: int = local) -> None:
            if machine.running(job.uid) == token:
                machine.role_fails(job.uid, local)

        machine.later(cluster.rng.choice([0.0, 0.01, 0.2]), fails)


async def start_whole(cluster: SimCluster, roles: tuple[Role, ...] = ROLES, **more: Any) -> None:
    """Submit the job with these roles, and wait until all of it runs. ``more``: other parts of its spec."""
    await cluster.submit(JOB, 1, 1, 1, roles=roles, **more)
    await cluster.until(lambda: cluster.whole(JOB), 30, "whole")


async def storm(cluster: SimCluster, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Faults at random moments, for ``STORM`` seconds. ``meanwhile`` is called with each."""

    async def strike(fault: Fault) -> None:
        try:
            await fault(cluster)
        except StoreRefusedError as refusal:
            if refusal.code not in ("not_found", "unsupported", "conflict"):  # the job has ended, or went meanwhile
                raise

    loop = asyncio.get_running_loop()
    over = loop.time() + STORM
    async with asyncio.TaskGroup() as faults:
        while loop.time() < over:
            await asyncio.sleep(cluster.rng.expovariate(0.5))
            faults.create_task(strike(cluster.rng.choice(FAULTS)))
            meanwhile()


def _fine(cluster: SimCluster) -> bool:
    """It is whole, with as many places of each role as are wanted of it by now; or some of its workers have ended well
    and the others get on."""
    job = cluster.job(JOB)
    if job.generation is None or job.generation.state != "active" or job.phase != "running":
        return False
    if not cluster.whole(JOB):
        return _partly_done(cluster, job)
    scale = job.control.scale
    if scale is not None and scale.state == "pending":
        return False
    return job.generation.sizes == {one.name: one.places for one in job.sized.roles}


def _settled(cluster: SimCluster) -> bool:
    """It has ended, or is fine. What was written over by hand while nobody reached the store is met once somebody does:
    until the agents have given it back, the job is not there."""
    job = cluster.find(JOB)
    return job is not None and (job.phase in TERMINAL or _fine(cluster))


def _partly_done(cluster: SimCluster, job: JobRecord) -> bool:
    """Every worker of its generation runs or has ended well, and some have."""
    assert job.generation is not None
    done = 0
    for member in job.generation.members.values():
        pod = cluster.nodes[member.node].machine.pods.get(job.uid)
        if pod is None or pod.generation != job.generation.token:
            return False
        well = sum(exited.code == 0 and not exited.stopped for exited in pod.exits)
        if len(pod.alive) + well != member.workers:
            return False
        done += well
    return done > 0


async def _complete(cluster: SimCluster, shape: Roles) -> None:
    """Its workers end one after another: then, and not before, the job has succeeded, in the generation that they were
    in."""
    for _ in range(200):
        if cluster.job(JOB).phase in TERMINAL or not cluster.checker.unfinished(cluster.job(JOB)):
            break
        end_one(cluster, shape.completes)
        await asyncio.sleep(cluster.rng.choice([0.0, 0.1, 1.0]))
    await cluster.until(lambda: cluster.job(JOB).phase == "succeeded", 30, "it succeeds when the last one has ended")
    await cluster.until(lambda: not cluster.checker.running(f"uid-{JOB}"), 30, "what is left of it is stopped")


async def _run(seed: int) -> Seen:
    shape, seen = drawn(seed), Seen()

    def meanwhile() -> None:
        """Servers fail now and then, and are started again alone; so are whole roles; workers end well now and then."""
        if cluster.rng.random() < 0.3:
            restart_alone(cluster)
        if cluster.rng.random() < 0.3:
            restart_whole(cluster)
        if cluster.rng.random() < shape.ending:
            seen.ended_in_storm += end_one(cluster, shape.completes)

    async with started(seed, shape.nodes, SLOTS) as cluster:
        await cluster.submit(JOB, 1, 1, 1, roles=shape.roles, completes=shape.completes)
        await cluster.until(lambda: cluster.whole(JOB), 90, "whole at first")
        await storm(cluster, meanwhile)
        await heal(cluster)
        await _play_on(cluster, shape, seen)
    seen.checks = cluster.checker.checks
    return seen


async def _play_on(cluster: SimCluster, shape: Roles, seen: Seen) -> None:
    """All is mended: the job comes to its end."""
    lost = cluster.checker.forgotten
    over = cluster.checker.has_ended(JOB)
    await cluster.until(lambda: cluster.find(JOB) is not None or lost or over, 60, "an emptied store is given back")
    if cluster.find(JOB) is None and over is not None:
        seen.ended[over] += 1
        await cluster.until(lambda: not cluster.checker.running(f"uid-{JOB}"), 60, "what has ended is stopped")
        return
    if cluster.find(JOB) is None:  # perhaps no agent that was there knew the job
        await asyncio.sleep(30)
    if cluster.find(JOB) is None:
        seen.forgotten = True
        await cluster.until(lambda: not cluster.checker.running(f"uid-{JOB}"), 60, "what nobody knows is stopped")
        return
    if cluster.job(JOB).phase not in TERMINAL:
        await cluster.operate(JOB, desired="run")
    generation = cluster.job(JOB).generation
    await unscale(cluster, JOB, generation.sizes if generation is not None else {})
    limit = TIMING.cooldown * 3 + TIMING.form_margin * 2 + 60
    await cluster.until(lambda: _settled(cluster), limit, "whole again")
    await asyncio.sleep(TIMING.lease * 2)  # what comes of the last faults
    await cluster.until(lambda: _settled(cluster), limit, "whole, and stays so")
    seen.ended[cluster.job(JOB).phase] += 1
    cluster.checker.calm = True
    if cluster.job(JOB).phase not in TERMINAL:
        await _complete(cluster, shape)
    await cluster.until(lambda: not cluster.checker.running(f"uid-{JOB}"), 30, "nothing runs of what has ended")


def run(seed: int) -> Seen:
    """The whole schedule. Raises an exception group of what went wrong."""
    return run_virtual(_run(seed))

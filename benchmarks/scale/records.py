"""Nodes and jobs as large clusters have them: what every part of this benchmark measures with."""

from __future__ import annotations

from nodeagent.model.facts import MachineUsage, PodUsage
from nodeagent.model.job import Control, JobRecord
from nodeagent.model.jobspec import JobSpec, Nodes, Role, Submitter
from nodeagent.model.node import Gpu, Incarnation, NodeFacts, NodeRecord
from nodeagent.model.pod import PodState, WorkerState
from nodeagent.model.world import Cause, Generation, Member, Token
from nodeagent.plan.cluster import Cluster

GPUS = 8
"""Of a node, each with one worker."""
FREE = 4
"""Nodes of ``crowd`` that run nothing. The agent that is measured is one of them: it has most to look at."""
WANTED = 20
"""Nodes that each waiting job needs."""
NOW = 10_000_000
"""Served time (ms) of ``crowd``."""


def names(nodes: int) -> list[str]:
    return [f"node{i:05d}" for i in range(nodes)]


def life(node: str) -> Incarnation:
    return Incarnation(life=f"life-{node}", start=1)


def facts(node: str) -> NodeFacts:
    gpus = tuple(Gpu(uuid=uuid, index=i, name="NVIDIA H100 80GB HBM3") for i, uuid in enumerate(devices(node)))
    return NodeFacts(
        address=f"{node}.cluster", hostname=node, boot_id=f"boot-{node}", agent_pid=4711, agent_version="0.1.0",
        started=1.7e9, cpu_slots=GPUS, gpus=gpus, http="http://127.0.0.1:7070", peer=f"{node}.cluster:29400",
    )  # fmt: skip


def devices(node: str) -> tuple[str, ...]:
    return tuple(f"GPU-{node}-{i:08x}-4b1d-9f2e" for i in range(GPUS))


def member(rank: int, node: str) -> Member:
    return Member(
        node=node, life=life(node).life, group_rank=rank, first_rank=GPUS * rank, workers=GPUS, devices=devices(node)
    )


def spec(name: str, least: int, most: int) -> JobSpec:
    who = Submitter(user="ann", uid=1000, gid=1000, host="login", cwd="/home/ann")
    role = Role(command=("python", "train.py"), nodes=Nodes(min=least, max=most, target=most))
    return JobSpec(name=name, roles=(role,), working_dir="/home/ann", user="ann", submitter=who)


def pod(uid: str, node: str, rank: int) -> PodState:
    """As a member's agent publishes it while its workers train."""
    machine = MachineUsage(load=9.5, cpus=192, memory_used=2 * 10**11, memory_total=2 * 10**12)
    return PodState(
        uid=uid, job="train", role="worker", node=node, phase="running", generation=1, shim_pid=5000,
        fork_server_pid=5001,
        workers=tuple(
            WorkerState(rank=GPUS * rank + i, local_rank=i, pid=6000 + i, state="running", step=1234, doing="train")
            for i in range(GPUS)
        ),
        usage=PodUsage(cpu=8.2, memory=8 * 10**10, processes=90, machine=machine),
    )  # fmt: skip


def job(uid: str, order: int, nodes: int, members: tuple[str, ...] = ()) -> JobRecord:
    """One that runs on ``members``, or waits if there are none."""
    generation = None
    if members:
        generation = Generation(
            number=1, id="g1", state="active", members={n: member(i, n) for i, n in enumerate(members)}, holders={},
            reports={}, cause=Cause(kind="start", text="first start"), planned=False, since=0, deadline=0,
            control_rev=1,
        )  # fmt: skip
    return JobRecord(
        uid=uid, name=uid, owner=1000, spec=spec(uid, nodes, nodes), control=Control(rev=1, target=nodes),
        submitted=0.0, order=order, phase="running" if members else "queued", reason="", generation=generation,
        active=Token(number=1, id="g1") if generation else None,
        failsafe_members={n: life(n).life for n in members[:5]},
    )  # fmt: skip


def crowd(nodes: int, queued: int, gang: int) -> Cluster:
    """All nodes but FREE are taken, by jobs of ``gang`` nodes; ``queued`` jobs wait."""
    every = names(nodes)
    taken = every[FREE:]
    gangs = [tuple(taken[i : i + gang]) for i in range(0, len(taken), gang)]
    jobs = [job(f"run-{i}", i, len(members), members) for i, members in enumerate(gangs)]
    jobs += [job(f"wait-{i}", len(jobs) + i, WANTED) for i in range(queued)]
    there = {n: NodeRecord(id=n, incarnation=life(n), joined=0, facts=facts(n)) for n in every}
    return Cluster(served=NOW, nodes=there, jobs={j.uid: j for j in jobs})

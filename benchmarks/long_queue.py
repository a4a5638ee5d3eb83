"""``python -m benchmarks.long_queue``: what one round of an agent costs in a large cluster with a long queue.

All nodes but a few run one job; the others wait. The records are in memory and the agent has no pods, store or network:
what is measured is the time that a round keeps its process from anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from nodeagent.agent.rounds import Rounds
from nodeagent.agent.turns import Turns
from nodeagent.model.job import Control, JobRecord
from nodeagent.model.jobspec import JobSpec, Nodes, Role, Submitter
from nodeagent.model.node import Gpu, Incarnation, NodeFacts, NodeRecord, Readiness
from nodeagent.model.world import Cause, Head, Member, Token
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.notes import Notes

GPUS = 8
FREE = 4
"""Nodes that run nothing. The agent that is measured is one of them: it has most to look at."""
SIZES = ((500, 100), (1000, 200))
ROUNDS = 50
NOW = 10_000_000
"""Served time (ms)."""


def node(name: str) -> NodeRecord:
    gpus = tuple(Gpu(uuid=f"GPU-{name}-{i}", index=i) for i in range(GPUS))
    facts = NodeFacts(
        address=name, hostname=name, boot_id="b", agent_pid=1, agent_version="0", started=0.0, cpu_slots=GPUS,
        gpus=gpus, peer=f"{name}:29400",
    )  # fmt: skip
    return NodeRecord(id=name, incarnation=Incarnation(life=f"life-{name}", start=1), joined=0, facts=facts)


def job(uid: str, order: int, nodes: int, members: tuple[str, ...] = ()) -> JobRecord:
    """One that runs on ``members``, or waits if there are none."""
    role = Role(command=("train",), nodes=Nodes(min=nodes, max=nodes, target=nodes))
    submitter = Submitter(user="u", uid=1, gid=1, host="h", cwd="/")
    spec = JobSpec(name=uid, roles=(role,), working_dir="/", user="u", submitter=submitter)
    head = None
    if members:
        gang = {
            n: Member(
                node=n, life=f"life-{n}", group_rank=i, first_rank=GPUS * i, workers=GPUS,
                devices=tuple(f"GPU-{n}-{g}" for g in range(GPUS)),
            )
            for i, n in enumerate(members)
        }  # fmt: skip
        head = Head(
            number=1, id="g1", state="active", members=gang, holders={}, acks={}, reports={},
            cause=Cause(kind="start", text="first start"), planned=False, since=0, deadline=0, control_rev=1,
        )  # fmt: skip
    return JobRecord(
        uid=uid, name=uid, owner=1, spec=spec, control=Control(rev=1, target=nodes), submitted=0.0, order=order,
        phase="running" if members else "queued", reason="", head=head,
        active=Token(number=1, id="g1") if head else None,
        keepers={n: f"life-{n}" for n in members[:5]},
    )  # fmt: skip


def crowd(nodes: int, queued: int, gang: int) -> Cluster:
    """All nodes but FREE are taken, by jobs of ``gang`` nodes."""
    names = [f"n{i}" for i in range(1, nodes + 1)]
    taken = names[FREE:]
    gangs = [tuple(taken[i : i + gang]) for i in range(0, len(taken), gang)]
    jobs = [job(f"run-{i}", i, len(members), members) for i, members in enumerate(gangs)]
    jobs += [job(f"wait-{i}", len(jobs) + i, 20) for i in range(queued)]
    return Cluster(served=NOW, nodes={n: node(n) for n in names}, jobs={j.uid: j for j in jobs})


class Measured:
    """Rounds of one agent over a view that the benchmark changes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        nothing: Callable[..., Awaitable[bool]] = _no
        parts: dict[str, Any] = {
            "lease": SimpleNamespace(incarnation=cluster.nodes["n1"].incarnation, publish=lambda *_: False),
            "host": SimpleNamespace(status=dict),
            "clock": SimpleNamespace(now=time.monotonic, wall=time.time),
            "failsafe": SimpleNamespace(next_end=lambda: None, lending=frozenset, replace_keepers=nothing),
            "applier": SimpleNamespace(pod=nothing, job=nothing, shelve=nothing),
            "commits": SimpleNamespace(carry=nothing),
            "stopwatch": SimpleNamespace(
                running=False, look=lambda *_: None, over=lambda *_: (), finished=lambda *_: ()
            ),
            "metrics": None,
            "checked": lambda ready, _cluster: ready,
            "standbys": lambda: 2,
            "counted": lambda: None,
            "keep": lambda: (604_800.0, 200),
            "unreachable": dict,
            "may_ask": lambda: True,
        }
        self.rounds = Rounds("n1", turns=Turns("n1", 0.1), cluster=lambda: self.cluster, **cast("Any", parts))

    async def round(self) -> float:
        """Milliseconds of CPU time."""
        began = time.process_time()
        await self.rounds.once()
        return 1000 * (time.process_time() - began)

    def beat(self) -> None:
        """Time passes, and nothing else."""
        self.cluster = replace(self.cluster, served=self.cluster.served + 500)

    def change(self, name: str, text: str) -> None:
        """A node's record changes."""
        record = self.cluster.nodes[name]
        ready = {"run-0": Readiness(state="ready", reason=text)}
        nodes = {**self.cluster.nodes, name: record.model_copy(update={"readiness": ready})}
        self.cluster = replace(self.cluster, nodes=nodes)


async def _no(*_: object) -> bool:
    return False


async def measure(nodes: int, queued: int, gang: int) -> tuple[float, float, float]:
    """Milliseconds of CPU time: of the first round, of one at rest, of one after a node's record changed (medians)."""
    measured = Measured(replace(crowd(nodes, queued, gang), notes=Notes()))
    first = await measured.round()
    rest, changed = [], []
    for turn in range(ROUNDS):
        measured.beat()
        rest.append(await measured.round())
        measured.change(f"n{nodes - turn % FREE}", str(turn))
        changed.append(await measured.round())
    return first, statistics.median(rest), statistics.median(changed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_queue", description=__doc__)
    parser.add_argument("--gang", type=int, default=0, help="nodes of each job that runs; default: one runs on all")
    arguments = parser.parse_args()
    print("| nodes | jobs that wait | jobs that run | first round | at rest | a node changed |")
    print("| --- | --- | --- | --- | --- | --- |")
    for nodes, queued in SIZES:
        gang = arguments.gang or nodes
        first, rest, changed = asyncio.run(measure(nodes, queued, gang))
        runs = -(-(nodes - FREE) // gang)
        print(f"| {nodes} | {queued} | {runs} | {first:.1f} ms | {rest:.2f} ms | {changed:.1f} ms |")


if __name__ == "__main__":
    main()

"""What it costs one agent to decide on a long queue whose jobs ask something of their nodes: CPU time of one core,
beside the same queue that asks nothing. ``python -m benchmarks.placement [NODES [JOBS]]``; prints, and writes nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from nodeagent.model.constraints import Constraints, Match
from nodeagent.model.job import Control, JobRecord
from nodeagent.model.jobspec import JobSpec, Nodes, Role, Submitter, Together
from nodeagent.model.node import Gpu, Incarnation, NodeFacts, NodeRecord
from nodeagent.model.world import Cause, Generation, Member
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing.heldback import line
from nodeagent.plan.queueing.queue import next_up

LEVELS = ("zone", "rack", "switch")
GPUS = 8
TAKEN = 0.95
"""Share of the nodes that one job holds."""
RUNS = 5


def node(number: int, topology: Sequence[str]) -> NodeRecord:
    """16 nodes to a switch, 4 switches to a rack, 8 racks to a zone."""
    switch, kind = number // 16, "h100" if number % 3 else "a100"
    labels = {"zone": f"z{switch // 32}", "rack": f"r{switch // 4}", "switch": f"s{switch}", "gpu": kind}
    gpus = tuple(Gpu(uuid=f"GPU-{number}-{i}", index=i) for i in range(GPUS))
    facts = NodeFacts(
        address=f"10.0.{number // 250}.{number % 250}", hostname=f"n{number}", boot_id="b", agent_pid=1,
        agent_version="0", started=0.0, cpu_slots=0, gpus=gpus, labels=labels, topology=tuple(topology),
    )  # fmt: skip
    return NodeRecord(id=f"n{number}", incarnation=Incarnation(life=f"l{number}", start=1), joined=0, facts=facts)


def spec(name: str, size: int, asked: Constraints | None = None, together: Together | None = None) -> JobSpec:
    """A job of so many whole nodes."""
    nodes = Nodes(min=size, max=size, target=size)
    return JobSpec(
        name=name,
        roles=(Role(command=("python", "train.py"), nodes=nodes, placement=asked),),
        placement=together,
        working_dir="/w",
        user="u",
        submitter=Submitter(user="u", uid=1, gid=1, host="h", cwd="/w"),
    )


def asked(number: int) -> tuple[Constraints | None, Together | None]:
    """What the queue's jobs ask, in turn: eight kinds, and some hundred different sets of names."""
    names = Match(label="node", values=(f"n[{number}-{number + 200}]",))
    h100 = Match(label="gpu", values=("h100",))
    kinds: list[tuple[Constraints | None, Together | None]] = [
        (None, None),
        (Constraints(require=(h100,)), None),
        (Constraints(exclude=(h100,)), None),
        (Constraints(prefer=(h100,)), None),
        (None, Together(within="rack")),
        (Constraints(require=(h100,)), Together(within="zone")),
        (None, Together(segments=4)),
        (Constraints(require=(names,)), None),
    ]
    return kinds[number % len(kinds)]


def cluster(nodes: int, jobs: int, *, choosy: bool) -> Cluster:
    """One job runs on most of the nodes, the others wait for more than there are."""
    records = [node(i, LEVELS if choosy else ()) for i in range(nodes)]
    busy = records[: int(nodes * TAKEN)]
    members = {
        r.id: Member(
            node=r.id, life=r.incarnation.life, group_rank=i, first_rank=i * GPUS, workers=GPUS,
            devices=tuple(g.uuid for g in r.facts.gpus),
        )
        for i, r in enumerate(busy)
    }  # fmt: skip
    generation = Generation(
        number=1, id="g", state="active", members=members, cause=Cause(kind="start", text="start"), since=0
    )
    waiting = [job(f"j{i}", i, spec(f"j{i}", 64, *(asked(i) if choosy else (None, None)))) for i in range(jobs)]
    big = job("big", 0, spec("big", len(busy))).model_copy(update={"phase": "running", "generation": generation})
    every = {j.uid: j for j in (big, *waiting)}
    return Cluster(10**6, nodes={r.id: r for r in records}, jobs=every)


def job(uid: str, order: int, of: JobSpec) -> JobRecord:
    """A job that waits."""
    control = Control(rev=1, desired="run", target=of.nodes.target, by="u")
    return JobRecord(
        uid=uid, name=of.name, owner=1, spec=of, control=control, phase="queued", reason="", submitted=0.0, since=0,
        order=order,
    )  # fmt: skip


def cost(work: Callable[[], object]) -> float:
    """CPU milliseconds."""
    begun = time.process_time()
    work()
    return (time.process_time() - begun) * 1000


def round_of(view: Cluster) -> Callable[[], object]:
    """What an agent does with a view: every job's decision, and for whom nodes get ready."""
    return lambda: (next_up(view, line(view)), [decide(view, j, 0.0) for j in view.jobs.values()])


def changed(view: Cluster) -> Cluster:
    """A free node that has just said something new."""
    last = list(view.nodes.values())[-1]
    return replace(view, nodes={**view.nodes, last.id: last.model_copy(update={"rev": last.rev + 1})})


def measure(nodes: int, jobs: int, *, choosy: bool) -> tuple[float, float, float]:
    """(first round, round at rest, round after a change), the middle one of some runs."""
    found: list[list[float]] = [[], [], []]
    for _ in range(RUNS):
        view = cluster(nodes, jobs, choosy=choosy)
        for column, of in zip(found, (view, view, changed(view)), strict=True):
            column.append(cost(round_of(of)))
    first, rest, news = (sorted(column)[RUNS // 2] for column in found)
    return first, rest, news


def main() -> None:
    nodes, jobs = (int(word) for word in (*sys.argv[1:], "1000", "1000")[:2])
    print(f"{nodes} nodes, {jobs} queued jobs; CPU ms of one agent: first round, at rest, a node has changed")
    for choosy in (False, True):
        first, rest, news = measure(nodes, jobs, choosy=choosy)
        print(f"{'with' if choosy else 'no'} placement and topology: {first:.1f}  {rest:.2f}  {news:.1f}")


if __name__ == "__main__":
    main()

"""What deciding costs an agent where many jobs wait, with one queue and with many, and with a large gang at the head of
the line for which nodes are kept: ``python -m benchmarks.line``.

CPU milliseconds of one process: for the line, for who gives nodes to whom, for the decision on each job, and for all of
it together; after a change of what jobs hold (each such change gives another view), and while nothing but time
changes. Each part is worked out once for a view; the medians of many changes are shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from itertools import pairwise, product

from benchmarks.scale.records import GPUS, NOW, facts, life, names
from nodeagent.model.job import Control, JobRecord
from nodeagent.model.jobspec import JobSpec, Nodes, Role, Submitter
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.model.world import Cause, Generation, Member
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.heldback import line

QUEUES, USERS, GANG = 20, 50, 7
CHANGES = 15


def _job(
    name: str, order: int, in_queue: str, generation: Generation | None, size: tuple[int, int], priority: int = 0
) -> JobRecord:
    who = Submitter(user="u", uid=1, gid=1, host="h", cwd="/")
    role = Role(command=("python", "train.py"), nodes=Nodes(min=size[0], max=size[1], target=size[1]))
    spec = JobSpec(
        name=name, roles=(role,), working_dir="/", user="u", submitter=who, queue=in_queue, priority=priority,
        time_limit=3600.0 + order,
    )  # fmt: skip
    return JobRecord(
        uid=name, name=name, owner=order % USERS, spec=spec, control=Control(rev=1, target=size[1]),
        generation=generation,
        phase="queued" if generation is None else "running", reason="", submitted=0.0, order=order,
        first_active=None if generation is None else 0,
    )  # fmt: skip


def _gang(nodes: dict[str, NodeRecord], on: list[str]) -> Generation:
    members = {
        name: Member(
            node=name, life=nodes[name].incarnation.life, group_rank=i, first_rank=GPUS * i, workers=GPUS,
            devices=tuple(gpu.uuid for gpu in nodes[name].facts.gpus),
        )
        for i, name in enumerate(on)
    }  # fmt: skip
    return Generation(
        number=1, id="g", state="active", members=members, cause=Cause(kind="start", text="first"), since=0
    )


def crowd(size: int, waiting: int, queues: int, large: bool = False) -> Cluster:
    """Most nodes run gangs of seven; the jobs that wait want four to eight. ``queues``: 0 for none. ``large``: the
    first of them wants a quarter of all nodes."""
    nodes = {n: NodeRecord(id=n, incarnation=life(n), joined=0, facts=facts(n)) for n in names(size)}
    teams = [f"q{i}" for i in range(queues)] or [""]
    gangs = [[*nodes][i : i + GANG] for i in range(0, int(0.9 * size), GANG)]
    jobs = [_job(f"r{i}", i, teams[i % len(teams)], _gang(nodes, on), (1, GANG)) for i, on in enumerate(gangs)]
    jobs += [_job(f"w{i}", size + i, teams[i % len(teams)], None, (4 + i % 3, 8)) for i in range(waiting)]
    if large:
        jobs.append(_job("large", 0, teams[0], None, (size // 4, size // 4), priority=1))
    tree = [Queue(name=f"p{i}", weight=1 + i) for i in range(4)] if queues else []
    cap = Amount(gpus=4 * size * GPUS // 10)
    tree += [Queue(name=t, parent=f"p{i % 4}", weight=1 + i % 5, capability=cap) for i, t in enumerate(teams) if queues]
    return Cluster(served=NOW, nodes=nodes, jobs={j.uid: j for j in jobs}, queues=Queues(queues=tuple(tree)))


def _costs(cluster: Cluster) -> tuple[float, ...]:
    """Of the line, of sharing, of decisions, and of all of it."""
    at = [time.process_time()]
    line(cluster)
    at.append(time.process_time())
    transfers(cluster)
    at.append(time.process_time())
    for job in cluster.jobs.values():
        decide(cluster, job, 0.0)
    at.append(time.process_time())
    return *(1000 * (end - start) for start, end in pairwise(at)), 1000 * (at[-1] - at[0])


def measure(size: int, waiting: int, queues: int, large: bool) -> tuple[list[float], list[float]]:
    """(after a change, at rest), as of ``_costs``."""
    cluster = crowd(size, waiting, queues, large)
    _costs(cluster)
    after, rest = [], []
    for i in range(CHANGES):
        gone = cluster.jobs[f"r{i}"].model_copy(update={"generation": None, "phase": "queued"})
        cluster = replace(cluster, jobs={**cluster.jobs, gone.uid: gone})
        after.append(_costs(cluster))
        rest.append(_costs(replace(cluster, served=cluster.served + 500)))
    return [*map(statistics.median, zip(*after, strict=True))], [*map(statistics.median, zip(*rest, strict=True))]


def main() -> None:
    """Print all figures for one queue and for many."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--nodes", type=int, default=1000)
    arguments.add_argument("--jobs", type=int, default=1000)
    asked = arguments.parse_args()
    for queues, large in product((0, QUEUES), (False, True)):
        what = f"{queues} queues under 4 others, with capabilities" if queues else "one queue"
        what += ", a large gang first" if large else ""
        print(f"{asked.nodes} nodes, {asked.jobs} jobs that wait, {what}:")
        after, rest = measure(asked.nodes, asked.jobs, queues, large)
        for when, costs in (("after a change", after), ("at rest", rest)):
            ms = zip(("line", "sharing", "decisions", "all"), costs, strict=True)
            print(f"  {when}: {', '.join(f'{name} {cost:.2f}' for name, cost in ms)} ms")


if __name__ == "__main__":
    main()

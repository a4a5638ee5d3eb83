"""Jobs of two queues on nodes with several slots, in few words. Builds records only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import Queue, Queues
from nodeagent.plan.cluster import Cluster
from tests.unit.plan.build import NOW, READY, make_cluster, make_generation, make_job, make_node, make_spec

P, Q = Queue(name="p", weight=3), Queue(name="q", weight=2)


def runs(
    name: str,
    on: str,
    *,
    workers: int = 2,
    first: int = 0,
    most: int = 0,
    auto: bool = False,
    target: int = 0,
    order: int = 0,
    since: int = 0,
) -> JobRecord:
    """A job of the queue that its name begins with. It runs on these nodes, on their slots from ``first`` on; ``most``:
    it may run on one node and have so many; ``auto``: it may borrow, and has if it has more than its target."""
    nodes = on.split()
    spec = make_spec(name=name, size=(1 if most else len(nodes), most or len(nodes)), workers=workers)
    role = spec.role.model_copy(update={"nodes": spec.role.nodes.model_copy(update={"auto": auto})})
    spec = spec.model_copy(update={"roles": (role,), "queue": name[:1]})
    generation = make_generation(nodes, workers=workers, since=since)
    slots = tuple(f"cpu{first + i}" for i in range(workers))
    members = {n: m.model_copy(update={"devices": slots}) for n, m in generation.members.items()}
    target = target or (1 if auto else len(nodes))
    generation = generation.model_copy(update={"members": members})
    return make_job("running", generation, spec=spec, uid=f"u-{name}", target=target, order=order)


def waits(name: str, least: int, *, workers: int = 2, order: int = 9) -> JobRecord:
    spec = make_spec(name=name, size=(least, least), workers=workers).model_copy(update={"queue": name[:1]})
    return make_job(spec=spec, uid=f"u-{name}", order=order, since=NOW - 1000)


def cluster(
    count: int, *jobs: JobRecord, queues: Iterable[Queue] = (Queue(name="q"),), cordoned: Iterable[str] = ()
) -> Cluster:
    """Nodes n1, n2, ... with four slots each, on which every job is ready."""
    ready, names = {job.uid: READY for job in jobs}, [f"n{i}" for i in range(1, count + 1)]
    nodes = [make_node(n, slots=4, ready=ready, cordon=n in cordoned) for n in names]
    return replace(make_cluster(nodes, *jobs), queues=Queues(rev=1, queues=tuple(queues)))

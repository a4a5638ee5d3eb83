"""Jobs of several queues on nodes of one slot, in few words. Builds records only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster
from tests.unit.plan.build import READY, make_cluster, make_generation, make_job, make_node, make_spec

A, B = Queue(name="a"), Queue(name="b")


def job(
    name: str, least: int, on: Iterable[int] = (), *, most: int = 0, order: int = 0, priority: int = 0
) -> JobRecord:
    """A job of the queue that its name begins with: ``a1`` of ``a``. It runs on these nodes, one slot on each."""
    nodes = [f"n{i}" for i in on]
    spec = make_spec(name=name, size=(least, max(least, most, len(nodes))), priority=priority)
    spec = spec.model_copy(update={"queue": name[:1]})
    generation = make_generation(nodes) if nodes else None
    return make_job("running" if nodes else "queued", generation, spec=spec, uid=f"u-{name}", order=order)


def formed(one: JobRecord, since: int) -> JobRecord:
    """Its gang runs since then, though the job has run before."""
    assert one.generation is not None
    generation = one.generation.model_copy(update={"since": since})
    return one.model_copy(update={"generation": generation, "first_active": 0})


def cluster(count: int, queues: Iterable[Queue], *jobs: JobRecord) -> Cluster:
    nodes = [make_node(f"n{i}", slots=1, ready={j.uid: READY for j in jobs}) for i in range(1, count + 1)]
    return replace(make_cluster(nodes, *jobs), queues=Queues(rev=1, queues=tuple(queues)))


C = Queue(name="c")


def ones(name: str, on: Iterable[int], order: int = 0) -> list[JobRecord]:
    """Jobs of one node each that run."""
    return [job(f"{name}{i}", 1, [i], order=order + i) for i in on]


QUEUES = st.lists(st.tuples(st.floats(0.5, 4), st.integers(0, 3), st.booleans()), min_size=2, max_size=3)
WAITING = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=5)


def in_roles(one: JobRecord) -> JobRecord:
    """With the same needs, but of two roles, one of which has a single place."""
    size = one.spec.nodes.min
    if size == 1 or one.spec.elastic:
        return one
    parts = {"x": 1, "y": size - 1}
    roles = tuple(one.spec.role.of_places(count).model_copy(update={"name": name}) for name, count in parts.items())
    return one.model_copy(update={"spec": one.spec.model_copy(update={"roles": roles})})


# --- under a capability


TEAM = [Queue(name="p", capability=Amount(nodes=4)), Queue(name="a", parent="p"), Queue(name="b", parent="p")]
"""Two queues that may have four nodes together."""


def auto(name: str, on: Iterable[int]) -> JobRecord:
    """It has one node of its own; the others that it runs on are borrowed."""
    spec = make_spec(name=name, size=(1, 8)).model_copy(update={"queue": name[:1]})
    nodes = spec.nodes.model_copy(update={"target": 1, "auto": True})
    spec = spec.model_copy(update={"roles": (spec.role.model_copy(update={"nodes": nodes}),)})
    return make_job("running", make_generation([f"n{i}" for i in on]), spec=spec, uid=f"u-{name}", target=1)

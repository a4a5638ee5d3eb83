"""Room for jobs of several roles: what is counted is what a layout finds, and a long queue of them is counted by kinds
of node, neither judged node by node nor laid out.

Work is counted in nodes that are judged and in passes over the roles, never in time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import CodeType

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Role
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import ceiling
from nodeagent.plan.fairshare.resources import of_devices, together
from nodeagent.plan.job.gang import decide
from nodeagent.plan.nodes import candidates
from nodeagent.plan.placing.placement import choose
from nodeagent.plan.placing.places import _Try
from nodeagent.plan.placing.roles import soon
from nodeagent.plan.queueing.elastic import MOST_OF_ROLES, transfers
from nodeagent.plan.queueing.queue import NEXT
from nodeagent.plan.queueing.reservations import reserved
from nodeagent.plan.queueing.room import room_for
from tests.profiled import counted
from tests.unit.plan.build import (
    PREPARING,
    READY,
    UNFIT,
    WALL,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)
from tests.unit.plan.placing.ofroles import role
from tests.unit.plan.placing.test_places_domains import some_role

JUDGED, PASSES = candidates._judge.__code__, _Try.__init__.__code__
QUEUES = Queues(
    rev=1,
    queues=(
        Queue(name="free"),
        Queue(name="few", capability=Amount(nodes=3)),
        Queue(name="gpus", capability=Amount(gpus=5)),
    ),
)


def some_node(draw: random.Random, i: int, uids: Sequence[str]) -> NodeRecord:
    states = {uid: draw.choice([READY, READY, PREPARING, UNFIT]) for uid in uids if draw.random() < 0.4}
    labels, gpus = {"rack": f"r{i // 3}"} | ({"gpu": "h100"} if draw.random() < 0.3 else {}), draw.choice([0, 0, 2, 8])
    return make_node(
        f"n{i}", slots=draw.choice([0, 2, 4, 8]), gpus=gpus, ready=states, labels=labels,
        cordon=draw.random() < 0.1, spot=draw.random() < 0.1, topology=("rack",), sick=range(int(draw.random() < 0.1)),
    )  # fmt: skip


def some_cluster(seed: int) -> Cluster:
    """Jobs of several roles that wait, some of which ran before, beside one that runs."""
    draw = random.Random(seed)
    uids = [f"u-{i}" for i in range(5)]
    nodes = [some_node(draw, i, uids) for i in range(draw.choice([3, 6, 12]))]
    names = [node.id for node in nodes]
    jobs = [make_job("running", make_generation(names[:2]), uid="u-runs", spec=make_spec(name="runs"))]
    for order, uid in enumerate(uids):
        roles = tuple(some_role(draw, name) for name in "abc"[: draw.choice([2, 3])])
        spec = make_spec(name=uid, within=draw.choice(["", "", "rack"]))
        spec = spec.model_copy(update={"roles": roles, "queue": draw.choice(["free", "few", "gpus"])})
        left = make_generation(names[1:3], state="ended", planned=True) if draw.random() < 0.2 else None
        jobs.append(make_job("holding" if left else "queued", left, uid=uid, spec=spec, order=order))
    return replace(make_cluster(nodes, *jobs), queues=draw.choice([QUEUES, Queues()]))


@pytest.mark.parametrize("seed", range(120))
def test_the_room_that_is_counted_is_what_a_layout_finds(seed: int) -> None:
    cluster = some_cluster(seed)
    for job in cluster.jobs.values():
        if job.phase == "running":
            continue
        found, room = Counter(c.standing for c in candidates.candidates(cluster, job)), room_for(cluster, job)
        if job.generation is None:
            assert (room.fit, room.pending, room.unfit) == (found["fit"], found["pending"], found["unfit"])
        assert room.enough == choose(cluster, job, job.sized_before.nodes.target).fits
        layout = soon(cluster, job)
        needs = together(of_devices([d for one in here for d in one.devices]) for here in layout.places.values())
        within = ceiling(cluster, job).holds(needs)
        assert room.enough_soon == (room.enough or (not layout.lack and within))
        assert (room.barred is not None) == (not room.enough and not layout.lack and not within)
        if room.barred is not None:
            assert room.barred() == needs


def crowd(nodes: int, free: int, jobs: int, roles: Sequence[Role], queues: Queues | None = None) -> Cluster:
    """All nodes but some are in use, by one job; others wait, no two of which are alike."""
    records = [make_node(f"n{i}", slots=4, ready={}) for i in range(nodes)]
    taken = make_generation([f"n{i}" for i in range(free, nodes)], workers=4)
    big = make_job("running", taken, uid="u-big", spec=make_spec(size=(1, nodes), name="big"))
    waiting = list[JobRecord]()
    for i in range(jobs):
        own = [one.model_copy(update={"workers_per_node": 1 + (i >> k) % 2}) for k, one in enumerate(roles)]
        spec = make_spec(name=f"j{i}").model_copy(update={"roles": tuple(own)})
        if queues is not None:
            spec = spec.model_copy(update={"queue": queues.queues[i % len(queues.queues)].name})
        waiting.append(make_job(uid=f"u-{i}", spec=spec, order=i))
    return replace(make_cluster(records, big, *waiting), queues=queues or Queues())


def work(cluster: Cluster) -> Counter[CodeType]:
    """What one look at all jobs costs."""

    def look() -> None:
        for job in cluster.jobs.values():
            assert decide(cluster, job, WALL).step is None

    return counted(look)


WIDE = [role(f"r{k}", replicas=2) for k in range(16)]
CAPPED = Queues(rev=1, queues=tuple(Queue(name=f"q{i}", capability=Amount(nodes=3)) for i in range(3)))


@pytest.mark.parametrize("queues", [None, CAPPED])
@pytest.mark.parametrize("free", [0, 8, 60])
def test_of_many_jobs_that_wait_few_are_laid_out_and_none_is_judged_node_by_node(
    free: int, queues: Queues | None
) -> None:
    passes = []
    for jobs in (40, 80):
        cluster = crowd(100, free, jobs, WIDE, queues)
        calls = work(cluster)
        assert calls[JUDGED] <= 2 * len(cluster.nodes), "for each job that waits it would be thousands"
        passes.append(calls[PASSES])
    assert passes[0] == passes[1] < 60


def test_nodes_for_the_first_of_several_queues_are_found_with_one_layout_each() -> None:
    """Of idle nodes and of what other jobs could leave: how much of that is enough, a count says."""
    shared = Queues(rev=1, queues=(Queue(name="a"), Queue(name="b")))
    cluster = crowd(100, 60, 8, WIDE, shared)
    calls = counted(lambda: transfers(cluster))
    assert len(reserved(cluster).found) <= NEXT + 1
    assert calls[PASSES] <= (NEXT + 1) + MOST_OF_ROLES, "one for each reservation, and one for each job here"

"""Room for jobs of several roles: what is counted is what a layout finds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import ceiling
from nodeagent.plan.fairshare.resources import of_devices, together
from nodeagent.plan.nodes import candidates
from nodeagent.plan.placing.placement import choose, soon
from nodeagent.plan.queueing.room import room_for
from tests.unit.plan.build import (
    PREPARING,
    READY,
    UNFIT,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)
from tests.unit.plan.placing.test_places_domains import some_role

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

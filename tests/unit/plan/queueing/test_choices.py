"""Which nodes a gang of several roles could have by some time: as a layout on what is free then would say, and mostly
without one.

Work is counted in passes over the roles, never in time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.placing.places import _Try
from nodeagent.plan.queueing.choices import of_places, would_do
from nodeagent.plan.queueing.departures import UNKNOWN
from nodeagent.plan.queueing.reservations import reservation_of
from tests.profiled import counted
from tests.unit.plan.build import NOW, WALL, make_cluster, make_generation, make_job, make_node, make_spec
from tests.unit.plan.placing.ofroles import role
from tests.unit.plan.queueing.test_room_places import some_cluster

PASSES = _Try.__init__.__code__


def running(number: int, nodes: list[str]) -> JobRecord:
    """It leaves them ``number`` minutes from now."""
    spec = make_spec(size=(1, len(nodes)), name=f"run-{number}", time_limit=3600.0 + 60 * number)
    job = make_job("running", make_generation(nodes, workers=4), uid=f"u-run-{number}", spec=spec, order=number)
    return job.model_copy(update={"first_active": NOW - 3_600_000, "since": NOW - 3_600_000})


def line_for(gangs: int) -> Cluster:
    """So many gangs of two nodes that end one after the other, and one of several roles that needs half of them."""
    jobs = [running(i, [f"n{2 * i}", f"n{2 * i + 1}"]) for i in range(gangs)]
    roles = tuple(role(f"r{k}", replicas=gangs // 4, workers=1) for k in range(16))
    waiting = make_job(uid="u-wide", spec=make_spec(name="wide").model_copy(update={"roles": roles}), order=99)
    return make_cluster([make_node(f"n{i}", slots=4, ready={}) for i in range(2 * gangs)], *jobs, waiting)


def test_the_time_at_which_enough_is_free_is_found_without_layouts() -> None:
    for gangs in (16, 64):
        cluster = line_for(gangs)
        job = cluster.jobs["u-wide"]
        assert counted(partial(decide, cluster, job, WALL))[PASSES] == 1, "its nodes, when the time is known"
        found = reservation_of(cluster, job)
        assert found is not None
        assert found.after == (f"run-{gangs // 2 - 1}",)
        assert len(found.nodes) == gangs


@pytest.mark.parametrize("seed", range(60))
def test_there_is_enough_where_nodes_are_found(seed: int) -> None:
    cluster = some_cluster(seed)
    running_job = cluster.jobs["u-runs"]
    spec = running_job.spec.model_copy(update={"time_limit": 1e6})
    ends = running_job.model_copy(update={"spec": spec, "first_active": NOW - 1000, "since": NOW - 1000})
    cluster = replace(cluster, jobs={**cluster.jobs, "u-runs": ends})
    for job in cluster.jobs.values():
        if job.phase == "running":
            continue
        for taken in ((), ("n0", "n2")):
            free, enough, pick = of_places(cluster, job, would_do(cluster, job), taken)
            assert {0, UNKNOWN} <= {*free.values()}
            for at in {*free.values()}:
                assert enough(at) == bool(pick(at))

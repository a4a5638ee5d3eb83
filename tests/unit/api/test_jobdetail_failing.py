"""A job that failed on a node where job after job fails: the detail names it."""

from __future__ import annotations

import pytest

from nodeagent.api.jobdetail import failing_node
from nodeagent.model.job import JobRecord
from tests.unit.plan.build import make_cluster
from tests.unit.plan.nodes.test_failing import ROW, ended


@pytest.mark.parametrize(
    ("job", "node"),
    [
        (ROW[0], "n1"),
        (ROW[2], "n1"),
        (ended(4, restarts=2), "n1"),
        (ended(4, "n2"), ""),
        (ended(4, phase="stopped"), ""),
        (ended(4, phase="running"), ""),
    ],
)
def test_the_node_that_fails_jobs_is_named_for_those_that_failed_there(job: JobRecord, node: str) -> None:
    """Also where that one was tried again and again, since all other nodes were busy, until its budget was spent."""
    assert failing_node(job, make_cluster(["n1", "n2"], *{one.uid: one for one in (*ROW, job)}.values())) == node
    assert failing_node(job, make_cluster(["n1", "n2"], job)) == "", "alone it may be the job's fault"

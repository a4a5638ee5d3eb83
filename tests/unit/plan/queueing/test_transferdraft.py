"""What is decided so far about nodes counts for the next job that is asked about."""

from __future__ import annotations

from nodeagent.model.queue import Amount, Queue
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.transfers import Transfers
from tests.unit.plan.queueing.shared import Q, cluster, runs, waits


def test_a_node_that_two_jobs_would_leave_counts_once() -> None:
    """Both have n2 on top of what they need, and n3: w gets both nodes only if one of them is stopped."""
    owns, pf, w = Queue(name="p", weight=3, guarantee=Amount(nodes=4)), runs("pf", "n1", workers=4), waits("pw", 2)
    for auto, giver in ((True, "u-q0"), (False, "u-q1")):
        jobs = [runs(f"q{i}", "n3 n2", first=2 * i, most=2, auto=auto, order=i) for i in range(2)]
        found = transfers(cluster(3, *jobs, pf, w, queues=[owns, Q]))
        assert found == Transfers(gives={giver: {"n2": "u-pw"}}, stops={"u-q1": "u-pw"})
        three = Queue(name="q", guarantee=Amount(nodes=3))
        assert transfers(cluster(3, *jobs, pf, w, queues=[owns, three])) == Transfers(), "neither may be stopped"

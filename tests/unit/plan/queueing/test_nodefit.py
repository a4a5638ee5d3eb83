"""Which nodes have room for a job as they are, and which once somebody leaves them."""

from __future__ import annotations

from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.transfers import Transfers
from tests.unit.plan.queueing.shared import P, Q, cluster, runs, waits


def test_a_borrowed_node_with_room_anyway_does_not_come_back() -> None:
    """Two slots of n2 are free, n1 is full: with n2 given back there would be one node for w as well."""
    borrower = runs("qa", "n1 n2", most=2, auto=True)
    assert transfers(cluster(2, borrower, runs("qb", "n1", first=2), waits("qw", 2))) == Transfers()
    third = transfers(cluster(3, runs("qa", "n1 n2 n3", most=3, auto=True), waits("qw", 3)))
    assert third == Transfers(), "each of the three has room"


def test_nobody_leaves_a_node_that_has_room_anyway() -> None:
    """n1 has room beside qe, n2 and n3 have none: one of these is needed."""
    jobs = runs("qe", "n2 n3 n1", most=3), runs("qf", "n2 n3", first=2), waits("pw", 2)
    assert transfers(cluster(3, *jobs, queues=[P, Q])) == Transfers(gives={"u-qe": {"n3": "u-pw"}})

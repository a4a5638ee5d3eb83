"""What a lease process answers who asks by which store its node has its lease."""

from __future__ import annotations

from nodeagent.lease.core import Core
from nodeagent.lease.whichstore import LeaseAnswer, lease_answer
from tests.unit.lease.build import ORDER

ANSWER = LeaseAnswer("n1", "c1", "e1", "127.0.0.1:6379")


def test_a_node_without_an_order_has_no_lease() -> None:
    core = Core(100.0)
    assert lease_answer(core, 101.0) == LeaseAnswer()
    core.take(100.0, ORDER)
    core.answered(100.0, 100.1)
    core.take(101.0, None)
    assert lease_answer(core, 101.0) == LeaseAnswer()


def test_it_says_how_long_ago_the_last_good_renewal_was_sent_and_what_came_of_the_next_one() -> None:
    core = Core(100.0, renewed=99.5)
    core.take(100.0, ORDER)
    assert lease_answer(core, 100.0) == ANSWER, "what an earlier process has renewed may have been in another store"
    core.answered(100.0, 100.1)
    assert lease_answer(core, 100.25) == ANSWER._replace(age=0.25)
    core.unanswered(100.5, 101.0, "the store did not answer")
    assert lease_answer(core, 101.0) == ANSWER._replace(age=1.0, away=True)
    core.answered(101.0, 101.0)
    assert lease_answer(core, 101.0) == ANSWER._replace(age=0.0)

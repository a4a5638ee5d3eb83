"""What the lease process does next, in every cell of its table."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.lease.core import Core, Departure
from nodeagent.lease.grants import NOTHING, Grant
from tests.unit.lease.build import ORDER

POD = "p1"
GIVEN_UP = ORDER.lease


class Run:
    """A core from time 100 on, in a life of its agent; ``obeyed`` is what ``POD``'s shim says."""

    def __init__(self, departure: Departure | None = None, granted: dict[str, float] | None = None, **changes: Any):
        self.now = 100.0
        self.core = Core(self.now, departure, granted)
        self.core.take(self.now, ORDER._replace(**changes))
        self.obeyed = 0.0

    def go(self, seconds: float) -> None:
        self.now += seconds

    def look(self) -> str | None:
        return self.core.look(self.now, lambda: {POD: self.obeyed})

    def renew(self, wanted: str = "") -> None:
        """One that is answered after 50 ms."""
        assert self.look() == "renew"
        self.now += 0.05
        self.core.answered(self.now - 0.05, self.now, wanted)

    def speak(self) -> None:
        self.core.agent_seen(self.now)

    @property
    def state(self) -> str:
        return self.core.state

    @property
    def grant(self) -> Grant:
        return self.core.grant(POD)


def stopping() -> Run:
    """Its agent has just been silent for too long; its workers have their time."""
    run = Run()
    run.go(ORDER.patience - 1)
    run.renew()
    run.go(1.1)
    assert run.look() == "renew"
    assert run.state == "stopping"
    return run


def giving_up() -> Run:
    """Its workers had time until 101.9 after the stop began."""
    run = stopping()
    run.renew(wanted="job a")
    assert run.state == "giving up"
    return run


# --- holding


def test_it_renews_at_once_and_then_with_each_heartbeat() -> None:
    run = Run()
    assert run.look() == "renew"
    assert run.grant == NOTHING
    run.renew()
    assert run.core.due() == 100.0 + ORDER.heartbeat, "from when it was sent"
    assert run.look() is None
    run.go(ORDER.heartbeat)
    assert run.look() == "renew"


def test_time_is_granted_from_when_the_renewal_was_sent() -> None:
    run = Run()
    run.renew()
    assert run.grant == Grant(100.0 + ORDER.fence, 0.0)
    assert run.core.until == run.grant.until
    assert run.core.grant("another") == run.grant
    assert (run.core.renewed, run.core.away) == (100.0, "")


def test_an_answer_that_came_late_is_followed_by_the_next_renewal_at_once() -> None:
    run = Run()
    run.core.answered(run.now, run.now + 5, "")
    assert run.core.due() == run.now + 5


def test_an_answer_that_a_later_one_has_overtaken_takes_nothing_back() -> None:
    run = Run()
    run.core.unanswered(100.0, 100.5, "silence")
    run.core.answered(100.6, 100.7, "")
    before = run.grant, run.core.due(), run.core.last
    run.core.answered(100.0, 100.8, "")
    run.core.unanswered(100.0, 100.9, "it lost writes", "era")
    assert (run.grant, run.core.due(), run.core.last) == before
    assert run.core.away == ""
    assert run.core.may_borrow(104.0)


def test_without_an_answer_nothing_more_is_granted() -> None:
    run = Run()
    run.renew()
    before = run.grant
    run.go(0.5)
    assert run.look() == "renew"
    run.core.unanswered(run.now, run.now + 0.05, "it is away")
    assert (run.grant, run.core.away, run.state) == (before, "it is away", "holding")
    assert run.core.due() == run.now + ORDER.heartbeat
    run.core.unanswered(run.now, run.now + 1, "it is away")
    assert run.core.due() == run.now + 1 + ORDER.heartbeat / 4


def test_when_the_store_may_answer_again_it_is_asked_at_once() -> None:
    run = Run()
    run.renew()
    run.core.urge(run.now)
    assert run.look() is None, "it has just answered"
    run.core.unanswered(run.now, run.now, "away")
    run.core.urge(run.now)
    assert run.look() == "renew"


def test_while_the_agent_speaks_it_holds_on() -> None:
    run = Run()
    for _ in range(200):
        run.go(0.5)
        run.speak()
        run.renew(wanted="job a")
    assert (run.state, run.grant.stop_before) == ("holding", 0.0)


def test_an_agent_that_is_silent_for_long_has_its_workers_stopped_in_order() -> None:
    run = Run()
    run.go(ORDER.patience)
    assert run.look() == "renew"
    assert run.state == "holding"
    run.go(0.1)
    assert run.look() == "renew", "they need their time to stop in order"
    assert (run.state, run.grant.stop_before) == ("stopping", run.now)
    assert run.core.departure == Departure("l1", 1, "e1", run.now, False, "its agent was silent for 30 s")


def test_one_without_workers_gives_back_at_once_when_its_agent_was_silent_for_long() -> None:
    core = Core(100.0)
    core.take(100.0, ORDER)
    assert core.look(131.0, dict) is None  # what is decided is written down first
    assert core.look(131.0, dict) == "leave"


@pytest.mark.parametrize("silent", [GIVEN_UP - 0.1, GIVEN_UP + 0.1])
def test_a_node_is_given_up_when_somebody_waits_for_it_after_a_lease_of_silence(silent: float) -> None:
    run = Run()
    run.go(silent - 0.05)
    run.renew(wanted="job a")
    if silent < GIVEN_UP:
        assert run.state == "holding"
        assert not run.core.asks(run.now)
    else:
        assert run.core.asks(run.now)
        assert (run.state, run.grant) == ("giving up", Grant(0.0, run.now))
        assert run.core.departure is not None
        assert run.core.departure.why == "its agent is silent for 3.1 s, and job a waits for it"


def test_it_asks_who_waits_for_it_as_soon_as_its_agent_was_silent_for_a_lease() -> None:
    run = Run()
    run.go(GIVEN_UP - 0.3)
    run.renew()
    assert 100 + GIVEN_UP < run.core.due() < 100 + GIVEN_UP + 0.01, "in the middle of a heartbeat"
    assert not run.core.asks(100 + GIVEN_UP)
    run.now = run.core.due()
    assert run.core.asks(run.now)
    run.renew("job a")
    assert run.state == "giving up"
    spoken = Run()
    spoken.go(GIVEN_UP - 0.3)
    spoken.speak()
    spoken.renew()
    assert spoken.core.due() == 100 + GIVEN_UP - 0.3 + ORDER.heartbeat


def test_nobody_is_given_up_for_nobody() -> None:
    run = Run()
    run.go(GIVEN_UP + 1)
    run.renew()
    assert run.state == "holding"


def test_a_life_that_holds_no_lease_any_more_is_lost() -> None:
    run = Run()
    run.renew()
    before = run.grant
    run.core.refused("it is over")
    run.go(10)
    assert (run.look(), run.state, run.core.away) == (None, "lost", "it is over")
    assert run.grant == before


# --- stopping


def test_stopping_goes_on_whether_the_agent_speaks_or_not() -> None:
    run = stopping()
    stop = run.grant.stop_before
    run.speak()
    run.renew()
    assert (run.state, run.grant.stop_before) == ("stopping", stop)


def test_while_they_are_stopped_workers_have_their_time() -> None:
    run = stopping()
    run.renew()
    assert run.grant.until == run.now - 0.05 + ORDER.fence


def test_who_waits_need_not_wait_for_an_orderly_stop() -> None:
    run = giving_up()
    assert (run.grant.until, run.core.until) == (0.0, 0.0)
    run = stopping()
    run.speak()
    run.renew(wanted="job a")
    assert run.state == "stopping", "its agent is there"


def test_stopping_and_refused_is_lost() -> None:
    run = stopping()
    run.core.refused("it is over")
    assert (run.look(), run.state) == (None, "lost")


def test_when_all_have_stopped_the_lease_is_given_back() -> None:
    run = stopping()
    run.renew()
    run.go(0.1)
    run.obeyed = run.grant.stop_before
    assert run.look() is None
    assert (run.state, run.grant.until) == ("giving up", 0.0)
    assert run.look() is None, "what its shim said was about the stop before"
    run.obeyed = run.now
    assert run.look() == "leave"
    run.core.gave_back()
    assert (run.look(), run.state) == (None, "left")


def test_one_that_does_not_stop_has_its_time_taken_after_the_grace() -> None:
    run = stopping()
    stop = run.now
    run.go(ORDER.grace)
    assert run.look() == "renew"
    run.go(0.1)
    assert run.look() is None
    assert (run.state, run.grant) == ("giving up", Grant(0.0, stop + ORDER.grace + 0.1))
    assert run.core.departure is not None
    assert run.core.departure.why == "its agent was silent for 30 s"


# --- giving up


def test_a_lease_is_given_back_only_when_no_worker_can_run() -> None:
    run = giving_up()
    last = run.now - 0.05 + ORDER.fence
    run.now = last + ORDER.kill
    assert run.look() is None
    run.go(0.01)
    assert run.look() == "leave"


def test_time_that_failsafe_members_lent_counts_as_well_but_no_longer_than_a_fence() -> None:
    run = stopping()
    run.core.lend(POD, run.now + ORDER.fence - 0.5)
    run.core.lend("another", run.now + 100)
    run.renew(wanted="job a")
    stop = run.grant.stop_before
    assert run.core.grant("another").until == 0.0
    run.now = stop + ORDER.fence + ORDER.kill
    assert run.look() is None
    run.go(0.01)
    assert run.look() == "leave"


def test_giving_up_goes_on_whatever_the_agent_says_and_the_store_does() -> None:
    run = giving_up()
    run.speak()
    run.core.take(run.now, ORDER._replace(patience=1000.0))
    assert run.grant.until == 0.0
    run.go(5)
    assert run.look() == "leave"
    run.core.unanswered(run.now, run.now, "away")
    assert run.look() is None
    run.go(ORDER.heartbeat)
    assert run.look() == "leave"
    run.core.refused("it is over")
    assert (run.look(), run.state, run.grant.until) == (None, "lost", 0.0)


@pytest.mark.parametrize("change", [{"life": "l2"}, {"start": 2}, {"era": "e2"}])
def test_an_agent_that_has_joined_since_takes_the_node_up_again(change: dict[str, Any]) -> None:
    for end in ("", "lost", "left"):
        run = giving_up()
        if end == "lost":
            run.core.refused("it is over")
        elif end:
            run.core.gave_back()
        run.core.take(run.now, ORDER._replace(**change))
        run.speak()
        assert (run.state, run.core.departure) == ("holding", None)
        run.renew()
        assert run.grant == Grant(run.now - 0.05 + ORDER.fence, 0.0)


# --- lost


def test_what_is_lost_stays_so_until_there_is_a_new_life() -> None:
    run = Run()
    run.renew()
    run.core.refused("it is over")
    run.speak()
    run.core.take(run.now, ORDER._replace(heartbeat=0.1))
    run.go(100)
    assert (run.look(), run.state) == (None, "lost")
    run.core.take(run.now, ORDER._replace(life="l2"))
    assert (run.state, run.grant, run.core.away, run.core.renewed) == ("holding", NOTHING, "", 0.0)
    run.speak()
    assert run.look() == "renew"


# --- orders


def test_without_an_order_nothing_is_granted_and_nobody_asked() -> None:
    core = Core(100.0, granted={POD: 110.0})
    assert (core.state, core.look(200.0, lambda: {POD: 0.0})) == ("idle", None)
    run = Run()
    run.renew()
    run.core.lend(POD, 110.0)
    run.core.take(run.now, None)
    assert (run.state, run.grant, run.core.until) == ("idle", NOTHING, 0.0)


def test_another_order_for_the_same_life_is_followed_at_once() -> None:
    run = Run()
    run.renew()
    before = run.grant
    run.core.take(run.now, ORDER)
    assert run.look() is None, "it is the same"
    run.core.take(run.now, ORDER._replace(fence=1.5))
    assert (run.look(), run.grant) == ("renew", before)


def test_time_that_failsafe_members_lend_is_that_pods_alone_and_never_shorter() -> None:
    run = Run()
    run.renew()
    run.core.lend(POD, 150.0)
    run.core.lend(POD, 140.0)
    assert run.grant.until == 150.0
    assert run.core.grant("another").until == 100.0 + ORDER.fence
    run.core.lend("another", 101.0)
    assert run.core.grant("another").until == 100.0 + ORDER.fence


# --- one that follows another


def test_what_an_earlier_one_granted_holds() -> None:
    run = Run(granted={POD: 101.0})
    assert run.grant == Grant(101.0, 0.0)
    run.renew()
    assert run.grant.until == 100.0 + ORDER.fence


def test_an_earlier_ones_decision_stands() -> None:
    run = Run(Departure("l1", 1, "e1", 90.0, False, "why"), {POD: 101.0})
    run.speak()
    run.renew()
    assert (run.state, run.grant) == ("stopping", Grant(100.0 + ORDER.fence, 90.0))
    another = Run(Departure("l0", 1, "e1", 90.0, True, "why"))
    assert (another.state, another.core.departure) == ("holding", None)


def test_one_that_follows_on_giving_up_knows_not_how_long_workers_had_time() -> None:
    run = Run(Departure("l1", 1, "e1", 99.0, True, "why"), {POD: 0.0})
    assert run.grant == Grant(0.0, 99.0)
    run.now = 99.0 + ORDER.fence + ORDER.kill
    assert run.look() is None
    run.go(0.01)
    assert run.look() == "leave"


def test_the_shims_are_asked_only_where_the_life_goes() -> None:
    """That reads a user's file for each pod."""
    run = Run()

    def unasked() -> dict[str, float]:
        raise AssertionError("nothing waits for them")

    assert run.core.look(run.now, unasked) == "renew"
    run.core.answered(run.now, run.now, "")
    assert run.core.look(run.now, unasked) is None

"""What the lease process does next, in every cell of its table."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.lease.core import Core, Departure
from nodeagent.lease.grants import NOTHING, Grant, grant_key
from nodeagent.lease.lending import Promises
from nodeagent.lease.withdrawals import Withdrawal, Withdrawals
from tests.unit.lease.build import ORDER

UID = "u-1"
POD = grant_key(UID)
ASKS = ORDER.lease


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

    def renew(self, **waiting: int) -> None:
        """One that is answered after 50 ms. ``waiting``: jobs by uid, with the generation that they wait for."""
        assert self.look() == "renew"
        self.now += 0.05
        self.core.answered(self.now - 0.05, self.now, waiting)

    def speak(self, cut_off: bool = False, **standing: int) -> None:
        self.core.agent_seen(self.now, cut_off, standing)

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
    """Its shim has stopped its workers, which had time for another 1.95 s."""
    run = stopping()
    run.renew()
    run.obeyed = run.grant.stop_before
    assert run.look() is None
    assert run.state == "giving up"
    return run


def letting_go(**changes: Any) -> Run:
    """A job waits for generation 4, and its agent has been silent for a lease; its workers had time until then."""
    run = Run(**changes)
    run.renew()
    run.go(ASKS)
    run.renew(**{UID: 4})
    assert run.core.withdrawn == Withdrawals("l1", {UID: Withdrawal(4, run.now)})
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
    run.core.answered(run.now, run.now + 5)
    assert run.core.due() == run.now + 5


def test_an_answer_that_a_later_one_has_overtaken_takes_nothing_back() -> None:
    run = Run()
    run.core.unanswered(100.0, 100.5, "silence")
    run.core.answered(100.6, 100.7)
    before = run.grant, run.core.due(), run.core.last
    run.core.answered(100.0, 100.8)
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
        run.renew(**{UID: 4})
    assert (run.state, run.grant.stop_before, run.core.withdrawn.jobs) == ("holding", 0.0, {})


def test_an_agent_that_is_silent_for_long_has_its_workers_stopped_in_order() -> None:
    run = Run()
    run.go(ORDER.patience)
    assert run.look() == "renew"
    assert run.state == "holding"
    run.go(0.1)
    assert run.look() == "renew", "they need their time to stop in order"
    assert (run.state, run.grant.stop_before) == ("stopping", run.now)
    assert run.core.departure == Departure("l1", 1, "e1", run.now, False, "its agent was silent for 30 s")


def test_while_the_machine_is_suspended_nobody_is_silent() -> None:
    """A laptop that was shut for an hour left its cluster, since its agent had been "silent for 3600 s"."""
    run = Run()
    run.renew()
    run.go(3600)
    run.core.woke(run.now, 3600.0)
    run.renew()
    assert (run.state, run.core.departure) == ("holding", None)
    run.go(ORDER.patience - 1)
    run.core.woke(run.now, 2.0 * ORDER.patience)
    run.renew()
    run.go(ORDER.patience + 0.1)
    assert run.look() == "renew"
    assert run.state == "stopping", "its agent's silence counts from the end of the suspension at the latest"


def test_one_without_workers_gives_back_at_once_when_its_agent_was_silent_for_long() -> None:
    core = Core(100.0)
    core.take(100.0, ORDER)
    assert core.look(131.0, dict) is None  # what is decided is written down first
    assert core.look(131.0, dict) == "leave"


def test_it_asks_who_waits_for_it_as_soon_as_its_agent_was_silent_for_a_lease() -> None:
    run = Run()
    run.go(ASKS - 0.3)
    run.renew()
    assert 100 + ASKS < run.core.due() < 100 + ASKS + 0.01, "in the middle of a heartbeat"
    assert not run.core.asks(100 + ASKS)
    run.now = run.core.due()
    assert run.core.asks(run.now)
    run.renew(**{UID: 4})
    assert UID in run.core.withdrawn.jobs
    spoken = Run()
    spoken.go(ASKS - 0.3)
    spoken.speak()
    spoken.renew()
    assert spoken.core.due() == 100 + ASKS - 0.3 + ORDER.heartbeat


def speaks_cut_off(run: Run, seconds: float, *, late: bool = False) -> None:
    """For so long the agent says with each renewal that the store does not answer it."""
    end = run.now + seconds
    while run.now < end:
        run.go(max(0.0, run.core.due() - run.now))
        run.speak(True)
        assert run.look() == "renew"
        sent = run.now
        run.go(ORDER.timeout + 0.01 if late else 0.05)
        run.core.answered(sent, run.now, {UID: 4} if run.core.asks(sent) else {})


def test_it_asks_when_its_agent_was_cut_off_for_a_lease_and_does_not_leave_for_it() -> None:
    run = Run()
    run.renew()
    speaks_cut_off(run, ASKS - 2 * ORDER.heartbeat)
    assert not run.core.withdrawn.jobs
    assert not run.core.asks(100 + ASKS) and run.core.asks(100 + ASKS + 0.01), "from its last word that it was not"
    speaks_cut_off(run, 3 * ORDER.heartbeat)
    assert UID in run.core.withdrawn.jobs
    speaks_cut_off(run, 2 * ORDER.patience)
    assert (run.state, run.core.asks(run.now)) == ("holding", True)
    run.speak()
    assert not run.core.asks(run.now)


def test_a_renewal_goes_in_the_middle_of_a_heartbeat_when_the_agent_has_been_cut_off_for_a_lease() -> None:
    run = Run()
    run.go(ASKS - 0.3)
    run.core.answered(99.9, 100.0)
    run.speak(cut_off=True)
    run.renew()
    assert 100 + ASKS < run.core.due() < 100 + ASKS + 0.01


def test_while_the_store_answers_nobody_or_late_an_agent_does_not_count_as_cut_off() -> None:
    run = Run()
    run.renew()
    for _ in range(40):
        run.go(1.0)
        run.speak(cut_off=True)
        run.core.unanswered(run.now, run.now + 0.5, "silence")
        assert not run.core.asks(run.now)
    run.go(1.0)
    speaks_cut_off(run, 2 * ASKS, late=True)
    assert not run.core.asks(run.now)
    run.go(max(0.0, run.core.due() - run.now))
    back = run.now
    speaks_cut_off(run, ASKS - 2 * ORDER.heartbeat)
    assert not run.core.asks(back + ASKS) and run.core.asks(back + ASKS + 0.01), "from the first answer on"


def test_a_store_that_answers_here_but_too_late_for_the_agent_is_a_reason_when_the_agents_patience_is_over() -> None:
    """Nothing of a job that waits can be reported from here, however long that lasts."""
    run = Run()
    speaks_cut_off(run, ORDER.patience - 2 * ORDER.heartbeat, late=True)
    assert not run.core.asks(100 + ORDER.patience) and run.core.asks(100 + ORDER.patience + 0.01)
    assert not run.core.withdrawn.jobs
    speaks_cut_off(run, 4 * ORDER.heartbeat, late=True)
    assert (run.state, run.core.asks_for_lateness(run.now)) == ("holding", True)
    assert UID in run.core.withdrawn.jobs
    run.speak()
    assert not run.core.asks(run.now)


def test_one_whose_agent_is_silent_asks_for_no_lateness() -> None:
    run = Run()
    run.renew()
    run.go(ORDER.patience + 0.1)
    run.core.answered(run.now, run.now + 0.01)
    assert run.core.asks(run.now) and not run.core.asks_for_lateness(run.now)


def test_the_agent_has_all_of_its_patience_anew_where_the_store_has_answered_nobody_for_a_lease() -> None:
    run = Run()
    speaks_cut_off(run, ORDER.patience - 2 * ORDER.heartbeat, late=True)
    run.go(ORDER.lease + 0.1)
    run.speak(cut_off=True)
    assert not run.core.asks(run.now), "it answers nobody"
    back = run.now
    speaks_cut_off(run, ORDER.patience, late=True)
    assert not run.core.asks(back + ORDER.patience) and run.core.asks(back + ORDER.patience + 0.01)


def test_where_a_renewal_is_due_with_each_answer_a_job_is_let_go_in_turn_with_them() -> None:
    """The answers of a store that is far come later than a heartbeat: it did nothing but renew."""
    run = letting_go()
    run.obeyed = run.now

    def answered() -> None:
        run.go(max(0.0, run.core.due() - run.now))
        assert run.look() == "renew"
        sent = run.now
        run.go(2 * ORDER.heartbeat)
        run.core.answered(sent, run.now)
        assert run.core.due() == run.now

    answered()
    assert run.look() == "let go"
    run.core.unanswered(run.now, run.now + ORDER.timeout, "silence")
    answered()
    assert run.look() == "let go"
    run.core.let_go({})
    answered()
    assert run.look() == "let go"
    run.core.let_go({UID: 4})
    answered()
    assert run.look() == "renew"


def test_who_is_cut_off_and_silent_is_waited_for_no_longer() -> None:
    run = Run()
    run.renew()
    speaks_cut_off(run, ORDER.heartbeat)
    run.go(ORDER.patience + 1)
    assert run.look() == "renew"
    assert run.state == "stopping"


def test_what_the_agent_names_is_as_of_its_last_word() -> None:
    run = Run()
    run.speak(True, **{UID: 4})
    assert run.core.standing == {UID: 4}
    run.speak(True)
    assert run.core.standing == {}
    run.speak(True, **{UID: 4})
    run.speak()
    assert run.core.standing == {}, "the store answers it, so it may start what it has named"


def test_nothing_is_let_go_for_nobody() -> None:
    run = Run()
    run.go(ASKS + 1)
    run.renew()
    assert (run.state, run.core.withdrawn.jobs) == ("holding", {})


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
    run.renew(**{UID: 4})
    assert run.grant.until > run.now, "its agent is there"
    run = stopping()
    run.renew(**{UID: 4})
    assert (run.state, run.grant) == ("stopping", Grant(0.0, run.now, 4.0))
    assert run.core.grant("another").until > run.now


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
    run.renew()
    run.obeyed = run.grant.stop_before
    assert run.look() is None
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


# --- letting go of one job


@pytest.mark.parametrize("silent", [ASKS - 0.1, ASKS + 0.1])
def test_a_jobs_time_is_taken_back_when_it_waits_after_a_lease_of_silence_and_no_other_jobs(silent: float) -> None:
    run = Run()
    run.go(silent - 0.05)
    run.renew(**{UID: 4})
    if silent < ASKS:
        assert not run.core.asks(run.now)
        assert run.grant == Grant(run.now - 0.05 + ORDER.fence)
    else:
        assert run.core.asks(run.now)
        assert run.grant == Grant(0.0, run.now, 4.0)
    assert run.core.grant("another") == Grant(run.now - 0.05 + ORDER.fence)
    assert (run.state, run.core.departure) == ("holding", None)


def test_a_job_is_let_go_when_its_shim_says_that_nothing_runs() -> None:
    run = letting_go()
    assert run.core.awaits_shims
    assert run.look() is None
    run.obeyed = run.grant.stop_before
    assert run.look() == "let go"
    assert run.core.free_of(run.now, lambda: {POD: run.obeyed}) == (UID, 4)
    run.core.let_go({UID: 4})
    assert (run.look(), run.core.awaits_shims) == (None, False)
    assert run.grant == Grant(run.now - 0.05 + ORDER.fence, run.obeyed, 4.0), "for newer generations it has time again"


def test_a_job_is_let_go_when_its_time_is_over_whatever_its_shim_says() -> None:
    run = letting_go()
    end = run.now + ORDER.fence + ORDER.kill
    while run.now <= end:
        if run.look() == "renew":
            run.core.answered(run.now, run.now, {UID: 4})
        assert run.core.free_of(run.now, lambda: {POD: 0.0}) is None
        assert run.grant.until == 0.0
        run.go(0.1)
    assert run.core.free_of(run.now, lambda: {POD: 0.0}) == (UID, 4)


def test_one_without_a_pod_here_is_let_go_at_once() -> None:
    run = letting_go()
    assert run.core.look(run.now, dict) == "let go"


def test_nothing_is_let_go_before_what_was_promised_is_over() -> None:
    run = letting_go()
    run.core.promises = Promises("b", 0.0, True, {UID: run.now + 0.4, "another": run.now + 100.0})
    run.obeyed = run.grant.stop_before
    assert run.look() is None
    run.go(0.4)
    assert run.look() == "let go"


def test_a_store_that_does_not_answer_is_asked_again_later() -> None:
    run = letting_go()
    run.obeyed = run.grant.stop_before
    assert run.look() == "let go"
    run.core.unanswered(run.now, run.now + 0.1, "it is away")
    assert run.look() is None
    run.go(ORDER.heartbeat)
    assert run.look() == "renew", "first, who may run"
    run.core.answered(run.now, run.now)
    assert run.look() == "let go"


def test_it_is_let_go_whether_its_agent_speaks_or_not() -> None:
    run = letting_go()
    run.speak()
    run.core.take(run.now, ORDER._replace(start=2, era="e2"))
    assert run.grant.until == 0.0
    run.obeyed = run.grant.stop_before
    run.core.answered(run.now, run.now)
    assert run.look() == "let go"


def test_a_newer_generation_is_let_go_anew_and_an_older_one_changes_nothing() -> None:
    run = letting_go()
    first = run.core.withdrawn
    run.core.answered(run.now, run.now + 0.1, {UID: 3})
    run.core.answered(run.now, run.now + 0.1, {UID: 4})
    assert run.core.withdrawn == first
    run.core.let_go({UID: 3})
    assert run.core.withdrawn == first
    run.core.let_go({UID: 4})
    run.core.answered(run.now, run.now + 0.2, {UID: 7})
    assert run.core.withdrawn.jobs[UID] == Withdrawal(7, run.now + 0.2)
    run.core.let_go({UID: 4})
    assert not run.core.withdrawn.jobs[UID].over


def test_a_store_that_has_lost_it_is_asked_once_more() -> None:
    run = letting_go()
    run.core.let_go({UID: 4})
    began = run.core.withdrawn.jobs[UID].at
    run.core.answered(run.now, run.now + 0.1, {UID: 4})
    assert run.core.withdrawn.jobs[UID] == Withdrawal(4, began)


def test_the_next_lease_process_goes_on_with_it_and_another_life_begins_anew() -> None:
    before = Withdrawals("l1", {UID: Withdrawal(4, 99.0)})
    core = Core(100.0, None, {POD: 101.0}, 99.5, before)
    core.take(100.0, ORDER)
    assert core.grant(POD) == Grant(0.0, 99.0, 4.0)
    core.answered(100.0, 100.0)
    assert core.look(100.1, lambda: {POD: 99.0}) == "let go"
    core.take(100.2, ORDER._replace(life="l2"))
    core.answered(100.2, 100.2)
    assert core.grant(POD).barred == 0.0


def test_while_the_node_leaves_a_job_that_it_lets_go_has_no_more_time_than_others() -> None:
    run = stopping()
    run.renew(**{UID: 4})
    run.core.let_go({UID: 4})
    assert run.grant.until > run.now
    run.obeyed = run.grant.stop_before
    assert run.look() is None
    assert (run.state, run.grant) == ("giving up", Grant(0.0, run.now, 4.0))


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


def test_a_life_is_one_nodes_and_no_other_nodes_renewal_grants_its_pods_time() -> None:
    run = Run()
    run.renew()
    run.core.lend(POD, run.now + 1.0)
    granted = run.grant
    for start in (2, 3):  # a node that was renamed, and the next agent of it
        run.core.take(run.now, ORDER._replace(node="renamed", start=start))
        run.speak()
        run.go(ORDER.heartbeat)
        assert (run.look(), run.state, run.grant) == (None, "lost", granted), "nothing is asked for it"
        assert "n1" in run.core.away
        assert "renamed" in run.core.away
        run.core.answered(run.now, run.now)
        assert (run.grant, run.core.may_borrow(run.now)) == (granted, False)
    run.core.take(run.now, ORDER._replace(start=4))
    run.renew()
    assert run.grant.until == run.now - 0.05 + ORDER.fence, "for its own node"


def test_what_one_life_was_granted_or_lent_is_not_the_next_ones() -> None:
    run = Run()
    run.renew()
    run.core.lend(POD, 150.0)
    run.core.take(run.now, ORDER._replace(node="renamed", life="l2"))
    assert (run.state, run.grant) == ("holding", NOTHING)
    run.renew()
    assert run.grant == Grant(run.now - 0.05 + ORDER.fence, 0.0)


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
    run.core.answered(run.now, run.now)
    assert run.core.look(run.now, unasked) is None

"""While the store is away: whom a lease process asks, what it makes of the answers, and what it promises itself."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from nodeagent.lease.core import Core, Departure
from nodeagent.lease.failsafe import RESEND, WHY_MAX, Failsafe, Question
from nodeagent.lease.lending import Ask, LoanAnswer, Promises, Table
from nodeagent.lease.withdrawals import Withdrawal, Withdrawals
from tests.unit.lease.build import FAILSAFE_MEMBERS, ORDER, PLACES, TOKEN, UID, ask, row, table

YES = LoanAnswer(True)


class Bench:
    """n1's, whose last renewal was sent at 100, and its one job."""

    def __init__(self, known: Table | None = None, departure: Departure | None = None, **changes: Any) -> None:
        self.now, numbers = 100.0, count(1)
        self.core = Core(self.now, departure, {"p1": 102.0}, self.now)
        self.core.take(self.now, ORDER._replace(**changes))
        self.failsafe = Failsafe(self.core, Promises("b", 0.0, True, {}), lambda: f"q{next(numbers)}")
        self.failsafe.table = table() if known is None else known
        self.written: list[Promises] = []
        """Each time that promises were written down."""

    def go(self, seconds: float) -> list[Question]:
        self.now += seconds
        return self.failsafe.questions(self.now)

    def own(self, question: Ask, then: Table | None = None) -> LoanAnswer:
        """Its answer; ``then``: the table as it is by the time that the promise is written."""
        steps = self.failsafe.answer(question, self.now)
        try:
            promises = next(steps)
            self.written += [promises] if promises is not None else []
            steps.send(self.failsafe.table if then is None else then)
        except StopIteration as end:
            shown: LoanAnswer = end.value
            return shown
        raise AssertionError("it does not come to an end")

    def reply(self, question: Question, shown: LoanAnswer | None = None) -> None:
        """The failsafe member that is asked says this, or yes."""
        ask = question.ask
        self.failsafe.answered(question.nonce, (shown or YES)._replace(node=ask.to, life=ask.to_life))

    @property
    def until(self) -> float:
        return self.core.grant("p1").until


# --- as a member


def test_when_every_failsafe_member_says_yes_its_workers_run_on() -> None:
    b = Bench()
    assert b.go(ORDER.failsafe - 0.01) == [], "not at the first missed renewal"
    assert b.failsafe.due() == 101.0
    asked = b.go(0.01)
    own = Ask(UID, TOKEN, FAILSAFE_MEMBERS, "n1", "l1", "n1", "l1")
    assert [(q.address, q.ask) for q in asked] == [
        ("", own),
        ("10.0.0.2:29400", own._replace(to="n2", to_life="l2")),
        ("10.0.0.3:29400", own._replace(to="n3", to_life="l3")),
    ]
    b.now += 0.2
    for question in asked[:2]:
        b.reply(question)
        assert (b.until, b.failsafe.lent) == (102.0, {}), "not before all have said it"
    b.reply(asked[2])
    assert b.until == 101.0 + ORDER.fence, "counted from before they were asked"
    assert b.core.grant("another").until == 0.0, "this pod only"
    assert b.failsafe.lent == {UID: b.until}


def test_it_asks_again_each_heartbeat_and_at_once_what_is_not_answered() -> None:
    b = Bench()
    first = b.go(1.0)
    b.reply(first[0])
    assert b.failsafe.due() == 101.0 + RESEND
    assert b.go(RESEND - 0.01) == []
    assert b.go(0.01) == first[1:], "the very same questions"
    for question in first[1:]:
        b.reply(question)
    assert b.failsafe.due() == 101.5
    assert b.go(0.3) == []
    second = b.go(0.1)
    assert [q.ask for q in second] == [q.ask for q in first]
    assert not {q.nonce for q in first} & {q.nonce for q in second}
    for question in first:
        b.reply(question)
    assert b.until == 101.0 + ORDER.fence, "old answers say nothing"


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (None, "n3 does not answer"),
        (LoanAnswer(False, "the store answers n3", "n3", "l3"), "the store answers n3"),
        (LoanAnswer(True, "", "n2", "l2"), "n2 answers at the address of n3"),
        (LoanAnswer(True, "", "n3", "before"), "n3 answers at the address of n3"),
        (LoanAnswer(True), "somebody else answers at the address of n3"),
        (LoanAnswer(False, "x" * 1000), "x" * WHY_MAX),
    ],
)
def test_one_no_or_one_silence_and_nothing_is_lent(shown: LoanAnswer | None, why: str) -> None:
    b = Bench()
    one, two, three = b.go(1.0)
    b.reply(one)
    b.reply(two)
    if shown is not None:
        b.failsafe.answered(three.nonce, shown)
    again = b.go(ORDER.heartbeat)
    assert (b.until, b.failsafe.lent, b.failsafe.refusals) == (102.0, {}, {UID: why})
    for question in again:
        b.reply(question)
    assert (b.failsafe.refusals, b.failsafe.lent) == ({}, {UID: 101.5 + ORDER.fence})


def test_why_its_workers_were_stopped_is_reported_until_the_store_answers() -> None:
    b = Bench(table({UID: row(failsafe_members={})}))
    b.go(1.0)
    b.failsafe.table = table({UID: row(failsafe_members={}, pod="")})
    assert b.go(5.0) == []
    assert b.failsafe.refusals == {UID: "this generation has no failsafe members"}
    assert b.failsafe.due() == b.now + ORDER.heartbeat
    b.core.answered(b.now, b.now)
    assert b.go(0.1) == []
    assert (b.failsafe.refusals, b.failsafe.due()) == ({}, float("inf"))


def test_what_cannot_be_asked_for_is_not_lent() -> None:
    nobody = Bench(table({UID: row(failsafe_members={})}))
    assert nobody.go(1.0) == []
    assert nobody.failsafe.refusals == {UID: "this generation has no failsafe members"}
    mute = Bench(table({UID: row(places={"n3": PLACES["n3"]})}))
    assert mute.go(1.0) == []
    assert mute.failsafe.refusals == {UID: "n2 does not answer"}


@pytest.mark.parametrize(
    "bench",
    [
        Bench(table({UID: row(pod="")})),
        Bench(table({})),
        Bench(table(life="another")),
        Bench(table(node="n2")),
        Bench(departure=Departure("l1", 1, "e1", 90.0, True, "it goes")),
    ],
    ids=["nothing runs", "no job", "another life", "another node", "its time is taken back"],
)
def test_nobody_is_asked_for_what_does_not_run(bench: Bench) -> None:
    assert bench.go(1.0) == []
    assert (bench.failsafe.refusals, bench.failsafe.due()) == ({}, float("inf"))


def test_before_it_knows_anything_it_asks_and_promises_nothing() -> None:
    core = Core(100.0, renewed=50.0)
    failsafe = Failsafe(core, Promises("b", 0.0, True, {}), lambda: "q")
    for _ in range(2):
        assert failsafe.questions(100.0) == []
        with pytest.raises(StopIteration) as shown:
            next(failsafe.answer(ask(), 100.0))
        assert shown.value.value == LoanAnswer(False, "the node that was asked knows no jobs yet")
        core.take(100.0, ORDER)


def test_one_whose_life_is_lost_asks_nobody_and_lends_nothing() -> None:
    b = Bench()
    b.core.refused("this life is over")
    assert b.go(2.0) == []
    assert b.own(ask()) == LoanAnswer(False, "n1 is leaving", "n1", "l1")


def test_while_its_workers_end_in_order_it_lends_on_but_asks_nobody() -> None:
    b = Bench(departure=Departure("l1", 1, "e1", 90.0, False, "its agent is silent"))
    assert b.go(1.0) == []
    assert b.own(ask()).yes


def test_what_it_has_let_go_it_lends_nothing_and_asks_for_nothing() -> None:
    b = Bench()
    b.core.withdrawn = Withdrawals("l1", {UID: Withdrawal(TOKEN[0], b.now, True)})
    assert b.go(1.0) == []
    assert b.own(ask()) == LoanAnswer(False, "n1 has let go of generation 4", "n1", "l1")
    b.core.withdrawn = Withdrawals("l1", {UID: Withdrawal(TOKEN[0] - 1, b.now, True)})
    assert len(b.go(ORDER.heartbeat)) == 3, "that was an older one"
    assert b.own(ask()).yes


@pytest.mark.parametrize("code", ["era", "unknown"])
def test_one_without_an_agent_asks_nobody_once_the_store_has_lost_writes(code: str) -> None:
    """Nobody tells the store what runs here, and it does not wait for that for ever."""
    b = Bench()
    b.core.unanswered(b.now, b.now, "it was emptied", code)
    assert len(b.go(ORDER.lease)) == 3, "its agent was heard a moment ago"
    b.core.unanswered(b.now, b.now, "no answer")
    assert b.go(ORDER.heartbeat) == []
    assert "has no agent to tell" in b.failsafe.refusals[UID]
    b.core.agent_seen(b.now)
    assert len(b.go(ORDER.heartbeat)) == 3
    b.core.unanswered(b.now, b.now, "something else", "version")
    assert len(b.go(ORDER.lease + 0.1)) == 3, "it lost nothing"


def test_what_was_asked_for_is_not_granted_to_what_has_come_since() -> None:
    b = Bench()
    asked = b.go(1.0)
    b.failsafe.table = table({UID: row(token=(5, "g5"))})
    for question in asked:
        b.reply(question)
    assert (b.until, b.failsafe.lent) == (102.0, {})


def test_when_the_store_answers_again_nothing_is_lent_any_more() -> None:
    b = Bench()
    for question in b.go(1.0):
        b.reply(question)
    b.go(0.5)
    b.core.answered(b.now, b.now)
    assert b.go(0.1) == []
    assert (b.failsafe.lent, b.failsafe.refusals) == ({}, {})


def test_no_longer_than_the_limit_over_its_own_restarts_too() -> None:
    b = Bench()
    assert b.go(ORDER.failsafe_limit)
    assert b.go(0.01) == []
    assert b.failsafe.refusals == {UID: "the store has been away for longer than failsafe_limit (1000 s)"}
    assert b.failsafe.due() > b.now
    core = Core(b.now, granted={"p1": 102.0}, renewed=100.0)
    core.take(b.now, ORDER)
    later = Failsafe(core, Promises("b", 0.0, True, {}), lambda: "q")
    later.table = table()
    assert later.questions(b.now) == []
    assert core.last == 100.0


# --- as a failsafe member


def test_its_yes_is_written_down_first() -> None:
    b = Bench()
    assert b.own(ask()) == LoanAnswer(False, "the store answers n1", "n1", "l1")
    assert b.written == []
    b.now += 1.0
    steps = b.failsafe.answer(ask(), b.now)
    promises = next(steps)
    assert promises is not None
    assert promises.until == {UID: b.now + ORDER.promise + ORDER.heartbeat / 2}
    assert not b.core.promises.until, "it may not have been possible"
    with pytest.raises(StopIteration):
        steps.send(table())
    assert b.core.promises == promises
    assert b.own(ask()) == LoanAnswer(True, "", "n1", "l1")


def test_each_yes_is_covered_though_not_each_is_written() -> None:
    b = Bench(table({UID: row(), "u-2": row()}))
    b.now += 1.0
    assert b.own(ask()).yes
    b.now += ORDER.heartbeat / 2
    assert b.own(ask()).yes
    assert len(b.written) == 1, "what is written covers it"
    b.now += 0.01
    assert b.own(ask(uid="u-2")).yes
    assert b.own(ask()).yes
    assert len(b.written) == 3
    assert b.written[-1].until.keys() == {UID, "u-2"}
    assert b.written[-1].until[UID] >= b.now + ORDER.promise
    b.now += 100
    assert b.own(ask()).yes
    assert b.written[-1].until.keys() == {UID}, "what is over is forgotten"


@pytest.mark.parametrize("then", [table({}), table(leaving=True), table({UID: row(refuses="gives it up")})])
def test_a_yes_is_not_given_if_the_agent_has_let_go_meanwhile(then: Table) -> None:
    b = Bench()
    b.now += 1.0
    assert not b.own(ask(), then).yes
    assert not b.own(ask()).yes, "it goes by the new one now"


def test_a_lease_is_not_given_back_before_its_promises_are_over() -> None:
    b = Bench(departure=None)
    b.now += 1.0
    assert b.own(ask()).yes
    promised = b.core.promises.until[UID]
    b.core._depart(b.now, True, "it goes")
    assert not b.own(ask()).yes
    b.now = promised - 0.01
    assert b.core.look(b.now, dict) is None
    assert b.core.look(promised, dict) == "leave"


def test_one_that_follows_knows_what_was_promised_before() -> None:
    core = Core(100.0, Departure("l1", 1, "e1", 90.0, True, "it goes"), {}, 50.0)
    Failsafe(core, Promises("b", 0.0, True, {UID: 103.0}), lambda: "q")
    core.take(100.0, ORDER)
    assert core.look(102.9, dict) is None
    assert core.look(103.0, dict) == "leave"

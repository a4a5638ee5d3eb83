"""What a failsafe member answers, and how long its promises bind it."""

from __future__ import annotations

import pytest

from nodeagent.lease.lending import Ask, LoanAnswer, Promises, answer
from nodeagent.model.timing import Timing
from tests.unit.lease.build import FAILSAFE_MEMBERS, UID, ask, row, table

TIMING = Timing()
UNSERVED = TIMING.heartbeat + TIMING.store_timeout / 2
LENGTH = 3.0


def answer_to(question: Ask, jobs: dict[str, object] | None = None, renewed: float = 1.0, **more: object) -> LoanAnswer:
    return answer(table(jobs, **more), question, renewed, UNSERVED)  # type: ignore[arg-type]


def test_a_failsafe_member_lends_to_members_of_the_generation_it_knows_as_active() -> None:
    assert answer_to(ask()) == LoanAnswer(True, "", "n1", "l1")
    assert answer_to(ask(node="n1", life="l1")).yes, "its own workers too"


@pytest.mark.parametrize("question", [ask(uid="u-other"), ask(token=(3, "g3")), ask(token=(4, "another history"))])
def test_nothing_is_lent_to_a_generation_it_does_not_know(question: Ask) -> None:
    why = f"n1 does not know generation {question.token[0]} as active"
    assert answer_to(question) == LoanAnswer(False, why, "n1", "l1")


def test_both_must_know_the_same_failsafe_members() -> None:
    other = "n1 knows other failsafe members of generation 4"
    assert answer_to(ask(failsafe_members={"n1": "l1", "n2": "l2"})).why == other
    assert answer_to(ask(failsafe_members=FAILSAFE_MEMBERS | {"n3": "an earlier life"})).why == other
    others = {"n2": "l2", "n3": "l3"}
    assert answer_to(ask(failsafe_members=others), {UID: row(failsafe_members=others)}).why == other, "it is none"


def test_only_members_in_their_life_are_lent_to() -> None:
    assert answer_to(ask(node="n3", life="l3")).why == "n1 does not know n3 as a member of generation 4"
    assert answer_to(ask(life="an earlier life")).why == "n1 does not know n2 as a member of generation 4"


@pytest.mark.parametrize("to", [{"to": "n3"}, {"to_life": "before"}, {"to": "", "to_life": ""}])
def test_a_question_to_another_is_answered_no(to: dict[str, str]) -> None:
    assert answer_to(ask(**to)).why == f"n1 was asked in the place of {to.get('to', 'n1')}"


def test_one_that_goes_or_gives_up_being_a_failsafe_member_lends_nothing() -> None:
    assert answer_to(ask(), leaving=True).why == "n1 is leaving"
    assert answer_to(ask(), {UID: row(refuses="is tired")}).why == "n1 is tired"


def test_a_failsafe_member_that_the_store_answers_says_no() -> None:
    """The store may let the asker lapse, and its workers have to end then."""
    assert answer_to(ask(), renewed=UNSERVED).why == "the store answers n1"
    assert answer_to(ask(), renewed=UNSERVED + 0.01).yes
    assert TIMING.failsafe > UNSERVED, "by the time that members ask, failsafe members who are cut off too say yes"


# --- promises


def test_a_promise_binds_until_its_end_and_what_is_not_known_for_its_whole_length() -> None:
    promises = Promises("b", 100.0, True, {UID: 112.0})
    assert promises.end(UID, LENGTH, True) == promises.end(UID, LENGTH, False) == 112.0
    assert promises.end("u-2", LENGTH, True) == 0.0, "in this life nothing was promised"
    assert promises.end("u-2", LENGTH, False) == 103.0, "in an earlier one there may have been something"
    assert promises._replace(whole=False).end("u-2", LENGTH, True) == 103.0
    assert (promises.last(LENGTH), promises._replace(until={}).last(LENGTH)) == (112.0, 103.0)


def test_lent_time_is_over_before_its_promise() -> None:
    assert TIMING.fence * 1.02 + TIMING.kill <= TIMING.promise

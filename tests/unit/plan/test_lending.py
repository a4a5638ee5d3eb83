"""What a keeper answers, and how long its promises bind it."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.timing import Timing
from nodeagent.model.world import Token
from nodeagent.plan.lending import Ask, Promises, answer
from tests.unit.plan.build import UID, life, make_cluster, make_head, make_job

TIMING = Timing()
AWAY = 1.0
"""Seconds without a renewal."""
KEEPERS = ("n1", "n2", "n3")


def job(**more: Any) -> JobRecord:
    return make_job("running", make_head(["n1", "n2"], number=4), keepers=KEEPERS).model_copy(update=more)


def ask(**more: Any) -> Ask:
    plain: dict[str, Any] = {
        "uid": UID, "token": Token(number=4, id="g4"), "keepers": {n: life(n) for n in KEEPERS}, "node": "n2",
        "life": life("n2"),
    }  # fmt: skip
    return Ask.model_validate(plain | more)


def said(question: Ask, known: JobRecord | None = None, node: str = "n1", renewed: float = AWAY) -> tuple[bool, str]:
    found = answer(make_cluster(["n1", "n2", "n3"], known or job()), node, renewed, question)
    return found.yes, found.why


def test_keepers_lend_to_members_of_the_generation_they_know_as_active() -> None:
    for node in KEEPERS:
        assert said(ask(), node=node) == (True, "")
    assert said(ask(node="n1", life=life("n1"))) == (True, ""), "its own workers too"


@pytest.mark.parametrize(
    "question",
    [ask(uid="u-other"), ask(token=Token(number=3, id="g3")), ask(token=Token(number=4, id="another history"))],
)
def test_nothing_is_lent_to_a_generation_it_does_not_know(question: Ask) -> None:
    assert said(question) == (False, f"n1 does not know generation {question.token.number} as active")


def test_nothing_is_lent_once_something_newer_forms_or_the_job_has_ended() -> None:
    old = "n1 does not know generation 4 as active"
    newer = make_job("forming", make_head(["n1", "n2"], state="forming", number=5), active=4, keepers=KEEPERS)
    assert said(ask(), newer) == (False, old)
    forming = make_job("forming", make_head(["n1", "n2"], state="forming", number=4), active=3, keepers=KEEPERS)
    assert said(ask(), forming) == (False, old)
    ended = make_job("stopped", make_head(["n1", "n2"], state="ended", number=4), active=4, keepers=KEEPERS)
    assert said(ask(), ended) == (False, old)
    assert said(ask(), make_job()) == (False, old)


def test_both_must_know_the_same_keepers() -> None:
    other = "n1 knows other keepers of generation 4"
    assert said(ask(keepers={n: life(n) for n in ("n1", "n2")})) == (False, other)
    assert said(ask(keepers={**ask().keepers, "n3": "an earlier life"})) == (False, other)
    assert said(ask(), job(keepers={})) == (False, other)
    assert said(ask(), node="n4") == (False, "n4 knows other keepers of generation 4"), "it is none"


def test_only_members_in_their_life_are_lent_to() -> None:
    assert said(ask(node="n3", life=life("n3")))[0] is False
    yes, why = said(ask(life="an earlier life"))
    assert (yes, why) == (False, "n1 does not know n2 as a member of generation 4")


def test_a_keeper_that_the_store_answers_says_no() -> None:
    """The store may let the asker lapse, and its workers have to end then."""
    bound = TIMING.heartbeat + TIMING.store_timeout / 2
    assert said(ask(), renewed=bound) == (False, "the store answers n1")
    assert said(ask(), renewed=bound + 0.01)[0] is True
    assert bound < TIMING.failsafe, "by the time that members ask, keepers who are cut off too say yes"


# --- promises


FIRST = Incarnation(life=life("n1"), start=1)


def test_a_promise_binds_for_its_whole_length() -> None:
    promises = Promises(TIMING, started=0.0)
    assert promises.end(job(), "n1", FIRST) == 0.0
    promises.give(UID, 100.0)
    assert promises.end(job(), "n1", FIRST) == 100.0 + TIMING.promise
    promises.give(UID, 101.0)
    assert promises.end(job(), "n1", FIRST) == 101.0 + TIMING.promise, "each yes anew"
    assert promises.end(job(uid="u-other"), "n1", FIRST) == 0.0
    assert promises.end(job(keepers={"n2": life("n2")}), "n1", FIRST) == 0.0, "a keeper no more: others let go"


def test_what_an_earlier_process_may_have_promised_binds_the_next() -> None:
    promises = Promises(TIMING, started=50.0)
    until = 50.0 + TIMING.promise
    assert promises.end(job(), "n1", Incarnation(life=life("n1"), start=2)) == until
    assert promises.end(job(), "n1", Incarnation(life="after a boot", start=1)) == until
    assert promises.end(job(), "n1", FIRST) == 0.0, "there was none in this life"
    promises.give(UID, 90.0)
    assert promises.end(job(), "n1", Incarnation(life=life("n1"), start=2)) == 90.0 + TIMING.promise


def test_lent_time_is_over_before_its_promise() -> None:
    assert TIMING.fence * 1.02 + TIMING.kill <= TIMING.promise

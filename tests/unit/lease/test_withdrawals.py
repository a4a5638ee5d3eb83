"""Jobs that a node lets go of: what is kept of them, and what a reply says."""

from __future__ import annotations

import pytest

from nodeagent.lease.withdrawals import MOST, Withdrawal, Withdrawals, jobs_and_numbers

NONE = Withdrawals("l1", {})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("u1 4", {"u1": 4}),
        ("u1 4 u2 17", {"u1": 4, "u2": 17}),
        ("u1", {}),
        ("u1 x u2 5", {"u2": 5}),
        ("u1 -4", {}),
        ("u1 0", {}),
        ("u1 \u0664", {}),
        ("u1 " + "9" * 16, {}),
    ],
)
def test_a_reply_is_pairs_of_a_job_and_a_number(text: str, found: dict[str, int]) -> None:
    assert jobs_and_numbers(text) == found


def test_a_generation_up_to_that_one_is_barred_and_a_newer_one_is_not() -> None:
    some = NONE.begun("u1", 4, 10.0)
    assert [some.barred("u1", number) for number in (3, 4, 5)] == [True, True, False]
    assert not some.barred("u2", 4)
    assert some.ended("u1", 4).barred("u1", 4), "for the rest of the life"


def test_of_those_that_are_over_the_oldest_go_and_of_others_none() -> None:
    some = NONE
    for number in range(MOST):
        some = some.begun(f"u{number}", 1, float(number))
    assert some.begun("another", 1, 1000.0) is some, "it is asked again"
    some = some.ended("u7", 1).ended("u3", 1).begun("another", 1, 1000.0)
    assert len(some.jobs) == MOST
    assert "u3" not in some.jobs and some.jobs["another"] == Withdrawal(1, 1000.0)
    assert len(some.pending) == MOST - 1

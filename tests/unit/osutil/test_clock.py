"""What may be spent at once, and in the long run."""

from __future__ import annotations

from pytest import approx

from nodeagent.osutil.clock import Allowance


def test_what_is_beyond_the_burst_has_to_wait() -> None:
    allowance = Allowance(3, 10)
    assert [allowance.spend(1, 5.0) for _ in range(5)] == approx([0.0, 0.0, 0.0, 0.1, 0.2])
    assert allowance.spend(0, 5.1) == approx(0.1)
    assert allowance.spend(0, 5.2) == approx(0.0)
    assert [allowance.spend(1, 1000.0) for _ in range(4)] == approx([0.0, 0.0, 0.0, 0.1]), "no more is saved up"


def test_another_rate_holds_from_then_on() -> None:
    allowance = Allowance(4, 1)
    assert allowance.spend(3, 5.0) == 0
    allowance.change(10, 10, 6.0)
    assert [allowance.may(6.0) for _ in range(3)] == [True, True, False]
    assert [allowance.may(7.0) for _ in range(11)] == [True] * 10 + [False]
    allowance.change(2, 1, 8.0)
    assert [allowance.may(8.0) for _ in range(3)] == [True, True, False]


def test_what_is_refused_costs_nothing() -> None:
    allowance = Allowance(2, 1)
    assert [allowance.may(5.0) for _ in range(50)] == [True, True] + [False] * 48
    assert [allowance.may(6.5), allowance.may(6.5)] == [True, False]

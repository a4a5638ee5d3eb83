"""Timing: the defaults hold, and each broken inequality is named with its numbers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from nodeagent.model.timing import Timing, millis


def test_the_defaults_hold() -> None:
    assert Timing().problems() == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"fence": 2.4}, "fence x 1.02 + credit + kill = 3.148 s is longer than lease = 3.0 s"),
        ({"lease": 2.9}, "is longer than lease = 2.9 s"),
        ({"store_timeout": 0.85}, "heartbeat + 2 x store_timeout = 2.200 s is not below fence = 2.2 s"),
        ({"heartbeat": 0.6}, "heartbeat <= credit < gap does not hold"),
        ({"gap": 0.5}, "heartbeat <= credit < gap does not hold"),
        ({"promise": 2.4}, "fence x 1.02 + kill = 2.444 s is longer than promise = 2.4 s"),
        ({"failsafe": 0.4}, "failsafe = 0.4 s is not within heartbeat = 0.5 s and fence - 2 x heartbeat = 1.200 s"),
        ({"failsafe": 1.3}, "there would be no time to ask the failsafe members"),
        ({"turn": 0.0}, "must be above zero"),
        ({"kill": 0.0}, "must be above zero"),
        ({"form_margin": -1.0}, "must be above zero"),
    ],
)
def test_a_broken_inequality_is_named(values: dict[str, float], named: str) -> None:
    problems = Timing.model_validate(Timing().model_dump() | values).problems()
    assert len(problems) == 1
    assert named in problems[0]


def test_every_problem_is_named_at_once() -> None:
    assert len(Timing(fence=5.0, store_timeout=3.0, gap=0.1, turn=0.0).problems()) == 5


def test_unknown_values_are_refused() -> None:
    with pytest.raises(ValidationError):
        Timing.model_validate({"hartbeat": 1.0})


def test_millis_are_whole() -> None:
    assert [millis(s) for s in (0.5, 0.0004, 0.0006, 2.2)] == [500, 0, 1, 2200]

"""Who comes after others is asked to stop before them."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.shim.grace import Turns

CHAIN: dict[str, dict[str, Any]] = {
    "server": {"after": ()},
    "trainer": {"after": ("server",)},
    "judge": {"after": ["trainer"]},
}


@pytest.mark.parametrize(
    ("living", "asked"),
    [
        (("server", "trainer", "judge"), {"judge"}),
        (("server", "trainer"), {"trainer"}),
        (("server", "judge"), {"judge"}),  # through the trainer, which has ended
        (("server",), {"server"}),
        (("trainer", "judge"), {"judge"}),
    ],
)
def test_a_role_waits_for_those_that_come_after_it(living: tuple[str, ...], asked: set[str]) -> None:
    turns = Turns(CHAIN)
    assert {role for role in living if turns.has_come(role, living)} == asked


def test_a_role_waits_for_workers_elsewhere_until_the_time_is_over() -> None:
    turns = Turns(CHAIN)
    turns.elsewhere = frozenset({"server"})
    assert not turns.has_come("server", ["server"])
    turns.over = True
    assert turns.has_come("server", ["server", "trainer", "judge"])


def test_without_an_order_all_are_asked_at_once() -> None:
    assert Turns({}).has_come("", [""])
    both = {"server": {"after": ()}, "trainer": {"after": ()}}
    assert all(Turns(both).has_come(role, both) for role in both)


def test_a_circle_waits_for_nobody_for_ever() -> None:
    """No job file may have one; then each waits for the other until the time is over."""
    turns = Turns({"a": {"after": ("b",)}, "b": {"after": ("a",)}})
    turns.over = True
    assert turns.has_come("a", ["a", "b"])

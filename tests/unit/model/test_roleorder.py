"""Which roles come after which."""

from __future__ import annotations

from nodeagent.model.roleorder import comes_after


def test_who_comes_after_whom() -> None:
    assert comes_after({"server": (), "trainer": ("server",), "judge": ("trainer",)}) == {
        "server": frozenset(),
        "trainer": frozenset({"server"}),
        "judge": frozenset({"server", "trainer"}),
    }


def test_a_circle_and_an_unknown_name_end_the_search() -> None:
    assert comes_after({"a": ("b",), "b": ("a", "nobody")}) == {"a": frozenset("ab"), "b": frozenset("ab")}

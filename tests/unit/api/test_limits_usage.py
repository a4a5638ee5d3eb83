"""What each user asks of an agent, held to its limits."""

from __future__ import annotations

from nodeagent.api.limits import BURST, REMEMBERED, USERS, Usage, refusal
from nodeagent.spec.sections import LimitsConfig

LIMITS = LimitsConfig(requests=10, concurrent=3, followers=2)


class Clocked(Usage):
    """With a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(lambda: self.now)

    def ask(self, key: int | str = 1, *, follows: bool = False) -> str:
        return self.begin(key, LIMITS, follows=follows)

    def quick(self, count: int, key: int = 1) -> list[str]:
        """So many requests, each answered before the next."""
        answer = []
        for _ in range(count):
            answer.append(self.ask(key))
            if not answer[-1]:
                self.end(key, follows=False)
        return answer


def test_a_flood_is_refused_and_an_ordinary_user_goes_on() -> None:
    usage = Clocked()
    assert usage.quick(BURST * 10 + 5) == [""] * (BURST * 10) + ["requests"] * 5
    assert usage.quick(5, key=2) == [""] * 5
    usage.now += 0.5
    assert usage.quick(7) == [""] * 5 + ["requests"] * 2


def test_requests_under_way_are_bounded() -> None:
    usage = Clocked()
    assert [usage.ask() for _ in range(4)] == ["", "", "", "concurrent"]
    usage.end(1, follows=False)
    assert usage.ask() == ""
    assert usage.ask(2) == ""


def test_followers_are_bounded() -> None:
    usage = Clocked()
    assert [usage.ask(follows=True) for _ in range(3)] == ["", "", "followers"]
    assert usage.ask() == ""
    usage.end(1, follows=True)
    assert usage.ask(follows=True) == ""


def test_who_was_refused_lately_is_known_for_a_while() -> None:
    usage = Clocked()
    usage.ask(2)
    assert usage.quick(BURST * 10 + 1)[-1] == "requests"
    assert usage.refused() == {}, "an operator is served all the same"
    usage.refuse(1, "requests")
    assert usage.refused() == {1: ("requests",)}
    usage.now += REMEMBERED + 1
    assert usage.refused() == {}


def test_the_count_itself_is_bounded() -> None:
    usage = Clocked()
    for key in range(USERS):
        assert usage.ask(key) == ""
    assert usage.ask("one more") == "users"
    usage.end(7, follows=False)
    usage.now += 1
    assert usage.ask("one more") == ""
    assert len(usage) == USERS


def test_every_refusal_names_its_key() -> None:
    for key in ("requests", "concurrent", "followers"):
        error = refusal("bob", key, LIMITS, "n1")
        assert error.status == 429
        assert f"limits.{key}" in error.message
        assert str(getattr(LIMITS, key)) in error.message
        assert error.next_step
    assert "4096 users" in refusal("bob", "users", LIMITS, "n1").message

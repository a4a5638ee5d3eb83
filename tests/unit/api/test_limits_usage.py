"""What each user asks of an agent, held to its limits."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.test_utils import make_mocked_request

from nodeagent.api.limits import BURST, HEAVY_AT_ONCE, REMEMBERED, USERS, Usage, reads_much, refusal, refusal_of_much
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


async def test_requests_that_read_much_take_turns() -> None:
    usage, open_, under_way, most = Clocked(), asyncio.Event(), 0, 0
    assert [usage.ask() for _ in range(3)] == ["", "", ""]
    assert usage.ask(2) == ""

    async def read(key: int) -> None:
        nonlocal under_way, most
        async with usage.turn(key):
            under_way += 1
            most = max(most, under_way)
            await open_.wait()
            under_way -= 1

    async with asyncio.TaskGroup() as tasks:
        for key in (1, 1, 1):
            tasks.create_task(read(key))
        await asyncio.sleep(0.01)
        assert most == HEAVY_AT_ONCE
        tasks.create_task(read(2))
        await asyncio.sleep(0.01)
        assert most == HEAVY_AT_ONCE + 1, "another user's goes on"
        open_.set()
    assert under_way == 0
    assert refusal_of_much("n1").status == 429


@pytest.mark.parametrize(
    ("target", "much"),
    [
        ("/v1/history?limit=3", True),
        ("/v1/events", True),
        ("/v1/events?follow=1", False),
        ("/v1/usage?by=job", True),
        ("/v1/usage", False),
        ("/v1/jobs", False),
    ],
)
def test_which_requests_read_much(target: str, much: bool) -> None:
    request = make_mocked_request("GET", target)
    assert reads_much(request, follows="follow" in target) is much


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

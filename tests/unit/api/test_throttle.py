"""What each user asks of an agent, held to its limits."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from nodeagent.api import auth
from nodeagent.api.auth import CALLER, Caller
from nodeagent.api.errors import ApiError
from nodeagent.api.throttle import (
    BURST,
    HEAVY_AT_ONCE,
    REMEMBERED,
    USERS,
    WORK_BURST,
    WORK_SHARE,
    Throttle,
    Timed,
    reads_much,
    refusal,
    refusal_of_much,
    throttle_middleware,
)
from nodeagent.osutil.subuids import SUBORDINATES, SubordinateUids
from nodeagent.spec.sections import LimitsConfig
from tests.unit.api.fakes import FakeView

LIMITS = LimitsConfig(requests=10, concurrent=3, followers=2)


class Clocked(Throttle):
    """With a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now, self.limits = 100.0, LIMITS
        super().__init__(lambda: self.limits, lambda: self.now)

    def ask(self, key: int | str = 1, *, follows: bool = False) -> str:
        return self.begin(key, follows=follows)

    def quick(self, count: int, key: int = 1) -> list[str]:
        """So many requests, each answered before the next."""
        answer = []
        for _ in range(count):
            answer.append(self.ask(key))
            if not answer[-1]:
                self.end(key, follows=False)
        return answer


def test_a_flood_is_refused_and_an_ordinary_user_goes_on() -> None:
    throttle = Clocked()
    assert throttle.quick(BURST * 10 + 5) == [""] * (BURST * 10) + ["requests"] * 5
    assert throttle.quick(5, key=2) == [""] * 5
    throttle.now += 0.5
    assert throttle.quick(7) == [""] * 5 + ["requests"] * 2


def test_limits_that_a_reload_changes_hold_at_once_for_those_who_ask_already() -> None:
    throttle = Clocked()
    assert throttle.quick(5) == [""] * 5
    throttle.limits = LimitsConfig(requests=1, concurrent=1, followers=2)
    assert throttle.quick(4) == [""] * BURST + ["requests"] * (4 - BURST)
    throttle.now += 1
    assert [throttle.ask(), throttle.ask()] == ["", "concurrent"]
    throttle.limits = LIMITS
    assert throttle.ask() == "requests"
    throttle.now += 1
    assert throttle.quick(11) == [""] * 10 + ["requests"]


def test_requests_under_way_are_bounded() -> None:
    throttle = Clocked()
    assert [throttle.ask() for _ in range(4)] == ["", "", "", "concurrent"]
    throttle.end(1, follows=False)
    assert throttle.ask() == ""
    assert throttle.ask(2) == ""


def test_followers_are_bounded() -> None:
    throttle = Clocked()
    assert [throttle.ask(follows=True) for _ in range(3)] == ["", "", "followers"]
    assert throttle.ask() == ""
    throttle.end(1, follows=True)
    assert throttle.ask(follows=True) == ""


def test_what_keeps_the_loop_is_bounded_however_few_the_requests_are() -> None:
    throttle = Clocked()
    assert throttle.ask() == ""
    throttle.worked(1, WORK_BURST + 0.5)
    assert [throttle.ask(), throttle.ask(2)] == ["work", ""]
    throttle.now += 0.5 / WORK_SHARE - 0.01
    assert throttle.ask() == "work"
    throttle.now += 0.02
    assert throttle.ask() == ""


async def test_each_step_of_an_answer_is_timed() -> None:
    def work() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    async def answer(error: Exception | None) -> str:
        work()
        await asyncio.sleep(0.05)
        work()
        if error is not None:
            raise error
        return "done"

    took: list[float] = []
    assert await Timed(answer(None), took.append) == "done"
    assert len(took) >= 2
    assert 0.04 <= sum(took) < 0.08, "not while it waited"
    with pytest.raises(KeyError, match="why"):
        await Timed(answer(KeyError("why")), took.append)


async def test_what_a_users_request_takes_is_counted_for_the_user(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    throttle, request = Throttle(lambda: view.config.limits, time.monotonic), make_mocked_request("GET", "/v1/jobs")
    request[CALLER] = Caller(uid=1000, gid=1000, name="ann", operator=False, trusted=False, remote=True)

    async def handler(_: web.Request) -> web.StreamResponse:
        until = time.thread_time() + WORK_BURST + 0.1
        while time.thread_time() < until:
            pass
        return web.Response()

    middleware = throttle_middleware(view, throttle, SUBORDINATES)
    assert (await middleware(request, handler)).status == 200
    with pytest.raises(ApiError, match="half of its time"):
        await middleware(request, handler)


async def test_nothing_was_begun_for_a_caller_who_left_before_the_turn_came(tmp_path: Path) -> None:
    """Python warns of work that was made and never awaited, and warnings are errors here."""
    view = FakeView(tmp_path)
    throttle, begun = Throttle(lambda: view.config.limits, time.monotonic), list[str]()
    request = make_mocked_request("GET", "/v1/history")
    request[CALLER] = Caller(uid=1000, gid=1000, name="ann", operator=False, trusted=False, remote=True)

    async def handler(_: web.Request) -> web.StreamResponse:
        begun.append("begun")
        await asyncio.sleep(60)
        return web.Response()

    middleware = throttle_middleware(view, throttle, SUBORDINATES)
    asked = [asyncio.ensure_future(middleware(request, handler)) for _ in range(HEAVY_AT_ONCE + 1)]
    await asyncio.sleep(0.01)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    del asked
    gc.collect()
    assert (len(begun), throttle.under_way(1000)) == (HEAVY_AT_ONCE, (0, 0))


async def test_an_answer_that_is_timed_is_cancelled_and_may_refuse_that() -> None:
    seen: list[str] = []

    async def answer() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("went on")
            raise
        return "never"

    async def outer() -> str:
        return await Timed(answer(), lambda _: None)

    task = asyncio.create_task(outer())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled", "went on"]


async def test_requests_that_read_much_take_turns() -> None:
    throttle, open_, under_way, most = Clocked(), asyncio.Event(), 0, 0
    assert [throttle.ask() for _ in range(3)] == ["", "", ""]
    assert throttle.ask(2) == ""

    async def read(key: int) -> None:
        nonlocal under_way, most
        async with throttle.turn(key):
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
    throttle = Clocked()
    throttle.ask(2)
    assert throttle.quick(BURST * 10 + 1)[-1] == "requests"
    assert throttle.refused() == {}, "an operator is served all the same"
    throttle.refuse(1, "requests")
    assert throttle.refused() == {1: ("requests",)}
    throttle.now += REMEMBERED + 1
    assert throttle.refused() == {}


def test_the_count_itself_is_bounded() -> None:
    throttle = Clocked()
    for key in range(USERS):
        assert throttle.ask(key) == ""
    assert throttle.ask("one more") == "users"
    throttle.end(7, follows=False)
    throttle.now += 1
    assert throttle.ask("one more") == ""
    assert len(throttle) == USERS


def test_every_refusal_names_its_key() -> None:
    for key in ("requests", "concurrent", "followers"):
        error = refusal("bob", key, LIMITS, "n1")
        assert error.status == 429
        assert f"limits.{key}" in error.message
        assert str(getattr(LIMITS, key)) in error.message
        assert error.next_step
    assert "4096 users" in refusal("bob", "users", LIMITS, "n1").message


class Peer(asyncio.Transport):
    """A connection of this uid on a unix socket."""

    family = socket.AF_UNIX

    def __init__(self, uid: int) -> None:
        super().__init__()
        self._uid = uid

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def getsockopt(self, _level: int, _option: int, _size: int) -> bytes:
        """As the kernel names who is at the other end."""
        return struct.pack("3i", 1, self._uid, self._uid)


async def test_what_the_subordinate_uids_of_a_user_ask_for_is_counted_together(tmp_path: Path) -> None:
    (tmp_path / "subuid").write_text("ann:100000:65536\n")
    view = FakeView(tmp_path)
    throttle = Throttle(lambda: view.config.limits, time.monotonic)
    counted: dict[int, tuple[int, int]] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        counted[auth.peer(request)[0]] = throttle.under_way("subordinate uids of ann")
        if request.path == "/v1/jobs":
            await middleware(make_mocked_request("GET", "/v1/nodes", transport=Peer(100_002)), handler)
        return web.Response()

    middleware = throttle_middleware(view, throttle, SubordinateUids(tmp_path / "subuid", time.monotonic))
    await middleware(make_mocked_request("GET", "/v1/jobs", transport=Peer(100_001)), handler)
    assert counted == {100_001: (1, 0), 100_002: (2, 0)}
    assert throttle.under_way("subordinate uids of ann") == (0, 0)

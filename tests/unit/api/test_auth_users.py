"""The database of users: asked in few threads, remembered for a while, never waited for on the loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from nodeagent.api.auth import FRESH, KEPT, THREADS, WAITING, UserDatabase, name_of
from nodeagent.api.errors import ApiError

BOUND = 10.0


class Slow:
    """A database that answers when it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.looks: list[int] = []

    def look(self, uid: int) -> str:
        self.looks.append(uid)
        assert self.let.wait(BOUND)
        return f"user-{uid}"


async def test_a_lookup_that_hangs_delays_nobody() -> None:
    slow = Slow()
    users = UserDatabase(slow.look, time.monotonic)
    turns = 0

    async def beats() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(beats())
    await users.learn([7])
    assert users.shown(7) == "7", "the number, where the name does not come"
    assert turns > 1, "the loop went on"
    beating.cancel()
    slow.let.set()
    assert await users.ask(("name", 7), lambda: slow.look(7), "uid 7") == "user-7"
    assert users.shown(7) == "user-7"
    assert slow.looks == [7], "one look-up for all that ask"


async def test_lookups_are_bounded() -> None:
    slow = Slow()
    users = UserDatabase(slow.look, time.monotonic)
    await users.learn(range(WAITING + 50))
    assert len(slow.looks) == THREADS
    with pytest.raises(ApiError, match="did not answer for uid 9999"):
        await users.ask("other", lambda: "", "uid 9999")
    slow.let.set()
    assert await users.ask(("name", WAITING - 60), lambda: "", "somebody") == f"user-{WAITING - 60}"


async def test_a_thread_that_cannot_be_started_locks_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full process table: the caller was refused until the agent's next start, and with the fourth all others."""
    users = UserDatabase(lambda uid: f"user-{uid}", time.monotonic)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", _cannot_start)
        for uid in range(THREADS + 1):
            with pytest.raises(ApiError, match=f"no thread for a look at the user database for uid {uid}"):
                await users.ask(("name", uid), lambda: "", f"uid {uid}")
        await users.learn([7])
        assert users.shown(7) == "7"
    assert [await users.ask(("name", uid), lambda: "a", "") for uid in range(THREADS + 2)] == ["a"] * (THREADS + 2)


async def test_who_finds_no_new_thread_waits_for_one_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    users = UserDatabase(slow.look, time.monotonic)
    first = asyncio.create_task(users.ask("a", lambda: slow.look(1), "uid 1", timeout=BOUND))
    await asyncio.sleep(0)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", _cannot_start)
        second = asyncio.create_task(users.ask("b", lambda: slow.look(2), "uid 2", timeout=BOUND))
        await asyncio.sleep(0)
    slow.let.set()
    assert (await first, await second) == ("user-1", "user-2")


def _cannot_start(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_who_waits_too_long_gets_an_error() -> None:
    slow = Slow()
    users = UserDatabase(slow.look, time.monotonic)
    with pytest.raises(ApiError, match="did not answer"):
        await users.ask("who", lambda: slow.look(1), "uid 1", timeout=0.01)
    slow.let.set()


async def test_answers_are_remembered_for_a_while_and_failures_are_not() -> None:
    now, looks = 0.0, 0

    def look() -> str:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise KeyError("nobody")
        return f"look {looks}"

    users = UserDatabase(clock=lambda: now, look=name_of)
    with pytest.raises(KeyError):
        await users.ask("who", look, "who")
    assert [await users.ask("who", look, "who") for _ in range(2)] == ["look 2", "look 2"]
    now += FRESH
    assert await users.ask("who", look, "who") == "look 3"


async def test_what_is_remembered_is_bounded() -> None:
    users = UserDatabase(lambda uid: f"user-{uid}", time.monotonic)
    for first in range(0, KEPT + 100, 100):
        await users.learn(range(first, first + 100))
        await users.ask(("name", first + 99), lambda: "", "")
    assert users.shown(0) == "0", "the oldest went"

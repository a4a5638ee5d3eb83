"""Whom a pod runs as: a user database that is slow, hangs or says no."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from nodeagent.pods.login import FRESH, MOST, Login, Logins, NoAnswerError, UserError

ANN = Login("ann", 1000, 1000, (1000,))


async def test_who_is_looked_up_is_remembered_for_a_while() -> None:
    now, asked = [0.0], list[str]()

    def look(user: str, _node: str, _allow_root: bool) -> Login:
        asked.append(user)
        return ANN

    logins = Logins("n1", look, lambda: now[0])
    assert logins.known("ann", False) is None
    assert [await logins.find("ann", False) for _ in range(3)] == [ANN] * 3
    assert logins.known("ann", False) == ANN
    assert logins.known("ann", True) is None, "root was allowed or not in the question"
    now[0] = FRESH
    assert logins.known("ann", False) is None
    await logins.find("ann", False)
    assert asked == ["ann", "ann"]


async def test_who_is_unknown_is_not_remembered() -> None:
    known = list[Login]()

    def look(user: str, node: str, _allow_root: bool) -> Login:
        if not known:
            raise UserError(f"user {user} does not exist on {node}")
        return known[0]

    logins = Logins("n1", look, time.monotonic)
    with pytest.raises(UserError, match="user ann does not exist on n1"):
        await logins.find("ann", False)
    known.append(ANN)
    assert await logins.find("ann", False) == ANN


async def test_one_that_hangs_holds_up_nobody_else_and_is_asked_once() -> None:
    answers, asked = threading.Event(), list[str]()

    def look(user: str, _node: str, _allow_root: bool) -> Login:
        asked.append(user)
        if user == "ann":
            answers.wait(30)
        return Login(user, 1, 1, ())

    logins = Logins("n1", look, time.monotonic)
    try:
        for _ in range(3):
            with pytest.raises(NoAnswerError, match=r"n1 did not answer for ann within 0\.01 s"):
                await logins.find("ann", False, limit=0.01)
        assert (await logins.find("bob", False)).name == "bob"
        assert asked == ["ann", "bob"]
        waiting = [asyncio.create_task(logins.find("ann", False, limit=30)) for _ in range(2)]
    finally:
        answers.set()
    assert [login.name for login in await asyncio.gather(*waiting)] == ["ann", "ann"]
    assert asked == ["ann", "bob"]


async def test_no_more_than_so_many_hang() -> None:
    answers = threading.Event()

    def look(user: str, _node: str, _allow_root: bool) -> Login:
        answers.wait(30)
        return Login(user, 1, 1, ())

    logins = Logins("n1", look, time.monotonic)
    try:
        for number in range(MOST):
            with pytest.raises(NoAnswerError, match="did not answer"):
                await logins.find(f"user-{number}", False, limit=0)
        with pytest.raises(UserError, match=f"{MOST} questions to the user database of n1 are not answered"):
            await logins.find("one-more", False)
    finally:
        answers.set()

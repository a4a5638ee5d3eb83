"""The store's client where an answer is not what it should be: the calls are made up, the decoding is not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, cast

import pytest

from nodeagent.model.node import Incarnation
from nodeagent.store.base import StoreUnavailableError
from nodeagent.store.calls import Calls
from nodeagent.store.client import RedisStore
from nodeagent.store.messages import Beat

UID = "a" * 32
PREFIX = "na:{x}:"


class Link:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def ask(self, *_: object) -> object:
        return self._answer

    async def ask_beside(self, command: Sequence[object], *others: Sequence[object]) -> tuple[object, list[object]]:
        return self._answer, [["5", "running", "1", "g", "active"] for _ in others]


class MadeUp:
    """``rev``: what a beat's reply says; ``woken``: fields of the entry of a wake. No other question is answered."""

    prefix = PREFIX
    replicated = False
    reached = None

    def __init__(self, rev: str | int = 50, woken: Sequence[str] = ()) -> None:
        self._rev, self._woken = rev, woken

    async def step(self, _name: str, *_: object) -> list[object]:
        records = [["job:" + UID, ["uid", "x"], "", "whole"]]
        return ["u", 1000, [], "", self._rev, 0, "1-0", records, "e1", 0, 0, 0, [], [], 0, "0  e1", 0, 50]

    @asynccontextmanager
    async def waiting(self, _timeout: float) -> AsyncIterator[Link]:
        yield Link([[f"{PREFIX}wake:job:{UID}", [["9-0", list(self._woken)]]]])

    def link(self) -> NoReturn:
        raise StoreUnavailableError("it did not answer")


def store(**more: Any) -> RedisStore:
    return RedisStore(cast("Calls", MadeUp(**more)))


def beat(rev: int) -> Beat:
    return Beat(node="n1", incarnation=Incarnation(life="l", start=1), seq=1, rev=rev, era="e1")


async def test_a_beat_whose_nodes_cannot_be_read_says_so() -> None:
    reply = await store().beat(beat(0))
    assert (reply.unfinished, reply.rev, reply.nodes, reply.unread) == (True, 0, (), ())


@pytest.mark.parametrize("rev", ["21.5", "1e+17", "x"])
async def test_a_revision_that_is_none_is_damage(rev: str) -> None:
    with pytest.raises(StoreUnavailableError, match="list of changes is damaged"):
        await store(rev=rev).beat(beat(10))


@pytest.mark.parametrize(
    "fields", [[], ["era", "x"], ["era", "e", "rev", "5", "", "x"], ["era", "e", "rev", "5", "+x"], ["x", "y"]]
)
async def test_a_wake_that_nobody_can_read_brings_nothing(fields: list[str]) -> None:
    """Anybody who writes to the store may add one; a beat brings what has changed."""
    woken = await store(woken=fields).wake("0-0", 1.0, "n1", [UID])
    assert (woken.event, woken.jobs) == ("9-0", ())

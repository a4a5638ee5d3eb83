"""Numeric addresses in the place of names: looked up beside the loop, kept while nobody answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from nodeagent.agent.questions import AGAIN, RETRY, Names
from tests.sim.virtual import run_virtual


class Resolver:
    """What the machine would be told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, str] = {}
        self.asked: list[str] = []
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", self._look_up)

    async def _look_up(self, host: str, port: None, **_more: int) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if ".." in host:
            raise UnicodeError("label empty or too long")  # as Python does
        if host not in self.known:
            raise socket.gaierror("nobody knows it")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (self.known[host], 0))]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    return Resolver(monkeypatch)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtual(scenario)


def test_addresses_stay_as_they_are(resolver: Resolver) -> None:
    names = Names(lambda: None)
    for address in ("10.0.0.1:29400", "[fe80::1]:29400"):
        assert names.numeric(address) == address
    assert [names.numeric(wrong) for wrong in ("", "x", ":1", "10.0.0.1:x")] == [""] * 4
    assert resolver.asked == []


def test_a_name_is_looked_up_again_now_and_then_and_kept_when_nobody_knows_it(resolver: Resolver) -> None:
    changed: list[int] = []

    async def scenario() -> None:
        names = Names(lambda: changed.append(1))
        running = asyncio.ensure_future(names.run())
        assert names.numeric("n1.example:5") == ""
        await asyncio.sleep(0.1)
        assert (resolver.asked, changed) == (["n1.example"], [])
        resolver.known["n1.example"] = "10.0.0.1"
        await asyncio.sleep(RETRY)
        assert (names.numeric("n1.example:5"), len(changed)) == ("10.0.0.1:5", 1)
        resolver.known["n1.example"] = "fe80::2"
        await asyncio.sleep(AGAIN)
        assert (names.numeric("n1.example:5"), len(changed)) == ("[fe80::2]:5", 2)
        resolver.known.clear()
        await asyncio.sleep(AGAIN + RETRY)
        assert (names.numeric("n1.example:5"), len(changed)) == ("[fe80::2]:5", 2)
        running.cancel()
        await asyncio.wait([running])

    play(scenario())


def test_what_is_no_name_keeps_no_other_from_being_looked_up(resolver: Resolver) -> None:
    """Whoever writes to the store says where a node is."""
    resolver.known["n1.example"] = "10.0.0.1"

    async def scenario() -> None:
        names = Names(lambda: None)
        running = asyncio.ensure_future(names.run())
        assert names.numeric("a..b:5") == ""
        await asyncio.sleep(0.1)
        names.numeric("n1.example:5")
        await asyncio.sleep(0.1)
        assert names.numeric("n1.example:5") == "10.0.0.1:5"
        running.cancel()

    play(scenario())

"""Numeric addresses in the place of names: looked up beside the loop, kept while nobody answers."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from nodeagent.agent import questions
from nodeagent.agent.questions import AGAIN, AT_ONCE, BOUND, RETRY, Names
from tests.sim.virtual import run_virtual


class Resolver:
    """What the machine would be told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, str] = {}
        self.asked: list[str] = []
        self.silent = False
        """A look-up of a name that is not known hangs, until the test ends it."""
        self.hang: list[asyncio.Future[str]] = []
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)
        monkeypatch.setattr(questions, "in_daemon", self._in_daemon)

    def _in_daemon(self, work: Callable[[], str], _name: str) -> asyncio.Future[str]:
        """At once: there are no threads in virtual time."""
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            done.set_result(work())
        except (OSError, ValueError) as error:
            if self.silent:
                self.hang.append(done)
            else:
                done.set_exception(error)
        return done

    def _look_up(self, host: str, port: None, **_more: int) -> list[tuple[Any, ...]]:
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


def test_a_name_that_no_node_has_any_more_is_forgotten(resolver: Resolver) -> None:
    resolver.known |= {"n1.example": "10.0.0.1", "n2.example": "10.0.0.2"}

    async def scenario() -> None:
        names = Names(lambda: None)
        running = asyncio.ensure_future(names.run())
        for name in resolver.known:
            names.numeric(f"{name}:5")
        await asyncio.sleep(0.1)
        names.keep(["n1.example:7", "[fe80::1]:5", ""])
        resolver.asked.clear()
        await asyncio.sleep(2 * AGAIN)
        assert set(resolver.asked) == {"n1.example"}
        assert names.numeric("n1.example:5") == "10.0.0.1:5"
        assert names.numeric("n2.example:5") == "", "to be looked up anew"
        await asyncio.sleep(0.1)
        assert names.numeric("n2.example:5") == "10.0.0.2:5"
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


def test_a_name_whose_look_up_hangs_delays_no_other_and_is_taken_when_it_is_known(resolver: Resolver) -> None:
    """With a silent name server the last of twenty members was found after 100 s."""
    resolver.known["n1.example"], resolver.silent = "10.0.0.1", True

    async def scenario() -> None:
        names = Names(lambda: None)
        running = asyncio.ensure_future(names.run())
        names.numeric("silent.example:5")
        await asyncio.sleep(0.1)
        names.numeric("n1.example:5")
        await asyncio.sleep(0.1)
        assert names.numeric("n1.example:5") == "10.0.0.1:5"
        await asyncio.sleep(BOUND)
        (hangs,) = resolver.hang
        hangs.set_result("10.0.0.2")
        await asyncio.sleep(RETRY)
        assert names.numeric("silent.example:5") == "10.0.0.2:5"
        assert resolver.asked == ["silent.example", "n1.example"], "one that hangs is begun once"
        running.cancel()

    play(scenario())


def test_only_so_many_names_are_looked_up_at_a_time(resolver: Resolver) -> None:
    resolver.silent = True

    async def scenario() -> None:
        names = Names(lambda: None)
        running = asyncio.ensure_future(names.run())
        for i in range(AT_ONCE + 1):
            names.numeric(f"n{i}.example:5")
        await asyncio.sleep(BOUND / 2)
        assert len(resolver.asked) == AT_ONCE
        await asyncio.sleep(BOUND)
        assert len(resolver.asked) == AT_ONCE + 1
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    play(scenario())


def test_where_no_thread_is_to_be_had_it_tries_again(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver.known["n1.example"] = "10.0.0.1"

    def no_thread(_work: object, _name: str) -> asyncio.Future[str]:
        raise OSError(errno.EAGAIN, "no thread for it: can't start new thread")

    async def scenario() -> None:
        names = Names(lambda: None)
        running = asyncio.ensure_future(names.run())
        with monkeypatch.context() as crowded:
            crowded.setattr(questions, "in_daemon", no_thread)
            names.numeric("n1.example:5")
            await asyncio.sleep(0.1)
        await asyncio.sleep(RETRY)
        assert names.numeric("n1.example:5") == "10.0.0.1:5"
        running.cancel()

    play(scenario())

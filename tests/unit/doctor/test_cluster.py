"""Which answers of an address mean that the machine behind it was reached; how often the store is inspected."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import NoReturn

import pytest

from nodeagent.doctor.cluster import StoreLooker, ask_peer, ask_peers, store_findings
from nodeagent.model.facts import Finding
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.storeconfig import RedisConfig


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def test_refused_and_accepted_are_both_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = await ask_peer("n2", "127.0.0.1", server.getsockname()[1], 5.0)
    assert (answer.outcome, answer.reached) == ("accepted", True)
    answer = await ask_peer("n2", "127.0.0.1", free_port(), 5.0)
    assert (answer.outcome, answer.reached) == ("refused", True)


async def test_silence_is_not_waited_for_longer_than_the_bound() -> None:
    """A server whose queue is full drops what comes, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        full = [socket.socket() for _ in range(4)]
        for one in full:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        answers = await ask_peers({f"n{i}": "127.0.0.1" for i in range(20)}, port, bound=1.0)
        for one in full:
            one.close()
    assert {a.outcome for a in answers} == {"timeout"}, "one after the other, they would take longer than ALL_BOUND"
    assert answers[0].detail == "1 s"


async def test_a_name_that_nobody_knows() -> None:
    answer = await ask_peer("n2", "no-such-host.invalid", 29400, 20.0)
    assert (answer.outcome, answer.reached) == ("unresolved", False)
    assert answer.detail


async def test_no_route() -> None:
    answer = await ask_peer("n2", "255.255.255.255", 29400, 5.0)
    assert answer.outcome == "unreachable"
    assert answer.detail


async def test_nobody_to_ask() -> None:
    assert await ask_peers({}, 29400, 1.0) == ()


async def test_a_name_that_nobody_resolves_is_found_out_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look had its answer, and waited for the resolver's thread: people read of a slow store."""
    resolved = threading.Event()

    def hang(*_: object, **__: object) -> NoReturn:
        resolved.wait(60)
        raise OSError("nobody knows it")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    config = AgentConfig(redis=RedisConfig(url="redis://redis.test:6379/0"))
    (found,) = await StoreLooker(store_findings).look(config)
    resolved.set()
    assert found.what.startswith("the store at redis.test:6379 did not answer within 0.5 s: ")
    assert found.what.endswith(" and that a name in redis.url is resolved at once")


async def test_who_asks_while_the_store_is_inspected_gets_the_same_findings() -> None:
    begun, there, go = list[int](), threading.Event(), threading.Event()

    async def find(_config: AgentConfig) -> tuple[Finding, ...]:
        begun.append(1)
        there.set()
        go.wait(30)
        return (Finding(severity="info", what=f"inspection {len(begun)}", fix=""),)

    looker = StoreLooker(find)
    asking = [asyncio.ensure_future(looker.look(AgentConfig())) for _ in range(20)]
    assert await asyncio.to_thread(there.wait, 30)
    go.set()
    assert {finding.what for found in await asyncio.gather(*asking) for finding in found} == {"inspection 1"}
    assert (await looker.look(AgentConfig()))[0].what == "inspection 2"

"""How many connections there may be on loopback HTTP; those on the unix socket are tried by a real second uid in
tests/hostile/test_local_account.py."""

from __future__ import annotations

import asyncio
import http.client
import socket
from contextlib import ExitStack
from pathlib import Path

from nodeagent.agent.metrics import Metrics
from nodeagent.api.connections import LOOPBACK
from nodeagent.api.server import ApiServer
from tests.unit.api.fakes import FakeView


async def test_the_oldest_connection_to_loopback_gives_way(tmp_path: Path) -> None:
    """Nobody says whose they are, and whoever looks at an agent's health must get through."""
    async with ApiServer(FakeView(tmp_path), Metrics()) as server:
        await asyncio.to_thread(many, server.http_url)


def many(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection((host, int(port)), 10)) for _ in range(3 * LOOPBACK)]
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        stack.callback(connection.close)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        for old in held[: 2 * LOOPBACK]:
            assert old.recv(1) == b"", "hung up on"
        held[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert held[-1].recv(12) == b"HTTP/1.1 200"

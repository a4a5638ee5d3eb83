"""How many connections there may be on loopback HTTP; those on the unix socket are tried by a real second uid in
tests/hostile/test_local_account.py."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from aiohttp import web

from nodeagent.agent.metrics import Metrics
from nodeagent.api.connections import LOOPBACK, READ_MAX, Guest
from nodeagent.api.server import HEADERS, ApiServer, create_runner
from tests.unit.api.fakes import FakeView


async def test_the_oldest_connection_to_loopback_gives_way(tmp_path: Path) -> None:
    """Nobody says whose they are, and whoever looks at an agent's health must get through."""
    async with ApiServer(FakeView(tmp_path), Metrics()) as server:
        await asyncio.to_thread(many, server.http_url)


async def test_no_connection_keeps_the_loop_for_long(tmp_path: Path) -> None:
    """Bodies in chunks of one byte on twenty connections kept another user's request waiting for 11 s."""
    read, ended = list[int](), asyncio.Event()

    class Inner(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            read.append(len(data))

        def connection_lost(self, exc: Exception | None) -> None:
            ended.set()

    def pour() -> None:
        with closing(socket.socket(socket.AF_UNIX)) as there:
            there.connect(str(tmp_path / "s"))
            there.sendall(bytes(1 << 20))

    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(
        lambda: Guest(Inner(), lambda _: True, lambda _: None), path=str(tmp_path / "s")
    )
    async with server, asyncio.timeout(30):
        await asyncio.to_thread(pour)
        await ended.wait()
    assert sum(read) == 1 << 20
    assert max(read) <= READ_MAX


async def test_a_head_of_many_lines_is_refused_before_it_is_whole(tmp_path: Path) -> None:
    """On 120 connections it was 240 MB of the agent's memory, before anybody was known."""
    async with ApiServer(FakeView(tmp_path), Metrics()) as server:
        host, port = server.http_url.removeprefix("http://").split(":")
        for count, status in ((HEADERS - 1, b"200"), (2 * HEADERS, b"400")):
            tcp, local = socket.create_connection((host, int(port)), 10), socket.socket(socket.AF_UNIX)
            local.settimeout(10)
            local.connect(str(server.socket_path))
            assert await asyncio.to_thread(head, tcp, count) == status
            assert await asyncio.to_thread(head, local, count) == status


async def test_no_body_is_unpacked(tmp_path: Path) -> None:
    """40 KB that were 40 MB, on each of 180 connections: the agent's loop unpacked them before it knew anybody, and
    its node lost its lease."""
    packed = gzip.compress(b"{}")

    async def back(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_post("/", back)
    runner = create_runner(app)
    await runner.setup()
    await web.UnixSite(runner, tmp_path / "s").start()
    try:
        assert await asyncio.to_thread(post, tmp_path / "s", "/", packed, "gzip") == (200, packed)
    finally:
        await runner.cleanup()


async def test_who_sends_a_compressed_body_learns_what_is_read(tmp_path: Path) -> None:
    async with ApiServer(FakeView(tmp_path), Metrics()) as server:
        for encoding in ("gzip", "Deflate", "br", "x"):
            for way in (server.socket_path, server.http_url):
                status, answer = await asyncio.to_thread(post, way, "/healthz", b"{}", encoding)
                assert status == 415
                assert f"Content-Encoding '{encoding.lower()}'" in json.loads(answer)["error"]["message"]
        status, _ = await asyncio.to_thread(post, server.socket_path, "/healthz", b"{}", "identity")
        assert status == 405


def post(way: Path | str, path: str, body: bytes, encoding: str) -> tuple[int, bytes]:
    """Status and body of the answer."""
    connection = http.client.HTTPConnection(way.removeprefix("http://") if isinstance(way, str) else "localhost")
    if isinstance(way, Path):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(way))
    with closing(connection):
        connection.request("POST", path, body, {"Content-Encoding": encoding})
        answer = connection.getresponse()
        return answer.status, answer.read()


def head(there: socket.socket, lines: int) -> bytes:
    """The status of the answer to so many more lines, of which the last one never comes where they are too many."""
    with closing(there):
        there.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        for number in range(lines - 1):
            there.sendall(b"A%d: b\r\n" % number)
        there.sendall(b"\r\n" if lines < HEADERS else b"")
        return there.recv(12).split()[1]


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


async def test_who_leaves_an_answer_unread_is_hung_up_on_and_who_reads_slowly_is_not(tmp_path: Path) -> None:
    """On each of 128 connections one unread answer kept everybody else out, for ever."""
    ended, size = asyncio.Event(), 1 << 22

    class Inner(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(bytes(size))

        def connection_lost(self, exc: Exception | None) -> None:
            ended.set()

    def read_slowly() -> int:
        with closing(socket.socket(socket.AF_UNIX)) as there:
            there.connect(str(tmp_path / "s"))
            count = 0
            while some := there.recv(1 << 17):
                time.sleep(0.02)
                count += len(some)
                if count == size:
                    break
            return count

    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(
        lambda: Guest(Inner(), lambda _: True, lambda _: None, unread=0.2), path=str(tmp_path / "s")
    )
    async with server, asyncio.timeout(30):
        with closing(socket.socket(socket.AF_UNIX)) as there:
            there.connect(str(tmp_path / "s"))
            await ended.wait()
        assert await asyncio.to_thread(read_slowly) == size


def test_no_thread_and_no_traceback_for_the_pages_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who asks for a file, reads nothing and hangs up wrote 40 lines into the agent's log each time."""

    async def ask() -> None:
        async with ApiServer(FakeView(tmp_path), Metrics()) as server:
            await asyncio.to_thread(hang_up, server.http_url)
            await asyncio.sleep(0.1)

    asyncio.run(ask())
    assert not [record for record in caplog.records if record.exc_info]


def hang_up(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for _ in range(20):
        with closing(socket.create_connection((host, int(port)), 10)) as there:
            there.sendall(b"GET /page/page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
            time.sleep(0.02)

"""How many connections there may be on loopback HTTP; those on the unix socket are tried by a real second uid in
tests/hostile/test_local_account.py."""

from __future__ import annotations

import asyncio
import errno
import gzip
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from aiohttp import web

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api import connections
from nodeagent.api.connections import BACKLOG, CONNECTS, CONNECTS_BURST, LOOPBACK, READ_MAX, Guest, SocketGuests
from nodeagent.api.server import HEADERS, ApiServer, create_runner
from nodeagent.osutil.subuids import SubordinateUids
from nodeagent.spec.sections import LimitsConfig
from tests.unit.api.fakes import FakeView


async def test_the_oldest_connection_to_loopback_gives_way(tmp_path: Path) -> None:
    """Nobody says whose they are, and whoever looks at an agent's health must get through."""
    async with ApiServer(FakeView(tmp_path), MetricsPage(Metrics())) as server:
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
        lambda: Guest(Inner(), lambda _: None, lambda _: None), path=str(tmp_path / "s")
    )
    async with server, asyncio.timeout(30):
        await asyncio.to_thread(pour)
        await ended.wait()
    assert sum(read) == 1 << 20
    assert max(read) <= READ_MAX


async def test_a_head_of_many_lines_is_refused_before_it_is_whole(tmp_path: Path) -> None:
    """On 120 connections it was 240 MB of the agent's memory, before anybody was known."""
    async with ApiServer(FakeView(tmp_path), MetricsPage(Metrics())) as server:
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
    async with ApiServer(FakeView(tmp_path), MetricsPage(Metrics())) as server:
        for encoding in ("gzip", "Deflate", "br", "x"):
            for way in (server.socket_path, server.http_url):
                status, answer = await asyncio.to_thread(post, way, "/healthz", b"{}", encoding)
                assert status == 415
                assert f"Content-Encoding '{encoding.lower()}'" in json.loads(answer)["error"]["message"]
        status, _ = await asyncio.to_thread(post, server.socket_path, "/healthz", b"{}", "identity")
        assert status == 405


class Crowd(SocketGuests):
    """Each connection is of the next of these users."""

    def __init__(self, view: FakeView, uids: Iterator[int], subordinates: SubordinateUids) -> None:
        self.built = 0
        super().__init__(view, self._build, subordinates, lambda: 0.0)
        self._uids = uids

    def _build(self) -> asyncio.Protocol:
        self.built += 1
        return asyncio.Protocol()

    def _uid(self, connection: socket.socket) -> int:
        return next(self._uids)


def connects(path: Path, times: int) -> list[bytes]:
    """What comes at once on so many connections, one after the other."""
    found = []
    for _ in range(times):
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(str(path))
            there.shutdown(socket.SHUT_WR)
            found.append(b"".join(iter(lambda: there.recv(1 << 16), b"")))
    return found


async def test_who_connects_without_end_keeps_nobody_out(tmp_path: Path) -> None:
    """A connection was a handler before anybody had looked whose it is; nobody else got one. All subordinate uids of
    an account count as one user; root counts as nobody."""
    (tmp_path / "subuid").write_text("eve:100000:65536\n")
    uids = chain.from_iterable((100_000 + n, 0, 7) for n in count())
    view = FakeView(tmp_path)
    view.config = view.config.model_copy(update={"limits": LimitsConfig(requests=1)})
    crowd = Crowd(view, uids, SubordinateUids(tmp_path / "subuid", time.monotonic))
    most = int(CONNECTS * CONNECTS_BURST)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen(BACKLOG)
    crowd.serve(listening)
    answers = await asyncio.to_thread(connects, tmp_path / "s", 3 * most)
    assert (crowd.built, set(answers)) == (3 * most, {b""})
    refused, ours, theirs = await asyncio.to_thread(connects, tmp_path / "s", 3)
    assert refused.startswith(b"HTTP/1.1 429 ")
    words = f"subordinate uids of eve, as {100_000 + most} is, made connections to the agent of node n1 more often"
    assert words in json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert (ours, theirs[:13], crowd.built) == (b"", b"HTTP/1.1 429 ", 3 * most + 1)
    await crowd.close()


async def test_where_no_connection_can_be_accepted_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "ACCEPT_AGAIN", 0.01)

    class Short(socket.socket):
        left = 3

        def accept(self) -> tuple[socket.socket, Any]:
            self.left -= 1
            if self.left >= 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    crowd = Crowd(FakeView(tmp_path), count(7), SubordinateUids(tmp_path / "none", time.monotonic))
    listening = Short(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen(BACKLOG)
    with structlog.testing.capture_logs() as logged:
        crowd.serve(listening)
        assert await asyncio.to_thread(connects, tmp_path / "s", 2) == [b"", b""]
    await crowd.close()
    assert [line["why"] for line in logged] == ["[Errno 24] Too many open files"]


async def test_of_two_users_on_loopback_who_has_most_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest gave way, whosever it was: who connected most often kept everybody else from /healthz."""
    uids = iter([7] * 10 + [8] + [7] * 3 * LOOPBACK)
    monkeypatch.setattr(connections, "whose", lambda *_: next(uids))
    async with ApiServer(FakeView(tmp_path), MetricsPage(Metrics())) as server:
        host, port = server.http_url.removeprefix("http://").split(":")

        def crowd() -> None:
            with ExitStack() as stack:
                place, most = (host, int(port)), 11 + 2 * LOOPBACK
                held = [stack.enter_context(socket.create_connection(place, 10)) for _ in range(most)]
                assert held[0].recv(1) == b"", "hung up on"
                for there in (held[10], held[-1]):
                    there.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert there.recv(12) == b"HTTP/1.1 200"

        await asyncio.to_thread(crowd)


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
        text = b"".join([b"A%d: b\r\n" % number for number in range(lines - 1)])
        end = b"\r\n" if lines < HEADERS else b""
        there.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + text + end)  # at once: it is hung up on soon
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
        lambda: Guest(Inner(), lambda _: None, lambda _: None, unread=0.2), path=str(tmp_path / "s")
    )
    async with server, asyncio.timeout(30):
        with closing(socket.socket(socket.AF_UNIX)) as there:
            there.connect(str(tmp_path / "s"))
            await ended.wait()
        assert await asyncio.to_thread(read_slowly) == size


def test_no_thread_and_no_traceback_for_the_pages_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who asks for a file, reads nothing and hangs up wrote 40 lines into the agent's log each time."""

    async def ask() -> None:
        async with ApiServer(FakeView(tmp_path), MetricsPage(Metrics())) as server:
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

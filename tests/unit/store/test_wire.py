"""What Redis may answer, byte by byte, and a server that hangs up or is none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest

from nodeagent.store.errors import explain
from nodeagent.store.whois import client_context
from nodeagent.store.wire import (
    LONGEST_ENTRIES,
    LONGEST_REPLY,
    Connection,
    Reached,
    ReplyError,
    TooLongError,
    is_about_tls,
)


@asynccontextmanager
async def answering(folder: Path, *pieces: bytes) -> AsyncIterator[tuple[Connection, asyncio.Future[bytes]]]:
    """A connection to a server that takes one write, answers in these pieces and hangs up; and what it took."""
    taken: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            taken.set_result(await reader.read(65536))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()

    path = str(folder / "s")
    async with await asyncio.start_unix_server(accept, path):
        connection = Connection(path)
        await connection.open()
        try:
            yield connection, taken
        finally:
            await connection.close()


async def reply(folder: Path, *pieces: bytes) -> object:
    async with answering(folder, *pieces) as (connection, _):
        await connection.send("PING")
        found: object = await connection.receive()
        return found


async def test_a_command_is_sent_as_bulk_strings(tmp_path: Path) -> None:
    async with answering(tmp_path, b"+OK\r\n") as (connection, taken):
        await connection.send("SET", "clé", 12, "")
        assert await taken == "*4\r\n$3\r\nSET\r\n$4\r\nclé\r\n$2\r\n12\r\n$0\r\n\r\n".encode()
        assert await connection.receive() == "OK"


@pytest.mark.parametrize(
    ("pieces", "value"),
    [
        ((b":-7\r\n",), -7),
        ((b"$4\r\na\r\nb\r\n",), "a\r\nb"),
        ((b"$0\r\n\r\n",), ""),
        ((b"*2\r\n$2\r\na\xff\r\n$1\r\nb\r\n",), ["a\udcff", "b"]),
        ((b"$-1\r\n",), None),
        ((b"*-1\r\n",), None),
        ((b"*0\r\n",), []),
        ((b"*3\r\n:1\r\n*2\r\n$1\r\nx\r\n$-1\r\n+y\r\n",), [1, ["x", None], "y"]),
        ((b"*2\r\n$3\r\nl", b"on\r", b"\n:", b"5\r\n"), ["lon", 5]),
        ((b"$300000\r\n", b"z" * 300_000, b"\r\n"), "z" * 300_000),
    ],
)
async def test_replies(tmp_path: Path, pieces: tuple[bytes, ...], value: object) -> None:
    assert await reply(tmp_path, *pieces) == value


@pytest.mark.parametrize(
    ("line", "code", "not_let_in"),
    [
        (b"-NOSCRIPT No matching script.", "NOSCRIPT", False),
        (b"-READONLY You can't write against a read only replica.", "READONLY", False),
        (b"-NOPERM this user has no permissions to run the 'get' command", "NOPERM", True),
        (b"-WRONGPASS invalid username-password pair or user is disabled.", "WRONGPASS", True),
        (b"-ERR AUTH <password> called without any password configured", "ERR", True),
        (b"-ERR invalid password", "ERR", True),
        (b"-ERR unknown command 'COW'", "ERR", False),
        (b"-LOADING Redis is loading the dataset in memory", "LOADING", False),
        (b"-MOVED cow", "MOVED", False),
    ],
)
async def test_errors_say_what_they_are_about(tmp_path: Path, line: bytes, code: str, not_let_in: bool) -> None:
    with pytest.raises(ReplyError) as caught:
        await reply(tmp_path, line + b"\r\n")
    assert (caught.value.code, caught.value.not_let_in) == (code, not_let_in)
    assert str(caught.value) == line[1:].decode()


async def test_after_an_error_the_next_reply_is_the_next_commands(tmp_path: Path) -> None:
    async with answering(tmp_path, b"-ERR no\r\n", b"+yes\r\n") as (connection, _):
        await connection.send("ONE")
        await connection.send("TWO")
        with pytest.raises(ReplyError):
            await connection.receive()
        assert await connection.receive() == "yes"


@pytest.mark.parametrize("pieces", [(), (b"$10\r\nhalf",), (b"*2\r\n:1\r\n",)])
async def test_a_server_that_hangs_up(tmp_path: Path, pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(ConnectionError, match="closed the connection"):
        await reply(tmp_path, *pieces)


@pytest.mark.parametrize("junk", [b"HTTP/1.1 400 Bad Request\r\n", b"$cow\r\n", b"x" * 70_000])
async def test_what_is_no_redis(tmp_path: Path, junk: bytes) -> None:
    with pytest.raises(ConnectionError, match="what is no reply of Redis"):
        await reply(tmp_path, junk)


@pytest.mark.parametrize(
    "junk",
    [
        b"*4000000000\r\n",
        b"*99999999999999\r\n",
        b"$-7\r\n",
        b"*1\r\n" * 100_000,
        b">1\r\n+x\r\n" * 100_000,
        b"%1\r\n*0\r\n+x\r\n",
    ],
    ids=["no memory", "a length", "less than nothing", "nested", "pushed", "a list as a key"],
)
async def test_a_stranger_that_speaks_the_protocol(tmp_path: Path, junk: bytes) -> None:
    with pytest.raises(ConnectionError, match="what is no reply of Redis"):
        await reply(tmp_path, junk)


PIECES = (
    b"*2\r\n", b"*0\r\n", b"%1\r\n", b"~1\r\n", b">1\r\n", b"|1\r\n", b"$3\r\nabc\r\n", b"$-1\r\n", b"+OK\r\n",
    b"-ERR x\r\n", b"-ASK 1\r\n",
    b":5\r\n", b",1.5\r\n", b",x\r\n", b"#t\r\n", b"_\r\n", b"(12\r\n", b"=7\r\ntxt:abc\r\n",
    b"!3\r\nERR\r\n", b"$?\r\n", b"*?\r\n", b";4\r\nabcd\r\n", b":\r\n", b"$2\r\n\xff\xfe\r\n", b"\r\n", b"\0",
)  # fmt: skip


async def test_whatever_comes_is_a_reply_or_one_of_two_errors(tmp_path: Path) -> None:
    rng = random.Random(5)
    for number in range(500):
        folder = tmp_path / str(number)
        folder.mkdir()
        with suppress(ReplyError, ConnectionError):
            await reply(folder, b"".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 9))))


@pytest.mark.parametrize("longest", [LONGEST_ENTRIES, LONGEST_REPLY])
@pytest.mark.parametrize(
    ("generation", "more"),
    [(b"$%d\r\n" % (2 * LONGEST_REPLY), b"x"), (b"*%d\r\n" % LONGEST_REPLY, b":1\r\n")],
    ids=["a text", "a list"],
)
async def test_a_reply_without_end_is_not_waited_for(
    tmp_path: Path, generation: bytes, more: bytes, longest: int
) -> None:
    sent = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with closing(writer), suppress(ConnectionError):
            await reader.readuntil(b"PING\r\n")
            writer.write(generation)
            while sent < 2 * LONGEST_REPLY + (2 << 20):
                writer.write(more * ((1 << 20) // len(more)))
                sent += 1 << 20
                await writer.drain()

    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(accept, path):
        connection = Connection(path, longest=longest)
        await connection.open()
        await connection.send("PING")
        with pytest.raises(TooLongError, match=f"more than {longest} bytes"):
            await connection.receive()
        await connection.close()
    assert sent < longest + (8 << 20), "what fits into the socket"


async def test_a_connection_that_failed_is_not_opened_again_behind_our_back(tmp_path: Path) -> None:
    """Else a command would go out before the password."""
    async with answering(tmp_path, b"+O") as (connection, _):
        await connection.send("PING")
        with pytest.raises(ConnectionError, match="closed the connection"):
            await connection.receive()
        for call in (connection.send("PING"), connection.receive()):
            with pytest.raises(ConnectionError, match="not open"):
                await call


async def test_a_connection_whose_call_was_cancelled_is_closed(tmp_path: Path) -> None:
    """Else the next call would get its reply."""
    async with answering(tmp_path) as (connection, _):
        waiting = asyncio.create_task(connection.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        with pytest.raises(ConnectionError, match="not open"):
            await connection.send("PING")


async def test_a_connection_that_is_not_open_says_so(tmp_path: Path) -> None:
    connection = Connection(str(tmp_path / "none"))
    for call in (connection.send("PING"), connection.receive()):
        with pytest.raises(ConnectionError, match="not open"):
            await call
    with pytest.raises(ConnectionError, match="No such file"):
        await connection.open()
    await connection.close()


async def test_the_next_address_of_a_host_is_tried_where_nobody_listens_at_the_first() -> None:
    async def find(host: str) -> Sequence[str]:
        return {"redis.test": ("127.0.0.2", "127.0.0.1")}[host]

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        connection = Connection(("redis.test", port), find=find)
        await connection.open()
        assert connection.reached == Reached("", "redis.test", "127.0.0.1", port)
        await connection.close()
    refused = Connection(("redis.test", port), find=find)
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port}"):
        await refused.open()


@pytest.mark.parametrize("order", [("127.0.0.2", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")])
async def test_an_address_without_tls_is_named_before_one_at_which_nobody_listens(order: Sequence[str]) -> None:
    """The last address's error was the one that people read."""

    async def find(_host: str) -> Sequence[str]:
        return order

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            writer.write(b"-ERR unknown command\r\n")
            await writer.drain()
            await reader.read()

    server = await asyncio.start_server(accept, "127.0.0.2", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        connection = Connection(("redis.test", port), client_context(None, None, None, check_name=False), find=find)
        with pytest.raises(ConnectionError, match=f"127.0.0.2:{port}") as caught:
            await connection.open()
        await connection.close()
    assert is_about_tls(caught.value)
    assert "do not agree on TLS" in explain(f"redis.test:{port}", 1.0, caught.value)

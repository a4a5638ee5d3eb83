"""One connection to a Redis server or sentinel: redis-py's connection, configured for leases.

The pools, retries, health checks and login of redis-py stay unused: a request is sent once, on one connection, within
its caller's bound, and a connection that failed is never reopened without the caller's knowledge. Must never bound a
call in time (callers do) or know what a command means.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import hiredis
from redis._parsers import _AsyncHiredisParser
from redis.asyncio.connection import AbstractConnection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import Connection as TcpConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as BrokenConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError

LONGEST_REPLY = 24 << 20
"""In bytes. The most that a step replies with is one record of ``codec.MOST_OF_RECORD`` (a larger one stays in the
store: ``beat.lua``), with the names of its fields and of the nodes that have lapsed; a page has one megabyte of them.
A longer reply comes from no store of ours, and would take memory that the node's workers need: four times its bytes,
if one letter of a text needs four."""
LONGEST_ENTRIES = 1 << 20
"""In bytes, of what a wait for the next entry of a stream brings. A wake has news of 64 KiB at the most, an event has
half a MiB (``codec.MOST_OF_LINE``). Each of an agent's streams may have one entry: two small ones and one for each job
that concerns its node. Where the news of many large jobs come at once, this bound is passed, and a beat brings them."""


_FORBIDDEN = re.compile(r"\bNOPERM |The user executing the script can't |ACL failure in script: ")
"""In an error of a command, or of a script: its server refuses such a command, or such a key, to this user."""
_AT_THIS_TIME = re.compile(r"@user_script: *\d+: -[A-Z]+ |user_script:\d+: (?!ERR |WRONGTYPE )[A-Z]{2,} ")
"""In an error of a script: its server refuses such a command at this time. Redis 6.2 puts what newer ones begin with,
as ``READONLY``, behind the place in the script, with a minus (``luaPushError`` in its scripting.c); ``attempt`` of
``_clock.lua`` puts it there, too."""
_PLACES = re.compile(r"(?<!@)user_script:(\d+)"), re.compile(r"@user_script: *(\d+)")
"""Where an error was raised: by the script for its caller (``attempt`` of ``_clock.lua``), or else by the server."""


class Reached(NamedTuple):
    """The server that a connection leads to."""

    path: str
    """Path of a unix socket; empty if it is host and port."""
    host: str
    """The name or address from the configuration."""
    address: str
    """The numeric address that the connection reached."""
    port: int


class ReplyError(ResponseError):
    """The server's answer is an error. ``str()`` is the server's text, ``code`` its first word."""

    @property
    def code(self) -> str:
        """``NOSCRIPT``, ``READONLY``, ``ERR``..."""
        return str(self).partition(" ")[0]

    @property
    def is_of_the_step(self) -> bool:
        """The script itself failed: it met a key of another type, or a value that it cannot read. Any other error, as
        of a server without memory, would come to each step, and says nothing about what is in the store."""
        of_a_script = "WRONGTYPE" in str(self) or "user_script" in str(self)
        of_now = self.is_forbidden or self.code not in ("ERR", "WRONGTYPE") or _AT_THIS_TIME.search(str(self))
        return of_a_script and not of_now

    @property
    def is_forbidden(self) -> bool:
        """The server let the user in, and its ACL refuses the command, or its key."""
        return _FORBIDDEN.search(str(self)) is not None

    @property
    def line(self) -> int:
        """Of the script, where the error is one of a script; else 0."""
        return next((int(found[1]) for place in _PLACES if (found := place.search(str(self)))), 0)

    @property
    def not_let_in(self) -> bool:
        """The error is about the user, the password, or that user's permissions."""
        return self.code in ("NOAUTH", "WRONGPASS", "NOPERM") or "AUTH" in str(self) or "password" in str(self)


class TooLongError(ConnectionError):
    """A reply has more bytes than any of its kind. Only a part of it was read."""


class _TooLong(InvalidResponse):
    """The same, in the words of redis-py."""


class _Parser(_AsyncHiredisParser):
    """hiredis, with a bound on a reply's length, and with errors in the server's own words: redis-py removes the code
    word and closes the connection for some errors."""

    longest = LONGEST_REPLY
    _room = 0

    @classmethod
    def parse_error(cls, response: str) -> ReplyError:
        return ReplyError(response)

    async def read_response(self, disable_decoding: bool = False, push_request: bool = False) -> Any:
        self._room = self.longest
        try:
            return await super().read_response(disable_decoding, push_request)
        except (MemoryError, RecursionError, TypeError) as error:  # a length, a depth, or a list as a key
            raise InvalidResponse(str(error) or type(error).__name__) from error

    async def read_from_socket(self) -> bool:
        stream, reader = cast(asyncio.StreamReader, self._stream), cast(hiredis.Reader, self._reader)
        data = await stream.read(self._read_size)
        if not data:
            raise BrokenConnectionError("the server closed the connection")
        self._room -= len(data)
        if self._room < 0:
            raise _TooLong(f"the reply has more than {self.longest} bytes")
        reader.feed(data)
        return True


class _Secured(SSLConnection):
    """One whose certificate has to be that of ``name``, whichever address it is made to."""

    name = ""

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "server_hostname": self.name}


async def _as_named(host: str) -> Sequence[str]:
    return (host,)


class Connection:
    """A connection to a unix socket (``at`` is its path) or a host and port; ``longest``: bytes of a reply at most;
    ``find``: the addresses of a host, in the order in which to try them; may raise OSError.
    After a cancelled call, or an error other than ReplyError, only ``close`` may be called. All methods but ``close``
    raise ``OSError``, even if the server closes the connection; ``receive`` also raises ReplyError, and TooLongError
    as soon as a reply has more bytes than ``longest``."""

    def __init__(
        self,
        at: str | tuple[str, int],
        tls: ssl.SSLContext | None = None,
        longest: int = LONGEST_REPLY,
        find: Callable[[str], Awaitable[Sequence[str]]] = _as_named,
    ) -> None:
        settings: dict[str, Any] = {
            "protocol": 2,  # the shapes of replies do not depend on the library's version, and nothing is pushed
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": None,
            "socket_connect_timeout": None,
            "health_check_interval": 0,
            "driver_info": None,  # CLIENT SETINFO would be a round trip, and a command that an ACL has to allow
            "decode_responses": True,
            "encoding_errors": "surrogateescape",
            "parser_class": _Parser,
        }
        self._at, self._find = at, find
        self._connection: AbstractConnection
        if isinstance(at, str):
            self._connection = UnixDomainSocketConnection(path=at, **settings)
        elif tls is None:
            self._connection = TcpConnection(host=at[0], port=at[1], **settings)
        else:
            secured = _Secured(host=at[0], port=at[1], **settings)
            secured.name = at[0]
            secured.ssl_context.context = tls  # the library's own would trust the system's authorities beside ours
            self._connection = secured
        cast(_Parser, self._connection._parser).longest = longest

    async def open(self) -> None:
        """Connect, to the first address of its host that can be reached. If there is none, the error is the last
        address's, or that of the last one with which there was no agreement on TLS: something listens there."""
        connection = self._connection
        addresses = await self._find(self._at[0]) if isinstance(connection, TcpConnection) else ("",)
        failed: OSError | None = None
        for address in addresses:
            if isinstance(connection, TcpConnection):
                connection.host = address
            try:
                with _as_os_error():
                    await connection.connect()  # type: ignore[no-untyped-call]
                return
            except OSError as error:
                if failed is None or is_about_tls(error) or not is_about_tls(failed):
                    failed = error
        if failed is not None:
            raise failed

    @property
    def reached(self) -> Reached | None:
        """The server behind an open connection; None if it is not open."""
        if isinstance(self._at, str):
            return Reached(self._at, "", "", 0)
        writer = self._connection._writer
        peer = writer.get_extra_info("peername") if writer is not None else None
        return Reached("", self._at[0], peer[0], peer[1]) if peer else None

    @property
    def has_ended(self) -> bool:
        """The server has closed it, or the network has lost it, as far as this process knows by now."""
        reader = self._connection._reader
        return reader is None or reader.at_eof() or reader.exception() is not None

    async def send(self, *words: str | int) -> None:
        """Send one command; its reply is the next one that was not received yet."""
        await self.send_all([words])

    async def send_all(self, commands: Iterable[Sequence[str | int]]) -> None:
        """Send commands in one go. What the server has to say against the connection itself then comes as the reply to
        the first one, where the second would meet its end."""
        self._require_open()
        with _as_os_error():  # a text that is not valid Unicode is sent with "?" instead
            words = [tuple(str(word).encode(errors="replace") for word in command) for command in commands]
            await self._connection.send_packed_command(self._connection.pack_commands(words))

    async def receive(self) -> Any:
        """The next reply: text, a whole number, None, or a list of these. An error within a list is an item of the
        list. A byte that is not UTF-8 becomes a lone surrogate (``readable`` returns false), because one bad value must
        not hide the others."""
        self._require_open()
        with _as_os_error():
            return await self._connection.read_response()

    async def close(self) -> None:
        """Close at once, without a command to the server."""
        writer = self._connection._writer
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the connection
            await self._connection.disconnect(nowait=True)
            if writer is not None:  # else TLS waits for the server's last word, half a minute where it hangs
                writer.transport.abort()

    def _require_open(self) -> None:
        """Without this check redis-py would reconnect, and send the command without the greeting."""
        if not self._connection.is_connected:
            raise ConnectionError("this connection is not open")


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Turns redis-py's errors into OSErrors; also errors about bytes that are no reply of Redis."""
    try:
        yield
    except ReplyError:
        raise
    except _TooLong as error:
        raise TooLongError(f"{error}: that is no reply of this store") from error
    except InvalidResponse as error:
        raise ConnectionError(f"the server sent what is no reply of Redis: {error}") from error
    except RedisError as error:
        raise ConnectionError(str(error)) from error


def is_about_tls(error: BaseException) -> bool:
    """There is no agreement on TLS, as on a certificate; it may be why this error was raised."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def readable(text: str) -> bool:
    """Returns whether all of the text was UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

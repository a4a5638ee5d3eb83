"""One connection to a Redis server or sentinel: commands out, replies in (RESP 2).

Ours, since the usual library took a fifth of an agent's start, for which running workers wait, and a tenth of its
memory. Must never retry, bound a call (callers do) or know what a command means.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any


class ReplyError(Exception):
    """The server's answer is an error. ``str()`` is what it said, ``code`` its first word."""

    @property
    def code(self) -> str:
        """``NOSCRIPT``, ``READONLY``, ``ERR``..."""
        return str(self).partition(" ")[0]

    @property
    def is_damage(self) -> bool:
        """A script met a key of another type, or a value that it cannot read."""
        return "WRONGTYPE" in str(self) or "user_script" in str(self)

    @property
    def not_let_in(self) -> bool:
        """It is about the user, the password, or what that user may do."""
        return self.code in ("NOAUTH", "WRONGPASS", "NOPERM") or "AUTH" in str(self) or "password" in str(self)


class Connection:
    """To a unix socket (``at`` is its path) or a host and port. After an error or a cancelled call, only ``close`` is
    of use. All but ``close`` raise ``OSError``, also when the server hangs up; ``receive`` ReplyError too."""

    def __init__(self, at: str | tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self._at, self._tls = at, tls
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Connect."""
        if isinstance(self._at, str):
            self._reader, self._writer = await asyncio.open_unix_connection(self._at)
        else:
            self._reader, self._writer = await asyncio.open_connection(*self._at, ssl=self._tls)

    async def send(self, *words: str | int) -> None:
        """One command; its reply is the next that is not received yet."""
        if self._writer is None:
            raise ConnectionError("this connection is not open")
        parts = [b"*%d\r\n" % len(words)]
        for word in words:
            data = str(word).encode(errors="replace")  # of text that is none, better a "?" than no call
            parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
        self._writer.write(b"".join(parts))
        await self._writer.drain()

    async def receive(self) -> Any:
        """The next reply: text, a whole number, None, or a list of such. An error within a list is an item of it. A
        byte that is not UTF-8 comes as a lone surrogate (``readable`` says no): one bad value must not hide others."""
        if self._reader is None:
            raise ConnectionError("this connection is not open")
        try:
            reply = await _read(self._reader)
        except asyncio.IncompleteReadError:
            raise ConnectionError("the server closed the connection") from None
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise ConnectionError(f"the server sent what is no reply of Redis: {error}") from None
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def close(self) -> None:
        """At once, without a word."""
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the connection
                self._writer.close()


def readable(text: str) -> bool:
    """All of it was UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _read(reader: asyncio.StreamReader) -> Any:
    line = (await reader.readuntil(b"\r\n"))[:-2]
    kind, rest = line[:1], line[1:]
    match kind:
        case b"+":
            return rest.decode(errors="surrogateescape")
        case b"-":
            return ReplyError(rest.decode(errors="replace"))
        case b":":
            return int(rest)
        case b"$":
            length = int(rest)
            return None if length < 0 else (await reader.readexactly(length + 2))[:-2].decode(errors="surrogateescape")
        case b"*":
            length = int(rest)
            return None if length < 0 else [await _read(reader) for _ in range(length)]
        case _:
            raise ValueError(f"{line[:40]!r}")

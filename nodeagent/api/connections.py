"""Bounds the connections that programs of this machine have to this agent. Each connection costs a descriptor even if
it is idle, and an agent without free descriptors opens no file, reaches no store and starts no worker.

Owns the counts for the unix socket and for loopback HTTP (``https.py`` counts its own). Must never look up a name.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable

from nodeagent.agent.view import AgentView
from nodeagent.api import auth
from nodeagent.api.auth import Key
from nodeagent.api.errors import ApiError
from nodeagent.api.subuids import SUBORDINATES, SubordinateUids

PER_REQUEST = 2
"""Connections that a user may have for each request that the user may have under way."""
OF_USERS = 256
"""Connections on the unix socket at once, of all users but root and the agent's own."""
LOOPBACK = 64
"""Connections on loopback HTTP at once."""
READ_MAX = 1 << 13
"""Bytes of a connection that are read in one go. The loop parses them without a pause, and a body in chunks of one byte
takes it a tenth of a second for what asyncio would read: of twenty connections, seconds in each turn."""

UNREAD = 60.0
"""Seconds in which a caller takes ``READ_LEAST`` bytes of an answer that waits to be read, or is hung up on."""
READ_LEAST = 1 << 13

Server = Callable[[], asyncio.Protocol]


class Guest(asyncio.Protocol):
    """One connection, passed on to aiohttp's handler: reports its begin and its end, and ends it where its answers are
    not read. ``came`` returns whether the connection may stay; if not, it has been answered, and ``went`` is not
    called."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        came: Callable[[asyncio.WriteTransport], bool],
        went: Callable[[asyncio.WriteTransport], None],
        unread: float = UNREAD,
    ) -> None:
        self._inner, self._came, self._went_away, self._bound = inner, came, went, unread
        self._transport: asyncio.WriteTransport | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def here(self) -> bool:
        """The connection is accepted (and its end will be reported)."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        if self._came(transport):
            if hasattr(transport, "max_size"):  # of asyncio's plain sockets
                transport.max_size = READ_MAX
            self._transport = transport
            self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:
            return
        self._is_read()
        try:
            self._inner.connection_lost(exc)
        finally:
            self._went_away(self._transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._transport is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._look_again(self._transport)
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._is_read()
            self._inner.resume_writing()

    def _look_again(self, transport: asyncio.WriteTransport) -> None:
        before = transport.get_write_buffer_size()

        def look() -> None:
            if before - transport.get_write_buffer_size() < READ_LEAST:
                transport.abort()
            else:
                self._look_again(transport)

        self._unread = asyncio.get_running_loop().call_later(self._bound, look)

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class SocketGuests:
    """Connections on the unix socket, where the kernel identifies the users: each user has a share; a connection beyond
    the share is answered with an error and closed. ``subordinates``: uids that are counted together."""

    def __init__(self, view: AgentView, server: Server, subordinates: SubordinateUids = SUBORDINATES) -> None:
        self._view, self._server, self._subordinates = view, server, subordinates
        self._free = (0, os.geteuid())
        self._users: Counter[Key] = Counter()
        self._whose: dict[asyncio.WriteTransport, Key] = {}

    def __call__(self) -> asyncio.Protocol:
        """The protocol for one more connection."""
        return Guest(self._server(), self._came, self._went)

    def _came(self, transport: asyncio.WriteTransport) -> bool:
        uid = auth.peer_of(transport)[0]
        key = uid if uid in self._free else self._subordinates.key(uid)
        no = None if uid in self._free else self._refusal(uid, key)
        if no is not None:
            transport.write(_answer(no))
            transport.close()
            return False
        self._users[key] += 1
        self._whose[transport] = key
        return True

    def _went(self, transport: asyncio.WriteTransport) -> None:
        key = self._whose.pop(transport)
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]

    def _refusal(self, uid: int, key: Key) -> ApiError | None:
        most = PER_REQUEST * self._view.config.limits.concurrent
        agent = f"the agent of node {self._view.node}"
        if self._users[key] >= most:
            has = f"uid {uid} has" if key == uid else f"{key}, as {uid} is, have"
            return ApiError(
                "limit",
                f"{has} {most} connections to {agent}, twice limits.concurrent in its config; nothing was changed",
                "close idle connections, then try again",
            )
        if sum(count for user, count in self._users.items() if user not in self._free) >= OF_USERS:
            return ApiError(
                "limit",
                f"users have {OF_USERS} connections to {agent}, the most that it keeps; nothing was changed",
                "ask again in a moment; an operator finds out whose they are with `ss -xp`",
            )
        return None


class LoopbackGuests:
    """Connections on loopback HTTP, where callers are not identified: a new connection closes the oldest. No request
    there takes long."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._here: dict[asyncio.WriteTransport, None] = {}

    def __call__(self) -> asyncio.Protocol:
        """The protocol for one more connection."""
        return Guest(self._server(), self._came, self._went)

    def _came(self, transport: asyncio.WriteTransport) -> bool:
        if len(self._here) >= LOOPBACK:
            oldest = next(iter(self._here))
            del self._here[oldest]
            oldest.abort()
        self._here[transport] = None
        return True

    def _went(self, transport: asyncio.WriteTransport) -> None:
        self._here.pop(transport, None)


def _answer(error: ApiError) -> bytes:
    """A whole HTTP response with this error, independent of the request."""
    body = json.dumps(error.body()).encode()
    head = (
        f"HTTP/1.1 {error.status} Too Many Requests\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body

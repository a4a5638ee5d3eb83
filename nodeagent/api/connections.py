"""Bounds the connections that programs of this machine have to this agent. Each connection costs a descriptor even if
it is idle, and an agent without free descriptors opens no file, reaches no store and starts no worker.

Owns the counts for the unix socket and for loopback HTTP (``https.py`` counts its own). Must never look up a name.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

import structlog

from nodeagent.agent.view import AgentView
from nodeagent.api.auth import CallerKey
from nodeagent.api.errors import ApiError
from nodeagent.osutil.clock import Allowance
from nodeagent.osutil.linux import peer_credentials
from nodeagent.osutil.subuids import SubordinateUids
from nodeagent.osutil.tcp import whose

PER_REQUEST = 2
"""Connections that a user may have for each request that the user may have under way."""
OF_USERS = 256
"""Connections on the unix socket at once, of all users but root and the agent's own."""
LOOPBACK = 64
"""Connections on loopback HTTP at once."""
CONNECTS, CONNECTS_PER_REQUEST = 128, 4
"""Connections a second that a user may make in the long run: so many, or so many for each of ``limits.requests``. The
tool makes two for a request."""
CONNECTS_BURST = 4.0
"""Seconds of that rate that may come at once."""
USERS = 1024
"""Users whose connections are counted; beyond them the one who came longest ago is forgotten."""
UNKNOWN: CallerKey = "who is not known"
"""Connections of whom the kernel does not know whose they are are one user's."""
BACKLOG = 4096
"""Connections that wait in the kernel to be accepted, unless net.core.somaxconn is less."""
AT_ONCE = 64
"""Connections that are accepted in a turn of the loop."""
ACCEPTS = 4000.0
"""The same a second in the long run, most of them to be hung up on."""
ACCEPT_PAUSE, ACCEPT_AGAIN = 0.05, 1.0
"""Seconds for which nothing is accepted: beyond what is needed, once too much came; after it was not possible."""
COMPLAINTS = 60.0
"""Seconds between two lines in the log about that."""
READ_MAX = 1 << 13
"""Bytes of a connection that are read in one go. The loop parses them without a pause, and a body in chunks of one byte
takes it a tenth of a second for what asyncio would read: of twenty connections, seconds in each turn."""

UNREAD = 60.0
"""Seconds in which a caller takes ``READ_LEAST`` bytes of an answer that waits to be read, or is hung up on."""
READ_LEAST = 1 << 13

ServerFactory = Callable[[], asyncio.Protocol]


class Guest(asyncio.Protocol):
    """One connection, passed on to aiohttp's handler: reports its begin and its end, and ends it where its answers are
    not read."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        came: Callable[[asyncio.WriteTransport], None],
        went: Callable[[asyncio.WriteTransport], None],
        unread: float = UNREAD,
    ) -> None:
        self._inner, self._came, self._went_away, self._bound = inner, came, went, unread
        self._transport: asyncio.WriteTransport | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._unwanted = False

    @property
    def here(self) -> bool:
        """The connection has begun (and its end will be reported)."""
        return self._transport is not None

    def hang_up(self) -> None:
        """End it, also before it has begun."""
        self._unwanted = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        if hasattr(transport, "max_size"):  # of asyncio's plain sockets
            transport.max_size = READ_MAX
        self._transport = transport
        self._came(transport)
        self._inner.connection_made(transport)
        if self._unwanted:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None
        self._is_read()
        try:
            self._inner.connection_lost(exc)
        finally:
            self._went_away(self._transport)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._look_again(self._transport)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
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


class Guests(ABC):
    """Connections to one listening socket. They are taken out of the kernel's queue here, each user's so often, and
    nothing is built for one before it is known whose it is. Of a user who makes too many the others keep their
    answers. ``subordinates``: uids that are counted together; ``clock`` counts seconds and never goes back."""

    def __init__(
        self,
        view: AgentView,
        server: ServerFactory,
        subordinates: SubordinateUids,
        clock: Callable[[], float],
    ) -> None:
        self._view, self._server, self._subordinates, self._clock = view, server, subordinates, clock
        self._free = (0, os.geteuid())
        self._here: dict[Guest, CallerKey] = {}
        """Whose they are, in the order in which they came."""
        self._users: Counter[CallerKey] = Counter()
        self._arrivals: dict[CallerKey, Allowance] = {}
        """By user, the one who came last at the end."""
        self._accepts = Allowance(BACKLOG, ACCEPTS)
        self._complaints = Allowance(1, 1 / COMPLAINTS)
        self._opening: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None

    def serve(self, listening: socket.socket) -> None:
        """Take connections from now on, until ``close``, which closes the socket."""
        listening.setblocking(False)
        self._listening = listening
        self._go_on()

    async def close(self) -> None:
        """Take no more; those that were taken are in the server's hands after that."""
        listening, self._listening = self._listening, None
        if self._pause is not None:
            self._pause.cancel()
        if listening is not None:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _go_on(self) -> None:
        self._pause = None
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening, self._accept, self._listening)

    def _wait(self, listening: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        self._pause = loop.call_later(seconds, self._go_on)

    def _accept(self, listening: socket.socket) -> None:
        taken = 0
        while taken < AT_ONCE:
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # without a descriptor or memory
                if self._complaints.may(self._clock()):
                    structlog.get_logger("api").error("no connection can be accepted", why=str(error))
                self._wait(listening, ACCEPT_AGAIN)
                return
            taken += 1
            connection.setblocking(False)
            try:
                self._meet(connection, self._uid(connection))
            except OSError:  # it was reset meanwhile
                connection.close()
        if late := self._accepts.spend(taken, self._clock()):
            self._wait(listening, late + ACCEPT_PAUSE)

    def _meet(self, connection: socket.socket, uid: int | None) -> None:
        key = UNKNOWN if uid is None else uid if uid in self._free else self._subordinates.key(uid)
        no = None if uid in self._free else self._refusal(_name(uid, key), key)
        if no is None:
            self._take(connection, key)
            return
        with suppress(OSError):  # who does not read it is not waited for
            connection.send(no)
        connection.close()

    def _take(self, connection: socket.socket, key: CallerKey) -> None:
        guest = Guest(self._server(), lambda _: None, lambda _: self._forget(guest))
        self._here[guest] = key
        self._users[key] += 1
        task = asyncio.get_running_loop().create_task(self._open(connection, guest))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, guest: Guest) -> None:
        try:
            with suppress(OSError):  # it was reset meanwhile
                await asyncio.get_running_loop().connect_accepted_socket(lambda: guest, connection)
        finally:
            if not guest.here:
                connection.close()
                self._forget(guest)

    def _forget(self, guest: Guest) -> None:
        if (key := self._here.pop(guest, None)) is not None:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]

    @abstractmethod
    def _uid(self, connection: socket.socket) -> int | None:
        """Whose it is, as the kernel says. Raises OSError if it is no connection any more."""

    def _refusal(self, who: str, key: CallerKey) -> bytes | None:
        """The answer to a user whose connection may not stay."""
        rate = max(CONNECTS, CONNECTS_PER_REQUEST * self._view.config.limits.requests)
        now, own = self._clock(), self._arrivals.pop(key, None)
        if own is None:
            own = Allowance(CONNECTS_BURST * rate, rate)
        self._arrivals[key] = own
        if len(self._arrivals) > USERS:
            del self._arrivals[next(iter(self._arrivals))]
        own.change(CONNECTS_BURST * rate, rate, now)
        return None if own.may(now) else _too_often(who, rate, self._view.node)


class SocketGuests(Guests):
    """Connections on the unix socket: each user has a share; a connection beyond the share is answered with an error
    and closed."""

    def _uid(self, connection: socket.socket) -> int | None:
        return peer_credentials(connection)[1]

    def _refusal(self, who: str, key: CallerKey) -> bytes | None:
        most = PER_REQUEST * self._view.config.limits.concurrent
        agent = f"the agent of node {self._view.node}"
        if no := super()._refusal(who, key):
            return no
        if self._users[key] >= most:
            return _answer(
                ApiError(
                    "limit",
                    f"{who} {'has' if isinstance(key, int) else 'have'} {most} connections to {agent}, twice "
                    "limits.concurrent in its config; nothing was changed",
                    "close idle connections, then try again",
                )
            )
        if sum(count for user, count in self._users.items() if user not in self._free) >= OF_USERS:
            return _answer(
                ApiError(
                    "limit",
                    f"users have {OF_USERS} connections to {agent}, the most that it keeps; nothing was changed",
                    "ask again in a moment; an operator finds out whose they are with `ss -xp`",
                )
            )
        return None


class LoopbackGuests(Guests):
    """Connections on loopback HTTP: one beyond those that there may be closes the oldest of who has most. No request
    there takes long."""

    def _uid(self, connection: socket.socket) -> int | None:
        there, here = connection.getpeername(), connection.getsockname()
        try:
            return whose(there, here)
        except OSError:  # a kernel that cannot be asked: all are one user
            return None

    def _take(self, connection: socket.socket, key: CallerKey) -> None:
        if len(self._here) >= LOOPBACK:
            most = max(self._users, key=lambda user: self._users[user])
            oldest = next(guest for guest, user in self._here.items() if user == most)
            self._forget(oldest)
            oldest.hang_up()
        super()._take(connection, key)


def _name(uid: int | None, key: CallerKey) -> str:
    if uid is None:
        return str(key)
    return f"uid {uid}" if key == uid else f"{key}, as {uid} is,"


@lru_cache(USERS)
def _too_often(who: str, rate: int, node: str) -> bytes:
    """The answer to who comes again and again, made once."""
    return _answer(
        ApiError(
            "limit",
            f"{who} made connections to the agent of node {node} more often than {rate} times a second "
            f"({CONNECTS_PER_REQUEST} for each of limits.requests in its config); nothing was changed",
            "ask again in a moment, and several times on one connection",
        )
    )


def _answer(error: ApiError) -> bytes:
    """A whole HTTP response with this error, independent of the request."""
    body = json.dumps(error.body()).encode()
    head = (
        f"HTTP/1.1 {error.status} Too Many Requests\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body

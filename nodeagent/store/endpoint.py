"""Makes connections to the store and its sentinels: addresses, passwords, TLS.

A name is looked up anew for each connection, too; one that is not resolved leads where it led before.

Passwords and certificates are read anew for each connection, so that renewed ones need no restart: in a thread, since
their disk may hang, and then what was read last is used. Must never send a command, or repeat a password in a message.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Generic, TypeVar

from nodeagent.osutil.linux import open_plain
from nodeagent.osutil.threads import in_daemon
from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store.whois import TlsFileError, client_context
from nodeagent.store.wire import LONGEST_REPLY, Connection

T = TypeVar("T")
StoreLogin = tuple[str | None, str | None]
"""User and password."""

LONGEST_PASSWORD = 4096
"""The most bytes read of a password file."""
LOOK_LIMIT = 0.1
"""Seconds from the begin of a look at files, and for which a name is looked up, that a connection waits for: a small
part of ``store_timeout``."""


class AccessError(OSError):
    """A password file or certificate that cannot be used. ``str()`` tells the operator what to do."""


class FileReading(Generic[T]):
    """What ``read`` makes of files. Read at once, and anew in a thread: one look at a time. Raises ``AccessError``."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._look: asyncio.Future[T] | None = None
        self._began = 0.0
        self._error: BaseException | None = None
        """Of the newest look that came back."""
        self.last = read()
        """As of the newest look that came back without an error."""

    async def renew(self) -> bool:
        """Look again, or wait for the look under way. False if it has not come back in ``LOOK_LIMIT`` seconds since it
        began, or there is no thread for it: ``last`` may be older than the files then, until one does. Raises what that
        look, or else the newest one that came back, has raised."""
        loop = asyncio.get_running_loop()
        look = self._look
        if look is None or look.done():
            try:
                look = in_daemon(self._read, "access")
            except OSError:  # as of a disk that hangs: what was read last still holds
                return False
            self._look, self._began = look, loop.time()
            look.add_done_callback(self._take)
        await asyncio.wait([look], timeout=max(0.0, self._began + LOOK_LIMIT - loop.time()))
        if look.done():
            look.result()  # raises its error
        elif self._error is not None:
            raise self._error
        return look.done()

    def age(self, now: float) -> float:
        """Seconds for which the look that is under way has not come back; ``now``: the loop's time."""
        return now - self._began if self._look is not None and not self._look.done() else 0.0

    def _take(self, look: asyncio.Future[T]) -> None:
        self._error = None if look.cancelled() else look.exception()
        if not look.cancelled() and self._error is None:
            self.last = look.result()


MOST_HOSTS = 64
"""Of which addresses are kept: sentinels may name others, one after the other."""


class HostAddresses:
    """What names are resolved to by ``look_up``, one look at a time for each, in a thread: it may take as long as it
    takes, and raises OSError for a name that is not known. Until it comes back with one, a host is where it was."""

    def __init__(self, look_up: Callable[[str], Sequence[str]]) -> None:
        self._look_up = look_up
        self._found: dict[str, Sequence[str]] = {}
        self._under_way: dict[str, asyncio.Future[Sequence[str]]] = {}

    async def find(self, host: str) -> Sequence[str]:
        """In the order in which to try them. Waits ``LOOK_LIMIT`` seconds where the host was found before, else as long
        as the caller does. Raises OSError if it was not, and is not now."""
        with suppress(ValueError):
            return (str(ip_address(host)),)
        before = self._found.get(host)
        look = self._under_way.get(host)
        try:
            if look is None:
                look = self._under_way[host] = in_daemon(partial(self._look_up, host), "look-up")
                look.add_done_callback(partial(self._take, host))
            await asyncio.wait([look], timeout=None if before is None else LOOK_LIMIT)
            return look.result() if before is None or look.done() else before
        except OSError as error:
            if before is not None:
                return before
            raise OSError(error.errno, f"the name {host} is not resolved: {error.strerror}") from error

    def _take(self, host: str, look: asyncio.Future[Sequence[str]]) -> None:
        del self._under_way[host]
        if not look.cancelled() and look.exception() is None:
            if host not in self._found and len(self._found) >= MOST_HOSTS:
                self._found.clear()
            self._found[host] = look.result()


def look_up(host: str) -> Sequence[str]:
    """The numeric addresses of a host, in the order in which to try them. Raises OSError."""
    try:
        return tuple(dict.fromkeys(str(at[0]) for *_, at in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    except UnicodeError as error:  # of what is no name
        raise OSError(errno.EINVAL, str(error)) from error


class StoreEndpoint:
    """Makes connections for one ``redis`` section, with what its files held when they were last read: here, and each
    time that they are renewed. Raises ``AccessError`` at once if a file cannot be used now. ``longest``: bytes of a
    reply at most. ``addresses``: what other endpoints of the store know of its hosts, too."""

    def __init__(
        self, config: RedisConfig, longest: int = LONGEST_REPLY, addresses: HostAddresses | None = None
    ) -> None:
        self._config, self._longest = config, longest
        self.place = config.place
        self._login = FileReading(self._read_login)
        self._sentinel_login = FileReading(self._read_sentinel_login)
        self._tls = FileReading(self._read_tls)
        self._addresses = addresses or HostAddresses(look_up)

    async def renew(self) -> None:
        """Read all files anew, before a connection is made; bounded. Raises ``AccessError`` if one cannot be used."""
        found: list[FileReading[StoreLogin] | FileReading[ssl.SSLContext | None]] = []
        found += [self._login] if self._config.password_file else []
        found += [self._sentinel_login] if self._config.sentinel.password_file else []
        found += [self._tls] if self.place.tls else []
        if found:
            await asyncio.gather(*(reading.renew() for reading in found))

    async def renew_greeting(self) -> float:
        """Read anew what ``greeting`` needs; bounded. For how many seconds its disk has not answered: so old it may be.
        Raises ``AccessError`` if the file cannot be used."""
        if self._config.password_file:
            await self._login.renew()
        return self._login.age(asyncio.get_running_loop().time())

    def server(self, host: tuple[str, int] | None = None) -> Connection:
        """A connection, not yet open, to the server at ``host``; by default to the one in the url."""
        if self.place.path:
            return Connection(self.place.path, longest=self._longest)
        return self._network(host or self.place.hosts[0])

    def greeting(self) -> tuple[tuple[str, ...], ...]:
        """The commands that begin a connection to the server. Send them without waiting for each reply: on a slow
        network, waiting alone could outlast a call's bound."""
        login = _auth(*self._login.last)
        return (*login, ("SELECT", str(self.place.db))) if self.place.db else login

    def sentinel(self, host: tuple[str, int]) -> Connection:
        """A connection, not yet open, to a sentinel."""
        return self._network(host)

    def sentinel_greeting(self) -> tuple[tuple[str, ...], ...]:
        """The commands that begin a connection to a sentinel; see ``greeting``."""
        return _auth(*self._sentinel_login.last)

    def _network(self, host: tuple[str, int]) -> Connection:
        return Connection(host, self._tls.last, self._longest, self._addresses.find)

    def _read_login(self) -> StoreLogin:
        file = self._config.password_file
        return self.place.user, read_secret(file) if file else self.place.password

    def _read_sentinel_login(self) -> StoreLogin:
        sentinel = self._config.sentinel
        return sentinel.user, read_secret(sentinel.password_file) if sentinel.password_file else None

    def _read_tls(self) -> ssl.SSLContext | None:
        if not self.place.tls:
            return None
        tls = self._config.tls
        try:
            return client_context(tls.ca_file, tls.cert_file, tls.key_file, check_name=tls.check_hostname)
        except TlsFileError as error:
            raise AccessError(str(error)) from error


def _auth(user: str | None, password: str | None) -> tuple[tuple[str, ...], ...]:
    return (("AUTH", *([user] if user else []), password),) if password is not None else ()


def read_secret(path: Path) -> str:
    """The password in a file, without the line's end. Raises ``AccessError``, even for a file that every user may read:
    a user who can log in to the store can stop and delete every job."""
    try:
        with open_plain(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(LONGEST_PASSWORD + 1).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise AccessError(f"the password file {path} cannot be read: {why}") from None
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise AccessError(
            f"the password file {path} has mode {mode:04o}, so others than its owner and group can read or change it: "
            f"run chmod 0600 {path} and set a new password"
        )
    if not text or len(text) > LONGEST_PASSWORD or "\n" in text:
        raise AccessError(f"the password file {path} does not hold one line with a password")
    return text

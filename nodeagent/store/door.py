"""How connections to the store and its sentinels are made: addresses, passwords, TLS.

Passwords and certificates are read anew for each connection, so that renewed ones need no restart. Must never send a
command, wait, or repeat a password in a message.
"""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from nodeagent.spec.storeconfig import RedisConfig

LONGEST_PASSWORD = 4096
"""Bytes read of a password file."""


class AccessError(OSError):
    """A password file or certificate that cannot be used. ``str()`` is for the person and says what to do."""


class Door:
    """Makes connections for one ``redis`` section. Raises ``AccessError`` at once for what cannot be used now."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self.place = config.place
        self._login()
        self._sentinel_login()
        self._tls()

    def server(self, host: tuple[str, int] | None = None) -> AbstractConnection:
        """A connection, not opened yet, to the server at ``host``, by default the one in the url."""
        options = {"redis_connect_func": _silent} | PLAIN
        if self.place.path:
            return UnixDomainSocketConnection(path=self.place.path, **options)
        return self._network(host or self.place.hosts[0], options)

    def greeting(self) -> tuple[tuple[str, ...], ...]:
        """The commands that a connection to the server begins with. The library would send them one after the other,
        each waiting for its reply: where replies come late, that alone could outlast a call's bound."""
        user, password = self._login().values()
        login = (("AUTH", *([user] if user else []), password),) if password is not None else ()
        return (*login, ("SELECT", str(self.place.db))) if self.place.db else login

    def sentinel(self, host: tuple[str, int]) -> AbstractConnection:
        """A connection, not opened yet, to a sentinel."""
        return self._network(host, self._sentinel_login() | PLAIN)

    def _network(self, host: tuple[str, int], options: dict[str, Any]) -> AbstractConnection:
        context = self._tls()
        if context is None:
            return Connection(host=host[0], port=host[1], **options)
        connection = SSLConnection(host=host[0], port=host[1], **options)
        connection.ssl_context.context = context  # redis-py's own would trust the system's CAs beside ours
        return connection

    def _login(self) -> dict[str, Any]:
        file = self._config.password_file
        return {"username": self.place.user, "password": read_secret(file) if file else self.place.password}

    def _sentinel_login(self) -> dict[str, Any]:
        sentinel = self._config.sentinel
        secret = read_secret(sentinel.password_file) if sentinel.password_file else None
        return {"username": sentinel.user, "password": secret}

    def _tls(self) -> ssl.SSLContext | None:
        if not self.place.tls:
            return None
        tls = self._config.tls
        at = tls.ca_file
        try:
            context = ssl.create_default_context(cafile=tls.ca_file)
            context.check_hostname = tls.check_hostname
            if tls.cert_file is not None:
                at = tls.key_file or tls.cert_file
                # An encrypted key is an error, not a question on the terminal.
                context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: "")
        except OSError as error:  # ssl.SSLError is one
            raise AccessError(
                f"{at}: no certificate or key can be read from it ({error}): check the files in redis.tls"
            ) from error
        return context


async def _silent(connection: AbstractConnection) -> None:
    """What the library does with a new connection, without its own greeting."""
    connection._parser.on_connect(connection)  # type: ignore[no-untyped-call]


PLAIN: dict[str, Any] = {
    "protocol": 2,
    "decode_responses": True,
    "retry": Retry(NoBackoff(), 0),
    "socket_timeout": None,
    "socket_connect_timeout": None,
    "health_check_interval": 0,
    "driver_info": None,
}
"""No retries and no bounds of the library's own: callers bound every call, and a lapse must not be hidden. The server
is not told the library's name either: that would cost a round trip."""


def read_secret(path: Path) -> str:
    """The password in a file, without the line's end. Raises ``AccessError``, also for a file that anybody may read:
    whoever can log in to the store can stop and lose every job."""
    try:
        with path.open("rb") as file:
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

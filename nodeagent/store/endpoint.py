"""Makes connections to the store and its sentinels: addresses, passwords, TLS.

Each connection reads passwords and certificates anew, so that renewed ones need no restart. Must never send a command,
wait, or repeat a password in a message.
"""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store.whois import TlsFileError, client_context
from nodeagent.store.wire import Connection

LONGEST_PASSWORD = 4096
"""The most bytes read of a password file."""


class AccessError(OSError):
    """A password file or certificate that cannot be used. ``str()`` tells the operator what to do."""


class StoreEndpoint:
    """Makes connections for one ``redis`` section. Raises ``AccessError`` at once if a file cannot be used now."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self.place = config.place
        self._login()
        self._sentinel_login()
        self._tls()

    def server(self, host: tuple[str, int] | None = None) -> Connection:
        """A connection, not yet open, to the server at ``host``; by default to the one in the url."""
        return Connection(self.place.path) if self.place.path else self._network(host or self.place.hosts[0])

    def greeting(self) -> tuple[tuple[str, ...], ...]:
        """The commands that begin a connection to the server. Send them without waiting for each reply: on a slow
        network, waiting alone could outlast a call's bound."""
        login = _auth(*self._login())
        return (*login, ("SELECT", str(self.place.db))) if self.place.db else login

    def sentinel(self, host: tuple[str, int]) -> Connection:
        """A connection, not yet open, to a sentinel."""
        return self._network(host)

    def sentinel_greeting(self) -> tuple[tuple[str, ...], ...]:
        """The commands that begin a connection to a sentinel; see ``greeting``."""
        return _auth(*self._sentinel_login())

    def _network(self, host: tuple[str, int]) -> Connection:
        return Connection(host, self._tls())

    def _login(self) -> tuple[str | None, str | None]:
        file = self._config.password_file
        return self.place.user, read_secret(file) if file else self.place.password

    def _sentinel_login(self) -> tuple[str | None, str | None]:
        sentinel = self._config.sentinel
        return sentinel.user, read_secret(sentinel.password_file) if sentinel.password_file else None

    def _tls(self) -> ssl.SSLContext | None:
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

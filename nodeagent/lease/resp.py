"""The lease process's talk with the store's server: one connection, one question at a time, each within its bound.

Certificates and keys are read anew for each connection, so that renewed ones need no restart: in a thread, since their
disk may hang, and then what was read last is used. Standard library only. Whatever is not as it should be is a
``TalkError`` with a sentence for people, and the connection is dropped: no later question can ever read an earlier
one's reply. A replica is never talked to. Must never retry, or know what a script means.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, Union

from nodeagent.lease.order import Server, StoreScript, Tls
from nodeagent.osutil.linux import boottime, socket_path
from nodeagent.store.whois import client_context, identity, parse_info, require_primary

if TYPE_CHECKING:
    import ssl

LONGEST_REPLY = 1 << 20
"""Bytes. What the scripts answer has some hundred, INFO some thousand."""
DEEPEST = 4
"""Lists within lists."""
LONGEST_NUMBER = 20
"""Digits and sign."""
LOOK_LIMIT = 0.1
"""Seconds for which a connection waits for certificates, if it has some that were read before."""
_CHUNK = 1 << 16

Wait = Callable[[int, int, float], bool]
"""Until these events of ``poll`` come of this file; False once CLOCK_BOOTTIME is the third, ``until``."""
Reply: TypeAlias = Union[str, int, list["Reply"], None]  # noqa: UP007 (it names itself)
"""What a server may answer. Bytes that are not UTF-8 are spelled out."""
T = TypeVar("T")


class TalkError(OSError):
    """The server cannot be reached, or does not say what it should."""


class ErrorReply(TalkError):  # noqa: N818 (that is Redis's name for it)
    """The server's answer is an error."""


def wait_for(fd: int, events: int, until: float) -> bool:
    """The plain ``Wait``."""
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(max(0.0, until - boottime()) * 1000))


def place(server: Server) -> str:
    """For people."""
    return server.path or (f"[{server.host}]:{server.port}" if ":" in server.host else f"{server.host}:{server.port}")


class Talk:
    """With one server. ``timeout`` (seconds) bounds making the connection, and again each question. All but ``close``
    raise TalkError."""

    def __init__(
        self, server: Server, timeout: float, wait: Wait = wait_for, certificates: Certificates | None = None
    ) -> None:
        """``certificates``: those of the talks before, if there were any."""
        self.server, self.timeout = server, timeout
        self._wait, self._certificates = wait, certificates or Certificates()
        self._line: _Line | None = None
        self._run_id = ""

    def open(self) -> None:
        """Connect, be let in, and hear who it is; nothing where that is done."""
        if self._line is not None:
            return
        line = _Line(self._wait, boottime() + self.timeout)
        try:
            line.connect(self.server, self._certificates)
            line.send(*self.server.greeting, ("INFO",))  # one round trip; before 7.0 INFO takes one section or all
            for _ in self.server.greeting:
                line.receive()
            received = line.receive()
            if not isinstance(received, str):
                raise TalkError("its INFO is no text")
            info = parse_info(received)
            require_primary(info)
            self._run_id = identity(info)
        except OSError as error:
            line.close()
            raise self._described(error) from error
        self._line = line

    def evaluate(self, step: StoreScript, prefix: str, *arguments: str) -> Reply:
        """Run a script on the keys that begin with ``prefix``, sending the source only where the server does not know
        it yet."""
        line = self._line
        if line is None:
            raise TalkError("there is no connection")
        line.until = boottime() + self.timeout
        words = ("1", prefix, self._run_id, *arguments)
        try:
            line.send(("EVALSHA", step.sha, *words))
            try:
                return line.receive()
            except ErrorReply as error:
                if not str(error).startswith("NOSCRIPT"):
                    raise
            line.send(("EVAL", step.source, *words))
            return line.receive()
        except OSError as error:
            self.close()
            raise self._described(error) from error

    def close(self) -> None:
        """At once, without a word."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _described(self, error: OSError) -> TalkError:
        where = f"the store at {place(self.server)}"
        if isinstance(error, TimeoutError):
            return TalkError(f"{where} did not answer within {self.timeout:g} s")
        return TalkError(f"{where} cannot be used: {error.strerror or error}")


class Certificates:
    """What was read of the files of ``Tls``. Raises OSError of files that cannot be used."""

    def __init__(self) -> None:
        self._look: _Look | None = None
        self._last: tuple[Tls, ssl.SSLContext] | None = None

    def newest(self, tls: Tls, wait: Wait, until: float) -> ssl.SSLContext:
        """Of a new look, or of the last one where this one takes too long."""
        look = self._look
        if look is not None and wait_for(look.over, select.POLLIN, 0.0):  # since the connection before
            with contextlib.suppress(OSError):
                self._last = look.tls, look.result()
            self.close()
        elif look is not None and look.tls != tls:
            self.close()
        known = self._last[1] if self._last is not None and self._last[0] == tls else None
        if self._look is None:
            try:
                self._look = _Look(tls)
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread
                if known is None:
                    raise OSError(errno.EAGAIN, f"certificates cannot be read: {error}") from error
                return known
        look = self._look
        if not wait(look.over, select.POLLIN, until if known is None else min(until, boottime() + LOOK_LIMIT)):
            if known is None:
                raise OSError(errno.EIO, f"the disk of its certificates ({', '.join(filter(None, tls[:3]))}) hangs")
            return known
        self.close()
        self._last = tls, look.result()
        return self._last[1]

    def close(self) -> None:
        """Forget a look that is not over."""
        if self._look is not None:
            os.close(self._look.over)
            self._look = None


class _Look:
    """One, in a thread."""

    def __init__(self, tls: Tls) -> None:
        """Raises RuntimeError if there is no thread to be had."""
        self.tls = tls
        self._found: ssl.SSLContext | OSError = OSError(errno.EIO, "certificates were not read to their end")
        self.over, self._end = os.pipe()
        """The first becomes readable at its end. Who has it closes it."""
        try:
            threading.Thread(target=self._run, name="certificates", daemon=True).start()
        except RuntimeError:
            os.close(self.over)
            os.close(self._end)
            raise

    def _run(self) -> None:
        tls = self.tls
        try:
            self._found = client_context(tls.ca or None, tls.cert or None, tls.key or None, check_name=bool(tls.server))
        except OSError as error:
            self._found = error
        finally:
            os.close(self._end)

    def result(self) -> ssl.SSLContext:
        """Once it is over."""
        if isinstance(self._found, OSError):
            raise self._found
        return self._found


class _Line:
    """A connection: commands out, replies in. Raises OSError for whatever goes wrong, TimeoutError once CLOCK_BOOTTIME
    is ``until``."""

    def __init__(self, wait: Wait, until: float) -> None:
        self.until, self._wait = until, wait
        self._socket: socket.socket | None = None
        self._data = bytearray()
        self._room = 0
        self._wants: dict[type[OSError], int] = {BlockingIOError: 0}
        """The errors that only say that it has to be tried again, and what is to be waited for; 0: what was tried."""

    def connect(self, server: Server, certificates: Certificates) -> None:
        if server.path:
            made = self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.setblocking(False)
            with socket_path(Path(server.path)) as path:
                made.connect(path)  # at once, or not at all
            return
        # A name would have to be looked up, and nobody can say how long that takes.
        family, kind, *_, at = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        made = self._socket = socket.socket(family, kind)
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if code := made.connect_ex(at):
            if code != errno.EINPROGRESS:
                raise OSError(code, os.strerror(code))
            self._ready(select.POLLOUT)
        if failed := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(failed, os.strerror(failed))
        if server.tls is not None:
            import ssl

            secured = certificates.newest(server.tls, self._wait, self.until).wrap_socket(
                made, server_hostname=server.tls.server or server.host, do_handshake_on_connect=False
            )
            self._socket = secured
            self._wants |= {ssl.SSLWantReadError: select.POLLIN, ssl.SSLWantWriteError: select.POLLOUT}
            self._try(secured.do_handshake, 0)

    def send(self, *commands: tuple[str, ...]) -> None:
        """What comes next are their replies, in their order."""
        if self._data:
            raise TalkError("it says more than it was asked")
        self._room = LONGEST_REPLY
        left = b"".join(map(_encoded, commands))
        while left:
            left = left[self._try(lambda: self._require_socket().send(left), select.POLLOUT) :]  # noqa: B023

    def receive(self, depth: int = 0) -> Reply:
        """The next reply; ErrorReply if it is an error, or has one in it."""
        line = self._until_end_of_line()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"+":
                return _text(rest)
            case b"-":
                raise ErrorReply(_text(rest))
            case b":":
                return _number(rest)
            case b"$":
                size = _size(rest)
                return None if size is None else _text(self._exactly(size))
            case b"*" if depth < DEEPEST:
                size = _size(rest)
                return None if size is None else [self.receive(depth + 1) for _ in range(size)]
        raise _no_reply(line)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _until_end_of_line(self) -> bytes:
        seen = 0
        while (end := self._data.find(b"\r\n", max(0, seen - 1))) < 0:
            seen = len(self._data)
            self._more()
        return self._take(end)

    def _exactly(self, size: int) -> bytes:
        while len(self._data) < size + 2:
            if size + 2 - len(self._data) > self._room:
                raise TalkError(f"its reply has more than {LONGEST_REPLY} bytes")
            self._more()
        if self._data[size : size + 2] != b"\r\n":
            raise _no_reply(bytes(self._data[size:]))
        return self._take(size)

    def _take(self, size: int) -> bytes:
        taken = bytes(self._data[:size])
        del self._data[: size + 2]
        return taken

    def _more(self) -> None:
        data = self._try(lambda: self._require_socket().recv(_CHUNK), select.POLLIN)
        if not data:
            raise TalkError("it closed the connection")
        self._data += data
        self._room -= len(data)
        if self._room < 0:
            raise TalkError(f"its reply has more than {LONGEST_REPLY} bytes")

    def _try(self, action: Callable[[], T], events: int) -> T:
        while True:
            try:
                return action()
            except OSError as error:
                wants = self._wants.get(type(error))
                if wants is None:
                    raise
            self._ready(wants or events)

    def _ready(self, events: int) -> None:
        if not self._wait(self._require_socket().fileno(), events, self.until):
            raise TimeoutError

    def _require_socket(self) -> socket.socket:
        assert self._socket is not None
        return self._socket


def _encoded(words: tuple[str, ...]) -> bytes:
    parts = [word.encode(errors="replace") for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _number(digits: bytes) -> int:
    if len(digits) <= LONGEST_NUMBER and digits.removeprefix(b"-").isdigit():
        return int(digits)
    raise _no_reply(digits)


def _size(digits: bytes) -> int | None:
    """None: there is nothing."""
    size = _number(digits)
    if size < -1:
        raise _no_reply(digits)
    return None if size < 0 else size


def _no_reply(data: bytes) -> TalkError:
    return TalkError(f"it sent what is no reply of Redis: {data[:40]!r}")

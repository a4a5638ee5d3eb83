"""The lease process's talk with the store's server: one connection, one question at a time, each within its bound.

What may have to wait is written as ``Steps``, which wait nowhere: who drives them (``links.py``) listens to others too.

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
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, Union

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

Reply: TypeAlias = Union[str, int, list["Reply"], None]  # noqa: UP007 (it names itself)
"""What a server may answer. Bytes that are not UTF-8 are spelled out."""
T = TypeVar("T")


class Wanted(NamedTuple):
    """What steps wait for: one of these events of ``poll`` of this file, or that CLOCK_BOOTTIME is ``until``."""

    fd: int
    events: int
    until: float


Steps: TypeAlias = Generator[Wanted, bool, T]
"""They are sent whether an event came before ``until``."""


class TalkError(OSError):
    """The server cannot be reached, or does not say what it should."""


class ErrorReply(TalkError):  # noqa: N818 (that is Redis's name for it)
    """The server's answer is an error."""


def place(server: Server) -> str:
    """For people."""
    return server.path or (f"[{server.host}]:{server.port}" if ":" in server.host else f"{server.host}:{server.port}")


class Talk:
    """With one server. All but ``close`` raise TalkError, also at ``until`` (CLOCK_BOOTTIME)."""

    def __init__(self, server: Server, certificates: Certificates | None = None) -> None:
        """``certificates``: those of the talks before, if there were any."""
        self.server = server
        self._certificates = certificates or Certificates()
        self._line: _Line | None = None
        self._run_id = ""

    def greet(self, until: float) -> Steps[None]:
        """Connect, be let in, and hear who it is. Once."""
        line = self._line = _Line(until)
        try:
            yield from line.connect(self.server, self._certificates)
            # One round trip; before 7.0 INFO takes one section or all.
            yield from line.send(*self.server.greeting, ("INFO",))
            for _ in self.server.greeting:
                yield from line.receive()
            received = yield from line.receive()
            if not isinstance(received, str):
                raise TalkError("its INFO is no text")
            info = parse_info(received)
            require_primary(info)
            self._run_id = identity(info)
        except OSError as error:
            self.close()
            raise self._described(error) from error

    def evaluate(self, until: float, step: StoreScript, prefix: str, *arguments: str) -> Steps[Reply]:
        """Run a script on the keys that begin with ``prefix``. Its source is read, and sent, only where the server does
        not know it yet."""
        line = self._line
        if line is None:
            raise TalkError("there is no connection")
        line.until = until
        words = ("1", prefix, self._run_id, *arguments)
        try:
            yield from line.send(("EVALSHA", step.sha, *words))
            try:
                return (yield from line.receive())
            except ErrorReply as error:
                if not str(error).startswith("NOSCRIPT"):
                    raise
            yield from line.send(("EVAL", _source(step), *words))
            return (yield from line.receive())
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
            return TalkError(f"{where} did not answer in time")
        return TalkError(f"{where} cannot be used: {error.strerror or error}")


class Certificates:
    """What was read of the files of ``Tls``. Raises OSError of files that cannot be used."""

    def __init__(self) -> None:
        self._look: _Look | None = None
        self._last: tuple[Tls, ssl.SSLContext] | None = None

    def newest(self, tls: Tls, until: float) -> Steps[ssl.SSLContext]:
        """Of a new look, or of the last one where this one takes too long."""
        look = self._look
        if look is not None and look.is_over():  # since the connection before
            with contextlib.suppress(OSError):
                self._last = look.tls, look.result()
            self._look = None
        elif look is not None and look.tls != tls:
            self._look = None
        known = self._last[1] if self._last is not None and self._last[0] == tls else None
        if self._look is None:
            try:
                self._look = _Look(tls, *os.pipe())
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread
                if known is None:
                    raise OSError(errno.EAGAIN, f"certificates cannot be read: {error}") from error
                return known
        look = self._look
        bound = until if known is None else min(until, boottime() + LOOK_LIMIT)
        if not (yield Wanted(look.over, select.POLLIN, bound)):
            if known is None:
                raise OSError(errno.EIO, f"the disk of its certificates ({', '.join(filter(None, tls[:3]))}) hangs")
            return known
        self._look, self._last = None, (tls, look.result())
        return self._last[1]


class _Look:
    """One, in a thread."""

    def __init__(self, tls: Tls, over: int, end: int) -> None:
        """``over``, ``end``: of a pipe. Raises RuntimeError if there is no thread to be had."""
        self.tls = tls
        self._found: ssl.SSLContext | OSError = OSError(errno.EIO, "certificates were not read to their end")
        self.over, self._end = over, end
        """The first becomes readable at its end. It stays open as long as anybody waits for it."""
        try:
            threading.Thread(target=self._run, name="certificates", daemon=True).start()
        except RuntimeError:
            os.close(end)
            raise

    def __del__(self) -> None:
        os.close(self.over)

    def is_over(self) -> bool:
        poll = select.poll()
        poll.register(self.over, select.POLLIN)
        return bool(poll.poll(0))

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

    def __init__(self, until: float) -> None:
        self.until = until
        self._socket: socket.socket | None = None
        self._data = bytearray()
        self._room = 0
        self._wants: dict[type[OSError], int] = {BlockingIOError: 0}
        """The errors that only say that it has to be tried again, and what is to be waited for; 0: what was tried."""

    def connect(self, server: Server, certificates: Certificates) -> Steps[None]:
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
            yield from self._ready(select.POLLOUT)
        if failed := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(failed, os.strerror(failed))
        if server.tls is not None:
            import ssl

            context = yield from certificates.newest(server.tls, self.until)
            secured = context.wrap_socket(
                made, server_hostname=server.tls.server or server.host, do_handshake_on_connect=False
            )
            self._socket = secured
            self._wants |= {ssl.SSLWantReadError: select.POLLIN, ssl.SSLWantWriteError: select.POLLOUT}
            yield from self._try(secured.do_handshake, 0)

    def send(self, *commands: tuple[str, ...]) -> Steps[None]:
        """What comes next are their replies, in their order."""
        if self._data:
            raise TalkError("it says more than it was asked")
        self._room = LONGEST_REPLY
        left = b"".join(map(_encoded, commands))
        while left:
            sent = yield from self._try(lambda: self._require_socket().send(left), select.POLLOUT)  # noqa: B023
            left = left[sent:]

    def receive(self, depth: int = 0) -> Steps[Reply]:
        """The next reply; ErrorReply if it is an error, or has one in it."""
        line = yield from self._until_end_of_line()
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
                return None if size is None else _text((yield from self._exactly(size)))
            case b"*" if depth < DEEPEST:
                if (size := _size(rest)) is None:
                    return None
                found: list[Reply] = []
                for _ in range(size):
                    found.append((yield from self.receive(depth + 1)))
                return found
        raise _no_reply(line)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _until_end_of_line(self) -> Steps[bytes]:
        seen = 0
        while (end := self._data.find(b"\r\n", max(0, seen - 1))) < 0:
            seen = len(self._data)
            yield from self._more()
        return self._take(end)

    def _exactly(self, size: int) -> Steps[bytes]:
        while len(self._data) < size + 2:
            if size + 2 - len(self._data) > self._room:
                raise TalkError(f"its reply has more than {LONGEST_REPLY} bytes")
            yield from self._more()
        if self._data[size : size + 2] != b"\r\n":
            raise _no_reply(bytes(self._data[size:]))
        return self._take(size)

    def _take(self, size: int) -> bytes:
        taken = bytes(self._data[:size])
        del self._data[: size + 2]
        return taken

    def _more(self) -> Steps[None]:
        data = yield from self._try(lambda: self._require_socket().recv(_CHUNK), select.POLLIN)
        if not data:
            raise TalkError("it closed the connection")
        self._data += data
        self._room -= len(data)
        if self._room < 0:
            raise TalkError(f"its reply has more than {LONGEST_REPLY} bytes")

    def _try(self, action: Callable[[], T], events: int) -> Steps[T]:
        while True:
            try:
                return action()
            except OSError as error:
                wants = self._wants.get(type(error))
                if wants is None:
                    raise
            yield from self._ready(wants or events)

    def _ready(self, events: int) -> Steps[None]:
        if not (yield Wanted(self._require_socket().fileno(), events, self.until)):
            raise TimeoutError

    def _require_socket(self) -> socket.socket:
        assert self._socket is not None
        return self._socket


def _source(step: StoreScript) -> str:
    try:
        return step.file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        why = error.strerror or error
        raise TalkError(f"it lacks a script that cannot be read from {step.file} either ({why})") from error


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

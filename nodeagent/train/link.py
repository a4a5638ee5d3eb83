"""A worker's connection to its shim: JSON over the unix socket in NODEAGENT_SOCKET.

``send`` does not wait for an answer, ``ask`` does, both within a bound. Standard library only. ``send`` must never
raise because the shim is stopped or gone: training continues without it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

VERSION = 1
"""Version of the messages' format, the same as the shim's."""
SEND_BOUND = 0.05
"""The most seconds that ``send`` may take; after that it does nothing for ``REST``."""
REST = 1.0
"""Seconds without another attempt after one that failed."""
ASK_BOUND = 5.0
"""Seconds to wait for an answer, unless the question has its own bound."""
_MAX_LINE = 16 << 20
_MAX_FDS = 8
_SUN_PATH = 107


class LinkError(Exception):
    """The shim refused, did not answer in time, or is not there; ``str()`` says which of these."""


class ShimAnswer(dict[str, Any]):
    """The shim's answer, and the descriptors that came with it (the caller closes them)."""

    fds: tuple[int, ...] = ()


class Link:
    """A connection that any thread, and forked children, may use."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._pid = 0
        self._not_before = 0.0
        self._asked = 0

    @classmethod
    def of_environment(cls) -> Link | None:
        """None if no shim started this process, as under torchrun."""
        path = os.environ.get("NODEAGENT_SOCKET")
        return cls(path) if path else None

    def send(self, name: str, /, **fields: Any) -> bool:
        """Send a message that needs no answer. False: it was not sent (the shim did not take it, or another thread was
        sending); it is not sent again."""
        data = _encode(name, fields)
        if not self._lock.acquire(timeout=SEND_BOUND):
            return False
        try:
            if time.monotonic() < self._not_before:
                return False
            try:
                self._connected().sendall(data)
            except OSError:
                self._drop()
                self._not_before = time.monotonic() + REST
                return False
            return True
        finally:
            self._lock.release()

    def ask(self, name: str, /, timeout: float = ASK_BOUND, fds: Sequence[int] = (), **fields: Any) -> ShimAnswer:
        """Ask, and wait for the answer. Each question has its own connection. Raises LinkError."""
        end = time.monotonic() + timeout
        with self._lock:
            self._asked += 1
            number = self._asked
        try:
            with contextlib.closing(_connect(self._path, timeout)) as line:
                return _asked(line, _encode(name, {"id": number, "fds": len(fds), **fields}), fds, number, end)
        except TimeoutError:
            raise LinkError(f"the shim did not answer worker.{name} within {timeout:g} s") from None
        except OSError as error:
            raise LinkError(f"the shim cannot be asked at {self._path}: {error.strerror or error}") from error

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _connected(self) -> socket.socket:
        if self._pid != os.getpid():  # a fork must not write between its parent's bytes
            self._drop()
        if self._line is None:
            self._line, self._pid = _connect(self._path, SEND_BOUND), os.getpid()
        return self._line

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def _encode(name: str, fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"v": VERSION, "op": f"worker.{name}", **fields}).encode() + b"\n"


def _asked(line: socket.socket, question: bytes, fds: Sequence[int], number: int, end: float) -> ShimAnswer:
    line.settimeout(_left(end))
    sent = socket.send_fds(line, [question], list(fds))
    line.sendall(question[sent:])
    data, came = b"", []
    try:
        while True:
            line.settimeout(_left(end))
            more, fresh, _, _ = socket.recv_fds(line, 1 << 16, _MAX_FDS)
            came += fresh
            for fd in fresh:
                os.set_inheritable(fd, False)
            if not more or len(data) > _MAX_LINE:
                raise LinkError("the shim closed the connection")
            *lines, data = (data + more).split(b"\n")
            for message in map(json.loads, lines):
                if message.get("id") != number:  # the shim's status, which it sends at every connect
                    continue
                if "error" in message:
                    raise LinkError(message["error"])
                if message["fds"] != len(came):
                    raise LinkError("what was to come with the answer did not: this process has too many files open")
                answer = ShimAnswer(message["answer"])
                answer.fds, came = tuple(came), []
                return answer
    finally:
        for fd in came:
            os.close(fd)


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _connect(path: Path, timeout: float) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(timeout)
        with _short(path) as name:
            line.connect(name)
    except OSError:
        line.close()
        raise
    return line


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Unix sockets take names of 107 bytes: a longer path is reached through an open folder."""
    if len(os.fsencode(path)) <= _SUN_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = f"/proc/self/fd/{folder}/{path.name}"
        if len(os.fsencode(name)) > _SUN_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        yield name
    finally:
        os.close(folder)

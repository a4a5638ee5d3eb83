"""One connection to the shim: JSON lines both ways, never blocking.

Standard library only. Must never keep more than a bounded amount for a peer that does not read.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from nodeagent.workers.shim_loop import Loop

VERSION = 1
_MAX_OUT = 4 << 20
_MAX_LINE = 16 << 20

Command = dict[str, Any]


class Peer:
    """Hears commands; ``heard`` and ``closed`` are told."""

    def __init__(
        self,
        loop: Loop,
        link: socket.socket,
        heard: Callable[[Peer, Command], None],
        closed: Callable[[Peer], None],
    ) -> None:
        self._loop, self._link, self._heard, self._closed = loop, link, heard, closed
        self.uid = peer_uid(link)
        link.setblocking(False)
        self._in, self._out = b"", b""
        self._fd = link.fileno()
        loop.watch(self._fd, self._readable)

    def send(self, line: str) -> None:
        """Queue one line; a peer that never reads is dropped."""
        if self._fd < 0:
            return
        self._out += line.encode() + b"\n"
        self._flush()
        if len(self._out) > _MAX_OUT:
            self.close()

    def close(self) -> None:
        """Drop the connection; ``closed`` is told once."""
        if self._fd < 0:
            return
        self._loop.forget(self._fd)
        self._fd = -1
        self._link.close()
        self._closed(self)

    def _flush(self) -> None:
        waiting = False
        with contextlib.suppress(BlockingIOError):
            try:
                sent = self._link.send(self._out)
                self._out = self._out[sent:]
            except (BrokenPipeError, ConnectionError):
                self._out = b""  # the read side sees the end
        waiting = bool(self._out)
        self._loop.writable(self._fd, self._readable, waiting, self._flush)

    def _readable(self) -> None:
        try:
            data = self._link.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self._in = (self._in + data).split(b"\n")
        if len(self._in) > _MAX_LINE:
            self.close()
            return
        for line in lines:
            try:
                command = json.loads(line)
            except ValueError:
                self.close()
                return
            if command.get("v") != VERSION:
                self.send(json.dumps({"v": VERSION, "error": f"this shim speaks version {VERSION}"}))
                continue
            self._heard(self, command)


def peer_uid(link: socket.socket) -> int:
    """Who is at the other end, as the kernel knows it."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", raw)[1]
    return uid

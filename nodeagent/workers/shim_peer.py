"""One connection to the shim: JSON lines both ways, with descriptors beside them; never blocking.

Standard library only. Must never keep more than a bounded amount for a peer that does not read, and never believe what
a peer sends: workers speak here too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from nodeagent.workers.shim_loop import Loop

VERSION = 1
_MAX_OUT = 4 << 20
_MAX_LINE = 16 << 20
MAX_FDS = 8
"""Descriptors that may come, or go, with one line."""

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
        self.pid, self.uid = peer_of(link)
        self.wants_status = True
        """Whether the shim's status is sent at each change."""
        link.setblocking(False)
        self._in, self._out = b"", b""
        self._fds: list[int] = []
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

    def send_with(self, line: str, fds: Sequence[int]) -> None:
        """Send one line with descriptors; a peer that has not read what came before is dropped."""
        self._flush()
        if self._fd < 0:
            return
        if self._out:
            self.close()
            return
        data = line.encode() + b"\n"
        try:
            sent = socket.send_fds(self._link, [data], list(fds))  # they go with the first byte
        except OSError:
            self.close()
            return
        self._out = data[sent:]
        self._flush()

    def take_fds(self, count: int) -> list[int]:
        """The descriptors of the line that is being heard; the caller closes them."""
        taken, self._fds = self._fds[:count], self._fds[count:]
        return taken

    def close(self) -> None:
        """Drop the connection; ``closed`` is told once."""
        if self._fd < 0:
            return
        self._loop.forget(self._fd)
        self._fd = -1
        self._link.close()
        self._drop_fds()
        self._closed(self)

    def _drop_fds(self) -> None:
        for fd in self.take_fds(len(self._fds)):
            os.close(fd)

    def _flush(self) -> None:
        if self._fd < 0:
            return
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
            data, fds, _, _ = socket.recv_fds(self._link, 1 << 18, MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        for fd in fds:  # before anything is started: Python's recv_fds drops the flag that would do it
            os.set_inheritable(fd, False)
        self._fds += fds
        if not data or len(self._fds) > MAX_FDS:
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
                command = None
            if not isinstance(command, dict):
                self.close()
            elif command.get("v") != VERSION:
                self.send(json.dumps({"v": VERSION, "error": f"this shim speaks version {VERSION}"}))
            else:
                self._heard(self, command)
            if self._fd < 0:
                return
        if not self._in:
            self._drop_fds()  # what nobody took


def peer_of(link: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them. The process is the one that connected."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid

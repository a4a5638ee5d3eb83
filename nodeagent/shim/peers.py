"""Who is connected to the shim: the one agent that may command it, and its own workers. A connection carries JSON lines
both ways, with descriptors beside them, and never blocks.

Standard library only. Owns the socket in the pod's folder, who is let in, and what is pushed to all. Must never act on
what a peer says, never keep more than a bounded amount for one that does not read, and never believe what it sends:
workers speak here too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nodeagent.osutil.linux import bind_private, boot_id, peer_credentials, start_time, write_atomic
from nodeagent.shim.loop import Loop
from nodeagent.shim.record import WHOLE_ERRORS

VERSION = 1
LINE_MAX = 1 << 20
"""Bytes of a status. What 1024 workers that all failed say is smaller; of more workers, or of words in signs of many
bytes, less is sent. The agent kills a shim that sends more, or no status: nobody could say what its pod does."""
_BRIEFER = ((WHOLE_ERRORS, 50), (WHOLE_ERRORS, 0), (0, 50), (0, 0))
"""Then: how many of the first ends keep all of their last words, and the characters of each other's."""
_MAX_OUT = 4 << 20
_MAX_LINE = 16 << 20
MAX_FDS = 8
"""Descriptors that may come, or go, with one line."""

AgentCommand = dict[str, Any]


def status_line(status: dict[str, Any]) -> str:
    """What is pushed of it, in ``LINE_MAX``."""
    line = _encoded(status)
    for whole, most in _BRIEFER:
        if len(line) < LINE_MAX:
            break
        exits, restarted = status["exits"], status["restarted"]
        line = _encoded(
            status | {"exits": exits[:whole] + _brief(exits[whole:], most), "restarted": _brief(restarted, most)}
        )
    return line.decode()


def _encoded(status: dict[str, Any]) -> bytes:
    """A lone surrogate would make all of it unreadable."""
    return json.dumps({"v": VERSION, "status": status}, ensure_ascii=False).encode("utf-8", "replace")


def _brief(ends: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    return [end | {"error": end["error"][max(0, len(end["error"]) - most) :]} for end in ends]


class Peer:
    """Reads commands; calls ``received`` for each, and ``closed`` at the end of a connection."""

    def __init__(
        self,
        loop: Loop,
        link: socket.socket,
        received: Callable[[Peer, AgentCommand], None],
        closed: Callable[[Peer], None],
    ) -> None:
        self._loop, self._link, self._received, self._closed = loop, link, received, closed
        self.pid, self.uid, _ = peer_credentials(link)
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
        """The descriptors of the line that is being read; the caller closes them."""
        taken, self._fds = self._fds[:count], self._fds[count:]
        return taken

    def close(self) -> None:
        """Drop the connection; ``closed`` is called once."""
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
        try:
            sent = self._link.send(self._out)
            self._out = self._out[sent:]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._out = b""  # the read side sees the end
        except OSError:  # no memory for it, say: the peer connects again
            self.close()
            return
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
            except (ValueError, RecursionError):
                command = None
            if not isinstance(command, dict):
                self.close()
            elif command.get("v") != VERSION:
                self.send(json.dumps({"v": VERSION, "error": f"this shim speaks version {VERSION}"}))
            else:
                self._received(self, command)
            if self._fd < 0:
                return
        if not self._in:
            self._drop_fds()  # what nobody took


ACCEPT_AGAIN = 0.5
"""Seconds until the next look at connections that could not be taken."""
PEERS_MAX = 4096
"""Connections at a time, four for each of a pod's workers; workers must not use up the shim's descriptors."""


class ShimPeers:
    """``received`` is called with what a peer sends, ``agent_changed`` when the agent has come or gone."""

    def __init__(
        self,
        loop: Loop,
        folder: Path,
        agent_uid: int,
        received: Callable[[Peer, AgentCommand], None],
        agent_changed: Callable[[], None],
    ) -> None:
        self._loop, self._folder, self._agent_uid = loop, folder, agent_uid
        self._received, self._agent_changed = received, agent_changed
        self.agent: Peer | None = None
        self._peers: dict[Peer, None] = {}
        """In the order in which they came."""
        self._last = ""
        self._listener = self._listen()

    def connect(self, link: socket.socket) -> None:
        """Let a connection in, if its user may be here; it gets the last status. One that is too many takes the place
        of the oldest: workers that leave connections behind must not keep the agent out."""
        peer = Peer(self._loop, link, self._received, self._closed)
        if peer.uid not in (0, os.getuid(), self._agent_uid):
            peer.close()
            return
        if len(self._peers) >= PEERS_MAX:
            next(p for p in self._peers if p is not self.agent).close()
        self._peers[peer] = None
        if self._last:
            peer.send(self._last)

    def attach(self, peer: Peer) -> bool:
        """Whether this one may be the agent, and now is, in the place of another one."""
        if peer.uid not in (0, self._agent_uid):
            peer.send(json.dumps({"v": VERSION, "error": "only the agent may attach"}))
            return False
        if self.agent not in (None, peer):
            self.agent.close()
        self.agent = peer
        return True

    def push(self, status: dict[str, Any]) -> None:
        """Tell every peer that wants to know, if it differs from what was pushed last."""
        line = status_line(status)
        if line != self._last:
            self._last = line
            for peer in [p for p in self._peers if p.wants_status]:
                peer.send(line)

    def echo(self, number: int) -> None:
        """To the agent: its ping has come through our loop."""
        if self.agent is not None:
            self.agent.send(json.dumps({"v": VERSION, "echo": number}))

    def notify_agent(self, text: str) -> None:
        """Of something that went wrong; it is also in the shim's own log."""
        print(text, file=sys.stderr, flush=True)
        if self.agent is not None:
            self.agent.send(json.dumps({"v": VERSION, "error": text}))

    def close(self) -> None:
        for peer in list(self._peers):
            peer.close()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bind_private(listener, self._folder / "s")
        listener.listen(16)
        listener.setblocking(False)
        self._await_peers(listener)
        identity = {"pid": os.getpid(), "start": start_time(os.getpid()), "boot": boot_id()}
        write_atomic(self._folder / "shim.json", json.dumps(identity), durable=False)
        return listener

    def _await_peers(self, listener: socket.socket) -> None:
        def accept() -> None:
            try:
                link, _ = listener.accept()
            except OSError:  # no descriptor is free, say: it waits in the backlog
                self._loop.forget(listener.fileno())
                self._loop.after(ACCEPT_AGAIN, lambda: self._await_peers(listener))
            else:
                self.connect(link)

        self._loop.watch(listener.fileno(), accept)

    def _closed(self, peer: Peer) -> None:
        self._peers.pop(peer, None)
        if peer is self.agent:
            self.agent = None
            self._agent_changed()

"""Who is connected to the shim: the one agent that may command it, and its own workers.

Standard library only. Owns the socket in the pod's folder, who is let in, and what is pushed to all; must never act on
what a peer says.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nodeagent.workers.linux import bind_private, boot_id, start_time, write_atomic
from nodeagent.workers.shim_loop import Loop
from nodeagent.workers.shim_peer import VERSION, Command, Peer

PEERS_MAX = 256
"""Connections at a time: workers must not use up the shim's descriptors."""


class Peers:
    """``heard`` is told what a peer says, ``agent_changed`` that the agent has come or gone."""

    def __init__(
        self,
        loop: Loop,
        folder: Path,
        agent_uid: int,
        heard: Callable[[Peer, Command], None],
        agent_changed: Callable[[], None],
    ) -> None:
        self._loop, self._folder, self._agent_uid = loop, folder, agent_uid
        self._heard, self._agent_changed = heard, agent_changed
        self.agent: Peer | None = None
        self._peers: set[Peer] = set()
        self._last = ""
        self._listener = self._listen()

    def connect(self, link: socket.socket) -> None:
        """Let a connection in, if its user may be here and there is room; it is told the last status."""
        peer = Peer(self._loop, link, self._heard, self._closed)
        if peer.uid not in (0, os.getuid(), self._agent_uid) or len(self._peers) >= PEERS_MAX:
            peer.close()
            return
        self._peers.add(peer)
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
        line = json.dumps({"v": VERSION, "status": status}, ensure_ascii=False)
        line = line.encode("utf-8", "replace").decode()  # a lone surrogate would make all of it unreadable
        if line != self._last:
            self._last = line
            for peer in [p for p in self._peers if p.wants_status]:
                peer.send(line)

    def echo(self, number: int) -> None:
        """To the agent: its ping has come through our loop."""
        if self.agent is not None:
            self.agent.send(json.dumps({"v": VERSION, "echo": number}))

    def tell_agent(self, text: str) -> None:
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
        self._loop.watch(listener.fileno(), lambda: self.connect(listener.accept()[0]))
        identity = {"pid": os.getpid(), "start": start_time(os.getpid()), "boot": boot_id()}
        write_atomic(self._folder / "shim.json", json.dumps(identity), durable=False)
        return listener

    def _closed(self, peer: Peer) -> None:
        self._peers.discard(peer)
        if peer is self.agent:
            self.agent = None
            self._agent_changed()

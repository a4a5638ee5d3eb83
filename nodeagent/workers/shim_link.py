"""What workers may say to their shim: who speaks, and which part of the shim answers.

A worker says ``{"op": "worker.NAME", ...}``; parts of the shim ``add`` their names. Who speaks is the kernel's word: a
process in the session of a living worker of the present generation. Anything else is refused, so what an older
generation left behind is never heard. A worker that was just forked may speak before the shim has learned its pid:
while pids are missing, strangers are heard later. Standard library only; must never trust a message's form, nor command
anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nodeagent.workers.shim_peer import MAX_FDS, VERSION, Peer

if TYPE_CHECKING:
    from nodeagent.workers.shim_gang import Gang
    from nodeagent.workers.shim_worker import Worker

OPS = "worker."
"""How the names of a worker's messages begin."""
EARLY_MAX = 128
"""Messages of strangers that are kept until all pids are known; one more is refused."""


@dataclass(slots=True)
class Call:
    """One message of a worker. A question carries an ``id`` and may be answered once, at once or later."""

    worker: Worker
    token: dict[str, Any]
    """The generation it is of."""
    message: dict[str, Any]
    fds: list[int]
    """Came with it. Whoever keeps one takes it out of the list: the rest is closed."""
    peer: Peer

    @property
    def rank(self) -> int:
        return self.worker.rank

    @property
    def local_rank(self) -> int:
        return self.worker.local_rank

    def answer(self, fds: tuple[int, ...] = (), **fields: Any) -> None:
        """To a question; what was only told gets none. ``fds`` go with it and stay the caller's to close."""
        self._reply({"answer": fields, "fds": len(fds)}, fds)

    def refuse(self, text: str) -> None:
        """A sentence for the person instead of an answer."""
        self._reply({"error": text}, ())

    def _reply(self, content: dict[str, Any], fds: tuple[int, ...]) -> None:
        if "id" not in self.message:
            return
        line = json.dumps({"v": VERSION, "id": self.message["id"], **content})
        if fds:
            self.peer.send_with(line, fds)
        else:
            self.peer.send(line)


Handler = Callable[[Call], None]
"""May raise LookupError, TypeError, ValueError or ArithmeticError for a message that is not as it must be, OSError for
what failed."""


class WorkerLink:
    """The names that workers may use. ``gang`` is asked for the present generation."""

    def __init__(self, gang: Callable[[], Gang | None]) -> None:
        self._gang = gang
        self._handlers: dict[str, Handler] = {}
        self._early: list[tuple[Peer, dict[str, Any], list[int], int]] = []

    def add(self, name: str, handler: Handler) -> None:
        """Have ``worker.NAME`` heard. It must return at once: the shim has one thread."""
        self._handlers[OPS + name] = handler

    def hear(self, peer: Peer, message: dict[str, Any]) -> None:
        """Dispatch one message."""
        peer.wants_status = False
        said = message.get("fds", 0)
        count = said if isinstance(said, int) and 0 < said <= MAX_FDS else 0
        self._hear(peer, message, peer.take_fds(count), count)

    def launched(self) -> None:
        """A pid has become known, or is not waited for any more: whoever spoke too early may be a worker."""
        early, self._early = self._early, []
        for one in early:
            self._hear(*one)

    def _hear(self, peer: Peer, message: dict[str, Any], fds: list[int], count: int) -> None:
        try:
            self._dispatch(peer, message, fds, count)
        finally:
            for fd in fds:
                os.close(fd)

    def _dispatch(self, peer: Peer, message: dict[str, Any], fds: list[int], count: int) -> None:
        gang = self._gang()
        worker = None if gang is None else speaker(gang, peer.pid)
        if gang is None or worker is None:
            if gang is not None and gang.forking and len(self._early) < EARLY_MAX:
                self._early.append((peer, message, fds[:], count))
                fds.clear()
                return
            if "id" in message:
                text = "only workers of the present generation are accepted here"
                peer.send(json.dumps({"v": VERSION, "id": message["id"], "error": text}))
            return
        call = Call(worker, gang.token, message, fds, peer)
        handler = self._handlers.get(message["op"])
        if handler is None:
            call.refuse(f"this shim does not know {message['op']}: the job's nodeagent is newer than the node's")
            return
        if len(fds) < count:
            call.refuse("what was to come with it did not: the shim has too many files open")
            return
        try:
            handler(call)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            call.refuse(f"{message['op']}: the message is not as it must be: {error!r}")
        except OSError as error:
            call.refuse(f"{message['op']}: {error.strerror or error}")


def speaker(gang: Gang, pid: int) -> Worker | None:
    """The living worker whose session this process is in."""
    try:
        session = os.getsid(pid) if pid else 0
    except OSError:  # it has ended
        return None
    return next((w for w in gang.workers if w.pid == session and not w.ended), None)

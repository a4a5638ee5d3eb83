"""What workers may say to their shim, and which part of the shim answers: a request to commit a checkpoint, the first
step, leaving at a planned stop.

A worker says ``{"op": "worker.NAME", ...}``; parts of the shim ``add`` their names. Who speaks is the kernel's word: a
process in the session of a living worker of the present generation. Anything else is refused, so what an older
generation left behind is never answered. A worker that was just forked may speak before the shim has learned its pid:
while pids are missing, strangers are answered later. Standard library only; must never trust a message's form, nor
command anything.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nodeagent.osutil.linux import boottime
from nodeagent.shim.grace import Grace
from nodeagent.shim.loop import Loop
from nodeagent.shim.peers import MAX_FDS, VERSION, Peer
from nodeagent.shim.worker import Worker

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
    """Came with it. A handler that keeps one takes it out of the list: the rest is closed."""
    peer: Peer

    @property
    def rank(self) -> int:
        return self.worker.rank

    @property
    def local_rank(self) -> int:
        return self.worker.local_rank

    def answer(self, fds: tuple[int, ...] = (), **fields: Any) -> None:
        """To a question; a mere report gets none. ``fds`` go with it and stay the caller's to close."""
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


CallHandler = Callable[[Call], None]
"""May raise LookupError, TypeError, ValueError, ArithmeticError or RecursionError for a message that is not as it must
be, OSError for what failed."""


class Speakers(Protocol):
    """The workers of the present generation, as far as they may speak."""

    @property
    def token(self) -> dict[str, Any]:
        """The generation."""

    @property
    def forking(self) -> bool:
        """Some of them may run already, with pids that are not known yet."""

    def speaker(self, pid: int) -> Worker | None:
        """The living worker whose session this process is in. Raises OSError if that is not to be seen."""


class WorkerLink:
    """The names that workers may use. ``present`` is asked for the present generation."""

    def __init__(self, present: Callable[[], Speakers | None]) -> None:
        self._present = present
        self._handlers: dict[str, CallHandler] = {}
        self._early: list[tuple[Peer, dict[str, Any], list[int], int]] = []

    def add(self, name: str, handler: CallHandler) -> None:
        """Have ``worker.NAME`` handled. It must return at once: the shim has one thread."""
        self._handlers[OPS + name] = handler

    def receive(self, peer: Peer, message: dict[str, Any]) -> None:
        """Dispatch one message."""
        peer.wants_status = False
        if not isinstance(message.get("id", 0), (int, str)):  # it is sent back, and may be too deep for that
            peer.close()
            return
        stated = message.get("fds", 0)
        count = stated if isinstance(stated, int) and 0 < stated <= MAX_FDS else 0
        self._receive(peer, message, peer.take_fds(count), count)

    def launched(self) -> None:
        """A pid has become known, or is not waited for any more: a process that spoke too early may be a worker."""
        early, self._early = self._early, []
        for one in early:
            self._receive(*one)

    def _receive(self, peer: Peer, message: dict[str, Any], fds: list[int], count: int) -> None:
        try:
            self._dispatch(peer, message, fds, count)
        finally:
            for fd in fds:
                os.close(fd)

    def _dispatch(self, peer: Peer, message: dict[str, Any], fds: list[int], count: int) -> None:
        present = self._present()
        try:
            worker = None if present is None else present.speaker(peer.pid)
        except OSError as error:
            _refuse(peer, message, f"who asks was not to be seen: {error.strerror}")
            return
        if present is None or worker is None:
            if present is not None and present.forking and len(self._early) < EARLY_MAX:
                self._early.append((peer, message, fds[:], count))
                fds.clear()
                return
            _refuse(peer, message, "only workers of the present generation are accepted here")
            return
        call = Call(worker, present.token, message, fds, peer)
        handler = self._handlers.get(message["op"])
        if handler is None:
            call.refuse(f"this shim does not know {message['op']}: the job's nodeagent is newer than the node's")
            return
        if len(fds) < count:
            call.refuse("what was to come with it did not: the shim has too many files open")
            return
        try:
            handler(call)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            call.refuse(f"{message['op']}: the message is not as it must be: {error!r}")
        except OSError as error:
            call.refuse(f"{message['op']}: {error.strerror or error}")


def _refuse(peer: Peer, message: dict[str, Any], text: str) -> None:
    """Answer a question whose asker is no worker, as far as is known."""
    if "id" in message:
        peer.send(json.dumps({"v": VERSION, "id": message["id"], "error": text}))


MOST = 1 << 53
"""Numbers above are not exact everywhere."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The process that asks."""

    lives: Callable[[], bool]
    answer: Callable[[str], None]
    """Called with the reason of the refusal; "" if it is committed."""


class PendingCommits:
    """A request to commit a checkpoint, on its way to the store: the agent sees it in the status and answers.

    A worker's, or that of the shim's own helper (``snapshots.py``). One request at a time, of the present generation,
    with its token; the request of a process that has ended is forgotten. Must never answer by itself that something was
    committed. ``changed`` is called when there is another request.
    """

    def __init__(self, link: WorkerLink, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._asker: Asker | None = None
        self._request: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        link.add("commit", self._asked)
        link.add("commit.last", self._asked_last)

    def _asked(self, call: Call) -> None:
        name, step, order = call.message["name"], call.message["step"], call.message["order"]
        if not isinstance(name, str) or not 0 < len(name.encode(errors="replace")) <= 200 or "/" in name:
            raise ValueError("a checkpoint's name is a folder's")
        if name in (".", "..") or not name.isprintable():
            raise ValueError("a checkpoint's name is a folder's")
        name.encode()  # a lone surrogate is no text that others could read: UnicodeEncodeError, a ValueError
        if not all(isinstance(n, int) and 0 <= n < MOST for n in (step, order)):
            raise ValueError("step and order are numbers")

        def answer(refused: str) -> None:
            if refused:
                call.refuse(refused)
            else:
                call.answer(name=name)

        self.request_commit(call.token, name, int(step), int(order), Asker(lambda: not call.worker.ended, answer))

    def request_commit(self, token: dict[str, Any], name: str, step: int, order: int, asker: Asker) -> None:
        """Take another request."""
        if self._asker is not None:
            self._asker.answer("another commit was asked for meanwhile")
        self._asker = asker
        self._request = {"token": token, "name": name, "step": step, "order": order}
        self._changed()

    def _asked_last(self, call: Call) -> None:
        """Which one of its generation was committed last, as far as is known here; "" for none."""
        call.answer(name=self._last["name"] if self._last.get("token") == call.token else "")

    def newest(self, token: dict[str, Any]) -> tuple[int, int]:
        """(generation, step) of what this generation committed last through here; (0, 0) if nothing."""
        return (token["number"], self._last["step"]) if self._last.get("token") == token else (0, 0)

    def request(self) -> dict[str, Any] | None:
        """As base.CommitWish; None if there is none."""
        if self._asker is not None and not self._asker.lives():
            self._asker = None
        return self._request if self._asker is not None else None

    def answered(self, request: dict[str, Any], refused: str) -> None:
        """The store has taken it, or refused with this sentence."""
        if not refused:
            self._last = request
        if self.request() != request or self._asker is None:
            return  # an answer to an earlier one
        asker, self._asker = self._asker, None
        asker.answer(refused)


REPORT_AFTER = 0.5
"""Seconds from the last worker's first step until it is shown."""


class FirstSteps:
    """When the workers of a generation did their first step, as far as they say (``nodeagent.train.progress``).

    A worker says ``worker.stepped`` once. Must never wake the agent during the first steps: what it learns is for its
    account of the recovery. ``workers`` are those of the present generation, ``changed`` is called when ``stepped`` may
    be shown.
    """

    def __init__(
        self, link: WorkerLink, loop: Loop, workers: Callable[[], Sequence[Worker]], changed: Callable[[], None]
    ) -> None:
        self._loop, self._workers, self._changed = loop, workers, changed
        link.add("stepped", self._stepped)

    def _stepped(self, call: Call) -> None:
        if call.worker.stepped is None:
            call.worker.stepped = boottime()
            if self.at is not None:
                self._loop.after(REPORT_AFTER, self._changed)

    @property
    def at(self) -> float | None:
        """When (CLOCK_BOOTTIME) the last worker of the present generation did its first step; None: not all have."""
        reported = [w.stepped for w in self._workers()]
        return max((at for at in reported if at is not None), default=None) if None not in reported else None


class LeavingWorkers:
    """Workers that leave by themselves at a planned stop. ``grace`` is that of the present generation.

    A worker asks ``leave.wait`` once and is answered when it is to leave, with the seconds that it has; it gets no
    SIGTERM then, nor do its children, which it may still need. ``leave.saving`` tells that the last step is done,
    ``leave.done`` after which step that was, and how long its state took to save (null: nothing was kept).

    One that dies before it saves never says its number, nor makes its part of a collective: the others, on whichever
    node, would wait for it until the grace is over. Those that save are left to it. Nothing is known of workers that
    did not ask, so they have all of their grace. Must never lengthen the grace.
    """

    def __init__(self, link: WorkerLink, grace: Callable[[], Grace | None]) -> None:
        self._grace = grace
        link.add("leave.wait", self._wait)
        link.add("leave.saving", self._saving)
        link.add("leave.done", self._done)

    def _wait(self, call: Call) -> None:
        grace = self._grace()
        left = grace.left(call.worker) if grace is not None else None
        if left is not None:
            call.answer(grace=left)
        else:
            call.worker.leave = lambda grace: call.answer(grace=grace)

    def _saving(self, call: Call) -> None:
        call.worker.farewell.saving = True
        call.answer()

    def _done(self, call: Call) -> None:
        step, seconds = call.message["step"], call.message["seconds"]
        if type(step) is not int or not 0 <= step < 1 << 63:
            raise ValueError(f"step is {step!r}")
        if seconds is not None and (type(seconds) is not float or not math.isfinite(seconds) or seconds < 0):
            raise ValueError(f"seconds is {seconds!r}")
        call.worker.farewell.left_at = step
        call.worker.farewell.saved_in = None if seconds is None else round(seconds, 3)
        call.answer()
        grace = self._grace()
        if grace is not None and grace.broken:
            grace.abandon()

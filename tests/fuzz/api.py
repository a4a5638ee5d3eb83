"""The agent's API on its unix socket, in a thread of this process, which takes raw bytes of whoever connects.

It begins with the first request and ends with ``close``. Requests change what it has, so a new one begins after many.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.metrics import Metrics
from nodeagent.api.server import ApiServer
from tests.submitting import submit_one
from tests.unit.api.fakes import FakeView, spec

SILENCE = 0.3
"""Seconds without a byte after which nothing more is expected: of half a request there is no answer, and one that
follows logs or events has no end."""
RENEWED_AFTER = 5000
"""Requests."""
MOST = 1 << 20
"""Bytes of an answer that are read."""


class Api:
    """``ask`` starts it where it does not run."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._path = ""
        self._asked = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None

    def ask(self, request: bytes, patience: float = SILENCE) -> bytes:
        """What it answers to these bytes. ``patience``: seconds without a byte after which that was all."""
        if self._asked >= RENEWED_AFTER:
            self.close()
        if self._thread is None:
            self._start()
        self._asked += 1
        answer = b""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(patience)
            link.connect(self._path)
            with suppress(TimeoutError, ConnectionError):  # or it has hung up on what it cannot read
                link.sendall(request)
                while len(answer) < MOST and (data := link.recv(1 << 16)):
                    answer += data
        return answer

    def close(self) -> None:
        """Nothing of it is left."""
        if self._thread is None or self._loop is None or self._over is None:
            return
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._thread, self._asked = None, 0

    def _start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="api", daemon=True)
        self._thread.start()
        assert ready.wait(30), "the API does not listen"

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
            view = FakeView(Path(place))
            await view.join()
            for name in ("digits", "resnet"):
                await submit_one(view.store, f"uid-{name}", spec(name), 1000, 12.25, "alice", f"submit-{name}")
            await view.refresh()
            async with ApiServer(view, MetricsPage(Metrics())) as server:
                self._path = str(server.socket_path)
                ready.set()
                await self._over.wait()


def check(answer: bytes) -> None:
    """Each response has a status that blames nobody here, and JSON where it says so. AssertionError for a defect."""
    generation, _, body = answer.partition(b"\r\n\r\n")
    if not generation:
        return  # it hung up: not HTTP at all
    status, *lines = generation.split(b"\r\n")
    version, code, *_ = status.split(b" ")
    assert version.startswith(b"HTTP/"), status
    assert code != b"500", (status, body[:400])
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    length = fields.get(b"content-length", b"")
    if fields.get(b"content-type", b"").startswith(b"application/json") and length.isdigit():
        json.loads(body[: int(length)] or b"{}")

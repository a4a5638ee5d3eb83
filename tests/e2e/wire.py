"""A wire between a local cluster's agents and its Redis: it can be slow, and cut for single nodes.

Takes the place of the server's socket, so that the product is not touched: who calls is known by the mark that each
process of a local node carries. A cut is a network's: what was sent waits, and arrives late when the wire is mended,
even if the sender has long given up.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import redis

from nodeagent.local.power import MARK

T = TypeVar("T")
PATIENCE = 10.0
"""Seconds for the wire itself to do something."""


class Wire:
    """Between the entering and the leaving, every call to the server at ``place`` goes through here."""

    def __init__(self, place: Path) -> None:
        self._place, self._server = place, place.with_suffix(".behind")
        self._late = 0.0
        self._open: dict[str, asyncio.Event] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire")

    def __enter__(self) -> Self:
        self._thread.start()
        self._place.rename(self._server)
        self._listener = self._do(asyncio.start_unix_server(self._accept, self._place))
        with self.admin() as admin:
            admin.client_kill_filter(_type="normal")  # everybody comes anew, through here
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._hang_up(None))
        self._server.replace(self._place)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def admin(self) -> redis.Redis:
        """Past the wire."""
        return redis.Redis(unix_socket_path=str(self._server))

    @contextmanager
    def late(self, seconds: float) -> Iterator[None]:
        """Each reply to anybody comes so much later."""
        self._late = seconds
        try:
            yield
        finally:
            self._late = 0.0

    def hang_up(self, node: str) -> None:
        """Every connection of this node breaks; it may come again."""
        self._do(self._hang_up(node))

    @contextmanager
    def cut(self, nodes: Iterable[str]) -> Iterator[None]:
        """Nothing passes between these nodes and the server."""
        chosen = tuple(nodes)
        self._do(self._set(chosen, False))
        try:
            yield
        finally:
            self._do(self._set(chosen, True))

    # --- in the thread of the loop

    def _do(self, what: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(PATIENCE)

    def _gate(self, node: str) -> asyncio.Event:
        if node not in self._open:
            self._open[node] = asyncio.Event()
            self._open[node].set()
        return self._open[node]

    async def _set(self, nodes: Iterable[str], passes: bool) -> None:
        for node in nodes:
            gate = self._gate(node)
            if passes:
                gate.set()
            else:
                gate.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = _caller(writer.get_extra_info("socket"))
        there, to_server = await asyncio.open_unix_connection(self._server)
        for pump in (self._pump(node, reader, to_server, False), self._pump(node, there, writer, True)):
            task = asyncio.create_task(pump, name=node)
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _pump(self, node: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_reply: bool) -> None:
        with suppress(ConnectionError):  # either side may hang up at any time
            try:
                while data := await source.read(65536):
                    if is_reply:
                        await asyncio.sleep(self._late)
                    await self._gate(node).wait()
                    sink.write(data)
                    await sink.drain()
            finally:
                sink.close()

    async def _hang_up(self, node: str | None) -> None:
        """Of this node's, or of everybody's, who then cannot come again."""
        if node is None:
            self._listener.close()
        calls = [task for task in self._calls if node in (None, task.get_name())]
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def _caller(connection: socket.socket) -> str:
    """The local node that a connection comes from; empty for anybody else."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    with suppress(OSError):  # it ended at once
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == MARK.encode():
                return value.decode().rpartition("/")[2]
    return ""

"""Connections to the Redis server: one link at a time does one request, and none outlives a doubt.

A link is given back only after its reply was read whole; after any error or cancellation it is dropped, so no later
request can ever read an earlier one's reply. Must never retry or know what a request means. Bounds are the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError

from nodeagent.store.scripts import Script

SCHEMES = ("redis://", "rediss://", "unix://")


class Link:
    """One connection, and the run id of the server process behind it."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self.run_id = ""

    async def open(self) -> None:
        await self._connection.connect()  # type: ignore[no-untyped-call]
        info = await self.ask("INFO", "server")
        found = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("run_id:")]
        self.run_id = found[0] if found else ""

    async def ask(self, *command: str | int) -> Any:
        """Send one command and read its reply."""
        await self._connection.send_command(*command)
        return await self._connection.read_response()

    async def evaluate(self, script: Script, *arguments: str) -> Any:
        """Run a script (first argument: its key), sending the source only where the server does not know it yet."""
        try:
            return await self.ask("EVALSHA", script.sha, 1, *arguments)
        except NoScriptError:
            return await self.ask("EVAL", script.source, 1, *arguments)

    async def drop(self) -> None:
        """Close without waiting."""
        await self._connection.disconnect(nowait=True)


class Links:
    """A bounded set of links to one server."""

    def __init__(self, url: str, limit: int) -> None:
        if not url.startswith(SCHEMES):
            scheme = url.partition("://")[0]
            raise ValueError(f"store url of scheme {scheme!r} is not supported: use one of {', '.join(SCHEMES)}")
        options: dict[str, Any] = dict(parse_url(url))
        self._kind: type[AbstractConnection] = options.pop("connection_class", Connection)
        self._options = options | {
            "protocol": 2,
            "decode_responses": True,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": None,
            "socket_connect_timeout": None,
            "health_check_interval": 0,
        }
        self.address: str = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self._idle: list[Link] = []
        self._used: set[Link] = set()
        self._room = asyncio.Semaphore(limit)
        self._closed = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Link]:
        """A link for one request; waits while all are in use."""
        async with self._room:
            if self._closed:
                raise ConnectionError("this store was closed")
            link = self._idle.pop() if self._idle else Link(self._kind(**self._options))
            self._used.add(link)
            try:
                if not link.run_id:
                    await link.open()
                yield link
            except BaseException:
                await link.drop()
                raise
            finally:
                self._used.discard(link)
            self._idle.append(link)

    async def forget(self) -> None:
        """Drop the idle links: the server behind them may not be the same any more."""
        while self._idle:
            await self._idle.pop().drop()

    async def close(self) -> None:
        """Drop all links; requests under way fail."""
        self._closed = True
        await self.forget()
        for link in tuple(self._used):
            await link.drop()

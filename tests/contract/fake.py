"""Links to fakeredis: the shipped Lua on commands that others have written, where no server program is installed.

Time is real. Owns how a fakeredis client is asked; a blocked XREAD holds no other request up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fakeredis import FakeAsyncRedis, FakeServer
from redis.exceptions import RedisError

from nodeagent.store.scripts import Script
from nodeagent.store.wire import Reached, ReplyError

MOST = 32
"""Requests at a time."""
TEXTS = """local redis = setmetatable({ pcall = function(...)
  local found = redis.pcall(...)
  if type(found) == 'table' and found.err then
    found.err = tostring(found.err)
  end
  return found
end }, { __index = redis })
"""
"""Before each script: of an error, fakeredis gives ``redis.pcall`` an object of Python, where a server gives a text."""


class FakeLinks:
    """A bounded set of links to one fake server; each is also the link that it hands out."""

    address = "fakeredis"
    reached: Reached | None = None

    def __init__(self, server: FakeServer) -> None:
        self._client = FakeAsyncRedis(
            server=server, version=(7,), decode_responses=True, encoding_errors="surrogateescape", protocol=2
        )
        self._room = asyncio.Semaphore(MOST)
        self.run_id = "fake"

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Any]:
        async with self._room:
            yield self

    async def ask(self, *command: str | int) -> Any:
        """One command's reply."""
        return await self._execute(command)

    async def ask_beside(self, command: Sequence[str | int], *others: Sequence[str | int]) -> tuple[Any, list[Any]]:
        """The replies to a command and to others."""
        return await self._execute(tuple(command)), [await self._execute(tuple(words)) for words in others]

    async def evaluate(self, script: Script, *arguments: str) -> Any:
        """A script's reply; the first argument is its key."""
        return await self._execute(("EVAL", TEXTS + script.source, 1, *arguments))

    async def _execute(self, command: tuple[str | int, ...]) -> Any:
        connection = await self._client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_command(*command)
            return await connection.read_response()
        except RedisError as error:
            code = error.status_code
            raise ReplyError(f"{code} {error}" if code else str(error)) from error
        finally:
            await self._client.connection_pool.release(connection)

    async def forget(self) -> None:
        """There is but one server."""

    async def close(self) -> None:
        await self._client.aclose()

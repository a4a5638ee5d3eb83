"""Another agent's part of a job's output. Must never wait for an agent that gives no sign of life."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import aiohttp

from nodeagent.api.auth import Caller
from nodeagent.api.locallogs import Query
from nodeagent.api.view import AgentView
from nodeagent.api.ways import RefusedError, Way, asked

Line = dict[str, Any]


async def peer_lines(
    view: AgentView, way: Way, uid: str, query: Query, who: Callable[[], Awaitable[Caller]], *, follow: bool
) -> AsyncGenerator[Line, None]:
    """What another agent has; an empty line is a sign of life. Raises one of ``ways.FAILURES``."""
    params = query.params() | {"local_only": "1"} | ({"follow": "1"} if follow else {})
    async with asked(view, way, "GET", f"/v1/jobs/{uid}/logs", await who(), query=params) as response:
        if response.status == 404:
            return  # it has not heard of the job yet, or not any more
        if response.status != 200:
            raise RefusedError(await _refusal(response))
        async for raw in response.content:
            line = json.loads(raw)
            if "end" in line:
                return
            yield line
        raise ConnectionResetError("its agent hung up")


async def _refusal(response: aiohttp.ClientResponse) -> str:
    try:
        return str((await response.json())["error"]["message"])
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        return f"its agent answered {response.status}"

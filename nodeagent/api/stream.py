"""Answers that go on: one JSON object a line, until the source ends or the caller hangs up.

The last line of an orderly end is ``{"end": true}``: without it the connection broke. ``{}`` is a sign of life.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from aiohttp import web

CONTENT_TYPE = "application/x-ndjson"
SEND_TIMEOUT = 60.0
"""Seconds a caller may leave a line unread before it is hung up on."""


async def send(request: web.Request, lines: AsyncIterator[dict[str, object]]) -> web.StreamResponse:
    """Write every line as it comes."""
    response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})
    await response.prepare(request)
    try:
        async for line in lines:
            await asyncio.wait_for(response.write(json.dumps(line).encode() + b"\n"), SEND_TIMEOUT)
        await response.write(b'{"end": true}\n')
        await response.write_eof()
    except (ConnectionError, TimeoutError):
        return response
    return response

"""Reading requests: bodies, request ids, query flags. Every mistake is a ``usage`` refusal that names the field."""

from __future__ import annotations

import json
import re
from typing import Any

from aiohttp import web

from nodeagent.api.errors import ApiError

MAX_BODY = 1024 * 1024
"""Bytes of the largest request body."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


async def read(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body."""
    try:
        raw = (await request.read()).decode()
        value = json.loads(raw or "{}")
        if "\\u" in raw:  # half of a character is JSON, and can be neither stored nor shown
            json.dumps(value, ensure_ascii=False).encode()
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(
            "usage", f"the request is larger than {MAX_BODY // 1024} KiB", "keep large values in files (env_file)"
        ) from None
    except RecursionError:
        raise ApiError("usage", "the body is nested too deeply", "send one flat JSON object") from None
    except ValueError as error:
        raise ApiError("usage", f"the body is not JSON: {error}", "send one JSON object, in UTF-8") from None
    if not isinstance(value, dict):
        raise ApiError("usage", "the body is not a JSON object", "send one JSON object")
    return value


def request_id(body: dict[str, Any]) -> str:
    """The caller's name for this one change, so that asking twice does it once."""
    value = body.get("request_id")
    if not isinstance(value, str) or not _REQUEST_ID.fullmatch(value):
        raise ApiError(
            "usage", "request_id is missing or not 1 to 64 of A-Z a-z 0-9 _ . : -", "send a random one with each change"
        )
    return value


def text(body: dict[str, Any], key: str, limit: int = 1000) -> str:
    """An optional string."""
    value = body.get(key, "")
    if not isinstance(value, str) or len(value) > limit:
        raise ApiError("usage", f"{key} must be a text of at most {limit} characters", "shorten it")
    return value


def flag(request: web.Request, key: str) -> bool:
    """A query flag: absent, empty, 0 or false is no for ``key=...``; ``?key`` alone is yes."""
    value = request.query.get(key)
    return value is not None and value.lower() not in ("0", "false", "no")


def number(request: web.Request, key: str) -> int | None:
    """An optional whole number in the query."""
    value = request.query.get(key)
    if value is None:
        return None
    if not value.isdecimal():
        raise ApiError("usage", f"{key}={value!r} is not a whole number", f"write {key}=N with N from 0 on")
    return int(value)

"""Functions that the handlers share: reading a request (body, request id, query flags), finding the job or node in its
path, and answers that stream one JSON object a line.

Every mistake of the caller is a ``usage`` refusal that names the field. Must never guess between two jobs.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from nodeagent.agent.view import AgentView
from nodeagent.api.errors import ApiError, store_away, unknown
from nodeagent.api.serializers import Json
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.spec.errors import closest
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError
from nodeagent.store.messages import PastJobs, Unread

MAX_BODY = 1024 * 1024
"""Bytes of the largest request body."""

MOST_OPENED = 1 << 15
"""Lists and mappings in a body: the decoder takes half a second, in the loop, for as many as a body has room for."""

MOST_DIGITS = 15
"""Of a whole number in the query."""

T = TypeVar("T")
_WRITERS = ThreadPoolExecutor(2, "api-writer")
"""The loop has its turn among as many threads as run: of 32 that wrote lists for one user it had a thirtieth."""

_NUMBER = re.compile(rf"[0-9]{{1,{MOST_DIGITS}}}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


async def written(work: Callable[[], T]) -> T:
    """What ``work`` returns, which takes longer than the agent's loop may be blocked. It runs in one of few threads,
    after what was asked for before."""
    return await asyncio.get_running_loop().run_in_executor(_WRITERS, work)


async def written_answer(work: Callable[[], Json]) -> web.Response:
    """An answer as JSON, made by ``work`` and ``written``: with a thousand jobs or nodes it takes so long."""
    body = await written(lambda: json.dumps(work()).encode())
    return web.Response(body=body, content_type="application/json", charset="utf-8")


async def read(request: web.Request, *names: str) -> dict[str, Any]:
    """The JSON object in the body. Beside ``request_id`` it may have these fields: a misspelt one would be as if it had
    not been given.

    Raises ``ApiError`` (``usage``).
    """
    try:
        raw = (await request.read()).decode()
        if (opened := raw.count("[") + raw.count("{")) > MOST_OPENED:  # what is in texts too: it is only a bound
            raise ApiError(
                "usage", f"the body opens {opened} lists and mappings, more than {MOST_OPENED}", "send a smaller one"
            )
        value = json.loads(raw or "{}")
        if "\\u" in raw:  # half of a surrogate pair is valid JSON, but cannot be stored or shown
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
    has_only(value, (*names, "request_id"), "the body")
    return value


def has_only(value: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Raises ``ApiError`` (``usage``) for a field that is not known."""
    for name in value:
        if name not in known:
            raise ApiError("usage", f"{what} has the unknown field {name[:64]!r}", _right(name, known))


def _right(name: str, known: Sequence[str]) -> str:
    """The next step of somebody who gave this name."""
    near = closest(name, known)
    return f"did you mean {near}?" if near else f"it has: {', '.join(known) or 'none'}"


def request_id(body: dict[str, Any]) -> str:
    """The caller's id of this one change, so that a repeated request makes the change once."""
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


def seconds(body: Mapping[str, Any], key: str) -> float | None:
    """An optional number of seconds, or Unix time."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # a whole number of hundreds of digits
            if math.isfinite(found := float(value)):
                return found
    raise ApiError("usage", f"{key} must be a number of seconds", f"send {{{key}: 14400}}")


OWN_ONLY = "local_only"
"""Query flag of all paths: answer only what this agent knows itself, and ask no other one."""

Route = TypeVar("Route", bound=Callable[..., Awaitable[web.StreamResponse]])

_PARAMETERS = "query_parameters"


def takes(*names: str) -> Callable[[Route], Route]:
    """Marks a handler with the query parameters that it reads. ``query_middleware`` refuses all others."""

    def mark(handler: Route) -> Route:
        setattr(handler, _PARAMETERS, names)
        return handler

    return mark


@web.middleware
async def query_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses query parameters that the path does not have: a misspelt one would be as if it had not been given."""
    matched = request.match_info
    if request.path.startswith("/v1/") and matched.http_exception is None:
        known = (*getattr(matched.handler, _PARAMETERS, ()), OWN_ONLY)
        for name in request.query:
            if name not in known:
                step = _right(name, known[:-1])
                raise ApiError("usage", f"{request.path} has no query parameter {name!r}", step)
    return await handler(request)


@web.middleware
async def encoding_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses bodies that are compressed: no server of an agent unpacks any."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            "encoding",
            f"the request has the Content-Encoding {encoding[:64]!r}, and agents read plain bodies only; nothing was "
            "changed",
            "send the body as it is, without a Content-Encoding",
        )
    return await handler(request)


def flag(request: web.Request, key: str) -> bool:
    """A query flag: absent, empty, 0 or false is no for ``key=...``; ``?key`` alone is yes."""
    value = request.query.get(key)
    return value is not None and value.lower() not in ("0", "false", "no")


def number(request: web.Request, key: str) -> int | None:
    """An optional whole number in the query."""
    value = request.query.get(key)
    if value is None:
        return None
    if not _NUMBER.fullmatch(value):
        problem = f"{key}={value[:64]!r} is not a whole number of at most {MOST_DIGITS} digits"
        raise ApiError("usage", problem, f"write {key}=N with N from 0 on")
    return int(value)


MIN_PREFIX = 4
"""The fewest characters of a uid that are accepted as its beginning."""


def find_job(cluster: Cluster, ref: str) -> JobRecord:
    """The job with this name (the live one, else the last to end), this uid, or this unique beginning of a uid. A name
    that an array with live jobs has is no ended job's.

    Raises ``ApiError`` (``not_found``; ``usage`` if several uids begin with the text).
    """
    if ref in cluster.jobs:
        return cluster.jobs[ref]
    named = [j for j in cluster.jobs.values() if j.name == ref]
    if named:
        found = max(named, key=lambda j: (j.phase not in TERMINAL, j.submitted))
        if found.phase not in TERMINAL or not is_live_array(cluster, ref):
            return found
        raise ApiError(
            "not_found",
            f"{ref!r} is an array with live jobs, and the name of an ended job",
            f"the ended job is found by its uid: {found.uid}",
        )
    if len(ref) >= MIN_PREFIX:
        begins = [j for uid, j in cluster.jobs.items() if uid.startswith(ref)]
        if len(begins) == 1:
            return begins[0]
        if begins:
            raise _several(ref, (job.uid for job in begins))
    raise unknown("job", ref, (j.name for j in cluster.jobs.values()))


def is_live_array(cluster: Cluster, name: str) -> bool:
    """Whether an array of this name has jobs that have not ended."""
    arrays = ((job.phase, job.spec.array) for job in cluster.jobs.values())
    return any(array is not None and array.name == name and phase not in TERMINAL for phase, array in arrays)


async def find_any_job(view: AgentView, ref: str) -> JobRecord:
    """Searches as ``find_job`` does, and then the store's history of ended jobs: by uid, by name (the last to end), or
    by a unique beginning of a uid. While the store is unreachable, only the view is searched.

    Raises the errors of ``find_job``, also where its record in the history is damaged, and ``store_away`` where the job
    may be in a history that cannot be read.
    """
    found, none, away = None, None, view.health().store_away_since is not None
    unanswered: StoreUnavailableError | None = None
    try:
        found = find_job(view.cluster(), ref)
    except ApiError as error:
        if error.code != "not_found":
            raise
        none = error
    if found is not None and ref in (found.uid, found.name):
        return found
    past = PastJobs(jobs=())
    if not away:
        try:
            past = await view.store.past(ref)
        except StoreUnavailableError as error:
            away, unanswered = True, error
    array = is_live_array(view.cluster(), ref)
    for job in past.jobs:
        if ref == job.uid or (ref == job.name and not array):
            return job
    if array or (len(ref) < MIN_PREFIX and not past.exact):
        past = PastJobs(jobs=())
    begins = [*([found] if found is not None else []), *past.jobs]
    uids = [*(job.uid for job in begins), *(one.key.removeprefix("past:") for one in past.unread)]
    if past.unread and (past.exact or len(uids) == 1):
        raise _damaged(past.unread[0])
    if len(uids) > 1:
        raise _several(ref, uids)
    if begins:
        return begins[0]
    assert none is not None
    if count := sum(job.spec.array is not None and job.spec.array.name == ref for job in view.cluster().jobs.values()):
        raise ApiError("not_found", f"{ref!r} is an array of {count} jobs", f"name one; see: nodeagentctl get {ref}")
    raise store_away(view, "none", unanswered) if away else none


def _damaged(record: Unread) -> ApiError:
    uid = record.key.removeprefix("past:")
    return ApiError(
        "not_found",
        f"job {uid} is in the history, and its record there cannot be read: {record.why}",
        f"the key {record.key} of the cluster in Redis is damaged: remove it, or leave that to the retention",
    )


def _several(ref: str, uids: Iterable[str]) -> ApiError:
    return ApiError("usage", f"{ref!r} is the beginning of several uids: {', '.join(sorted(uids))}", "give more of it")


def find_node(cluster: Cluster, ref: str) -> NodeRecord:
    """The node with this id. Raises ``ApiError`` (``not_found``)."""
    if ref not in cluster.nodes:
        raise unknown("node", ref, cluster.nodes)
    return cluster.nodes[ref]


CONTENT_TYPE = "application/x-ndjson"
SEND_TIMEOUT = 60.0
"""Seconds that a caller may leave a line unread before the connection is closed."""


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


Done = TypeVar("Done")

WRITE_TRIES = 4
"""The most attempts of one write, if others write in between."""


async def write_again(view: AgentView, attempt: Callable[[], Awaitable[Done]]) -> Done:
    """Decides by the view and writes; if the store refuses as ``stale``, or because the job has ``ended``, reads and
    does both again. So of two simultaneous changes the second is made on top of the first. Raises ``StoreError``, and
    the errors of ``attempt``."""
    for number in range(WRITE_TRIES):
        if number:
            await view.refresh()
        try:
            return await attempt()
        except StoreRefusedError as refused:
            if refused.code not in ("stale", "ended") or number == WRITE_TRIES - 1:
                raise
    raise AssertionError("unreachable: the last try returns or raises")


async def seen(view: AgentView) -> None:
    """Have what was written in the snapshot. It is written already: a store that is away now changes nothing, and the
    snapshot follows with the next beat."""
    with suppress(StoreUnavailableError):
        await view.refresh()


async def saved(view: AgentView, rev: int, era: str) -> Json:
    """Waits, within a bound, until the write with this revision is on enough disks. ``era``: era of the view before the
    write."""
    done = await view.acknowledged(rev, era)
    text = ""
    if not done.safe:
        have = f"{len(done.nodes)} of {done.wanted} nodes"
        names = f" ({', '.join(done.nodes)})" if done.nodes else ""
        text = (
            f"it is accepted and will be carried out, but only {have}{names} had it on disk after "
            f"{done.waited:.1f} s: if Redis lost its data now, it could be forgotten"
        )
    return {"saved": {"nodes": list(done.nodes), "wanted": done.wanted, "text": text}}

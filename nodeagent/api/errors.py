"""Refusals of the API: one error type, one JSON shape, one table of HTTP codes.

Every refusal says what happened, where, and what to do next. Must never send an exception's traceback to a caller.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import Literal

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from nodeagent.agent.view import AgentHealth, AgentView
from nodeagent.spec.errors import closest
from nodeagent.store.base import (
    StepFailedError,
    StoreBusyError,
    StoreRefusedError,
    StoreUnavailableError,
    StoreUnusableError,
)

STATUS = {
    "spec": 400,
    "usage": 400,
    "unknown_caller": 401,
    "permission": 403,
    "not_found": 404,
    "method": 405,
    "state": 409,
    "stopping": 409,
    "other_node": 409,
    "encoding": 415,
    "limit": 429,
    "store_away": 503,
    "unknown_outcome": 503,
    "node_away": 503,
    "not_joined": 503,
    "recovering": 503,
}
"""Code of an error to HTTP status; the tool maps the status to its exit code."""


class ApiError(Exception):
    """A refusal: nothing was changed. Only with ``code`` ``unknown_outcome`` (the store stopped answering in the middle
    of the change) or ``node_away`` a change may have been made; the text says so."""

    def __init__(self, code: str, message: str, next_step: str = "", *, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.next_step = next_step
        self.problems = tuple(problems)

    @property
    def status(self) -> int:
        return STATUS[self.code]

    def body(self) -> dict[str, object]:
        """The JSON that callers get."""
        error: dict[str, object] = {
            "code": self.code, "message": _cut(self.message, MOST_MESSAGE), "next": _cut(self.next_step, MOST_MESSAGE)
        }  # fmt: skip
        if self.problems:
            error["problems"] = _shown(self.problems)
        return {"error": error}


MOST_MESSAGE, MOST_SENTENCE = 3000, 400
"""The most characters of a message and of one of its problems: callers choose some of the words in them."""
MOST_SHOWN = 24 << 10
"""Bytes of all problems in one answer, as JSON, but for the last of them."""


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _shown(problems: Sequence[str]) -> list[str]:
    found, size = list[str](), 0
    for problem in problems:
        if size > MOST_SHOWN:
            return [*found, f"... and {len(problems) - len(found)} more"]
        found.append(_cut(problem, MOST_SENTENCE))
        size += len(json.dumps(found[-1]))
    return found


def unknown(kind: str, name: str, known: Iterable[str]) -> ApiError:
    """A ``not_found`` with the nearest known name."""
    names = sorted(set(known))
    if near := closest(name, names):
        step = f"did you mean {near!r}?"
    elif names:
        step = f"there are: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
    else:
        step = f"there is no {kind} at all"
    return ApiError("not_found", f"no {kind} {name!r}", step)


def what_goes_on(health: AgentHealth) -> str:
    """What runs on while the store does not answer this node's agent, and on what time here. The lease process has a
    link of its own: while the store answers that, or the lease has time left, nothing here needs failsafe time."""
    if health.lent:
        return f"running jobs go on, {len(health.lent)} of those on this node on failsafe time"
    if health.lease_left > 0:
        return "running jobs go on, those on this node on its lease"
    return "running jobs go on, but not on this node, whose lease has run out"


def store_away(
    view: AgentView, change: Literal["none", "refused", "unknown"], error: StoreUnavailableError | None = None
) -> ApiError:
    """The store does not answer, cannot serve, or is too busy for callers: since when, why (``error``, if it has just
    been asked), and what happened to the requested change."""
    if isinstance(error, StoreBusyError):
        return ApiError("limit", f"node {view.node}: {error}; nothing was changed", "ask again in a moment")
    since = view.health().store_away_since
    when = "" if since is None else f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}"
    ago = "" if since is None else f" ({max(0, round(time.time() - since))} s)"
    goes_on = what_goes_on(view.health())
    done = {
        "none": goes_on,
        "refused": f"nothing was changed, and nothing can be until it answers; {goes_on}",
        "unknown": "it is not known whether the change was written",
    }[change]
    step = (
        "ask again with the same request id: it happens once at most"
        if change == "unknown"
        else f"see that Redis runs and that node {view.node} reaches it (nodeagentctl doctor); then ask again"
    )
    code = "unknown_outcome" if change == "unknown" else "store_away"
    now = isinstance(error, StoreUnusableError | StepFailedError)
    if unusable := str(error) if now else view.health().store_unusable:
        return ApiError(code, f"node {view.node} cannot use the store{when}{ago}: {unusable}; {done}", step)
    return ApiError(code, f"the store has not answered node {view.node}{when}{ago}; {done}", step)


_REFUSED = {
    "not_found": ("not_found", "list what there is: nodeagentctl get"),
    "name_taken": ("state", "a name is one job's while it is live: see nodeagentctl get"),
    "stopping": ("stopping", "ask again in a moment, or choose another name"),
    "limit": ("limit", "delete jobs that are not needed any more (nodeagentctl get), or ask an operator"),
    "full": (
        "limit",
        "delete jobs of yours that are not needed any more, ended ones too (nodeagentctl get, nodeagentctl delete "
        "JOB), or ask those who have most, or an operator, to do so; then submit again",
    ),
    "ended": ("state", "submit it again: nodeagentctl submit FILE"),
    "not_live": ("state", "see nodeagentctl nodes, then ask again"),
    "recovering": ("recovering", "running jobs go on undisturbed; ask again when that is over"),
    "stale": ("state", "another request changed it at the same moment; look, then try again: nodeagentctl get"),
}


def not_joined(view: AgentView) -> ApiError:
    """The agent does not know the cluster (any more, or yet): it must not answer as if the cluster were empty."""
    health = view.health()
    if health.store_away_since is not None:
        why = health.reason or "the store does not answer, and it has started since it last did"
        step = f"see that Redis runs and that node {view.node} reaches it (nodeagentctl doctor); then ask again"
    else:
        why, step = health.reason or "it has only just started", "ask again in a moment, or see its log"
    return ApiError("not_joined", f"node {view.node} has not joined its cluster: {why}", step)


def from_refused(refused: StoreRefusedError) -> ApiError:
    """The store's refusal in the API's form."""
    code, step = _REFUSED.get(refused.code, ("state", "see nodeagentctl describe, then ask again"))
    return ApiError(code, str(refused), step)


UNJOINED = ("/v1/version", "/v1/doctor")
"""Paths that answer before the agent has joined."""


def joined_middleware(view: AgentView) -> Middleware:
    """Lets only health, version and doctor through before the agent has joined."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/v1/") and request.path not in UNJOINED and view.me() is None:
            raise not_joined(view)
        return await handler(request)

    return middleware


HICCUP = 2.0
"""Seconds for which an answer that did not come may have been late on a busy machine: until then the store is asked
again before a change is refused. The agent asks by itself twice a second, and knows when it is back."""


def answering_middleware(view: AgentView) -> Middleware:
    """Refuses changes while the store is unreachable. They are not even sent: a store that was only frozen would make
    the change later, when the caller no longer expects it. Costs nothing while it answers, nor once it is known to be
    away; at most two timeouts of the store in between."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        since = view.health().store_away_since
        if request.method != "GET" and since is not None:
            if time.time() - since > HICCUP:
                raise store_away(view, "refused")
            try:
                with contextlib.suppress(StoreRefusedError):  # the store answers: the handler reports the refusal
                    await view.refresh()
            except StoreUnavailableError as error:
                raise store_away(view, "refused", error) from None
        return await handler(request)

    return middleware


def error_middleware(view: AgentView) -> Middleware:
    """Turns refusals of the API and of the store into JSON."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        headers: dict[str, str] = {}
        try:
            return await handler(request)
        except ApiError as error:
            refusal = error
        except StoreRefusedError as refused:
            refusal = from_refused(refused)
        except StoreUnavailableError as error:
            refusal = store_away(view, "none" if request.method == "GET" else "unknown", error)
        except web.HTTPNotFound:
            refusal = ApiError("not_found", f"no such path: {request.path}", "see docs/cli.md for what the API serves")
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            refusal = ApiError("method", f"{request.method} is not for {request.path}", f"it takes {allowed}")
            headers["Allow"] = allowed
        return web.json_response(refusal.body(), status=refusal.status, headers=headers)

    return middleware

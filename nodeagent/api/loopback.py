"""The parts of the API on loopback HTTP: health, readiness, metrics, and the status page's files. Must never ask the
store, or a frozen store would make the agent look dead.

The files hold no data, and are read once. A TCP connection has no SO_PEERCRED, but the kernel lists the owner
of each end. Must never admit a user that the unix socket's mode excludes. Must never answer to a host name that is not
this machine's: a foreign web page could point a name of its own at 127.0.0.1, and have a browser here read the answer.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from nodeagent.agent.gauges import CONTENT_TYPE, MetricsPage
from nodeagent.agent.view import AgentView
from nodeagent.api.errors import ApiError
from nodeagent.osutil.tcp import SocketAddress, holders, user_of

ADDRESS = "127.0.0.1"
OTHER_PORT = "have that program ended, or choose another ports.api (0: any free one)"
PATHS = ("/healthz", "/readyz", "/metrics")
"""Paths for every caller: probes and Prometheus do not identify themselves. The metrics name jobs, so they are answered
under loopback's own names only (``UNNAMED``)."""
PAGES_SHARE = 0.1
"""The most of the loop's time that making the Prometheus page takes; between two of them the last one is answered."""
MAX_LAG = 1.0
"""Seconds by which the main loop may be late and still count as healthy."""


class HealthRoutes:
    """The handlers, for one agent's view."""

    def __init__(self, view: AgentView, metrics: MetricsPage) -> None:
        self.view = view
        self.metrics = metrics
        self._page, self._page_until = b"", 0.0

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        return [
            web.get("/healthz", self.healthz),
            web.get("/readyz", self.readyz),
            web.get("/metrics", self.page),
        ]

    async def healthz(self, _request: web.Request) -> web.Response:
        """200 while the agent's loop is on time. An unreachable store must not get an agent restarted, since the new
        agent would not know which failsafe members lend its workers time."""
        health = self.view.health()
        reasons = []
        if health.loop_lag > MAX_LAG:
            reasons.append(f"the main loop is {health.loop_lag:.2f} s late (at most {MAX_LAG} s is healthy)")
        return self._answer(reasons)

    async def readyz(self, _request: web.Request) -> web.Response:
        """200 while this node has joined and the store answers: it accepts work, and changes. Running work continues
        without the store while it is lent time."""
        health = self.view.health()
        reasons = []
        if not health.joined:
            reasons.append(f"node {self.view.node} has not joined: {health.reason or 'not tried yet'}")
        if health.store_away_since is not None:
            away = max(0.0, time.time() - health.store_away_since)
            ended = "; nothing runs on this node, which has no lease" if health.lease_left <= 0 else ""
            on = f"; {len(health.lent)} of the jobs here run on failsafe time" if health.lent else ended
            why = f"cannot serve ({health.store_unusable})" if health.store_unusable else "has not answered"
            reasons.append(f"the store {why} for {away:.1f} s: nothing can be changed, started or recovered{on}")
        elif health.joined and health.lease_left <= 0:
            but = f", but for those that run on failsafe time (jobs: {len(health.lent)})" if health.lent else ""
            reasons.append(f"the lease has run out: this node's workers were stopped{but}")
        return self._answer(reasons)

    def _answer(self, reasons: list[str]) -> web.Response:
        health = self.view.health()
        ok = not reasons
        return web.json_response(
            {
                "ok": ok,
                "node": self.view.node,
                "reasons": reasons,
                "joined": health.joined,
                "lease_left": round(health.lease_left, 3),
                "beat_age": round(health.beat_age, 3),
                "loop_lag": round(health.loop_lag, 4),
                "store_away_since": health.store_away_since,
                "lent": {uid: round(left, 3) for uid, left in health.lent.items()},
                "not_lent": dict(health.not_lent),
            },
            status=200 if ok else 503,
        )

    async def page(self, _request: web.Request) -> web.Response:
        """The Prometheus page; of a large cluster made ever again, as anybody may ask, it would leave the loop no time
        for anything else."""
        now = time.monotonic()
        if now >= self._page_until:
            self._page = self.metrics.text(self.view)
            self._page_until = now + (time.monotonic() - now) / PAGES_SHARE
        return web.Response(body=self._page, headers={"Content-Type": CONTENT_TYPE})


FOLDER = Path(__file__).with_name("page")
FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/draw.js": ("draw.js", "text/javascript"),
    "/page/timeline.js": ("timeline.js", "text/javascript"),
    "/page/shares.js": ("shares.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Path to file and content type."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def table() -> list[web.RouteDef]:
    """Every route of the page."""
    return [web.get(path, _file) for path in FILES]


async def _file(request: web.Request) -> web.Response:
    name, kind = FILES[request.path]
    return web.Response(body=_content(name), headers=HEADERS | {"Content-Type": f"{kind}; charset=utf-8"})


@cache
def _content(name: str) -> bytes:
    """Of a file of the page. aiohttp's answer with a file takes a thread, and writes a traceback into the log where the
    caller hangs up."""
    return (FOLDER / name).read_bytes()


NAMES = frozenset({ADDRESS, "localhost", "[::1]"})
UNNAMED = frozenset({"/healthz", "/readyz"})
"""Paths that answer to any host name: a load balancer uses one of its own, and these answers name no user."""


def guest_middleware(
    free: Iterable[str], uid: int, owner: Callable[[SocketAddress, SocketAddress], int | None] = user_of
) -> Middleware:
    """Lets only permitted users beyond the ``free`` paths. ``uid``: the agent's own; ``owner``: returns the user of a
    connection's other end, by default from the kernel."""
    open_to_all = frozenset(free)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in UNNAMED:
            _check_name(request.host)
        if request.path not in open_to_all and uid != 0:  # root's socket is open to every user of the machine
            who = await asyncio.to_thread(owner, *_ends(request))
            if who not in (0, uid):
                raise ApiError(
                    "permission", "this agent shows its jobs to its own user only", "run the request as that user"
                )
        return await handler(request)

    return middleware


def _check_name(host: str) -> None:
    """Checks the host name of a request. Raises ``ApiError``. Any port is allowed: it may be forwarded."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() not in NAMES:
        raise ApiError(
            "permission",
            f"the request names the host {host!r}, which is not a name for loopback",
            "use 127.0.0.1 or localhost (from elsewhere: ssh -L 9470:127.0.0.1:9470 NODE), or over https with a token",
        )


def _ends(request: web.Request) -> tuple[SocketAddress, SocketAddress]:
    """The client's end of the connection, and ours."""
    transport = request.transport
    client, mine = (None, None) if transport is None else map(transport.get_extra_info, ("peername", "sockname"))
    if client is None or mine is None:
        raise ApiError("permission", "the caller is unknown", "try again")
    return client[:2], mine[:2]


def why_not(port: int, error: OSError | None = None) -> str:
    """Why nothing can listen on this port of loopback, and who has it. Reads tables of the kernel."""
    what = f"cannot listen on {ADDRESS}:{port}"
    if error is not None:
        what += f": {error.strerror or error}"
        if error.errno != errno.EADDRINUSE:
            return what
    try:
        uids = sorted(holders(ADDRESS, port))
    except OSError as unseen:
        return f"{what}; who has the port cannot be seen ({unseen})"
    if not uids:
        return f"{what}; the kernel does not list who has the port"
    return f"{what}; the port belongs to uid {', '.join(map(str, uids))}"

"""What loopback HTTP serves: health, readiness, metrics, and the status page's files. Must never ask the store, or
a store that stands would make the agent look dead.

The files hold no data, and are read when somebody asks for them. A TCP connection has no SO_PEERCRED, but the kernel
lists whose end of it is whose. Must never let in whom the unix socket's mode keeps out, nor answer a name that is not
this machine's: a page from elsewhere could have a browser here read the answer, by a name that it has pointed at
127.0.0.1.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from nodeagent.agent.metrics import CONTENT_TYPE, Metrics
from nodeagent.api.errors import ApiError
from nodeagent.api.view import AgentView

PATHS = ("/healthz", "/readyz", "/metrics")
"""For whoever can connect: probes and Prometheus say nothing of themselves, and use any name."""
MAX_LAG = 1.0
"""Seconds the main loop may be late and still count as healthy."""


class HealthRoutes:
    """The handlers, over one agent's view."""

    def __init__(self, view: AgentView, metrics: Metrics) -> None:
        self.view = view
        self.metrics = metrics

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        return [
            web.get("/healthz", self.healthz),
            web.get("/readyz", self.readyz),
            web.get("/metrics", self.page),
        ]

    async def healthz(self, _request: web.Request) -> web.Response:
        """200 while the agent's loop turns in time: that the store is away must not get an agent restarted, since a new
        one would not know who lends its workers time."""
        health = self.view.health()
        reasons = []
        if health.loop_lag > MAX_LAG:
            reasons.append(f"the main loop is {health.loop_lag:.2f} s late (at most {MAX_LAG} s is healthy)")
        return self._answer(reasons)

    async def readyz(self, _request: web.Request) -> web.Response:
        """200 while this node has joined and the store answers: it can take work, and changes. What runs goes on
        without that, while it is lent time."""
        health = self.view.health()
        reasons = []
        if not health.joined:
            reasons.append(f"node {self.view.node} has not joined: {health.reason or 'not tried yet'}")
        if health.store_away_since is not None:
            away = max(0.0, time.time() - health.store_away_since)
            on = f"; {len(health.lent)} of the jobs here run on failsafe time" if health.lent else ""
            reasons.append(
                f"the store has not answered for {away:.1f} s: nothing can be changed, started or recovered{on}"
            )
        elif health.joined and health.lease_left <= 0:
            reasons.append("the lease has run out: this node's workers were stopped")
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
        """The Prometheus page."""
        return web.Response(body=self.metrics.page(self.view), headers={"Content-Type": CONTENT_TYPE})


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
"""Path to file and type."""
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


async def _file(request: web.Request) -> web.FileResponse:
    name, kind = FILES[request.path]
    return web.FileResponse(FOLDER / name, headers=HEADERS | {"Content-Type": f"{kind}; charset=utf-8"})


TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Of this process's network namespace; a dual-stack client's end is in the second."""
ESTABLISHED = "01"
NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
UNNAMED = frozenset({"/healthz", "/readyz"})
"""Answer to any name: a load balancer asks by one of its own, and they name nobody."""


End = tuple[str, int]
"""Address and port."""


def guest_middleware(
    free: Iterable[str], uid: int, owner: Callable[[End, End], int | None] | None = None
) -> Middleware:
    """Lets only those who may read get beyond the ``free`` paths. ``uid``: the agent's own; ``owner``: who says whose
    the client's end of a connection is, the kernel if nobody else."""
    whose = owner or end_owner
    open_to_all = frozenset(free)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in UNNAMED:
            _check_name(request.host)
        if request.path not in open_to_all and uid != 0:  # root's socket is open to every user of the machine
            who = await asyncio.to_thread(whose, *_ends(request))
            if who not in (0, uid):
                raise ApiError("permission", "this agent shows its jobs to its own user only", "ask as that user")
        return await handler(request)

    return middleware


def _check_name(host: str) -> None:
    """Raises ``ApiError``. The port may be any: it may be forwarded."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() not in NAMES:
        raise ApiError(
            "permission",
            f"this is asked for as {host!r}, which is no name for loopback",
            "ask as 127.0.0.1 or localhost (from elsewhere: ssh -L 9470:127.0.0.1:9470 NODE), or over https with a "
            "token",
        )


def _ends(request: web.Request) -> tuple[End, End]:
    """The client's end of the connection, and ours."""
    transport = request.transport
    client, mine = (None, None) if transport is None else map(transport.get_extra_info, ("peername", "sockname"))
    if client is None or mine is None:
        raise ApiError("permission", "nobody says who asks", "ask again")
    return client[:2], mine[:2]


def end_owner(client: End, mine: End) -> int | None:
    """The user of the process that holds the client's end; None: it is not on this machine, or gone."""
    ends = [(_hex(*client), _hex(*mine)), (_mapped(*client), _mapped(*mine))]
    for table, (there, here) in zip(TABLES, ends, strict=True):
        try:
            rows = table.read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:  # no IPv6 here
            continue
        for row in rows:
            cells = row.split()
            if cells[1] == there and cells[2] == here and cells[3] == ESTABLISHED:
                return int(cells[7])
    return None


def _hex(address: str, port: int) -> str:
    """As the kernel prints it: words of the machine's byte order."""
    word = int.from_bytes(socket.inet_aton(address), sys.byteorder)
    return f"{word:08X}:{port:04X}"


def _mapped(address: str, port: int) -> str:
    marker = int.from_bytes(b"\0\0\xff\xff", sys.byteorder)
    return f"{0:016X}{marker:08X}{_hex(address, port)}"

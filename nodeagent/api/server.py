"""The API's listening sockets, and the routes of each: everything on the unix socket and over https; only health,
metrics and the status page on loopback HTTP.

Where it cannot listen on a TCP port, it says so and tries again: any account can have a port in the moment of a
restart, so that may end no agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from nodeagent import __version__
from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.view import AgentView
from nodeagent.api import loopback
from nodeagent.api.accounting import AccountingRoutes
from nodeagent.api.arrays import ArrayRoutes
from nodeagent.api.auth import DATABASE, USERS, UserDatabase
from nodeagent.api.connections import BACKLOG, Guests, LoopbackGuests, ServerFactory, SocketGuests
from nodeagent.api.doctor import DoctorRoutes
from nodeagent.api.errors import answering_middleware, error_middleware, joined_middleware
from nodeagent.api.events import EventRoutes
from nodeagent.api.jobs import JobRoutes
from nodeagent.api.logs import LogRoutes
from nodeagent.api.loopback import ADDRESS, OTHER_PORT, PATHS, HealthRoutes, guest_middleware, why_not
from nodeagent.api.nodehealth import DiagRoutes, NodeHealthRoutes
from nodeagent.api.nodes import NodeRoutes
from nodeagent.api.queues import QueueRoutes
from nodeagent.api.remote import Doorkeeper, RemoteConnections, door_middleware, farewell_middleware
from nodeagent.api.requests import MAX_BODY, encoding_middleware, query_middleware
from nodeagent.api.serializers import API_VERSION
from nodeagent.api.status import StatusRoutes, TopRoutes
from nodeagent.api.submit import SubmitRoutes
from nodeagent.api.throttle import Throttle, throttle_middleware
from nodeagent.api.windows import WindowRoutes
from nodeagent.osutil.linux import refuse_descriptors
from nodeagent.osutil.subuids import SUBORDINATES
from nodeagent.trust.certificate import CertificateError


def _of_ours(record: logging.LogRecord) -> bool:
    """It is no caller's mistake. aiohttp logs those with a traceback, for any bytes that are no HTTP: so many that
    the journal would drop the agent's own lines."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


logging.getLogger("aiohttp.server").addFilter(_of_ours)

Door = tuple[Doorkeeper, RemoteConnections]
"""Who says who asks, and the connections on which they do."""


def create_app(
    view: AgentView,
    metrics: MetricsPage,
    *,
    local_socket: bool = False,
    door: Door | None = None,
    throttle: Throttle | None = None,
    users: UserDatabase = DATABASE,
) -> web.Application:
    """``local_socket``: the full API, for a unix socket (SO_PEERCRED identifies callers); ``door``: the full API for
    the callers that it identifies; neither: health, metrics and the status page only. ``throttle``: of users'
    requests, if several applications share it."""
    throttle = Throttle(lambda: view.config.limits, time.monotonic) if throttle is None else throttle
    full = local_socket or door is not None
    middlewares = [error_middleware(view)]
    if door is not None:
        middlewares = [farewell_middleware, *middlewares, door_middleware(*door)]
    if full:
        middlewares += [throttle_middleware(view, throttle, SUBORDINATES), encoding_middleware, query_middleware]
        middlewares += [joined_middleware(view), answering_middleware(view)]
    else:
        middlewares += [guest_middleware(PATHS, os.geteuid()), encoding_middleware]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app[USERS] = users
    for routes in (HealthRoutes(view, metrics).table(), StatusRoutes(view, users).table(), loopback.table()):
        app.router.add_routes(routes)
    if not full:
        return app

    async def version(_request: web.Request) -> web.Response:
        return web.json_response(
            {
                "apiVersion": API_VERSION,
                "version": __version__,
                "cluster": view.config.cluster,
                "node": view.node,
                "store_away_since": view.health().store_away_since,
            }
        )

    app.router.add_get("/v1/version", version)
    for noun in (NodeRoutes, NodeHealthRoutes, DiagRoutes, LogRoutes, EventRoutes, TopRoutes, WindowRoutes):
        app.router.add_routes(noun(view).table())
    jobs = JobRoutes(view, throttle, users)
    app.router.add_routes(jobs.table())
    for of_users in (SubmitRoutes, ArrayRoutes, QueueRoutes, AccountingRoutes):
        app.router.add_routes(of_users(view, users).table())
    app.router.add_routes(DoctorRoutes(view, throttle, jobs.sizes).table())
    return app


PROBE_TIMEOUT = 1.0
"""Seconds to find out whether a program listens on an existing socket."""
SHUTDOWN_TIMEOUT = 0.1
"""Seconds that requests under way get (twice) when the agent ends; connections that follow logs are closed. No process
renews the lease in this time: the next agent must run before the fence."""
HEADERS = 32
"""Lines in a request's head, of 8 KiB at most, as the request's own. aiohttp keeps 128, before anybody is known: of all
connections a quarter of a gigabyte."""


def create_runner(app: web.Application, **more: Any) -> web.AppRunner:
    """What serves this application, with the bounds that hold on every socket. A compressed body stays as it came:
    aiohttp would unpack it in the loop, a thousand times its size, before anybody knows whose it is."""
    return web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT, max_headers=HEADERS,
        auto_decompress=False, **more,
    )  # fmt: skip


RETRY = 10.0
"""Seconds until it is tried again to serve where that was not possible."""


async def keep_trying(
    serve: Callable[[], Awaitable[None]], complain: Callable[[str], None], retry: float = RETRY
) -> None:
    """Calls it until it returns, again after each ``OSError`` and ``CertificateError``. ``complain`` gets each new
    reason."""
    last = ""
    while True:
        try:
            return await serve()
        except (OSError, CertificateError) as error:
            if str(error) != last:
                last = str(error)
                complain(last)
        await asyncio.sleep(retry)


class ListenError(Exception):
    """The unix socket cannot be used. ``str()`` says which, why, and what to do."""


class ApiServer:
    """``async with ApiServer(view, metrics) as server``: it listens inside, and leaves nothing behind after. Call
    ``run``, too."""

    def __init__(
        self,
        view: AgentView,
        metrics: MetricsPage,
        throttle: Throttle | None = None,
        users: UserDatabase = DATABASE,
        *,
        notify: Callable[[str], None] = lambda _url: None,
        retry: float = RETRY,
    ) -> None:
        """``notify`` is called with the url of loopback HTTP, once it listens."""
        self._view = view
        self._metrics = metrics
        self.throttle = Throttle(lambda: view.config.limits, time.monotonic) if throttle is None else throttle
        """Of the users' requests to this agent."""
        self._users = users
        self._runners: list[web.AppRunner] = []
        self._listening: dict[web.AppRunner, Guests] = {}
        self._inode: tuple[int, int] | None = None
        self._notify, self._retry = notify, retry
        self.socket_path = view.config.dirs.run / "api.sock"
        """The unix socket."""
        self.http_url = ""
        """``http://127.0.0.1:PORT`` of health and metrics, known once it listens."""

    async def __aenter__(self) -> Self:
        """Start listening. Raises ``ListenError``."""
        try:
            await self._listen_unix()
            with contextlib.suppress(OSError):  # ``run`` says why
                await self._listen_http()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def run(self) -> None:
        """Returns once loopback HTTP listens, which it tries until it can."""
        if not self.http_url:
            await keep_trying(self._listen_http, self._complain, self._retry)

    async def _listen_unix(self) -> None:
        path = self.socket_path
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(_make_way, path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        refuse_descriptors(sock)
        # Bound under another name, given its final mode, then renamed: no client ever sees it unfinished.
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        try:
            sock.bind(str(fresh))
            fresh.chmod(0o666 if os.geteuid() == 0 else 0o600)
            sock.listen(BACKLOG)
            fresh.rename(path)
        except OSError as error:
            sock.close()
            fresh.unlink(missing_ok=True)
            raise ListenError(f"cannot listen on {path}: {error.strerror}; see dirs.run in the config") from error
        found = path.stat()
        self._inode = (found.st_dev, found.st_ino)
        runner, server = await self._runner(local_socket=True)
        guests = self._listening[runner] = SocketGuests(self._view, server, SUBORDINATES, time.monotonic)
        guests.serve(sock)

    async def _listen_http(self) -> None:
        """Raises OSError."""
        port = self._view.config.ports.api
        try:
            sock = _listening(port)
        except OSError as error:
            why = await asyncio.to_thread(why_not, port, error)
            try:
                sock = _listening(port)  # whoever had it may have gone while that was looked up: then nobody has it
            except OSError:
                raise OSError(why) from error
        try:
            runner, server = await self._runner(local_socket=False)
        except BaseException:
            sock.close()
            raise
        guests = self._listening[runner] = LoopbackGuests(self._view, server, SUBORDINATES, time.monotonic)
        guests.serve(sock)
        self.http_url = f"http://{ADDRESS}:{sock.getsockname()[1]}"
        self._notify(self.http_url)

    def _complain(self, why: str) -> None:
        log = structlog.get_logger("api").bind(node=self._view.node)
        log.warning("health and metrics are not served on loopback yet", why=why, fix=OTHER_PORT)

    async def _runner(self, local_socket: bool) -> tuple[web.AppRunner, ServerFactory]:
        app = create_app(
            self._view, self._metrics, local_socket=local_socket, throttle=self.throttle, users=self._users
        )
        runner = create_runner(app)
        await runner.setup()
        self._runners.append(runner)
        assert runner.server is not None
        return runner, runner.server

    async def close(self) -> None:
        """Stop listening; remove the socket if it is still ours."""
        while self._runners:
            runner = self._runners.pop()
            if (listening := self._listening.pop(runner, None)) is not None:
                await listening.close()
            await runner.cleanup()
        if self._inode is not None:
            inode, self._inode = self._inode, None
            try:
                found = self.socket_path.stat()
                if (found.st_dev, found.st_ino) == inode:
                    self.socket_path.unlink()
            except FileNotFoundError:
                return


def _listening(port: int) -> socket.socket:
    """On loopback. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((ADDRESS, port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _make_way(path: Path) -> None:
    """Remove a socket without a listener. Raises ``ListenError`` if a program listens on it, or if it is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path} is in the way and is not a socket; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ListenError(f"another program may listen on {path} ({error}); stop that agent first") from error
    raise ListenError(f"another agent listens on {path} already; stop it, or give this one another dirs.run")

"""Which routes an application serves: everything on the unix socket and over https, only health, metrics and the status
page on loopback HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from aiohttp import web

from nodeagent import __version__
from nodeagent.agent.metrics import Metrics
from nodeagent.api import page
from nodeagent.api.auth import USERS
from nodeagent.api.care import CareRoutes
from nodeagent.api.diag import DiagRoutes
from nodeagent.api.doctor import DoctorRoutes
from nodeagent.api.errors import answering_middleware, error_middleware, joined_middleware
from nodeagent.api.events import EventRoutes
from nodeagent.api.health import PATHS, HealthRoutes
from nodeagent.api.jobs import JobRoutes
from nodeagent.api.logs import LogRoutes
from nodeagent.api.nodes import NodeRoutes
from nodeagent.api.page import guest_middleware
from nodeagent.api.remote import Doorkeeper, door_middleware
from nodeagent.api.requests import MAX_BODY
from nodeagent.api.shapes import API_VERSION
from nodeagent.api.status import StatusRoutes
from nodeagent.api.top import TopRoutes
from nodeagent.api.usage import Usage, usage_middleware
from nodeagent.api.users import DATABASE, UserDatabase
from nodeagent.api.view import AgentView

Door = tuple[Doorkeeper, Callable[[asyncio.BaseTransport], None]]
"""Who lets others in, and who is told which connections they came by."""


def create_app(
    view: AgentView,
    metrics: Metrics,
    *,
    local_socket: bool = False,
    door: Door | None = None,
    usage: Usage | None = None,
    users: UserDatabase = DATABASE,
) -> web.Application:
    """``local_socket``: the full API, for a unix socket (callers are known by SO_PEERCRED); ``door``: the full API for
    those that it lets in; neither: health, metrics and the status page only. ``usage``: what users ask of this agent,
    where other applications count with it."""
    usage = Usage() if usage is None else usage
    full = local_socket or door is not None
    middlewares = [error_middleware(view)]
    if door is not None:
        middlewares.append(door_middleware(*door))
    if full:
        middlewares += [usage_middleware(view, usage), joined_middleware(view), answering_middleware(view)]
    else:
        middlewares.append(guest_middleware(PATHS, os.geteuid()))
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app[USERS] = users
    for routes in (HealthRoutes(view, metrics).table(), StatusRoutes(view, users).table(), page.table()):
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
    for noun in (NodeRoutes, CareRoutes, DiagRoutes, LogRoutes, EventRoutes, TopRoutes):
        app.router.add_routes(noun(view).table())
    app.router.add_routes(JobRoutes(view, usage, users).table())
    app.router.add_routes(DoctorRoutes(view, usage).table())
    return app

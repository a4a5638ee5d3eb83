"""Health, readiness and metrics: what loopback HTTP serves. Must never do I/O, or a stuck store would make it lie."""

from __future__ import annotations

import time

from aiohttp import web

from nodeagent.agent.metrics import CONTENT_TYPE, Metrics
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

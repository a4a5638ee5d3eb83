"""What the API's handlers cost an agent whose view is large, and how much memory that view is."""

from __future__ import annotations

import gc
import json
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from benchmarks.scale.agents import Agent
from nodeagent.agent.view import AgentView
from nodeagent.api.auth import UserDatabase
from nodeagent.api.nodes import NodeRoutes
from nodeagent.api.status import StatusRoutes, TopRoutes

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def view_of(agent: Agent) -> AgentView:
    """The agent as the API sees it, as far as these handlers look."""
    health = SimpleNamespace(store_away_since=None, store_waits="", lent=(), lease_left=1.0)
    parts: dict[str, Any] = {
        "cluster": agent.cluster,
        "me": lambda: agent.snapshot.node(agent.node),
        "health": lambda: health,
        "store": agent.store,
        "era": agent.snapshot.era,
        "why": lambda uid: agent.decide(uid).why,
        "node": agent.node,
        "config": SimpleNamespace(cluster="scale"),
    }
    return cast("AgentView", SimpleNamespace(**parts))


class Answered(NamedTuple):
    """One question."""

    cpu: float
    """Milliseconds of CPU time."""
    loop: float
    """Those of them in which the agent's loop stood."""
    size: int
    """Bytes."""
    after: str = ""
    """Where the next page begins, if there is one."""


async def answered(handler: Handler, path: str) -> Answered:
    """Ask it. The loop has to be the main thread's."""
    assert threading.current_thread() is threading.main_thread()
    request = make_mocked_request("GET", path)
    gc.collect()
    gc.freeze()  # a collection would go through what the other agents in this process know
    began, held = time.process_time(), time.thread_time()
    response = await handler(request)
    cost = 1000 * (time.process_time() - began), 1000 * (time.thread_time() - held)
    gc.unfreeze()
    assert isinstance(response, web.Response) and isinstance(response.body, bytes)
    return Answered(*cost, len(response.body), json.loads(response.body).get("next", ""))


async def in_pages(handler: Handler, path: str) -> Answered:
    """Ask for each page of a list, as the tool does; the longest stand of the loop counts."""
    whole, after, more = Answered(0.0, 0.0, 0), "", True
    while more:
        one = await answered(handler, f"{path}?after={after}")
        whole = Answered(whole.cpu + one.cpu, max(whole.loop, one.loop), whole.size + one.size)
        after = one.after
        more = after != ""
    return whole


QUESTIONS: dict[str, Callable[[Agent], Awaitable[Answered]]] = {
    "top": lambda agent: answered(TopRoutes(view_of(agent)).top, "/v1/top"),
    "get nodes": lambda agent: in_pages(NodeRoutes(view_of(agent)).index, "/v1/nodes"),
    "page": lambda agent: answered(
        StatusRoutes(view_of(agent), UserDatabase(str, time.monotonic)).status, "/v1/status"
    ),
}
"""Each to an agent that has not answered it yet."""


async def memory(newcomer: Agent) -> float:
    """Megabytes that an agent has allocated once it has read everything and made its view."""
    gc.collect()
    tracemalloc.start()
    try:
        await newcomer.join()
        await newcomer.beat()
        newcomer.cluster()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()

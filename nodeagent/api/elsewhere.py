"""What only a node's own agent can do, asked of another one: that asks it, for the same person.

The agent that is asked first looks whether the person may; the other one believes it, as it believes a ticket. Must
never pass a question on twice.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from nodeagent.api import auth
from nodeagent.api.body import flag
from nodeagent.api.errors import ApiError
from nodeagent.api.view import AgentView
from nodeagent.api.ways import FAILURES, Way, asked, way_to, words
from nodeagent.model.node import NodeRecord

OWN_ONLY = "local_only"
"""Query flag: answer for this agent's own node, or not at all."""


async def elsewhere(
    view: AgentView, node: NodeRecord, request: web.Request, body: dict[str, Any] | None = None
) -> web.Response | None:
    """The answer of the node's own agent; None where that is this one. Raises ``ApiError`` when it cannot be asked."""
    if node.id == view.node:
        return None
    if flag(request, OWN_ONLY):
        raise ApiError(
            "other_node", f"this is the agent of {view.node}, not of {node.id}",
            f"ask on {node.facts.hostname} itself; nothing was changed",
        )  # fmt: skip
    way = way_to(view, node)
    if not isinstance(way, Way):
        raise ApiError("other_node", way, "nothing was changed")
    if not view.cluster().live(node.id):
        raise ApiError("other_node", f"the agent of {node.id} is gone", "see nodeagentctl nodes; nothing was changed")
    who = await auth.caller(request, view.config.jobs)
    try:
        async with asked(view, way, request.method, request.path, who, query={OWN_ONLY: "1"}, json=body) as response:
            return web.json_response(await response.json(), status=response.status)
    except (*FAILURES, ValueError) as error:
        unknown = "" if request.method == "GET" else "; it is not known whether it was done"
        raise ApiError(
            "node_away", f"the agent of {node.id} could not be asked: {words(error)}{unknown}",
            "ask again with the same request id, or see that its agent runs: nodeagentctl nodes",
        ) from error  # fmt: skip

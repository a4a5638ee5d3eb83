"""Asking a node's own agent: what changes a node's health is nobody else's business. To the agent that answers, else
to the node's own socket where it is on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodeagent.ctl.client import Client
from nodeagent.ctl.errors import CtlError

Json = dict[str, Any]
ELSEWHERE = "other_node"
"""The agent's word for a node that is not its own."""


def asked_of(client: Client, node: str, ask: Callable[[Client], Json]) -> tuple[Client, Json]:
    """The answer, and who gave it. Raises ``CtlError``, which says where to ask."""
    try:
        return client, ask(client)
    except CtlError as refusal:
        if refusal.kind != ELSEWHERE or client.remote is not None:
            raise
        near = client.near(node)
        if near is None:
            raise
        return near, ask(near)

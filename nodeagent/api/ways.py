"""Asking another agent on somebody's behalf: over https, by the certificate that the cluster's key vouches for and with
a ticket, or over its unix socket where it serves nothing else and is on this machine.

Every wait is bounded. Must never send anything to a server that is not the agent that was meant.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from nodeagent.api.auth import Caller
from nodeagent.api.errors import ApiError
from nodeagent.api.remote import CHALLENGE
from nodeagent.api.view import AgentView
from nodeagent.model.node import NodeRecord
from nodeagent.trust.endpoint import genuine
from nodeagent.trust.ticket import Ticket, subject, write

SILENCE = 4.0
"""Seconds without a line or a sign of life after which another agent is given up (it may be frozen)."""
BUFFER = 2**16
"""Bytes read ahead of each agent; a line may be twice as long (16 KiB of output, six bytes each at worst)."""


FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ApiError)
"""What asking another agent may raise."""


class RefusedError(ConnectionError):
    """It cannot be asked, or says no: asking again at once is of no use."""


@dataclass(frozen=True, slots=True)
class Way:
    """How another agent is reached."""

    node: str
    url: str
    socket: str = ""
    certificate: str = ""
    """SHA-256 that its certificate must have."""

    @property
    def remote(self) -> bool:
        return bool(self.certificate)


def way_to(view: AgentView, node: NodeRecord) -> Way | str:
    """The way to this node's agent, or why there is none, as a sentence."""
    https, me = node.facts.https, view.me()
    if https is not None:
        if genuine(view.key, view.config.cluster, node):
            return Way(node.id, https.url, certificate=https.certificate)
        return (
            f"node {node.id} is not asked: its certificate is not signed with this cluster's key (cluster_key must "
            f"hold the same on every node)"
        )
    mine = me is not None and node.facts.api_socket == me.facts.api_socket  # in another container, at the same place
    if me is not None and node.facts.boot_id == me.facts.boot_id and node.facts.api_socket and not mine:
        return Way(node.id, "http://agent", socket=node.facts.api_socket)
    return (
        f"node {node.id} is another machine ({node.facts.hostname}) whose agent serves nobody over https (see "
        f"api.listen in its config, and its log): run nodeagentctl there"
    )


@asynccontextmanager
async def asked(
    view: AgentView, way: Way, method: str, path: str, who: Caller, *, query: Mapping[str, str], json: Any = None
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """The other agent's answer to a question of ``who``. Raises one of ``FAILURES``; ``words`` says them."""
    url = URL(way.url + path) % query
    timeout = aiohttp.ClientTimeout(total=None, connect=SILENCE, sock_connect=SILENCE, sock_read=SILENCE)
    connector = (
        aiohttp.TCPConnector(ssl=aiohttp.Fingerprint(bytes.fromhex(way.certificate)))
        if way.remote
        else aiohttp.UnixConnector(path=way.socket)
    )
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=BUFFER) as session:
        headers = {"Authorization": await _ticket(session, view, way, method, url, who)} if way.remote else {}
        async with session.request(method, url, headers=headers, json=json, allow_redirects=False) as response:
            yield response


async def _ticket(session: aiohttp.ClientSession, view: AgentView, way: Way, method: str, url: URL, who: Caller) -> str:
    async with session.get(URL(way.url) / CHALLENGE.lstrip("/"), allow_redirects=False) as response:
        response.raise_for_status()
        challenge = str((await response.json())["challenge"])
    return write(
        view.key,
        Ticket(
            challenge=challenge, node=way.node, certificate=way.certificate, path=subject(method, url.raw_path_qs),
            uid=who.uid, name=who.name, operator=who.operator, by=view.node,
        ),
    )  # fmt: skip


def words(error: BaseException) -> str:
    """For people."""
    match error:
        case TimeoutError():
            return f"no answer within {SILENCE:g} s"
        case aiohttp.ServerFingerprintMismatch():
            return "it showed another certificate than it published (just restarted, or it is somebody else)"
        case aiohttp.ClientConnectorError():
            at = f"{error.host}:{error.port}: " if error.port else ""
            return f"{at}{os.strerror(error.os_error.errno) if error.os_error.errno else error.os_error}"
    return str(error) or type(error).__name__

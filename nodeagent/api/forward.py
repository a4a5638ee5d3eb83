"""Asks another agent on behalf of a caller: over https, verified by the certificate that the cluster's key confirms,
with a ticket for that caller. If the other agent is on this machine and serves no https, over its unix socket. Used for
work that only a node's own agent can do, and for its part of a job's output.

The asking agent first checks the caller's permission; the other agent relies on that, as it relies on a ticket. Every
wait is bounded. Must never forward a request twice, send anything to a server that is not the intended agent, or wait
for an agent that sends no sign of life. A node's record, which nobody signs, names the socket: who listens there must
be root or this agent's own user; and what comes back is looked at before a caller gets it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import ClientRequest, web
from aiohttp.client_exceptions import UnixClientConnectorError
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import LineTooLong
from aiohttp.tracing import Trace
from yarl import URL

from nodeagent.agent.view import AgentView
from nodeagent.api import auth
from nodeagent.api.auth import Caller
from nodeagent.api.errors import ApiError
from nodeagent.api.locallogs import Query
from nodeagent.api.remote import CHALLENGE
from nodeagent.api.requests import OWN_ONLY, flag
from nodeagent.model.node import NodeRecord
from nodeagent.osutil.linux import peer_credentials, refuse_descriptors
from nodeagent.trust.certificate import genuine
from nodeagent.trust.ticket import Ticket, subject, write

SILENCE = 4.0
"""Seconds without a line or a sign of life after which another agent is given up (it may be frozen)."""
BUFFER = 2**16
"""Bytes read ahead of each agent; a line may be twice as long (16 KiB of output, six bytes each at worst)."""
ANSWER = 16 * 2**20
"""The most bytes of an answer that is no output."""
REFUSAL = 2**16
"""The same of a refusal in the place of output."""
WORDS = 1000
"""The most characters of it that a caller is shown."""
LINE: Mapping[str, type] = {
    "rank": int, "stream": str, "node": str, "generation": int, "time": str, "text": str, "partial": bool,
}  # fmt: skip
"""What a line of output has. One of a job of several roles may have a ``place``, too."""

FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ApiError)
"""Errors that asking another agent may raise."""


class PeerRefusedError(ConnectionError):
    """The agent cannot be asked, or refuses: an immediate second attempt is useless."""


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
    # else: another container has its socket at the same path
    mine = me is not None and node.facts.api_socket == me.facts.api_socket
    if me is not None and node.facts.boot_id == me.facts.boot_id and node.facts.api_socket and not mine:
        return Way(node.id, "http://agent", socket=node.facts.api_socket)
    return (
        f"node {node.id} is another machine ({node.facts.hostname}) whose agent serves nobody over https (see "
        f"api.listen in its config, and its log): run nodeagentctl there"
    )


class _AgentsSocket(aiohttp.UnixConnector):
    """Nothing is sent to, or read of, a process of another user, whatever path it listens at."""

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            refuse_descriptors(sock)
            sock.setblocking(False)
            sock.connect(self.path)  # at once, or not at all
            _, uid, _ = peer_credentials(sock)
            if uid not in (0, os.geteuid()):
                raise PeerRefusedError(f"user {uid} listens at {self.path}, who is not the agent's")
            _, found = await self._loop.create_unix_connection(self._factory, sock=sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError) and not isinstance(error, PeerRefusedError):
                raise UnixClientConnectorError(self.path, req.connection_key, error) from error
            raise
        return found


@asynccontextmanager
async def asked(
    view: AgentView, way: Way, method: str, path: str, who: Caller, *, query: Mapping[str, str], json: Any = None
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """The other agent's answer to a request of ``who``. Raises one of ``FAILURES``; ``words`` gives their text."""
    url = URL(way.url + path) % query
    timeout = aiohttp.ClientTimeout(total=None, connect=SILENCE, sock_connect=SILENCE, sock_read=SILENCE)
    connector = (
        aiohttp.TCPConnector(ssl=aiohttp.Fingerprint(bytes.fromhex(way.certificate)))
        if way.remote
        else _AgentsSocket(path=way.socket)
    )
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=BUFFER, auto_decompress=False
    ) as session:
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
    """The error in words for people."""
    match error:
        case TimeoutError():
            return f"no answer within {SILENCE:g} s"
        case aiohttp.ServerFingerprintMismatch():
            return "it showed another certificate than it published (it has just restarted, or it is another server)"
        case aiohttp.ClientConnectorError():
            at = f"{error.host}:{error.port}: " if error.port else ""
            return f"{at}{os.strerror(error.os_error.errno) if error.os_error.errno else error.os_error}"
    return str(error) or type(error).__name__


async def elsewhere(
    view: AgentView, node: NodeRecord, request: web.Request, body: dict[str, Any] | None = None
) -> web.Response | None:
    """The answer of the node's own agent; None if this is that agent. Raises ``ApiError`` if it cannot be asked."""
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
            return web.json_response(await _object(response, ANSWER), status=response.status)
    except (*FAILURES, ValueError) as error:
        unknown = "" if request.method == "GET" else "; it is not known whether it was done"
        raise ApiError(
            "node_away", f"the agent of {node.id} could not be asked: {words(error)}{unknown}",
            "ask again with the same request id, or see that its agent runs: nodeagentctl nodes",
        ) from error  # fmt: skip


Line = dict[str, Any]


async def peer_lines(
    view: AgentView, way: Way, uid: str, query: Query, who: Callable[[], Awaitable[Caller]], *, follow: bool
) -> AsyncGenerator[Line, None]:
    """The log lines of another agent; an empty line is a sign of life. Raises one of ``FAILURES``."""
    params = query.params() | {OWN_ONLY: "1"} | ({"follow": "1"} if follow else {})
    async with asked(view, way, "GET", f"/v1/jobs/{uid}/logs", await who(), query=params) as response:
        if response.status == 404:
            return  # it does not know the job yet, or not any more
        if response.status != 200:
            raise PeerRefusedError(await _refusal(response))
        while raw := await _raw_line(response):
            line = _read(raw)
            if "end" in line:
                return
            yield _checked(line, way.node)
        raise ConnectionResetError("its agent hung up")


async def _raw_line(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readline()
    except LineTooLong as error:
        raise PeerRefusedError("it sent a line that is too long") from error


def _read(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise PeerRefusedError("what it sent is no JSON, or none that it would send") from error
    if not isinstance(found, dict):
        raise PeerRefusedError("what it sent is no JSON object")
    return found


def _checked(line: Line, node: str) -> Line:
    """The same line, without what no line has; an empty one stays so. Raises PeerRefusedError if it is none of this
    node's."""
    if not line:
        return line
    if any(type(line.get(name)) is not kind for name, kind in LINE.items()) or line["node"] != node:
        raise PeerRefusedError("it sent a line that is no output of its node")
    kept = {name: line[name] for name in LINE}
    place = line.get("place")
    return kept | {"place": place} if isinstance(place, str) else kept


async def _object(response: aiohttp.ClientResponse, most: int) -> dict[str, Any]:
    """The JSON object that an answer of at most so many bytes is. Raises one of ``FAILURES``."""
    found = bytearray()
    async for part in response.content.iter_chunked(BUFFER):
        found += part
        if len(found) > most:
            raise PeerRefusedError(f"its answer has more than {most} bytes")
    return _read(bytes(found))


async def _refusal(response: aiohttp.ClientResponse) -> str:
    try:
        return str((await _object(response, REFUSAL))["error"]["message"])[:WORDS]
    except (*FAILURES, KeyError, TypeError):
        return f"its agent answered {response.status}"

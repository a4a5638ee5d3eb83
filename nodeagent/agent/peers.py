"""Agents asking each other, one datagram each way: the only talk between agents that does not go through the store.

Each datagram is JSON with an HMAC under a secret that comes from the cluster's key, which only agents have. An answer
carries the nonce of its question, so an old one is never taken for a new one. Must never decide what is answered.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Callable
from typing import Protocol, cast

import structlog

from nodeagent.plan.lending import Answer, Ask

RESEND = 0.12
"""Seconds after which a question without an answer is sent again."""
MOST_BYTES = 8192
WHY_MAX = 300
"""Characters in the log about a datagram that cannot be read."""
_MAC = hashlib.sha256().digest_size

Handler = Callable[[Ask], Answer]


class Peers(Protocol):
    """How an agent asks others and is asked. ``handler`` must be set before anything arrives."""

    handler: Handler

    async def ask(self, address: str, question: Ask, timeout: float) -> Answer | None:
        """The answer of the agent at ``host:port``, or None within ``timeout`` seconds."""
        ...


class UdpPeers(asyncio.DatagramProtocol):
    """The real ones. Use ``listen`` once, ``close`` at the end."""

    def __init__(self, secret: bytes, handler: Handler = lambda ask: Answer(yes=False, why="not ready yet")) -> None:
        self.handler = handler
        self._secret = secret
        self._transport: asyncio.DatagramTransport | None = None
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._log = structlog.get_logger("peers")

    async def listen(self, address: str, ports: tuple[int, int]) -> str:
        """Take the first free port of the range on this address; on all of this machine where it is a name, which may
        mean another one here, or an address that only others know (NAT). Returns ``host:port`` as others are to use
        it; nothing, and says so, if no port is free: then this agent cannot be asked."""
        loop = asyncio.get_running_loop()
        last: OSError | None = None
        for local in (address, "0.0.0.0") if _numeric(address) else ("0.0.0.0",):
            for port in range(ports[0], ports[1] + 1):
                try:
                    await loop.create_datagram_endpoint(lambda: self, local_addr=(local, port))
                except OSError as error:
                    last = error
                    if error.errno == errno.EADDRNOTAVAIL:
                        break
                    continue
                return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._log.warning(
            "no UDP port is free: nobody can ask this agent for failsafe time while the store is away",
            ports=f"{ports[0]}-{ports[1]}", address=address, why=str(last),
        )  # fmt: skip
        return ""

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def ask(self, address: str, question: Ask, timeout: float) -> Answer | None:
        nonce = secrets.token_hex(16)
        packet = self._sealed({"nonce": nonce, "ask": question.model_dump(mode="json")})
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[nonce] = future
        try:
            async with asyncio.timeout(timeout):
                there = await _resolved(address)
                while True:
                    self._send(packet, there)
                    done, _ = await asyncio.wait([future], timeout=RESEND)
                    if done:
                        return future.result()
        except (TimeoutError, socket.gaierror):
            return None
        finally:
            del self._waiting[nonce]

    # --- asyncio.DatagramProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # the real one does not derive from it

    def error_received(self, exc: Exception) -> None:
        self._log.debug("peer cannot be reached", why=str(exc))

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        body = self._opened(data)
        if body is None:
            self._log.warning("a datagram without the cluster's signature was dropped", sender=addr[0])
            return
        try:
            message = json.loads(body)
            if not isinstance(message, dict):
                raise ValueError("no JSON object")
            nonce = str(message["nonce"])
            if "ask" in message:
                answer = self.handler(Ask.model_validate(message["ask"]))
                self._send(self._sealed({"nonce": nonce, "answer": answer.model_dump(mode="json")}), addr)
                return
            future = self._waiting.get(nonce)
            if future is not None and not future.done():
                future.set_result(Answer.model_validate(message["answer"]))
        except (KeyError, ValueError, RecursionError) as error:  # signed, so written by another version of ours
            self._log.warning("a peer's datagram cannot be read", sender=addr[0], why=str(error)[:WHY_MAX])

    # --- sealing

    def _send(self, packet: bytes, there: tuple[str, int]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(packet, there)

    def _sealed(self, message: dict[str, object]) -> bytes:
        body = json.dumps(message).encode()
        return self._mac(body) + body

    def _opened(self, data: bytes) -> bytes | None:
        """What another agent signed, if one did."""
        if not _MAC < len(data) <= MOST_BYTES:
            return None
        if not hmac.compare_digest(data[:_MAC], self._mac(data[_MAC:])):
            return None
        return data[_MAC:]

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, body, hashlib.sha256)


def _numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _resolved(address: str) -> tuple[str, int]:
    """Host and port as a socket takes them; a name is looked up beside the loop."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not _numeric(host):
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
        host = str(found[0][4][0])
    return host, int(port)

"""Serves other machines over https. Every connection is bounded: their number, how often they come, the time of the
handshake, and the time in which a caller must identify itself. Must never serve plain HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import struct
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.view import AgentView
from nodeagent.api.auth import Caller, CallerKey
from nodeagent.api.connections import Guest
from nodeagent.api.errors import ApiError
from nodeagent.api.remote import Doorkeeper, TokenBook
from nodeagent.api.server import RETRY, create_app, create_runner, keep_trying
from nodeagent.api.throttle import Throttle
from nodeagent.osutil.clock import Allowance
from nodeagent.spec.sections import serves
from nodeagent.trust.certificate import server_context
from nodeagent.trust.ticket import Gate


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Bounds on numbers and times. Times are seconds."""

    connections: int = 128
    """Connections at once, of all callers; more wait in the kernel's queue."""
    accepts: float = 1000.0
    """Connections that are taken out of the kernel's queue a second, most of them to be hung up on."""
    at_once: int = 32
    """Handshakes for one address at once that nobody known came of; for another agent's as many as connections."""
    per_second: float = 4.0
    """The same in the long run."""
    strangers_at_once: int = 64
    """The same for all addresses together that are no agents'."""
    strangers_per_second: float = 32.0
    anonymous: int = 8
    """Requests without credentials on one connection, of those that need none."""
    handshake: float = 5.0
    silent: float = 10.0
    """From the handshake to an accepted request."""
    body: float = 15.0
    """Time for a request's body to arrive."""
    keepalive: float = 15.0
    """Time between two requests of one connection."""
    tokens: float = 30.0
    """Time between two looks whether the tokens whose requests are being answered are still known."""
    retry: float = RETRY
    """Time until the next attempt if the address or the certificate could not be used."""


BACKLOG = 128
TLS_BUFFER = 1 << 15
"""Bytes that each connection with TLS keeps for what it reads, and reads in one go: two of its records. asyncio takes
256 KiB, which of a thousand connections to other agents is a quarter of a gigabyte, and has no setting for it."""

Notify = Callable[[str, str], None]
"""Called with the url and the certificate's SHA-256, once others can connect."""


class HttpsServer:
    """The https side of one agent's API; call ``run``. Errors that prevent it from listening are logged, and it tries
    again: none of them may stop an agent whose workers run."""

    def __init__(
        self,
        view: AgentView,
        metrics: MetricsPage,
        address: str,
        notify: Notify,
        bounds: ServerBounds = ServerBounds(),
        throttle: Throttle | None = None,
    ) -> None:
        """``address``: this node's address for other nodes; ``throttle``: see ``create_app``."""
        self._throttle = throttle
        self._bounds = bounds
        self._view, self._metrics, self._notify = view, metrics, notify
        self._address = view.config.api.listen or address
        self._log = structlog.get_logger("https").bind(node=view.node)

    async def run(self) -> None:
        """Serve until cancelled; returns at once if nothing is to be served."""
        SSLProtocol.max_size = TLS_BUFFER
        if serves(self._view.config.api.listen, self._address):
            await keep_trying(self._serve, self._fail, self._bounds.retry)

    def _fail(self, why: str) -> None:
        self._log.warning("others are not served over https", why=why, address=self._address)

    async def _serve(self) -> None:
        view, config = self._view, self._view.config
        context, certificate = await server_context(config.api.tls, view.node, config.dirs.state)
        tokens = TokenBook(config.api.tokens, lambda why: self._log.error("no token is let in", why=why))
        gate = Gate(view.key, view.node, time.monotonic)
        keeper = Doorkeeper(gate, certificate, tokens, lambda: view.config.jobs, self._bounds.body)
        listening = await _listen(self._address, config.ports.api)
        handshakes = Handshakes(self._bounds, self._agents, self._complain, time.monotonic)
        door = _Door(context, self._bounds, handshakes)
        app = create_app(view, self._metrics, door=(keeper, door), throttle=self._throttle)
        runner = create_runner(
            app,
            keepalive_timeout=self._bounds.keepalive,
            lingering_time=0,  # who was refused is read no more
        )
        with contextlib.closing(listening):
            await runner.setup()
            try:
                host = f"[{self._address}]" if ":" in self._address else self._address
                self._notify(f"https://{host}:{listening.getsockname()[1]}", certificate)
                assert runner.server is not None
                failed: OSError | None = None
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(keeper.watch_tokens(self._bounds.tokens))
                    try:
                        await door.serve(listening, runner.server)
                    except OSError as error:  # by itself, not as one of a group, for who tries again
                        failed = error
                    watch.cancel()
                if failed is not None:
                    raise failed
            finally:
                await runner.cleanup()
                door.hang_up()

    def _agents(self) -> Iterable[str]:
        """Where the other agents are."""
        nodes = self._view.cluster().nodes
        return [node.facts.address for name, node in nodes.items() if name != self._view.node]

    def _complain(self, address: str) -> None:
        what = "connections are hung up on before TLS: too many came of which no caller was known"
        self._log.warning(what, newest=address)


async def _listen(address: str, port: int) -> socket.socket:
    """Opens the listening socket. Raises ``OSError``."""
    found = await asyncio.get_running_loop().getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, place = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


ADDRESSES = 1024
"""Addresses whose handshakes are counted; beyond them the one that is silent for longest is forgotten."""
AGENTS_AGAIN = 5.0
"""Seconds until it is looked again where the agents are."""
COMPLAINTS = 60.0
"""Seconds between two lines in the log about connections that were hung up on."""


class Handshakes:
    """How often TLS may begin, by where a connection comes from: a handshake takes the agent's loop a signature before
    it knows anybody. Each address has an allowance, so that one that floods keeps out no others; and all that are no
    agents' together have one, so that many addresses cannot, either, take the loop. What a known caller's took is given
    back. ``clock`` counts seconds and never goes back."""

    def __init__(
        self,
        bounds: ServerBounds,
        agents: Callable[[], Iterable[str]],
        complain: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """``agents``: the other agents' addresses; ``complain`` is called, now and then, with an address that was
        refused."""
        self._bounds, self._find, self._complain, self._clock = bounds, agents, complain, clock
        self._strangers = Allowance(bounds.strangers_at_once, bounds.strangers_per_second)
        self._complaints = Allowance(1, 1 / COMPLAINTS)
        self._agents: frozenset[str] = frozenset()
        self._looked = -AGENTS_AGAIN
        self._sources: dict[str, Allowance] = {}
        """By address, or network, the one that was asked for last at the end."""

    def __len__(self) -> int:
        """The number of addresses that are counted."""
        return len(self._sources)

    def may(self, host: str) -> bool:
        """Whether one may begin for this address, which is counted then."""
        now = self._clock()
        if now - self._looked >= AGENTS_AGAIN:
            self._looked, self._agents = now, frozenset(map(_plain, self._find()))
        host = _plain(host)
        agent = host in self._agents
        source = host if agent else _network(host)
        own = self._sources.pop(source, None)
        if own is None:
            most = self._bounds.connections if agent else self._bounds.at_once
            own = Allowance(most, self._bounds.per_second)
        self._sources[source] = own
        if len(self._sources) > ADDRESSES:
            del self._sources[next(iter(self._sources))]
        if own.may(now) and (agent or self._strangers.may(now)):
            return True
        if self._complaints.may(now):
            self._complain(host)
        return False

    def known(self, host: str) -> None:
        """A caller on a connection from there is known: its handshake does not count."""
        now, host = self._clock(), _plain(host)
        own = self._sources.get(host if host in self._agents else _network(host))
        if own is not None:
            own.spend(-1, now)
        if host not in self._agents:
            self._strangers.spend(-1, now)


def _plain(host: str) -> str:
    """An address in its usual form, an IPv4 address that came over IPv6 as such; what is none as it is."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(found, "ipv4_mapped", None) or found)


def _network(host: str) -> str:
    """Of IPv6 the network: who has one address of it has all 2**64."""
    return ipaddress.IPv6Address(host).exploded[:19] if ":" in host else host


ACCEPT_PAUSE = 0.05
"""Seconds beyond those that are needed for which nothing is accepted, once too much came."""
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: closed with a reset, so that nothing of it stays in the kernel."""


class _Door:
    """Accepts a bounded number of connections, and closes those that stay silent."""

    def __init__(self, context: ssl.SSLContext, bounds: ServerBounds, handshakes: Handshakes) -> None:
        self._context, self._bounds, self._handshakes = context, bounds, handshakes
        self._accepts = Allowance(BACKLOG, bounds.accepts)
        self._free = asyncio.Semaphore(bounds.connections)
        self._silent: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        self._anonymous: Counter[asyncio.BaseTransport] = Counter()
        self._here: set[asyncio.WriteTransport] = set()
        self._whose: dict[asyncio.BaseTransport, CallerKey] = {}
        self._share = max(1, bounds.connections // 2)

    async def serve(self, listening: socket.socket, server: Callable[[], asyncio.Protocol]) -> None:
        """Accept until cancelled. Raises ``OSError`` if accepting is impossible."""
        loop = asyncio.get_running_loop()
        opening: set[asyncio.Task[None]] = set()
        try:
            while True:
                if late := self._accepts.spend(1, time.monotonic()):
                    await asyncio.sleep(late + ACCEPT_PAUSE)
                await self._free.acquire()
                connection, there = await loop.sock_accept(listening)
                if not self._handshakes.may(there[0]):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                    connection.close()
                    self._free.release()
                    continue
                task = loop.create_task(self._open(connection, server))
                opening.add(task)
                task.add_done_callback(opening.discard)
        finally:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)

    async def _open(self, connection: socket.socket, server: Callable[[], asyncio.Protocol]) -> None:
        guest = Guest(server(), self._came, self._went)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: guest, connection, ssl=self._context, ssl_handshake_timeout=self._bounds.handshake
            )
        except OSError:  # no TLS, a certificate of another CA, or too slow: there is no one to answer
            connection.close()
        finally:
            if not guest.here:
                self._free.release()

    def _came(self, transport: asyncio.WriteTransport) -> None:
        self._here.add(transport)
        self._silent[transport] = asyncio.get_running_loop().call_later(self._bounds.silent, transport.abort)

    def hang_up(self) -> None:
        """Closes all connections at once: a browser may leave the end of TLS unanswered for long."""
        for transport in list(self._here):
            transport.abort()

    def passed(self, transport: asyncio.BaseTransport, who: Caller) -> None:
        """The caller on this connection has been identified. Raises ``ApiError`` where the caller has half of all
        connections already: this one then counts as silent."""
        if self._whose.get(transport) != who.key:
            if sum(key == who.key for key in self._whose.values()) >= self._share:
                raise ApiError(
                    "limit",
                    f"{who.name} has {self._share} connections over https to this agent, half of what it keeps; "
                    "nothing was changed",
                    "close idle connections, then try again",
                )
            self._whose[transport] = who.key
        if transport in self._silent:
            self._handshakes.known(transport.get_extra_info("peername")[0])
        self._speaks(transport)

    def may_ask_again(self, transport: asyncio.BaseTransport) -> bool:
        """Whether there may be another request on this connection, after one without credentials."""
        if transport not in self._silent:
            return True
        self._anonymous[transport] += 1
        return self._anonymous[transport] < self._bounds.anonymous

    def _speaks(self, transport: asyncio.BaseTransport) -> None:
        self._anonymous.pop(transport, None)
        if (late := self._silent.pop(transport, None)) is not None:
            late.cancel()

    def _went(self, transport: asyncio.WriteTransport) -> None:
        self._here.discard(transport)
        self._whose.pop(transport, None)
        self._speaks(transport)
        self._free.release()

"""Questions of an agent to the lease processes of other nodes, as ``lease/peers.py`` has them: datagrams beside the
store. Names of hosts are looked up in a thread: a look-up may take longer than an answer is worth.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, cast

from nodeagent.lease.failsafe import RESEND
from nodeagent.lease.lending import Ask, LoanAnswer
from nodeagent.lease.order import LeasePort
from nodeagent.lease.peers import DatagramSeal, Message, is_numeric, open_port, parse, split
from nodeagent.lease.whichstore import LeaseAnswer, LeaseAsk
from nodeagent.osutil.threads import in_daemon


class PeerQuestions(Protocol):
    """How an agent asks other nodes."""

    async def ask(self, address: str, question: Ask, timeout: float) -> LoanAnswer | None:
        """The answer of the node at ``host:port``, or None within ``timeout`` seconds."""
        ...


class LeaseQuestions(Protocol):
    """Likewise, by which store they have their leases."""

    async def ask_lease(self, address: str, timeout: float) -> LeaseAnswer | None:
        """As ``PeerQuestions.ask``."""
        ...


class Questions(ABC):
    """Both, whatever carries them."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        """By nonce."""

    async def ask(self, address: str, question: Ask, timeout: float) -> LoanAnswer | None:
        answer = await self._ask(address, question, timeout)
        return answer if isinstance(answer, LoanAnswer) else None

    async def ask_lease(self, address: str, timeout: float) -> LeaseAnswer | None:
        answer = await self._ask(address, LeaseAsk(), timeout)
        return answer if isinstance(answer, LeaseAnswer) else None

    @abstractmethod
    async def _ask(self, address: str, question: Message, timeout: float) -> Message | None:
        """Wait for the answer to one question, in ``_waiting``."""

    def _answered(self, nonce: str, message: Message) -> None:
        """What is no answer, or to no question that waits, is dropped."""
        future = self._waiting.get(nonce)
        if isinstance(message, LoanAnswer | LeaseAnswer) and future is not None and not future.done():
            future.set_result(message)


class UdpPeers(Questions, asyncio.DatagramProtocol):
    """The real ones. ``listen`` once, ``close`` at the end."""

    def __init__(self, door: LeasePort) -> None:
        super().__init__()
        self._door, self._seal = door, DatagramSeal(bytes.fromhex(door.secret))
        self._transport: asyncio.DatagramTransport | None = None
        self._look_ups: dict[str, asyncio.Future[str]] = {}
        """Those under way, by host: one that takes long is asked for once."""

    async def listen(self) -> None:
        """From the range's end: its beginning is the lease process's, which others know. Without one that is free any
        other port will do where no firewall minds. Raises OSError."""
        first, last = self._door.ports
        port = open_port(self._door.address, [*range(last, first - 1, -1), 0])
        if port is not None:
            await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, sock=port)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def relocate(self, address: str) -> None:
        """Ask from this address of this node's from now on. Raises OSError."""
        self.close()
        self._door = self._door._replace(address=address)
        await self.listen()

    async def _ask(self, address: str, question: Message, timeout: float) -> Message | None:
        nonce = secrets.token_hex(16)
        packet = self._seal.sealed(nonce, question)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[nonce] = future
        try:
            async with asyncio.timeout(timeout):
                there = await self._resolved(address)
                while True:
                    if self._transport is not None and not self._transport.is_closing():
                        self._transport.sendto(packet, there)
                    done, _ = await asyncio.wait([future], timeout=RESEND)
                    if done:
                        return future.result()
        except (TimeoutError, OSError, ValueError):  # an address that is none: anybody who writes to the store sets it
            return None
        finally:
            del self._waiting[nonce]

    async def _resolved(self, address: str) -> tuple[str, int]:
        """Host and port as a socket takes them."""
        host, port = split(address)
        if is_numeric(host):
            return host, port
        look_up = self._look_ups.get(host)
        if look_up is None:
            look_up = self._look_ups[host] = in_daemon(lambda: _address_of(host), "look-up")
            look_up.add_done_callback(lambda _: self._look_ups.pop(host, None))
        return await asyncio.shield(look_up), port

    # --- asyncio.DatagramProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # the real one does not derive from it

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        body = self._seal.opened(data)
        if body is None:
            return
        try:
            nonce, message = parse(body)
        except ValueError:
            return
        self._answered(nonce, message)


def _address_of(host: str) -> str:
    """Takes as long as it takes. Raises OSError, or ValueError of what is no name."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])


AGAIN = 60.0
"""Seconds between two look-ups of a name that was found."""
RETRY = 2.0
BOUND = 5.0
"""Seconds that one look-up is waited for."""
AT_ONCE = 8
"""Look-ups that are waited for at a time: with a name server that is silent each takes all of ``BOUND``."""


class Names:
    """``run`` once."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """``changed`` is called when a name has another address than before."""
        self._changed = changed
        self._found: dict[str, str] = {}
        self._due: dict[str, float] = {}
        """When each is to be looked up again; never, as long as it is its turn now."""
        self._look_ups: dict[str, asyncio.Future[str]] = {}
        """Those that were begun, by host: one that takes longer than it is waited for is not begun again."""
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._new = asyncio.Event()

    def numeric(self, address: str) -> str:
        """``host:port`` with the host's address; empty as long as that is not known."""
        try:
            host, port = split(address)
        except ValueError:
            return ""
        if not is_numeric(host):
            if host not in self._due:
                self._due[host] = 0.0
                self._new.set()
            host = self._found.get(host, "")
        if not host:
            return ""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def keep(self, addresses: Iterable[str]) -> None:
        """Forget all hosts but those of these addresses."""
        kept = {address.rpartition(":")[0].strip("[]") for address in addresses}
        for host in self._due.keys() - kept:
            del self._due[host]
            self._found.pop(host, None)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._new.clear()
                for host in [host for host, due in self._due.items() if loop.time() >= due]:
                    self._due[host] = math.inf
                    tasks.create_task(self._look_up(host))
                wait = min([*self._due.values(), loop.time() + AGAIN]) - loop.time()
                try:
                    async with asyncio.timeout(max(0.0, wait)):
                        await self._new.wait()
                except TimeoutError:
                    pass

    async def _look_up(self, host: str) -> None:
        async with self._turns:
            new = await self._address(host)
        if host not in self._due:  # it was forgotten meanwhile
            return
        self._due[host] = asyncio.get_running_loop().time() + (RETRY if new is None else AGAIN)
        self._new.set()
        if new is not None and new != self._found.get(host):
            self._found[host] = new
            self._changed()

    async def _address(self, host: str) -> str | None:
        """None: nobody knows it, or not soon enough. An answer that comes later is taken at the next try."""
        try:
            if host not in self._look_ups:
                self._look_ups[host] = in_daemon(partial(_address_of, host), "look-up")
            async with asyncio.timeout(BOUND):
                found = await asyncio.shield(self._look_ups[host])
        except (TimeoutError, OSError, ValueError):  # there may be no thread to be had
            found = None
        if host in self._look_ups and self._look_ups[host].done():
            del self._look_ups[host]
        return found

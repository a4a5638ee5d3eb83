"""Nodes asking each other, one datagram each way: the only talk between nodes that does not go through the store.

Each datagram is JSON with an HMAC under a secret that comes from the cluster's key, which only agents have. An answer
carries the nonce of its question, so an old one is never taken for a new one. Standard library only. Must never decide
what is answered, nor look up a name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import socket
from _operator import _compare_digest as same
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from nodeagent.lease.grants import sha256
from nodeagent.lease.lending import Ask, LoanAnswer
from nodeagent.lease.order import LeasePort
from nodeagent.lease.whichstore import LeaseAnswer, LeaseAsk

MOST_BYTES = 8192
"""Of a datagram."""
MOST = 64
"""Datagrams that are read in one go."""
_BLOCK = 64
_MAC = 32

Message: TypeAlias = Ask | LoanAnswer | LeaseAsk | LeaseAnswer
Sender: TypeAlias = tuple[Any, ...]


class DatagramSeal:
    """The signature of all datagrams in a cluster: HMAC-SHA256 (RFC 2104)."""

    def __init__(self, secret: bytes) -> None:
        key = (secret if len(secret) <= _BLOCK else sha256(secret).digest()).ljust(_BLOCK, b"\0")
        self._inner = sha256(bytes(b ^ 0x36 for b in key))
        self._outer = sha256(bytes(b ^ 0x5C for b in key))

    def sealed(self, nonce: str, message: Message) -> bytes:
        body = json.dumps({"nonce": nonce, **_plain(message)}).encode()
        return self._mac(body) + body

    def opened(self, data: bytes) -> bytes | None:
        """What was signed under this secret, if it was."""
        if not _MAC < len(data) <= MOST_BYTES or not same(data[:_MAC], self._mac(data[_MAC:])):
            return None
        return data[_MAC:]

    def _mac(self, body: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(body)
        outer.update(inner.digest())
        mac: bytes = outer.digest()
        return mac


def parse(body: bytes) -> tuple[str, Message]:
    """The nonce, and what is asked or answered. Raises ValueError."""
    try:
        message = json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    match message:
        case {"nonce": str(nonce), "ask": dict(ask)}:
            return nonce, _ask(ask)
        case {"nonce": str(nonce), "answer": dict(answer)}:
            return nonce, _answer(answer)
        case {"nonce": str(nonce), "lease_ask": {**more}} if not more:
            return nonce, LeaseAsk()
        case {"nonce": str(nonce), "lease_answer": dict(answer)}:
            return nonce, _lease_answer(answer)
    raise ValueError("it is neither a question nor an answer")


def _ask(ask: dict[str, Any]) -> Ask:
    token, failsafe_members = ask.pop("token", None), ask.pop("failsafe_members", None)
    if not isinstance(token, dict) or token.keys() != {"number", "id"}:
        raise ValueError("it names no generation")
    if type(token["number"]) is not int or not isinstance(token["id"], str):
        raise ValueError("it names no generation")
    if not isinstance(failsafe_members, dict) or not all(isinstance(life, str) for life in failsafe_members.values()):
        raise ValueError("its failsafe members are no nodes with lives")
    _check(ask, {"uid", "node", "life"}, {"uid", "node", "life", "to", "to_life"})
    return Ask(token=(token["number"], token["id"]), failsafe_members=failsafe_members, **ask)


def _answer(answer: dict[str, Any]) -> LoanAnswer:
    yes = answer.pop("yes", None)
    if not isinstance(yes, bool):
        raise ValueError("it says neither yes nor no")
    _check(answer, set(), {"why", "node", "life"})
    return LoanAnswer(yes=yes, **answer)


def _lease_answer(answer: dict[str, Any]) -> LeaseAnswer:
    age, away = answer.pop("age", None), answer.pop("away", None)
    if not isinstance(away, bool) or not (age is None or (isinstance(age, float) and math.isfinite(age))):
        raise ValueError("it does not say how old the lease is")
    texts = {"node", "cluster_uid", "era", "store"}
    _check(answer, texts, texts)
    return LeaseAnswer(age=age, away=away, **answer)


def _check(texts: dict[str, Any], needed: set[str], known: set[str]) -> None:
    if not needed <= texts.keys() <= known or not all(isinstance(value, str) for value in texts.values()):
        raise ValueError(f"it does not have the texts {', '.join(sorted(known))}")


def _plain(message: Message) -> dict[str, Any]:
    if isinstance(message, LoanAnswer):
        return {"answer": message._asdict()}
    if isinstance(message, LeaseAsk | LeaseAnswer):
        return {"lease_ask" if isinstance(message, LeaseAsk) else "lease_answer": message._asdict()}
    number, name = message.token
    return {"ask": message._asdict() | {"token": {"number": number, "id": name}}}


def open_port(address: str, ports: Iterable[int]) -> socket.socket | None:
    """The first free UDP port of these on this address; on all of this machine where it is a name, which may mean
    another one here, or an address that only others know (NAT). None if none is free. Raises OSError where none can be
    opened, free or not: there is no descriptor or memory for it, say."""
    for local, family in _locals(address):
        for port in ports:
            one = socket.socket(family, socket.SOCK_DGRAM)
            one.setblocking(False)
            try:
                one.bind((local, port))
            except OSError as error:
                one.close()
                if error.errno == errno.EADDRNOTAVAIL:
                    break
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
            return one
    return None


def _locals(address: str) -> Iterator[tuple[str, socket.AddressFamily]]:
    for family in (socket.AF_INET, socket.AF_INET6):
        if _is_numeric(address, family):
            yield address, family
    yield "0.0.0.0", socket.AF_INET


def _is_numeric(host: str, family: socket.AddressFamily) -> bool:
    try:
        socket.inet_pton(family, host)
    except OSError:
        return False
    return True


def is_numeric(host: str) -> bool:
    """It is an address, which nobody has to look up."""
    return _is_numeric(host, socket.AF_INET) or _is_numeric(host, socket.AF_INET6)


def split(address: str) -> tuple[str, int]:
    """Host and port as a socket takes them. Raises ValueError."""
    host, _, digits = address.rpartition(":")
    if not (digits.isdecimal() and len(digits) <= 5 and (port := int(digits)) < 1 << 16):
        raise ValueError(f"{digits[:20]} is no port")
    return host.strip("[]"), port


class PeerPort:
    """This node's port. ``before``: the address that an earlier process had, which others know; ``trouble`` is
    called with what people should know. Raises OSError as ``open_port`` does."""

    def __init__(self, door: LeasePort, before: str, trouble: Callable[[str], None]) -> None:
        first, last = door.ports
        ports = list(range(first, last + 1))
        with contextlib.suppress(ValueError):
            host, port = split(before)
            if host == door.address and port in ports:
                ports.insert(0, port)
        self.door = door
        self._trouble, self._seal = trouble, DatagramSeal(bytes.fromhex(door.secret))
        self._socket = open_port(door.address, ports)
        self.address = ""
        """``host:port`` as others are to use it; empty if no port is free: then this node cannot be asked."""
        if self._socket is None:
            trouble(f"no UDP port of {first}-{last} is free: nobody can ask this node for failsafe time")
        else:
            port = self._socket.getsockname()[1]
            self.address = f"[{door.address}]:{port}" if ":" in door.address else f"{door.address}:{port}"

    def fileno(self) -> int:
        """Negative if there is no port."""
        return self._socket.fileno() if self._socket is not None else -1

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def ask(self, address: str, nonce: str, ask: Ask) -> None:
        with contextlib.suppress(ValueError):
            self.send(split(address), nonce, ask)

    def send(self, there: Sender, nonce: str, message: Message) -> None:
        """It may be lost."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(self._seal.sealed(nonce, message), there)

    def receive(self) -> Iterator[tuple[Sender, str, Message]]:
        """What has arrived, and from where."""
        for _ in range(MOST if self._socket is not None else 0):
            assert self._socket is not None
            try:
                data, sender = self._socket.recvfrom(MOST_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:  # what was sent before could not be delivered
                continue
            body = self._seal.opened(data)
            if body is None:
                self._trouble("a datagram without the cluster's signature was dropped")
                continue
            try:
                nonce, message = parse(body)
            except ValueError:  # signed, so written by another version of ours
                self._trouble("a signed datagram cannot be read: another version's")
                continue
            yield sender, nonce, message

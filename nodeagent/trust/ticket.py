"""Tickets: one agent states to another for which user it asks one thing, signed with the cluster's key.

The agent that is asked issues a challenge first, and measures the ticket's age from it by its own clock. So clocks need
not agree, and challenges from before its restart are invalid. A challenge can be used once. ``api/remote.py`` of the
asked agent decides what tickets may do beyond reading.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable

from pydantic import ValidationError

from nodeagent.model.base import Record
from nodeagent.trust.key import ClusterKey

SCHEME = "Nodeagent-Ticket"
"""Scheme of the Authorization header."""
PURPOSE = "api-ticket"
LIFE = 15.0
"""Seconds after the challenge for which its ticket is accepted."""
MOST_USED = 4096
"""The most tickets accepted within their life that are remembered; further tickets are refused."""
LONGEST = 4096
"""The most characters of a ticket."""


class Ticket(Record):
    """One request of one agent to another, for one user."""

    challenge: str
    node: str
    """The node that is asked."""
    certificate: str
    """SHA-256 of the certificate that this node showed."""
    path: str
    """The request, as ``subject`` writes it."""
    uid: int
    name: str
    """The user for whom the agent asks."""
    operator: bool
    by: str
    """The node that asks."""


class TicketError(Exception):
    """A ticket that is refused. ``str()`` gives the reason."""


def subject(method: str, path: str) -> str:
    """A request as text; ``path`` includes the query, as it is sent."""
    return f"{method} {path}"


def write(key: ClusterKey, ticket: Ticket) -> str:
    """The value of the Authorization header."""
    body = ticket.to_json().encode()
    return f"{SCHEME} {base64.urlsafe_b64encode(body).decode()}.{key.sign(PURPOSE, body)}"


class Gate:
    """Issues challenges and checks tickets, for one run of one agent. ``clock`` counts seconds and never goes back."""

    def __init__(self, key: ClusterKey, node: str, clock: Callable[[], float]) -> None:
        self._key, self._node, self._clock = key, node, clock
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, float] = {}
        """Challenge to the end of its life, in the order they were used."""

    def challenge(self) -> str:
        """A new challenge. It is not stored, so many challenges cost no memory."""
        text = f"{self._clock() * 1000:.0f}.{secrets.token_hex(16)}"
        return f"{text}.{self._mac(text)}"

    def take(self, written: str, what: str, certificate: str) -> Ticket:
        """The ticket in this header value, valid for this subject. Raises ``TicketError``."""
        body, _, signature = written.removeprefix(f"{SCHEME} ").partition(".")
        try:
            if len(written) > LONGEST or not written.isascii():
                raise ValueError("too long, or no text of ours")
            data = base64.b64decode(body, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise TicketError("it cannot be read") from None
        if not self._key.verify(PURPOSE, data, signature):
            raise TicketError("it is not signed with this cluster's key (do cluster_key's files differ?)")
        try:
            ticket = Ticket.from_json(data)
        except ValidationError:
            raise TicketError("it was written by another version") from None
        if (ticket.node, ticket.certificate, ticket.path) != (self._node, certificate, what):
            raise TicketError("it is for something else")
        self._use(ticket.challenge)
        return ticket

    def _use(self, challenge: str) -> None:
        text, _, mac = challenge.rpartition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(text).encode()):
            raise TicketError("its challenge is not from this agent, or from before its restart")
        now, end = self._clock(), int(text.partition(".")[0]) / 1000 + LIFE
        for old in [c for c, until in self._used.items() if until < now]:
            del self._used[old]
        if end < now:
            raise TicketError(f"it is older than {LIFE:g} s")
        if challenge in self._used:
            raise TicketError("it was used before")
        if len(self._used) >= MOST_USED:
            raise TicketError(f"more than {MOST_USED} tickets within {LIFE:g} s")
        self._used[challenge] = end

    def _mac(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode(), hashlib.sha256).hex()

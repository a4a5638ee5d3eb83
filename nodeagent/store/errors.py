"""Sentences for people if the store, or a record in it, cannot be used: what happened, where, what to do next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from nodeagent.model.timing import Timing
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.endpoint import AccessError
from nodeagent.store.link import NoPrimaryError
from nodeagent.store.whois import NotPrimaryError
from nodeagent.store.wire import ReplyError, TooLongError, is_about_tls

_FULL = "OOM command not allowed"
"""In an error of a command, or of a script: the server has no memory for it."""
_NUMERIC = re.compile(r"(\[.*\]|[\d.]+):\d+")
"""An address and a port, in which no name is to be resolved."""


@contextmanager
def strict() -> Iterator[None]:
    """Raises StoreRefusedError for a record that cannot be decoded: another version, or another program, wrote it."""
    try:
        yield
    except ValueError as error:
        raise StoreRefusedError(
            "version",
            f"a record in the store cannot be read by this version of nodeagent: {error}. "
            "Install the version that the other nodes run",
        ) from error


class NotReplicatedError(ConnectionError):
    """A step was done, but too few replicas have it."""


def explain(address: str, timeout: float, error: Exception) -> str:
    """One sentence about an error of the connection or the server at ``address``."""
    where = f"the store at {address}"
    if isinstance(error, AccessError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"{where} did not answer within {timeout:g} s: check that Redis runs there{_besides(address)}"
    if isinstance(error, NotReplicatedError):
        return f"{where} did the step, but {error}: it counts as not done and is sent again; check the replicas"
    if isinstance(error, TooLongError):
        return (
            f"{where} holds more than any agent writes ({error}): somebody else has written into it (docs/security.md, "
            "The store)"
        )
    reply = error if isinstance(error, ReplyError) else None
    if isinstance(error, NotPrimaryError) or (reply and reply.code == "READONLY"):
        return (
            f"{where} cannot serve now ({error}): with redis+sentinel:// this ends by itself after a fail-over, "
            f"otherwise set redis.url to the primary"
        )
    if isinstance(error, NoPrimaryError):
        return f"{where} cannot be found ({error}): check that the sentinels run and watch that service"
    if reply and _FULL in str(reply):
        return (
            f"{where} cannot serve now ({error}): its memory is full; set a larger maxmemory, with maxmemory-policy "
            "noeviction, or remove what others keep there"
        )
    if reply and reply.is_forbidden:
        return (
            f"{where} refused this agent's user a right that it needs ({error}): give it all of docs/config.md, An ACL "
            "user; ACL LOG there names what was refused"
        )
    if reply and reply.not_let_in:
        return f"{where} refused this agent ({error}): check the store's user and password in the agent's config"
    if is_about_tls(error):
        return (
            f"{where} and this agent do not agree on TLS ({error}): check redis.tls in the agent's config, and that "
            f"the server's certificate is for that host"
        )
    if reply:
        return f"{where} cannot serve now ({error}): see the server's log and its INFO"
    return f"{where} cannot be reached ({error}): check that Redis runs there and that this node may connect"


def answers(error: Exception) -> bool:
    """The server, or a sentinel, answers, or is not asked for a reason on this machine: waiting will not mend it."""
    there = (ReplyError, NotReplicatedError, NotPrimaryError, NoPrimaryError, AccessError)
    return isinstance(error, there) or is_about_tls(error)


def _besides(address: str) -> str:
    """What else may take its time, by the kind of address."""
    if address.startswith("/"):  # a unix socket
        return " and is not overloaded"
    hosts = address.rpartition(" (sentinels ")[2].removesuffix(")").split(", ")
    if all(_NUMERIC.fullmatch(host) for host in hosts):
        return " and is not overloaded, and the network between"
    return " and is not overloaded, the network between, and that a name in redis.url is resolved at once"


NAMED = 5
"""The most nodes that a sentence names."""


def waits_for(nodes: Iterable[str], count: int, seconds: float) -> str:
    """Why a store that has lost writes, or may have, decides nothing yet. ``nodes``: at least the first few by name;
    ``count``: the number of all of them."""
    named = ", ".join(sorted(nodes)[:NAMED])
    more = f" and {count - NAMED} more" if count > NAMED else ""
    return (
        f"the store may lack what was written last, and waits for nodes that may know it: {named}{more}; "
        f"nothing is decided until enough of them are back, or for another {seconds:.1f} s"
    )


def timing_differs(stored: Timing, ours: Timing) -> str:
    """Which timing values differ from the store's, and what to do."""
    theirs, mine = stored.model_dump(), ours.model_dump()
    parts = [f"{key} is {theirs[key]} there and {mine[key]} here" for key in theirs if theirs[key] != mine[key]]
    return (
        f"the cluster's timing differs from this agent's: {'; '.join(parts)}. Every node needs the same values: "
        "set timing in this agent's config to the cluster's"
    )


def key_differs(refusal: str, file: str) -> str:
    """The store's refusal of a node with another cluster key, with what to do."""
    return (
        f"{refusal}: copy {file} from another node, then restart the agent (a new key for the whole cluster: "
        "docs/operations.md, Another key of the cluster)"
    )

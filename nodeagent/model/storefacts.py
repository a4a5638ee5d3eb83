"""What was seen of the store's server, its replicas and its sentinels. Whatever could not be asked is None, never a
guess."""

from __future__ import annotations

from nodeagent.model.base import Record


class SentinelFacts(Record):
    """What the sentinels said of one service."""

    service: str
    listed: int
    """Sentinels in the url."""
    answered: int
    known: int | None = None
    """Sentinels that watch the service, as the one that knows most says."""
    quorum: int | None = None
    down_after: float | None = None
    """Seconds without an answer after which a sentinel takes the primary for down: the least of all answers."""
    primaries: tuple[str, ...] = ()
    """The different addresses that were named, host:port."""


class StoreFacts(Record):
    """One look at the store."""

    address: str
    problem: str = ""
    """Why the server could not be asked; the rest is unknown then."""
    server: str = ""
    """``redis`` or ``valkey``."""
    version: str = ""
    role: str = ""
    """``master`` or ``slave``, in the server's own words."""
    tls: bool = False
    replicas_wanted: int = 0
    """How many replicas have to have a write before an agent believes it (``redis.replicas``)."""
    replicas: int | None = None
    """Connected now."""
    policy: str | None = None
    """maxmemory-policy."""
    memory_limit: int | None = None
    """maxmemory in bytes; 0: none."""
    memory_used: int | None = None
    appendonly: bool | None = None
    append_failed: bool | None = None
    """The last write or rewrite of the append-only file went wrong."""
    appendfsync: str | None = None
    min_replicas: int | None = None
    """min-replicas-to-write."""
    max_lag: int | None = None
    """min-replicas-max-lag, in seconds."""
    pings: tuple[float, ...] = ()
    """Seconds from each PING to its answer."""
    clock_step: float | None = None
    """By how much the server's clock went on more (or less) than ours while it was looked at, in seconds."""
    clock_offset: float | None = None
    """The server's clock less this machine's wall clock, in seconds."""
    sentinel: SentinelFacts | None = None
    """None unless the url names sentinels."""

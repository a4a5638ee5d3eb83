"""The URL of the store, taken apart. Pure; no message repeats the URL, since it may hold a password."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from nodeagent.spec.errors import CheckError

EXAMPLE = (
    "write for instance redis://host:6379/0, rediss://host:6379/0, unix:///run/redis.sock or "
    "redis+sentinel://h1:26379,h2:26379,h3:26379/mymaster/0"
)
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
REDIS_PORT, SENTINEL_PORT = 6379, 26379


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Where the store is. Either ``path``, or one server in ``hosts``, or with ``service`` that service's sentinels."""

    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    """The name under which the sentinels watch it; empty without Sentinel."""
    tls: bool = False
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """For people: without user, password and database."""
        if self.service:
            return f"{self.service} (sentinels {', '.join(shown(*host) for host in self.hosts)})"
        return self.path or shown(*self.hosts[0])


def shown(host: str, port: int) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(text: str) -> StoreUrl:
    """Take a URL apart. Raises ``CheckError``."""
    scheme, found, rest = text.partition("://")
    if not found or scheme not in SCHEMES:
        raise CheckError(
            "the Redis URL does not start with redis://, rediss://, unix://, redis+sentinel:// or rediss+sentinel://",
            EXAMPLE,
        )
    rest, _, query = rest.partition("?")
    if "@" in query:
        raise CheckError("the Redis URL has a '?' before its '@'", "write ? / @ in a password as %3F %2F %40")
    network, _, path = rest.partition("/")
    login, _, network = network.rpartition("@")
    user, _, password = login.partition(":")
    extra = [k for k, v in parse_qsl(query, keep_blank_values=True) if k != "db" or not v.isdecimal()]
    if extra:
        raise CheckError(
            f"the Redis URL has the option {extra[0]!r}", "only ?db=NUMBER may follow; the rest is nodeagent's"
        )
    service = ""
    if scheme.endswith("+sentinel"):
        service, _, path = path.partition("/")
        service = unquote(service)
        if not service:
            raise CheckError("the Sentinel URL names no service", "end it with /mymaster/0 (sentinel monitor NAME)")
    numbers = [v for _, v in parse_qsl(query)]
    db, place = (numbers[-1] if numbers else "0"), ""
    if scheme == "unix":
        place = unquote(f"/{path}") if path else ""
        if network or not place:
            raise CheckError("the unix:// URL has no path", "write for instance unix:///run/redis.sock")
    elif not re.fullmatch(r"\d{0,5}", path):
        raise CheckError("the Redis URL ends with something that is not a database number", "end it with /0")
    elif path and not numbers:
        db = path
    default = SENTINEL_PORT if service else REDIS_PORT
    hosts = () if scheme == "unix" else tuple(_host(part, default) for part in network.split(","))
    if len(hosts) > 1 and not service:
        raise CheckError("the Redis URL names several hosts", "list several only with redis+sentinel://")
    if len(set(hosts)) < len(hosts):
        raise CheckError("the Sentinel URL names a host twice", "name each sentinel once")
    return StoreUrl(
        hosts=hosts, path=place, service=service, tls=scheme.startswith("rediss"), db=int(db),
        user=unquote(user) or None, password=unquote(password) or None,
    )  # fmt: skip


def _host(text: str, default_port: int) -> tuple[str, int]:
    try:
        place = urlsplit(f"//{text}")
        host, port = place.hostname, place.port
    except ValueError:
        raise CheckError("the Redis URL has a port that is not a number from 1 to 65535", EXAMPLE) from None
    if not host:
        raise CheckError("the Redis URL names no host", EXAMPLE)
    if port == 0:
        raise CheckError("the Redis URL has port 0", EXAMPLE)
    return host, port or default_port

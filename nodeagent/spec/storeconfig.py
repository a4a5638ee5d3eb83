"""The ``redis`` section of the agent's config: where the store is (its URL taken apart), how to be let in, what a
write has to reach. No message repeats the URL, since it may hold a password.

Must never read a file or connect: ``nodeagent/store`` does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from nodeagent.spec import units
from nodeagent.spec.errors import CheckError, raise_all
from nodeagent.spec.sections import OptionalFile, Section, host

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
        name, port = place.hostname, place.port
    except ValueError:
        raise CheckError("the Redis URL has a port that is not a number from 1 to 65535", EXAMPLE) from None
    if not name:
        raise CheckError("the Redis URL names no host", EXAMPLE)
    if port == 0:
        raise CheckError("the Redis URL has port 0", EXAMPLE)
    host(name)
    return name, port or default_port


def _url(value: object) -> object:
    if not isinstance(value, str):
        raise CheckError(f"{units.show(value)} is not a Redis URL", EXAMPLE)
    parse(value)
    return value


class TlsConfig(Section):
    """TLS to the store and its sentinels: for rediss:// and rediss+sentinel:// only."""

    ca_file: OptionalFile = None
    """The CA that signed the servers' certificates (PEM); no other is trusted. Default: those of the system."""
    cert_file: OptionalFile = None
    """This node's own certificate (PEM), where the server asks for one."""
    key_file: OptionalFile = None
    """Its private key (PEM). Default: it is in cert_file."""
    check_hostname: bool = True
    """Whether the server's certificate must be for the host that was asked for."""


class SentinelConfig(Section):
    """How the sentinels let agents in: for redis+sentinel:// and rediss+sentinel:// only."""

    user: str | None = Field(default=None, min_length=1)
    """ACL user at the sentinels."""
    password_file: OptionalFile = None
    """File that holds the sentinels' password."""


class RedisConfig(Section):
    """The store."""

    url: Annotated[str, BeforeValidator(_url), Field(repr=False)] = "redis://127.0.0.1:6379/0"
    """redis://[user[:password]@]host:port/db, rediss:// for TLS, unix:///path?db=0,
    redis+sentinel://[user[:password]@]host:port,host:port/service/db, rediss+sentinel:// for TLS."""
    password_file: OptionalFile = None
    """File that holds the password, read at each new connection; others than its owner and group must not be able
    to read it."""
    replicas: int | None = Field(default=None, ge=0, le=16)
    """Replicas that must have a step before an agent believes it (WAIT). Default: 1 with Sentinel, otherwise 0."""
    tls: TlsConfig = TlsConfig()
    sentinel: SentinelConfig = SentinelConfig()
    _place: StoreUrl = PrivateAttr()

    def model_post_init(self, _context: object, /) -> None:
        self._place = parse(self.url)

    @property
    def place(self) -> StoreUrl:
        """The url, taken apart."""
        return self._place

    @property
    def replicas_wanted(self) -> int:
        """With the default filled in."""
        if self.replicas is not None:
            return self.replicas
        return 1 if self.place.service else 0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        place, bad = parse(self.url), []
        if self.password_file is not None and place.password is not None:
            bad.append(CheckError("the password is in the url too", "keep one of them", at=("password_file",)))
        if self.tls != TlsConfig() and not place.tls:
            bad.append(CheckError("the url does not ask for TLS", "begin it with rediss://", at=("tls",)))
        if self.tls.key_file is not None and self.tls.cert_file is None:
            bad.append(CheckError("a key without a certificate", "give cert_file too", at=("tls", "key_file")))
        if self.sentinel != SentinelConfig() and not place.service:
            bad.append(CheckError("the url names no sentinels", "begin it with redis+sentinel://", at=("sentinel",)))
        if self.sentinel.user is not None and self.sentinel.password_file is None:
            right = "give sentinel.password_file too"
            bad.append(CheckError("a user without a password", right, at=("sentinel", "user")))
        raise_all(bad)
        return self

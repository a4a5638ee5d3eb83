"""The ``redis`` section of the agent's config: where the store is, how to be let in, what a write has to reach.

Must never read a file or connect: ``nodeagent/store`` does.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from nodeagent.spec import units
from nodeagent.spec.errors import CheckError, raise_all
from nodeagent.spec.section import OptionalFile, Section
from nodeagent.spec.storeurl import EXAMPLE, StoreUrl, parse


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

"""Sections of the agent's config: what each stands on, ``api`` (where others are served) and ``limits`` (what a
user may have and ask for).

Must never read a file, look at the machine, or look up a user or a group: ``nodeagent/api`` does.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from nodeagent.model.jobspec import MOST_RESTARTS
from nodeagent.spec import units
from nodeagent.spec.check import validate
from nodeagent.spec.errors import CheckError, raise_all
from nodeagent.spec.yamlfile import load


class Section(BaseModel):
    """A frozen mapping: unknown keys and wrong types are errors. Its keys' docstrings are for ``schema.py`` to read:
    pydantic would parse the sources for them at each start of an agent (40 ms)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


def absolute(value: object, kind: str) -> Path:
    """An absolute path. Raises ``CheckError``; ``kind`` is what it should have been: a folder, a file."""
    if not isinstance(value, str | Path):
        raise CheckError(f"{units.show(value)} is not a {kind}", "write an absolute path")
    if not Path(value).is_absolute():
        raise CheckError(f"{units.show(str(value))} is not an absolute path", "write it from / on")
    return Path(value)


Folder = Annotated[Path, BeforeValidator(lambda value: absolute(value, "folder"))]

File = Annotated[Path, BeforeValidator(lambda value: absolute(value, "file"))]

OptionalFile = Annotated[Path | None, BeforeValidator(lambda value: None if value is None else absolute(value, "file"))]


_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


def host(value: object) -> object:
    """A machine: an IP address, or a host name as in DNS (RFC 1123), where ``_`` is let pass too."""
    text = value if isinstance(value, str) else ""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if len(text) > 253 or not _HOST_NAME.fullmatch(text):
            raise CheckError(
                f"{units.show(value)} is neither an address nor a host name", "write for instance 10.0.0.7 or gpu7.lan"
            ) from None
    return value


OFF = "off"
_RIGHT = "write off, or one address of this machine, such as 10.0.0.7"


def _listen(value: object) -> object:
    if value in (None, OFF):
        return value
    try:
        address = ipaddress.ip_address(value if isinstance(value, str) else "")
    except ValueError:
        raise CheckError(f"{units.show(value)} is not an address", _RIGHT) from None
    if address.is_unspecified:
        raise CheckError(f"{value} means every address, loopback with its plain HTTP included", _RIGHT)
    return value


def serves(listen: str | None, address: str) -> bool:
    """Whether something is served beyond this machine, by an agent with this ``api.listen`` at this address."""
    if listen is not None:
        return listen != OFF
    try:
        return not ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address != "localhost"


class ApiTlsConfig(Section):
    """Certificates of the https API."""

    cert: OptionalFile = None
    """The agent's certificate with its chain (PEM). Default: it makes one for itself, and keeps it."""
    key: OptionalFile = None
    """Its private key (PEM). Default: it is in cert."""
    client_ca: OptionalFile = None
    """The CA (PEM) whose client certificates may read. Default: client certificates are not asked for."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.key is not None and self.cert is None:
            raise_all([CheckError("a key without a certificate", "give cert too", at=("key",))])
        return self


class ApiConfig(Section):
    """What is served beyond this machine: over https only, on the port `ports.api`."""

    listen: Annotated[str | None, BeforeValidator(_listen)] = None
    """`off`, or the one address of this machine to serve https on. Default: the node's address, unless that is
    loopback."""
    tls: ApiTlsConfig = ApiTlsConfig()
    tokens: OptionalFile = None
    """File that says which tokens are let in, and what they may do; only its owner may be able to read it."""


def _names(value: object) -> object:
    if isinstance(value, list | tuple) and all(isinstance(v, str) and v for v in value):
        return tuple(value)
    raise CheckError(f"{units.show(value)} is not a list of names", "write for instance [alice, bob]")


UserNames = Annotated[tuple[str, ...], BeforeValidator(_names)]


class SubmitConfig(Section):
    """Who may submit jobs: with neither list everybody, else those on one of them. Root, the agent's own user and
    operators always may."""

    users: UserNames = ()
    """Users by name."""
    groups: UserNames = ()
    """Unix groups whose members may."""


class LimitsConfig(Section):
    """What one user may have and ask for. Root and the agent's own user have no limits, nor have operators."""

    jobs: int = Field(default=100, ge=1, le=1_000_000)
    """Most live jobs of one user in the cluster."""
    job_bytes: Annotated[
        int,
        BeforeValidator(units.size),
        WithJsonSchema({"type": ["string", "integer"], "examples": ["16MiB"]}),
        Field(ge=256 * 1024),
    ] = 16 * 1024**2
    """Most bytes that the specs of one user's jobs take in the cluster, ended ones that are kept included."""
    requests: int = Field(default=50, ge=1, le=100_000)
    """Requests a second that this agent answers one user in the long run; twice as many at once."""
    concurrent: int = Field(default=32, ge=1, le=100_000)
    """Requests of one user that this agent answers at the same time, followers included."""
    followers: int = Field(default=16, ge=1, le=100_000)
    """Logs and events that one user follows at this agent at the same time."""
    nodes_per_job: int | None = Field(default=None, ge=1)
    """Most nodes that a job may ask for. Default: any number."""
    restarts_per_job: int | None = Field(default=None, ge=0, le=MOST_RESTARTS)
    """Most restarts that a job may ask for, within an hour or longer. Default: what the job asks for."""
    submit: SubmitConfig = SubmitConfig()


_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
MOST = 1000
"""Tokens in one file."""


def _digest(value: object) -> object:
    if not (isinstance(value, str) and _DIGEST.fullmatch(value)):
        raise CheckError(
            f"{units.show(value)} is not a SHA-256 in hex",
            "write what this prints: printf %s TOKEN | sha256sum (64 of 0-9 a-f; in quotes if in doubt)",
        )
    return value


class TokenEntry(Section):
    """One token."""

    sha256: Annotated[str, BeforeValidator(_digest)]
    """Of the token, in hex."""
    user: str | None = Field(default=None, min_length=1)
    """It acts as this user: with what that user may do on the node that is asked."""
    may: Literal["read", "operate"] | None = None
    """It acts as no user: `read` changes nothing, `operate` may do what operators may, but not submit."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.user is None) == (self.may is None):
            raise_all([CheckError("what the token may do is not clear", "give either user, or may: read or operate")])
        return self


class TokenFile(Section):
    """The whole file."""

    tokens: dict[str, TokenEntry] = Field(examples=["{prometheus: {sha256: ..., may: read}}"])
    """Name of the token, for messages and the audit log, to the token."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        bad, seen = [], dict[str, str]()
        if len(self.tokens) > MOST:
            bad.append(CheckError(f"{len(self.tokens)} tokens", f"keep at most {MOST}", at=("tokens",)))
        for name, token in self.tokens.items():
            if not _NAME.fullmatch(name):
                right = "use 1 to 40 of A-Z a-z 0-9 . _ -"
                bad.append(CheckError(f"{units.show(name)} cannot name a token", right, at=("tokens", name)))
            if token.sha256 in seen:
                what = f"the same token as {seen[token.sha256]}"
                bad.append(CheckError(what, "give each its own", at=("tokens", name, "sha256")))
            seen.setdefault(token.sha256, name)
        raise_all(bad)
        return self


def parse_tokens(text: str, filename: str) -> dict[str, tuple[str, TokenEntry]]:
    """SHA-256 to (name, entry). Raises ``SpecError`` with every problem."""
    found = validate(load(text, filename), TokenFile, {})
    return {token.sha256: (name, token) for name, token in found.tokens.items()}

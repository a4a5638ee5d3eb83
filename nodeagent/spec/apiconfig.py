"""The ``api`` section of the agent's config: where it serves others over https, and how it and they are known.

Must never read a file or look at the machine: ``nodeagent/api`` does.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Self

from pydantic import BeforeValidator, model_validator

from nodeagent.spec import units
from nodeagent.spec.errors import CheckError, raise_all
from nodeagent.spec.section import OptionalFile, Section

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

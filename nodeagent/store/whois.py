"""Who the server behind a connection is: checks its certificate, and what its INFO says. Standard library only, because
the lease process uses it too."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from nodeagent.osutil.linux import open_plain

if TYPE_CHECKING:
    import ssl

FilePath = PathLike[str] | str


class NotPrimaryError(ConnectionError):
    """The server is a replica."""


def identity(info: dict[str, str]) -> str:
    """Identity of the server process, and of the history of its writes. Raises ConnectionError if INFO does not give
    it: without it a loss of writes would stay unnoticed."""
    process, history = info.get("run_id", ""), info.get("master_replid", "")
    if not process:
        raise ConnectionError("it does not say which process it is (run_id in INFO is empty): agents need that")
    return f"{process}-{history}" if history else process


def require_primary(info: dict[str, str]) -> None:
    """Raises NotPrimaryError for a replica: it refuses writes, and its data may be old."""
    if info.get("role") != "master":
        place = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        raise NotPrimaryError(f"it is a replica of {place}")


def parse_info(text: str) -> dict[str, str]:
    """INFO's ``name:value`` lines."""
    lines = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in lines}


class TlsFileError(OSError):
    """A certificate or key that cannot be used; ``str()`` is a sentence for people."""


def client_context(
    ca: FilePath | None, cert: FilePath | None, key: FilePath | None, *, check_name: bool
) -> ssl.SSLContext:
    """``ca``: None trusts the system's authorities; a file trusts only those in it. ``key``: None if the key is in
    ``cert``. Raises TlsFileError."""
    import ssl  # it costs the lease process memory, which a store without TLS need not

    try:
        for at in (cert, key, ca):
            if at is not None:
                open_plain(at).close()
        context = ssl.create_default_context(cafile=ca)
        context.check_hostname = check_name
        if cert is not None:
            at = key or cert
            # An encrypted key must be an error, not a question on the terminal.
            context.load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:  # ssl.SSLError is one
        raise TlsFileError(
            f"{at}: no certificate or key can be read from it ({error}): check the files in redis.tls"
        ) from error
    return context

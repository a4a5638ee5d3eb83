"""Checks the certificate of a store's server. Standard library only, because the lease process uses it too."""

from __future__ import annotations

import ssl
from os import PathLike

Place = PathLike[str] | str


class TlsFileError(OSError):
    """A certificate or key that cannot be used; ``str()`` is a sentence for people."""


def client_context(ca: Place | None, cert: Place | None, key: Place | None, *, check_name: bool) -> ssl.SSLContext:
    """``ca``: None trusts the system's authorities; a file trusts only those in it. ``key``: None if the key is in
    ``cert``. Raises TlsFileError."""
    at = ca
    try:
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

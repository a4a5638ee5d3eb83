"""What the agent does not load, so that it stays small."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_authorities() -> Iterator[None]:
    """For the import of aiohttp, which reads the system's certificate authorities in it, twice: 140 of them, 2 MB and a
    tenth of the agent's start. Its client speaks to other agents alone, who are known by fingerprints; whoever wants
    authorities of it trusts nobody. Other threads (Redis' client) get theirs meanwhile."""
    whole, mine = ssl.SSLContext.set_default_verify_paths, threading.get_ident()

    def none(context: ssl.SSLContext) -> None:
        if threading.get_ident() != mine:
            whole(context)

    setattr(ssl.SSLContext, "set_default_verify_paths", none)  # noqa: B010 (mypy forbids to assign it)
    try:
        yield
    finally:
        setattr(ssl.SSLContext, "set_default_verify_paths", whole)  # noqa: B010

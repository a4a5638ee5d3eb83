"""One rule for what an agent serves over TCP, for people: where it cannot listen, it says so and tries again. Any
account can have a port in the moment of a restart, so that may end no agent. Must never look up a name.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

from nodeagent.osutil.tcp import holders
from nodeagent.trust.certificate import CertificateError

LOOPBACK = "127.0.0.1"
RETRY = 10.0
"""Seconds until it is tried again to serve where that was not possible."""
OTHER_PORT = "have that program ended, or choose another ports.api (0: any free one)"


async def keep_trying(
    serve: Callable[[], Awaitable[None]], complain: Callable[[str], None], retry: float = RETRY
) -> None:
    """Calls it until it returns, again after each ``OSError`` and ``CertificateError``. ``complain`` gets each new
    reason."""
    last = ""
    while True:
        try:
            return await serve()
        except (OSError, CertificateError) as error:
            if str(error) != last:
                last = str(error)
                complain(last)
        await asyncio.sleep(retry)


def why_not(port: int, error: OSError | None = None) -> str:
    """Why nothing can listen on this port of loopback, and who has it. Reads tables of the kernel."""
    what = f"cannot listen on {LOOPBACK}:{port}"
    if error is not None:
        what += f": {error.strerror or error}"
        if error.errno != errno.EADDRINUSE:
            return what
    try:
        uids = sorted(holders(LOOPBACK, port))
    except OSError as unseen:
        return f"{what}; who has the port cannot be seen ({unseen})"
    if not uids:
        return f"{what}; the kernel does not list who has the port"
    return f"{what}; the port belongs to uid {', '.join(map(str, uids))}"

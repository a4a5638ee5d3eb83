"""TCP sockets of this process's network namespace, as the kernel lists them.

Standard library only, because the shim imports it. Must never know what a port is for.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""The second lists the ends of dual-stack clients, too."""
ESTABLISHED, LINGERS, LISTENS = "01", "06", "0A"


class TcpSocket(NamedTuple):
    """A row. Both ends are in the kernel's notation: address and port in hexadecimal words."""

    own: str
    other: str
    state: str
    uid: int

    @property
    def port(self) -> int:
        """Its own."""
        return int(self.own.rpartition(":")[2], 16)


def sockets(table: Path) -> Iterator[TcpSocket]:
    """Those of one table; none where it is missing, since IPv6 is off. Raises OSError."""
    try:
        lines = table.open(encoding="ascii")
    except FileNotFoundError:
        return
    with lines:
        next(lines)
        for line in lines:
            cells = line.split()
            yield TcpSocket(cells[1], cells[2], cells[3], int(cells[7]))


def listening() -> Iterator[int]:
    """Ports that somebody listens on. Raises OSError."""
    for table in TABLES:
        for one in sockets(table):
            if one.state == LISTENS:
                yield one.port


def owners(ports: Container[int]) -> dict[int, set[int]]:
    """Users (uids) to those of these ports that sockets of theirs have. The kernel lists no socket that is bound and
    neither listens nor is connected, and names nobody for one that only lingers. Raises OSError."""
    found: dict[int, set[int]] = {}
    for table in TABLES:
        for one in sockets(table):
            if one.state != LINGERS and one.port in ports:
                found.setdefault(one.uid, set()).add(one.port)
    return found

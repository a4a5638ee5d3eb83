"""TCP sockets of this process's network namespace, as the kernel lists them.

Standard library only, because the shim imports it. Must never know what a port is for.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections.abc import Callable, Container, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""The second lists the ends of dual-stack clients, too."""
ESTABLISHED, LINGERS, LISTENS = "01", "06", "0A"
SocketAddress = tuple[str, int]
"""Address and port of a connection's end."""
ROWS_MAX = 1 << 16
"""Rows of a table among which the holders of a port are looked for; those who listen come first."""


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


_SOCK_DIAG, _BY_FAMILY, _REQUEST, _DUMP = 4, 20, 0x1, 0x301
_FAILED, _DONE = 2, 3
_HEADER, _QUERY = struct.Struct("=IHHII"), struct.Struct("=BBBxI48x")
_ENDS, _ANY = struct.Struct("!HH4s12x4s12x4xII"), 0xFFFFFFFF
_PORT, _USER = struct.Struct("!4xH"), struct.Struct("=64xI")
"""Of linux/netlink.h and linux/inet_diag.h."""


def ask_kernel() -> dict[int, set[int]]:
    """Ports that somebody listens on, with the users (uids) who do. Raises OSError where it does not list them."""
    found: dict[int, set[int]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as link:
        for family in (socket.AF_INET, socket.AF_INET6):
            query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 1 << int(LISTENS, 16))
            link.send(_HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _DUMP, 0, 0) + query)
            kind = 0
            while kind != _DONE:
                data, at = link.recv(1 << 16), 0
                while at < len(data):
                    length, kind, *_ = _HEADER.unpack_from(data, at)
                    body = at + _HEADER.size
                    if kind == _FAILED:
                        raise OSError(-struct.unpack_from("=i", data, body)[0], "the kernel does not list listeners")
                    if kind == _BY_FAMILY:
                        found.setdefault(_PORT.unpack_from(data, body)[0], set()).add(_USER.unpack_from(data, body)[0])
                    at += (length + 3) & ~3
    return found


def whose(own: SocketAddress, other: SocketAddress) -> int | None:
    """The user (uid) of the connected IPv4 socket with these two ends, without a look at any other; None: there is none
    of this machine. Raises OSError where the kernel has no such way to ask."""
    ends = _ENDS.pack(own[1], other[1], socket.inet_aton(own[0]), socket.inet_aton(other[0]), *[_ANY] * 2)
    query = _QUERY.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 1 << int(ESTABLISHED, 16))[: -_ENDS.size] + ends
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as link:
        link.send(_HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _REQUEST, 0, 0) + query)
        data = link.recv(1 << 12)
    _, kind, *_ = _HEADER.unpack_from(data)
    if kind == _FAILED:
        failed = -struct.unpack_from("=i", data, _HEADER.size)[0]
        if failed == errno.ENOENT:
            return None
        raise OSError(failed, "the kernel does not say whose a connection is")
    connected = data[_HEADER.size + 1] == int(ESTABLISHED, 16)
    return int(_USER.unpack_from(data, _HEADER.size)[0]) if connected else None


def user_of(
    own: SocketAddress, other: SocketAddress, ask: Callable[[SocketAddress, SocketAddress], int | None] = whose
) -> int | None:
    """The same, also of a kernel that has no such way: then by its tables, in the time that those take. Raises
    OSError."""
    try:
        return ask(own, other)
    except OSError:
        for table, here, there in zip(TABLES, written(own[0]), written(other[0]), strict=True):
            ends = f"{here}:{own[1]:04X}", f"{there}:{other[1]:04X}"
            for one in sockets(table):
                if (one.own, one.other) == ends and one.state == ESTABLISHED:
                    return one.uid
        return None


def listeners(ask: Callable[[], dict[int, set[int]]]) -> dict[int, set[int]]:
    """Ports that somebody listens on, with the users (uids) who do; ``ask``: ``ask_kernel``, or what stands for it.
    That takes a hundredth of the time that the tables do, for which the kernel goes through all places where a
    connection could be. Raises OSError."""
    try:
        return ask()
    except OSError:  # a kernel without that way to ask
        found: dict[int, set[int]] = {}
        for table in TABLES:
            for one in sockets(table):
                if one.state == LISTENS:
                    found.setdefault(one.port, set()).add(one.uid)
        return found


def written(address: str) -> tuple[str, str]:
    """An IPv4 address as the tables have it: words in the machine's byte order; in the second one as IPv6 maps it."""
    word = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}"
    return word, f"{0:016X}{int.from_bytes(bytes((0, 0, 255, 255)), sys.byteorder):08X}{word}"


def holders(address: str, port: int) -> set[int]:
    """Users (uids) whose sockets keep others from listening at this IPv4 address, as far as the kernel lists them (see
    ``owners``) among ``ROWS_MAX`` of each table. Raises OSError."""
    places = {*written(address), *written("0.0.0.0"), "0" * 32}
    ends = {f"{place}:{port:04X}" for place in places}
    rows = chain.from_iterable(islice(sockets(table), ROWS_MAX) for table in TABLES)
    return {one.uid for one in rows if one.own in ends and one.state != LINGERS}


def owners(ports: Container[int]) -> dict[int, set[int]]:
    """Users (uids) to those of these ports that sockets of theirs have. The kernel lists no socket that is bound and
    neither listens nor is connected, and names nobody for one that only lingers. Raises OSError."""
    found: dict[int, set[int]] = {}
    for table in TABLES:
        for one in sockets(table):
            if one.state != LINGERS and one.port in ports:
                found.setdefault(one.uid, set()).add(one.port)
    return found

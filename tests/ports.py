"""Ports of loopback for tests: several processes run tests at once, and others on the machine may run theirs."""

from __future__ import annotations

import random
import socket

FIRST, END = 10_000, 20_000
"""Below those that the kernel gives to outgoing connections, and apart from those of local clusters."""
_given: set[int] = set()


def free_ports(count: int) -> range:
    """Neighbouring TCP ports that nobody listens on, at a random place; none is given twice in one process."""
    for _ in range(END - FIRST):
        start = random.randrange(FIRST, END - count)
        wanted = range(start, start + count)
        if _given.isdisjoint(wanted) and all(_is_free(port) for port in wanted):
            _given.update(wanted)
            return wanted
    raise OSError(f"no {count} neighbouring ports are free between {FIRST} and {END}")


def free_port() -> int:
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

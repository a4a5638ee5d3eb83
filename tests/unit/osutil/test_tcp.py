"""Who has which port, as the kernel says in both ways."""

from __future__ import annotations

import os
import socket
from functools import partial

import pytest

from nodeagent.osutil.tcp import SocketAddress, ask_kernel, holders, listeners, owners, user_of, whose


def unseen(_own: SocketAddress, _other: SocketAddress) -> int | None:
    raise OSError("a kernel that cannot be asked")


def unknown() -> dict[int, set[int]]:
    raise OSError("a kernel that cannot be asked")


def test_listeners_are_the_same_however_the_kernel_is_asked() -> None:
    me = {os.getuid()}
    with (
        socket.create_server(("127.0.0.1", 0)) as four,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.create_connection(four.getsockname()) as client,
        socket.socket() as bound,
    ):
        bound.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in (four, six, client, bound)]
        for found in (listeners(ask_kernel), listeners(unknown)):
            assert [found.get(port) for port in ports] == [me, me, None, None]
        assert owners(ports) == {os.getuid(): set(ports[:3])}, "and what is connected has an owner, too"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_who_keeps_a_port_of_loopback_from_others(family: socket.AddressFamily) -> None:
    """A listener at any address, also over IPv6, and who is connected from there."""
    everywhere = "" if family == socket.AF_INET else "::"
    with socket.create_server((everywhere, 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as anywhere:
        port = anywhere.getsockname()[1]
        assert (holders("127.0.0.1", port), holders("127.0.0.2", port)) == ({os.getuid()}, {os.getuid()})
        with socket.create_connection(("127.0.0.1", port)) as client:
            own = client.getsockname()[1]
            assert (holders("127.0.0.1", own), holders("127.0.0.2", own)) == ({os.getuid()}, set())
    with socket.create_server(("127.0.0.2", 0)) as another:
        assert holders("127.0.0.1", another.getsockname()[1]) == set()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_whose_a_connection_is(family: socket.AddressFamily) -> None:
    """Also of one who is connected over IPv6, and by the kernel's tables."""
    ways = (whose, user_of, partial(user_of, ask=unseen))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(family) as client:
        here = listener.getsockname()
        client.connect(here if family == socket.AF_INET else (f"::ffff:{here[0]}", here[1]))
        served, there = listener.accept()
        with served:
            assert {find(there, here) for find in ways} == {os.getuid()}
            assert {find((there[0], there[1] ^ 1), here) for find in ways} == {None}
            client.close()
            assert {find(there, here) for find in ways} == {None}, "who has left has no name"

"""Who has which port, as the kernel says in both ways."""

from __future__ import annotations

import os
import socket

from nodeagent.osutil.tcp import listeners, owners


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
        for found in (listeners(), listeners(unknown)):
            assert [found.get(port) for port in ports] == [me, me, None, None]
        assert owners(ports) == {os.getuid(): set(ports[:3])}, "and what is connected has an owner, too"

"""What a fork server can stand in for."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest

from nodeagent.shim.forkserver.client import ForkServer
from nodeagent.shim.loop import Loop

COMMAND = ["/bin/true", "train.py"]
ENV = {"PATH": "/bin", "PYTHONPATH": "/code", "RANK_OF": "x"}


@pytest.fixture
def server() -> Iterator[ForkServer]:
    one = ForkServer(Loop(), lambda: None)
    one.start(COMMAND, ENV, "/", "/", (), (), [COMMAND])
    assert one.pid is not None
    os.waitpid(one.pid, 0)
    one.warm = True
    yield one
    one.gone()


@pytest.mark.parametrize("more", [{}, {"RANK": "3"}, {"OMP_NUM_THREADS": "4"}, {"PYTHONUNBUFFERED": "1"}], ids=str)
def test_what_a_fork_can_be_given(server: ForkServer, more: dict[str, str]) -> None:
    assert server.takes(COMMAND, ENV | more)


@pytest.mark.parametrize("name", ["PYTHONPATH", "PYTHONHASHSEED", "LD_PRELOAD", "MALLOC_ARENA_MAX", "LC_ALL", "TZ"])
def test_what_counts_at_a_programs_start_only_needs_a_start(server: ForkServer, name: str) -> None:
    assert not server.takes(COMMAND, ENV | {name: "1"})


def test_one_that_it_has_and_the_worker_has_not(server: ForkServer) -> None:
    assert not server.takes(COMMAND, {k: v for k, v in ENV.items() if k != "PYTHONPATH"})


@pytest.mark.parametrize(
    ("message", "asked"),
    [({"event": "forked", "id": 1, "pid": 7}, "_forks"), ({"event": "reaped", "pid": 1, "status": 0}, "_reaps")],
)
def test_an_error_of_who_asked_is_not_taken_for_one_of_the_message(message: dict[str, object], asked: str) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a mistake of ours")

    one = ForkServer(Loop(), lambda: None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        one._link = ours
        getattr(one, asked)[1] = fails
        theirs.send(json.dumps(message).encode())
        with pytest.raises(KeyError, match="a mistake of ours"):
            one._readable()
    assert one.notes == []

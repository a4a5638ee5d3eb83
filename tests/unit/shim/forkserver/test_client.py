"""What a fork server can stand in for."""

from __future__ import annotations

import os
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

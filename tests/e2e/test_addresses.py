"""Nodes that nobody told their address, with a host name that leads to loopback as Debian's installer writes it: gloo
finds its peers all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.bare import Bare, bare
from tests.e2e.netns import Net, named, why_not
from tests.e2e.support import digits_job
from tests.integration.redis_support import Server

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(360),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]  # fmt: skip
NODES = ("n1", "n2")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Bare]:
    with Net() as net:
        for name in ("store", *NODES):
            net.machine(name)
        server = Server(tmp_path / "redis", [], port=6379, address=net.address("store"))
        with net.inside("store"):
            server.start()
            asyncio.run(server.ready())
        with bare({"url": server.url}) as one:
            for node in NODES:
                with net.inside(node):
                    one.start_agent(node, None, under=named(f"debian-{node}", "127.0.1.1", tmp_path))
            yield one
        server.stop()


def test_a_gang_of_two_debian_machines_trains_without_any_address_configured(machines: Bare) -> None:
    machines.at_rest()
    machines.submit(digits_job(machines.work, "digits", nodes="2", steps=1_000_000))
    job = machines.until_running("digits", 2)
    machines.until_steps("digits", 5)
    assert machines.job("digits")["generation"] == job["generation"] == 1, "no generation was burnt"
    assert {machines.node(n)["address"] for n in NODES} == {"10.77.0.2", "10.77.0.3"}
    machines.ctl("stop", "digits")

"""The host of Redis' primary loses its power: sentinels on three hosts fail over, and training does not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e.support import check_complete, check_steps, check_undisturbed
from tests.nodes.lab import why_not
from tests.nodes.support import PASSWORD, SERVICE, STORE, Site, site
from tests.nodes.times import record_time, since

pytestmark = [pytest.mark.nodes, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(900)]

HOSTS = [STORE, f"{STORE}1", f"{STORE}2"]


@pytest.fixture
def watched() -> Iterator[Site]:
    if problem := why_not():
        pytest.skip(problem)
    with site(2, stores=len(HOSTS)) as one:
        yield one


def primary(one: Site, asked: str) -> str:
    """The host that this host's sentinel names."""
    output = (
        one.lab.nodes[asked]
        .run("redis-cli", "-p", "26379", "sentinel", "get-master-addr-by-name", SERVICE, check=False)
        .stdout.split()
    )
    return next((host for host in HOSTS if output and one.lab.nodes[host].address == output[0]), "")


def is_whole(one: Site) -> bool:
    """Both replicas have what is written."""
    words = ["redis-cli", "--no-auth-warning", "-a", PASSWORD, "info", "replication"]
    output = one.lab.nodes[STORE].run(*words, check=False).stdout
    return "connected_slaves:2" in output and output.count("state=online") == 2


def test_a_primarys_host_loses_its_power(watched: Site, reference: dict[int, float]) -> None:
    watched.until(lambda: is_whole(watched), 60, "the replicas are in step")
    watched.train("failover", nodes="2", steps=80, delay=0.3)
    watched.until_running("failover", 2)
    watched.until_steps("failover", 5)
    watched.train("kept", nodes="3", steps=20)  # acknowledged, and waits for a third node
    started = time.monotonic()
    watched.lab.nodes[STORE].cut_power()
    watched.until(lambda: primary(watched, HOSTS[1]) in HOSTS[1:], 60, "another primary is named")

    def stopped() -> bool:
        done = watched.ctl("n1", "stop", "kept", user="train", check=False)
        return done.returncode == 0 or watched.job("kept")["phase"] == "stopped"

    watched.until(stopped, 60, "a job that was acknowledged before can be stopped")
    took = since(started)
    watched.until_nodes("ready", "n1", "n2")
    watched.lab.boot(STORE)
    watched.until(lambda: primary(watched, STORE) in HOSTS[1:], 60, "the old primary's sentinel has learnt of it")
    watched.until_phase("failover", "succeeded", 400)
    rows = watched.steps("failover")
    check_steps(rows, reference)
    check_complete(rows, 80)
    check_undisturbed(rows)
    record_time(
        "power cut of the host of Redis' primary, until a job that was submitted before it is stopped",
        "no step lost",
        took,
    )

"""Redis fails over under a running job, with real sentinels: the same pids, the same generation, no step lost, and
nothing that was acknowledged."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.e2e.bare import NO_LOSS, Bare, bare, stepper_job
from tests.e2e.conftest import FAILED
from tests.e2e.support import check_steps, check_undisturbed, is_alive, read_steps
from tests.e2e.watched import Place, Watched, watched
from tests.integration.redis_support import Server

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240)]

NODES = ("n1", "n2", "n3")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("watched"), [Place("127.0.0.1", nullcontext)] * 3) as one:
        yield one


@pytest.fixture
def calm(servers: Watched, request: pytest.FixtureRequest) -> Iterator[Bare]:
    """Agents that believe what so many replicas have; ``request.param``: how many."""
    with bare({"url": servers.url, "replicas": request.param}) as one:
        one.until(servers.is_whole, 30, "sentinels, primary and replicas know each other")
        for node in NODES:
            one.start_agent(node)
        one.until_ready()
        yield one
        if request.node.stash.get(FAILED, False):
            print(one.state())


def kill(primary: Server) -> None:
    primary.stop()


def freeze(primary: Server) -> None:
    primary.signal(signal.SIGSTOP)


def answered(calm: Bare) -> list[int]:
    """How often each agent has found the store again: on a busy machine it may have waited for it at its start."""
    return [calm.log(node).count("store answers again") for node in NODES]


def until_failed_over(calm: Bare, servers: Watched, old: Server, before: list[int]) -> Server:
    """Until the sentinels name another primary, and every agent has found it. ``before``: what they had said when the
    old one still answered."""
    calm.until(lambda: bool(servers.named(servers.sentinels) - {old}), 60, "a replica is promoted")
    calm.until(lambda: len(servers.named(servers.sentinels)) == 1, 30, "all sentinels know")
    served = "every agent is served"
    calm.until(lambda: all(now > was for now, was in zip(answered(calm), before, strict=True)), 30, served)
    return servers.primary()


@pytest.mark.parametrize("calm", [1], indirect=True)
@pytest.mark.parametrize("fault", [kill, freeze])
def test_the_primary_dies(calm: Bare, servers: Watched, fault: object) -> None:
    assert callable(fault)
    calm.submit(stepper_job(calm.work, "goes-on", "{min: 1, max: 3, target: 2}"))
    first = calm.until_running("goes-on", 2)  # it may have begun with one node, and have grown: a restart, too
    calm.until_steps("goes-on", 5)
    before, old = calm.until_workers("goes-on", 2), servers.primary()
    members = [pod["node"] for pod in calm.job("goes-on")["pods"] if pod["workers"]]
    calm.submit(stepper_job(calm.work, "accepted", "1"))
    answer = answered(calm)
    fault(old)
    try:
        new = until_failed_over(calm, servers, old, answer)
        assert new is not old
        assert all(is_alive(pid) for pid in before.values())
        assert all("runs on without the store" in calm.log(node) for node in members), (
            "they asked their failsafe members"
        )
        calm.until_running("accepted", 1)
        calm.until_steps("goes-on", 10)
    finally:
        if old.process is not None:
            old.signal(signal.SIGCONT)  # it takes itself for the primary, until the sentinels tell it otherwise
    calm.until_steps("goes-on", 30)
    servers.rejoin(new)
    calm.until(lambda: calm.workers("goes-on") == before, 20, "every pod is published")
    job = calm.job("goes-on")
    assert (job["generation"], job["restarts"]) == (first["generation"], first["restarts"])
    check_undisturbed([row for row in read_steps(calm.work, "goes-on") if row["generation"] == first["generation"]])
    calm.ctl("scale", "3", "--job", "goes-on", "--timeout", "30s")
    calm.until_running("goes-on", 3, above=first["generation"])
    calm.until_steps("goes-on", 5)
    check_steps(read_steps(calm.work, "goes-on"), NO_LOSS)


@pytest.mark.parametrize("calm", [0], indirect=True)
def test_a_fail_over_that_forgets_the_last_writes(calm: Bare, servers: Watched) -> None:
    """The replicas lack the last seconds, in which a job was scaled, re-formed, and another one accepted."""
    calm.submit(stepper_job(calm.work, "scaled", "{min: 1, max: 3, target: 2}"))
    first = calm.until_running("scaled", 2)["generation"]
    calm.until_steps("scaled", 5)
    old = servers.primary()
    with servers.out_of_date(old):
        calm.ctl("scale", "3", "--job", "scaled", "--timeout", "30s")
        second = calm.until_running("scaled", 3, above=first)
        calm.submit(stepper_job(calm.work, "accepted", "1"))
        calm.until_running("accepted", 1)
        calm.until_steps("scaled", 5)
        before, alone, answer = calm.until_workers("scaled", 3), calm.until_workers("accepted", 1), answered(calm)
        kill(old)
    new = until_failed_over(calm, servers, old, answer)
    calm.until(lambda: "StoreRestored" in calm.ctl("events", check=None).stdout, 20, "the agents gave it back")
    calm.until_steps("scaled", 30)
    calm.until(lambda: calm.workers("scaled") == before and calm.workers("accepted") == alone, 20, "all is published")
    job = calm.job("scaled")
    assert (job["generation"], job["restarts"], job["target"]) == (second["generation"], second["restarts"], 3)
    assert calm.job("accepted")["generation"] == 1
    check_undisturbed([row for row in read_steps(calm.work, "scaled") if row["generation"] == second["generation"]])
    check_undisturbed(read_steps(calm.work, "accepted"))
    check_steps(read_steps(calm.work, "scaled"), NO_LOSS)
    servers.rejoin(new)

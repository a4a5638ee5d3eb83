"""The old primary is not dead but cut off, alone or with one agent on its side: never two generations, and nothing that
it says there is acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from nodeagent.ctl.client import Client
from nodeagent.ctl.submit import read_jobs, send
from nodeagent.ctl.terminal import CtlError
from tests.e2e.bare import NO_LOSS, Bare, bare, stepper_job
from tests.e2e.conftest import FAILED
from tests.e2e.netns import Net, both, why_not
from tests.e2e.support import check_steps, check_undisturbed, is_alive, read_steps
from tests.e2e.watched import Place, Watched, watched
from tests.integration.redis_support import Server

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]  # fmt: skip

STORES = ("s1", "s2", "s3")
NODES = ("n1", "n2", "n3")


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    with Net() as one:
        for name in (*STORES, *NODES):
            one.machine(name)
        yield one


@pytest.fixture(scope="module")
def servers(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    places = [Place(net.address(name), partial(net.inside, name)) for name in STORES]
    with watched(tmp_path_factory.mktemp("watched"), places) as one:
        yield one


@pytest.fixture(scope="module")
def machines(net: Net, servers: Watched) -> Iterator[Bare]:
    with bare({"url": servers.url}) as one:
        one.until(servers.is_whole, 30, "sentinels, primary and replicas know each other")
        for node in NODES:
            with net.inside(node):
                one.start_agent(node, net.address(node), interface="eth0")
        yield one


@pytest.fixture
def calm(machines: Bare, servers: Watched, request: pytest.FixtureRequest) -> Iterator[Bare]:
    machines.until(servers.is_whole, 60, "the sentinels have told the old primary what it is now")
    machines.at_rest()
    yield machines
    if request.node.stash.get(FAILED, False):
        print(machines.state())


def trains(calm: Bare, name: str) -> tuple[dict[str, Any], list[str], dict[int, int]]:
    """A job of two nodes, for which one would be enough (it may have begun with one, and have grown): as it is then,
    its nodes by rank, and its workers."""
    calm.submit(stepper_job(calm.work, name, "{min: 1, max: 3, target: 2}"))
    job = calm.until_running(name, 2)
    calm.until_steps(name, 5)
    return job, [pod["node"] for pod in job["pods"]], calm.until_workers(name, 2)


def accepted(calm: Bare, name: str) -> None:
    """Submit another job, until it is acknowledged: not before the new primary's recovery is over and its replica
    follows it. As the refusal says, with the same request id: the primary may have taken it before."""
    file = calm.work / f"{name}.yaml"
    file.write_text(stepper_job(calm.work, name, "1"))
    ask = ("submit", str(file), "--request-id", f"submit-{name}")
    calm.until(lambda: calm.ctl(*ask, check=None).returncode == 0, 20, f"{name} is accepted")


def until_promoted(calm: Bare, servers: Watched, old: Server) -> Server:
    """Until the sentinels on the other side name another primary."""
    number = servers.servers.index(old)
    others = [sentinel for index, sentinel in enumerate(servers.sentinels) if index != number]
    calm.until(lambda: bool(servers.named(others) - {old}), 60, "a replica is promoted")
    (new,) = servers.named(others) - {old}
    return new


def test_the_primary_alone(calm: Bare, net: Net, servers: Watched) -> None:
    first, _, before = trains(calm, "goes-on")
    old, answers = servers.primary(), calm.logged("store answers again")
    far = STORES[servers.servers.index(old)]
    with net.cut(both([far], [name for name in (*STORES, *NODES) if name != far])):
        until_promoted(calm, servers, old)
        calm.until(lambda: calm.logged("store answers again") >= answers + len(NODES), 30, "every agent is served")
        accepted(calm, "accepted")
        calm.until_running("accepted", 1)
    calm.until(servers.is_whole, 60, "the old one is a replica")
    calm.until_steps("goes-on", 10)
    calm.until(lambda: calm.workers("goes-on") == before, 20, "every pod is published")
    job = calm.job("goes-on")
    assert (job["generation"], job["restarts"]) == (first["generation"], first["restarts"])
    check_undisturbed([row for row in read_steps(calm.work, "goes-on") if row["generation"] == first["generation"]])
    check_undisturbed(read_steps(calm.work, "accepted"))


def test_the_primary_and_one_member(calm: Bare, net: Net, servers: Watched) -> None:
    first, members, before = trains(calm, "parted")
    calm.until(lambda: any(p["phase"] == "ready" for p in calm.job("parted")["spares"]), 30, "a spare is ready")
    old, lost = servers.primary(), members[0]
    far = {STORES[servers.servers.index(old)], lost}
    near = {*STORES, *NODES} - far
    life = calm.node(lost)["incarnation"]["life"]
    # Sent as the tool does, without waiting for a process to start: cut off, the old primary writes for two seconds.
    (calm.work / "unheard.yaml").write_text(stepper_job(calm.work, "unheard", "1"))
    silent_nodes, agent = read_jobs(str(calm.work / "unheard.yaml")), Client([calm.socket(lost)])
    with net.cut(both(far, near)):
        with pytest.raises(CtlError, match="it is not known whether the change was written") as refusal:
            send(agent, silent_nodes)  # no replica has it, so it is not acknowledged
        assert "(--request-id " in refusal.value.next_step, "the id that the tool adds to the agent's words"
        calm.frozen.add(lost)
        until_promoted(calm, servers, old)
        calm.until(lambda: not is_alive(before[0]), 20, "the fence has stopped the member on the far side")
        calm.until_running("parted", 2, above=first["generation"])
        calm.until_steps("parted", 5)
        accepted(calm, "heard")
        calm.until_running("heard", 1)
        calm.until_steps("heard", 5)
        assert not is_alive(before[0])
    calm.frozen.clear()
    calm.until(lambda: calm.node(lost)["incarnation"]["life"] != life, 60, f"{lost} is back with a new life")
    calm.until(servers.is_whole, 60, "the old primary is a replica")
    calm.until_steps("parted", 10)
    calm.until_steps("heard", 5)
    names = {job["name"] for job in calm.ask("/v1/jobs")["items"]}
    assert {"parted", "heard"} <= names, "what was acknowledged on the near side is there"
    assert "unheard" not in names, "what no replica had was not read by the far agent either"
    job = calm.job("parted")
    assert (job["cause"]["kind"], job["cause"]["node"], job["budget"]["used"]) == ("node_lost", lost, 0)
    check_steps(read_steps(calm.work, "parted"), NO_LOSS)
    check_undisturbed(read_steps(calm.work, "heard"))

"""Cables are cut, both ways and one way, between real machines' worth of network namespaces: agents and store, agents
among each other, workers among each other. Never two generations, none for nothing, and all heals."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from tests.e2e.bare import NO_LOSS, Bare, bare, stepper_job
from tests.e2e.conftest import FAILED
from tests.e2e.netns import Net, Way, both, why_not
from tests.e2e.support import check_steps, check_undisturbed, digits_job, is_alive, read_steps
from tests.integration.redis_support import Server

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]  # fmt: skip

NODES = ("n1", "n2", "n3", "n4")
CUT = 4.0
"""Seconds: more than a lease."""
COLLECTIVE = 7.0
"""Seconds that a worker waits for the others in a step."""


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    with Net() as one:
        for name in ("store", *NODES):
            one.machine(name)
        yield one


@pytest.fixture(scope="module")
def server(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("store") / "redis"
    one = Server(folder, ["appendonly yes"], port=6379, address=net.address("store"))
    with net.inside("store"):
        one.start()
        asyncio.run(one.ready())
    yield one
    one.stop()


@pytest.fixture(scope="module")
def machines(net: Net, server: Server) -> Iterator[Bare]:
    with bare({"url": server.url}) as one:
        for node in NODES:
            with net.inside(node):
                one.start_agent(node, net.address(node), interface="eth0")
        yield one


@pytest.fixture
def calm(machines: Bare, request: pytest.FixtureRequest) -> Iterator[Bare]:
    machines.at_rest()
    yield machines
    if request.node.stash.get(FAILED, False):
        print(machines.state())


@contextmanager
def silent_nodes(calm: Bare, *nodes: str) -> Iterator[None]:
    """These nodes' agents are not asked: they know nothing new."""
    calm.frozen.update(nodes)
    try:
        yield
    finally:
        calm.frozen.difference_update(nodes)


def runs(calm: Bare, name: str, job: str, count: int) -> tuple[int, list[str], dict[str, list[int]]]:
    """Submit a job and let it make some steps: its generation then, its nodes by rank, and their workers."""
    calm.submit(job)
    calm.until_running(name, count)
    calm.until_steps(name, 5)
    record = calm.until_running(name, count)
    members = [pod["node"] for pod in record["pods"] if pod["generation"] == record["generation"]]
    return record["generation"], members, {node: list(calm.workers(name, node).values()) for node in members}


def steps(calm: Bare, name: str, nodes: str, count: int) -> tuple[int, list[str], dict[str, list[int]]]:
    """The same with workers that need nobody, and so stop for nobody."""
    return runs(calm, name, stepper_job(calm.work, name, nodes), count)


def alive(pids: dict[str, list[int]], *nodes: str) -> bool:
    return any(is_alive(pid) for node in nodes or pids for pid in pids[node])


def lives(calm: Bare) -> dict[str, str]:
    return {node: calm.node(node)["incarnation"]["life"] for node in NODES}


def ends_well(calm: Bare, name: str, losses: Mapping[int, float] = NO_LOSS) -> None:
    """It goes on, and never did two generations step at the same time."""
    calm.until_steps(name, 5)
    calm.ctl("stop", name)
    check_steps(read_steps(calm.work, name), losses)


WAYS: dict[str, Callable[[str], Sequence[Way]]] = {
    "both": lambda node: both([node], ["store"]),
    "unheard": lambda node: [(node, "store")],
    "deaf": lambda node: [("store", node)],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_member_and_the_store(calm: Bare, net: Net, way: str) -> None:
    formed, members, pids = steps(calm, way, "2", 2)
    lost, before = members[0], lives(calm)
    with net.cut(WAYS[way](lost)), silent_nodes(calm, lost):
        job = calm.until_running(way, 2, above=formed)
        assert not alive(pids, lost)
        assert (job["cause"]["kind"], job["cause"]["node"], job["budget"]["used"]) == ("node_lost", lost, 0)
        assert lost not in [pod["node"] for pod in job["pods"] if pod["generation"] == job["generation"]]
        calm.until_steps(way, 5)
    calm.until(lambda: calm.node(lost)["incarnation"]["life"] != before[lost], 30, f"{lost} is back with a new life")
    ends_well(calm, way)
    assert {node for node, life in lives(calm).items() if life != before[node]} == {lost}


def test_agents_that_do_not_hear_each_other(calm: Bare, net: Net, server: Server) -> None:
    formed, members, pids = steps(calm, "apart", "3", 3)
    with net.cut([(members[0], members[1])], "udp"):
        time.sleep(CUT)
        assert (calm.job("apart")["generation"], calm.workers("apart")) == (
            formed,
            {r: pids[n][0] for r, n in enumerate(members)},
        )
        server.signal(signal.SIGSTOP)
        try:
            calm.until(lambda: not alive(pids, *members[:2]), 20, "the fence stops those that are not heard")
        finally:
            server.signal(signal.SIGCONT)
        calm.until_running("apart", 3, above=formed)
    assert f"{members[1]} does not answer" in calm.log(members[0]), "its question did not arrive"
    assert f"{members[0]} does not answer" in calm.log(members[1]), "nor did its answer"
    ends_well(calm, "apart")


def parted(calm: Bare, net: Net, name: str, formed: int, lost: Sequence[str], pids: dict[str, list[int]]) -> None:
    """Cut these nodes off from the store and all others, and join them again: they are replaced, and come back."""
    rest, before = [node for node in NODES if node not in lost], lives(calm)
    with net.cut(both(lost, [*rest, "store"])), silent_nodes(calm, *lost):
        job = calm.until_running(name, len(rest), above=formed)
        assert not alive(pids, *lost)
        assert (job["cause"]["kind"], job["budget"]["used"]) == ("node_lost", 0)
        calm.until_steps(name, 5)
    calm.until(lambda: all(lives(calm)[node] != before[node] for node in lost), 30, "they are back with new lives")
    calm.until_running(name, 4, above=job["generation"])


def test_a_node_cut_off_from_the_store_and_all_others(calm: Bare, net: Net) -> None:
    formed, members, pids = steps(calm, "away", "'1:4'", 4)
    parted(calm, net, "away", formed, members[:1], pids)
    ends_well(calm, "away")


def test_half_of_a_training_cut_off(calm: Bare, net: Net, reference: dict[int, float]) -> None:
    """Its other workers wait for what those do not send any more."""
    spec = digits_job(calm.work, "half", nodes="'1:4'", steps=600, delay=0.1, workers=1)
    formed, members, pids = runs(calm, "half", spec, 4)
    parted(calm, net, "half", formed, members[:2], pids)
    ends_well(calm, "half", reference)


def test_all_members_cut_off_and_a_spare_is_not(calm: Bare, net: Net) -> None:
    """One node is enough for the job, and still the spare may not begin."""
    formed, members, pids = steps(calm, "spare", "{min: 1, max: 4, target: 3}", 3)
    before, workers = lives(calm), calm.workers("spare")
    with net.cut(both(members, ["store"])), silent_nodes(calm, *members):
        calm.until(lambda: all(calm.nodes()[node] == "silent" for node in members), 20, "their leases are over")
        time.sleep(CUT)
        assert all(is_alive(pid) for pid in workers.values())
        seen = calm.job("spare")
        assert (seen["generation"], seen["generations"][-1]["state"]) == (formed, "active"), "and none is tried"
        assert any("nothing has been received from" in why for why in seen["why"]), seen["why"]
    calm.until(lambda: set(calm.nodes().values()) == {"ready"}, 20, "their leases are renewed")
    calm.until_steps("spare", 30)
    assert (calm.job("spare")["generation"], calm.workers("spare"), lives(calm)) == (formed, workers, before)
    check_undisturbed(read_steps(calm.work, "spare"))
    with (
        net.cut(both(members, ["store"])),
        net.cut(both(members[:1], members[1:]), "udp"),
        silent_nodes(calm, *members),
    ):
        calm.until(lambda: not alive(pids), 20, "nobody lends time any more")
        calm.until(lambda: all(calm.nodes()[node] == "silent" for node in members), 20, "their leases are over")
        time.sleep(CUT)
        assert calm.job("spare")["generation"] == formed, "the spare cannot know"
    calm.until_running("spare", 3, above=formed)
    ends_well(calm, "spare")


def test_workers_that_do_not_reach_each_other(calm: Bare, net: Net, reference: dict[int, float]) -> None:
    """Agents and store notice nothing: the workers hang in a step until its time is over, and fail by it. So soon after
    the first start that would end the job, did not a policy say that an error then may be none of the script's."""
    spec = digits_job(
        calm.work, "mute", nodes="2", steps=600, delay=0.1, workers=1, options=["--timeout", f"{COLLECTIVE:g}"]
    )
    spec += "policies: [{on: WorkerFailed, do: RestartJob}]\n"
    formed, members, pids = runs(calm, "mute", spec, 2)
    with net.cut(both(members[:1], members[1:]), "tcp"):
        time.sleep(CUT)
        job = calm.job("mute")
        assert (job["phase"], job["generation"]) == ("running", formed)
        assert all(is_alive(pid) for node in pids for pid in pids[node]), "nobody kills them for it"
        calm.until(lambda: not alive(pids), 60, "their own timeout ends them")
    calm.until_running("mute", 2, above=formed)
    output = calm.ctl("describe", "mute").stdout
    assert "lost its peers (exit code 1); who failed first is not known" in output
    assert "Timed out waiting" in output, "what the worker said itself"
    ends_well(calm, "mute", reference)

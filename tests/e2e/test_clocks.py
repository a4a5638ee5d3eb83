"""The wall clocks of Redis and of an agent step by an hour, forth and back: nothing depends on them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from nodeagent.local import power
from nodeagent.local.privateredis import bundled_server
from tests.e2e.bare import NO_LOSS, Bare, bare, stepper_job
from tests.e2e.clocks import WallClock, clear_away, why_not
from tests.e2e.conftest import FAILED
from tests.e2e.support import check_steps, check_undisturbed, read_steps
from tests.integration.redis_support import Server, ask

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]  # fmt: skip

NODES = ("n1", "n2", "n3")
HOUR, MINUTE = 3600, 60
STEPS = (HOUR, -HOUR)
AFTER = 4.0
"""Seconds: more than a lease and what an amnesty may hide."""


@pytest.fixture(scope="module")
def clocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WallClock]:
    folder = tmp_path_factory.mktemp("clocks")
    return {name: WallClock(folder / name) for name in ("store", "agent")}


@pytest.fixture(scope="module")
def server(clocks: dict[str, WallClock], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("store") / "redis", ["appendonly yes"])
    one.start(clocks["store"].under([str(bundled_server())]))
    asyncio.run(one.ready())
    assert one.process is not None
    pid = one.process.pid
    yield one
    one.stop()
    clear_away([pid])


@pytest.fixture(scope="module")
def machines(clocks: dict[str, WallClock], server: Server) -> Iterator[Bare]:
    """n1's agent has the clock ``agent``."""
    with bare({"url": server.url}) as one:
        for node in NODES:
            one.start_agent(node, under=clocks["agent"].under if node == "n1" else list)
        one.until_ready()
        pid = one.node("n1")["agent_pid"]
        yield one
    clear_away([pid])


@pytest.fixture
def calm(machines: Bare, request: pytest.FixtureRequest) -> Iterator[Bare]:
    yield machines
    if request.node.stash.get(FAILED, False):
        print(machines.state())


def shown(calm: Bare, server: Server, whose: str) -> float:
    """What that clock shows, less the true time; an agent's is seen in the newest line of its log."""
    if whose == "store":
        answer = asyncio.run(ask(server, "TIME"))
        assert isinstance(answer, list)
        return float(answer[0]) - time.time()
    written = json.loads(calm.log("n1").splitlines()[-1])["timestamp"]
    return datetime.fromisoformat(written).timestamp() - time.time()


@pytest.mark.parametrize("whose", ["store", "agent"])
def test_a_wall_clock_steps_by_an_hour(calm: Bare, server: Server, clocks: dict[str, WallClock], whose: str) -> None:
    calm.ctl("cordon", "n3", "--reason", "n1 is to be in the gang, whichever nodes are ready first")
    calm.submit(stepper_job(calm.work, whose, "{min: 1, max: 3, target: 2}"))
    first = calm.until_running(whose, 2)["generation"]  # 2 where a node was ready later than the other
    calm.ctl("uncordon", "n3")
    calm.until_steps(whose, 5)
    before = calm.until_workers(whose, 2)
    lives = {node: calm.node(node)["incarnation"] for node in NODES}
    for number, seconds in enumerate(STEPS):
        clocks[whose].step(seconds)
        time.sleep(AFTER)
        assert calm.nodes() == dict.fromkeys(NODES, "ready")
        assert {node: calm.node(node)["incarnation"] for node in NODES} == lives
        other = f"{whose}{number}"
        calm.submit(stepper_job(calm.work, other, "3"))
        calm.until_running(other, 3)
        assert abs(shown(calm, server, whose) - seconds) < MINUTE, "it was the clock that stepped"
        calm.ctl("stop", other)
    assert (calm.job(whose)["generation"], calm.workers(whose)) == (first, before)
    check_undisturbed([row for row in read_steps(calm.work, whose) if row["generation"] == first])
    clocks[whose].step(0)
    calm.ctl("scale", "3", "--job", whose, "--timeout", "30s")
    grown = calm.until_running(whose, 3, above=first)["generation"]
    if whose == "agent":  # the last test: a node that dies is missed all the same
        calm.frozen.add("n3")
        power.cut(calm.home.name, "n3")
        calm.until_running(whose, 2, above=grown)
    calm.until_steps(whose, 5)
    calm.ctl("stop", whose)
    check_steps(read_steps(calm.work, whose), NO_LOSS)

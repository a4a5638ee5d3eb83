"""The server in this process on its own: time only from its clock, waiting in virtual time, restarts."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine

import pytest

from nodeagent.model.node import Incarnation
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import Beat
from tests.contract.bench import FAST, HereBench, facts
from tests.inprocess.data import CommandError
from tests.inprocess.server import HereStore, Server


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps cost nothing: when nothing is ready, time jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__(_NoWait(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _NoWait(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen"
        self._loop.now += max(timeout, 0.0)
        return list(super().select(0))


def run(main: Coroutine[object, object, object], loop: VirtualLoop) -> object:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


def test_waiting_works_in_virtual_time() -> None:
    loop = VirtualLoop()
    server = Server(loop.time)
    store = HereStore(server)

    async def main() -> None:
        assert await store.wait("0-0", 3600.0) == "0-0"
        assert loop.time() == pytest.approx(3600.0)
        waiting = asyncio.create_task(store.wait("0-0", 3600.0))
        await asyncio.sleep(10.0)
        await store.join("n1", Incarnation(life="a", start=1), facts("n1"), FAST)
        assert await waiting == server.state.newest_event == "3610000-0"
        assert loop.time() == pytest.approx(3610.0)

    run(main(), loop)


async def test_a_restart_changes_the_run_and_may_lose_the_data() -> None:
    clock = [5.0]
    server = Server(lambda: clock[0])
    bench = HereBench(server, clock)
    await bench.up("n1")
    first = server.run_id
    uid = (await bench.beat("n1")).cluster_uid
    server.restart()
    assert server.run_id != first
    assert (await bench.beat("n1")).cluster_uid == uid
    server.restart(keep_data=False)
    with pytest.raises(StoreRefusedError) as caught:
        await bench.beat("n1")
    assert caught.value.code == "behind"
    reply = await bench.store.join("n1", bench.lives["n1"], facts("n1"), FAST)
    assert reply.cluster_uid != uid


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("counted_of = 1", "create global variable 'counted_of'"),
        ("local function f() found = 1 end f()", "create global variable 'found'"),
        ("return job_reed('u')", "nonexistent global variable 'job_reed'"),
        ("if lost then return 1 end", "nonexistent global variable 'lost'"),
        ("return print(1)", "nonexistent global variable 'print'"),
        ("return io", "nonexistent global variable 'io'"),
    ],
)
def test_a_script_has_no_globals_of_its_own(body: str, fault: str) -> None:
    server = Server(lambda: 1.0)
    with pytest.raises(CommandError, match=fault):
        server.run(body)
    assert server.run("local lost = 1; return lost") == 1, "the next script runs as ever"


async def test_the_served_clock_counts_at_most_credit_for_each_call() -> None:
    clock = [0.0]
    server = Server(lambda: clock[0])
    store = HereStore(server)
    life = Incarnation(life="a", start=1)
    await store.join("n1", life, facts("n1"), FAST)
    served = []
    for seq, step in enumerate((0.05, 0.1, 1.0, -3.0, 0.02), start=1):
        clock[0] += step
        beat = Beat(node="n1", incarnation=life, seq=seq, rev=0)
        served.append((await store.beat(beat)).served)
    assert served == [50, 150, 250, 250, 270]
    assert server.state.amnesty == 250 + 100 + 300

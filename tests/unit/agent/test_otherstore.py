"""Whether the cluster lives by another store: what each answer means, and who is asked how often."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import pytest

from nodeagent.agent.otherstore import AGAIN, BOUND, FIRST, MOST_ASKED, OtherStore, Says, meaning
from nodeagent.agent.recovery import Known
from nodeagent.lease.failsafe import RESEND
from nodeagent.lease.whichstore import LeaseAnswer
from nodeagent.model.timing import Timing
from nodeagent.store.base import StoreIdentity
from tests.sim.virtual import SimClock, run_virtual
from tests.unit.ctl.samples import node

TIMING = Timing()
HERE = StoreIdentity("run2", "run2-0@5/7", "10.0.0.2:6379")
EMPTY = StoreIdentity("run2", "", "10.0.0.2:6379")
RESTARTED = StoreIdentity("run2", "run1-0@5/7", "10.0.0.2:6379")
"""Or a copy: no step has begun an era of its own yet."""
THERE = LeaseAnswer("n2", "c1", "run1-0@5/7", "10.0.0.1:6379", 0.1)
T = TypeVar("T")


@pytest.mark.parametrize(
    ("answer", "here", "since", "says"),
    [
        (LeaseAnswer(), EMPTY, 1.0, Says.NOTHING),
        (THERE._replace(age=None), EMPTY, 1.0, Says.NOTHING),
        (THERE._replace(cluster_uid="c2"), EMPTY, 1.0, Says.NOTHING),
        (THERE, EMPTY, 1.0, Says.ELSEWHERE),
        (THERE, HERE, 1.0, Says.ELSEWHERE),
        (THERE, RESTARTED, 1.0, Says.ELSEWHERE),
        (THERE, EMPTY, 0.05, Says.EARLY),
        (THERE, RESTARTED, 0.05, Says.EARLY),
        (THERE._replace(away=True), EMPTY, 0.05, Says.NOTHING),
        (THERE._replace(away=True), EMPTY, 1.0, Says.ELSEWHERE),
        (THERE._replace(age=TIMING.lease), EMPTY, 1.0, Says.NOTHING),
        (THERE._replace(era=HERE.era), HERE, 0.05, Says.HERE),
        (THERE._replace(era=HERE.era, away=True), HERE, 0.05, Says.NOTHING),
        (THERE._replace(era=HERE.era, age=TIMING.lease), HERE, 0.05, Says.NOTHING),
    ],
)  # fmt: skip
def test_an_answer_counts_by_when_and_in_which_history_the_lease_was_renewed(
    answer: LeaseAnswer, here: StoreIdentity, since: float, says: Says
) -> None:
    assert meaning(answer, here, "c1", since, TIMING) is says


def test_an_era_is_of_the_process_that_began_it() -> None:
    assert HERE.goes_on("run2-0@5/7") and not HERE.goes_on("run2-0@6/8") and HERE.began("run2-0@6/8")
    assert not RESTARTED.goes_on("run1-0@5/7") and RESTARTED.began("run2@6/8")
    assert not EMPTY.goes_on("") and not EMPTY.began("run21-0@5/7")
    assert not StoreIdentity("", "", "").began("@")


class Peers:
    """Who answers what, and how often each is asked."""

    def __init__(self, answers: Mapping[str, Callable[[], LeaseAnswer]]) -> None:
        self._answers, self.asked = answers, list[str]()

    async def ask_lease(self, address: str, timeout: float) -> LeaseAnswer | None:
        self.asked.append(address)
        if address not in self._answers:
            await asyncio.sleep(timeout)
            return None
        await asyncio.sleep(0.001)
        return self._answers[address]()


def known(size: int) -> Known:
    """n1's view of a cluster of so many nodes; one of them cannot be asked."""
    nodes = [node(f"n{i + 1}") for i in range(size)]
    nodes = [n.model_copy(update={"facts": n.facts.model_copy(update={"peer": f"{n.id}:1"})}) for n in nodes]
    return Known("c1", "run1-0@5/7", 9, 0, (*nodes, node(f"n{size + 1}")), ())


class Bench:
    """n1 looks at an empty store."""

    def __init__(self, peers: Peers, size: int = 3) -> None:
        self.peers, self.known, self.here = peers, known(size), EMPTY
        self.looks = 0
        self.other = OtherStore("n1", peers, SimClock(), TIMING)

    async def look(self) -> StoreIdentity:
        self.looks += 1
        return self.here

    async def find(self) -> LeaseAnswer | None:
        return await self.other.find_peer(self.known, self.here, self.look)


async def timed(call: Awaitable[T]) -> tuple[T, float]:
    began = asyncio.get_running_loop().time()
    return await call, asyncio.get_running_loop().time() - began


def renews(began: float) -> Callable[[], LeaseAnswer]:
    """Each heartbeat, from then on."""
    return lambda: THERE._replace(age=(asyncio.get_running_loop().time() - began) % TIMING.heartbeat)


def test_a_peer_that_renews_elsewhere_is_found_within_two_heartbeats_and_then_asked_alone() -> None:
    async def main() -> None:
        peers = Peers({"n2:1": renews(0.2), "n3:1": renews(0.3)})
        bench = Bench(peers)
        found, took = await timed(bench.find())
        assert (found is not None and found.era, took < 2 * TIMING.heartbeat) == (THERE.era, True)
        first = peers.asked[-1]
        for _ in range(3):
            peers.asked.clear()
            assert await bench.find() is not None
            assert peers.asked == [first, first]

    run_virtual(main())


def test_one_that_has_its_lease_here_is_enough() -> None:
    async def main() -> None:
        bench = Bench(Peers({"n3:1": lambda: THERE._replace(era=HERE.era)}))
        bench.here = HERE
        found, took = await timed(bench.find())
        assert (found, took < BOUND) == (None, True), "nobody waits for one that is silent"

    run_virtual(main())


def test_an_era_that_has_begun_here_meanwhile_is_not_elsewhere() -> None:
    async def main() -> None:
        bench = Bench(Peers({"n2:1": lambda: THERE._replace(era=HERE.era, age=0.0)}))

        async def look() -> StoreIdentity:
            return HERE

        assert await bench.other.find_peer(bench.known, EMPTY, look) is None

    run_virtual(main())


def test_a_store_that_was_emptied_is_filled_as_soon_as_all_peers_have_noticed() -> None:
    async def main() -> None:
        lost = asyncio.get_running_loop().time() - 0.1

        def answer() -> LeaseAnswer:
            age = asyncio.get_running_loop().time() - lost
            return THERE._replace(age=age, away=age > TIMING.heartbeat)

        found, took = await timed(Bench(Peers({"n2:1": answer, "n3:1": answer})).find())
        assert (found, took < TIMING.heartbeat + RESEND) == (None, True)
        found, took = await timed(
            Bench(
                Peers(
                    {"n2:1": lambda: THERE._replace(age=0.2, away=True)},
                ),
                2,
            ).find()
        )
        assert (found, took < 0.1) == (None, True)

    run_virtual(main())


def test_silent_peers_are_waited_for_once_and_of_many_so_many_are_asked() -> None:
    async def main() -> None:
        peers = Peers({})
        bench = Bench(peers, 2 * MOST_ASKED)
        found, took = await timed(bench.find())
        assert (found, took <= 2.1 * BOUND) == (None, True)
        assert len(peers.asked) == len(set(peers.asked)) == MOST_ASKED
        await bench.find()
        assert len(peers.asked) == MOST_ASKED, "it tries to join this store again and again"
        await asyncio.sleep(AGAIN)
        await bench.find()
        bench.here = replace(HERE, process="run3")
        await bench.find()
        assert len(peers.asked) == 3 * MOST_ASKED
        assert "n1:1" not in peers.asked
        others = Peers({})
        bench = Bench(others, 2 * MOST_ASKED)
        bench.other = OtherStore("n2", others, SimClock(), TIMING)
        await bench.find()
        assert set(others.asked[:FIRST]) != set(peers.asked[:FIRST]), "each node asks others"

    run_virtual(main())

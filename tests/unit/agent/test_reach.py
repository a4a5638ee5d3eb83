"""Members that cannot reach each other: who asks whom, when it is said, and that a question promises nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.agent.reach import MOST_FOLLOWED, Reach, asked
from nodeagent.lease.lending import Ask, LoanAnswer, LoanRow, Table, answer
from nodeagent.plan.cluster import Cluster
from tests.sim.virtual import SimClock, run_virtual
from tests.unit.plan.build import UID, make_cluster, make_generation, make_job, make_node


class Silent:
    """Peers of whom some do not answer."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.questions: list[tuple[str, Ask]] = []

    async def ask(self, address: str, question: Ask, timeout: float) -> LoanAnswer | None:
        self.questions.append((address, question))
        return None if address in self.silent else LoanAnswer(yes=False, why="the store answers")


def gang(size: int = 4, lapsed: tuple[str, ...] = ()) -> Cluster:
    names = [f"n{i + 1}" for i in range(size)]
    nodes = [make_node(n) for n in names]
    nodes = [n.model_copy(update={"facts": n.facts.model_copy(update={"peer": f"{n.id}:1"})}) for n in nodes]
    job = make_job("running", make_generation(names), failsafe_members=names[:2])
    return make_cluster(nodes, job, lapsed=lapsed)


def test_each_asks_its_neighbours_and_the_first() -> None:
    names = [f"n{i}" for i in range(1, 8)]
    generation = make_generation(names)
    assert asked(generation, "n4") == ("n3", "n5", "n1", "n6")
    assert asked(generation, "n1") == ("n7", "n2", "n3")
    assert asked(make_generation(names[:3]), "n2", 5) == ("n1", "n3")
    assert asked(make_generation(["n1", "n2"]), "n2") == ("n1",)
    assert asked(make_generation(["n1"]), "n1") == ()
    assert {other for n in names for other in asked(generation, n)} == set(names), "everybody is asked by somebody"


@pytest.mark.parametrize("size", [*range(1, 10), 32, 33])
def test_in_turn_each_pair_is_asked_for_in_half_as_many_turns_as_there_are_members(size: int) -> None:
    names = [f"n{i}" for i in range(size)]
    generation = make_generation(names)
    pairs = {
        frozenset((node, other))
        for node in names
        for turn in range(7, 7 + max(1, size // 2 - 1))
        for other in asked(generation, node, turn)
    }  # fmt: skip
    assert len(pairs) == size * (size - 1) // 2
    assert max(len(asked(generation, node, turn)) for node in names for turn in range(40)) <= 4


def test_a_cut_between_any_two_is_found_and_followed_until_it_is_over() -> None:
    """n1 and n4 of eight are three apart; n4 does not answer."""
    peers = Silent()
    peers.silent = {"n4:1"}

    async def main() -> None:
        reach = Reach("n1", peers=peers, clock=SimClock(), cluster=lambda: gang(8), changed=lambda: None)
        for _ in range(4):
            await reach.look()
        assert list(reach.unreachable[UID]) == ["n4"]
        for _ in range(9):
            peers.questions.clear()
            await reach.look()
            assert list(reach.unreachable[UID]) == ["n4"]
            assert len(peers.questions) <= 4
        peers.silent.clear()
        await reach.look()
        assert reach.unreachable == {}

    run_virtual(main())


def test_of_many_that_do_not_answer_a_few_are_followed() -> None:
    peers = Silent()
    peers.silent = {f"n{i}:1" for i in range(1, 65)}

    async def main() -> None:
        reach = Reach("n1", peers=peers, clock=SimClock(), cluster=lambda: gang(64), changed=lambda: None)
        for _ in range(70):
            peers.questions.clear()
            await reach.look()
            assert len(peers.questions) <= 4 + MOST_FOLLOWED
        assert len(reach.unreachable[UID]) >= MOST_FOLLOWED

    run_virtual(main())


def test_who_does_not_answer_twice_is_not_reached_until_it_does() -> None:
    peers, changes = Silent(), []
    peers.silent = {"n3:1"}

    async def main() -> None:
        clock = SimClock()
        reach = Reach("n2", peers=peers, clock=clock, cluster=gang, changed=lambda: changes.append(1))
        began = clock.wall()
        await reach.look()
        assert reach.unreachable == {}, "one datagram may be lost"
        await reach.look()
        assert reach.unreachable == {UID: {"n3": pytest.approx(began - 1, abs=0.01)}}
        same = reach.unreachable
        await reach.look()
        assert reach.unreachable is same
        peers.silent.clear()
        await reach.look()
        assert reach.unreachable == {}

    run_virtual(main())
    assert len(changes) == 2


def test_failsafe_members_outside_the_gang_are_asked_in_turn_by_the_first_member() -> None:
    """One that did not answer took all failsafe time from its jobs, and nobody knew before the store went away."""
    peers = Silent()
    peers.silent = {"n4:1"}
    whole = gang(5)
    job = make_job("running", make_generation(["n1", "n2"]), failsafe_members=["n1", "n2", "n3", "n4"])
    cluster = replace(whole, jobs={UID: job})

    async def main() -> None:
        first, other = (
            Reach(name, peers=peers, clock=SimClock(), cluster=lambda: cluster, changed=lambda: None)
            for name in ("n1", "n2")
        )
        await other.look()
        assert [address for address, _ in peers.questions] == ["n1:1"]
        for _ in range(3):
            await first.look()
        assert list(first.unreachable[UID]) == ["n4"]
        assert {address for address, _ in peers.questions} == {"n1:1", "n2:1", "n3:1", "n4:1"}

    run_virtual(main())


def test_a_node_that_is_gone_is_not_asked() -> None:
    peers = Silent()

    async def main() -> None:
        cluster = gang(lapsed=("n3",))
        reach = Reach("n2", peers=peers, clock=SimClock(), cluster=lambda: cluster, changed=lambda: None)
        await reach.look()

    run_virtual(main())
    assert sorted({address for address, _ in peers.questions}) == ["n1:1", "n4:1"]


def test_the_question_never_makes_a_failsafe_member_lend() -> None:
    peers = Silent()

    async def main() -> None:
        reach = Reach("n2", peers=peers, clock=SimClock(), cluster=gang, changed=lambda: None)
        await reach.look()

    run_virtual(main())
    (job,) = gang().jobs.values()
    assert job.generation is not None and peers.questions
    lives = {node: member.life for node, member in job.generation.members.items()}
    for address, question in peers.questions:
        node = address.removesuffix(":1")
        row = LoanRow((job.generation.token.number, job.generation.token.id), job.failsafe_members, lives)
        known = Table("b", node, lives[node], False, {UID: row})
        right = question._replace(failsafe_members=job.failsafe_members, to=node, to_life=lives[node])
        assert not answer(known, question, 60.0, 0.75).yes
        assert answer(known, right, 60.0, 0.75).yes == (node in job.failsafe_members)

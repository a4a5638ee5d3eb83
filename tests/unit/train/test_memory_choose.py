"""Which snapshot a new generation goes on from."""

from __future__ import annotations

from nodeagent.train.memory import SnapshotOffer, choose


def kept(
    rank: int, step: int, *, generation: int = 5, world: int = 2, replicated: bool = False, half: int = 0
) -> SnapshotOffer:
    return SnapshotOffer(rank, half, generation, step, rank, world, replicated)


def test_the_newest_step_that_every_rank_has() -> None:
    n1 = [kept(0, 100), kept(0, 90, half=1)]
    n2 = [kept(1, 90), kept(1, 80, half=1)]  # killed before step 100 was whole
    choice = choose([n1, n2])
    assert choice is not None
    assert (choice.step, choice.local) == (90, {0: n1[1], 1: n2[0]})


def test_ranks_of_one_node_may_change_places_in_it() -> None:
    node = [kept(0, 90), kept(1, 90)]
    choice = choose([node, node])
    assert choice is not None
    assert choice.local == {0: node[0], 1: node[1]}


def test_a_rank_whose_state_is_its_own_cannot_have_anothers() -> None:
    assert choose([[kept(0, 90)], []]) is None


def test_nor_can_a_gang_of_another_size() -> None:
    node = [kept(0, 90), kept(1, 90)]
    assert choose([node]) is None


def test_a_state_that_is_the_same_everywhere_serves_each_rank_that_lacks_it() -> None:
    n1 = [kept(1, 90, replicated=True), kept(1, 100, replicated=True, half=1)]
    choice = choose([[], n1, []])
    assert choice is not None
    assert (choice.step, choice.giver, choice.local) == (100, 1, {1: n1[1]})


def test_a_newer_generation_goes_before_a_higher_step() -> None:
    stale = [kept(0, 300, generation=6, replicated=True)]
    fresh = [kept(1, 250, generation=7, replicated=True)]
    choice = choose([stale, fresh])
    assert choice is not None
    assert (choice.generation, choice.step, choice.giver) == (7, 250, 1)


def test_nothing_older_than_what_is_on_disk() -> None:
    node = [kept(0, 90, world=1)]
    assert choose([node], since=(5, 91)) is None
    assert choose([node], since=(6, 10)) is None
    assert choose([node], since=(5, 90)) is not None


def test_nothing_is_kept() -> None:
    assert choose([[], []]) is None

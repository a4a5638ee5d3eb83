"""Each sample of a pass is used exactly once, whatever the sizes; shares and weights add up to the global mean."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.train.batches import Plan, scale_with_world, shuffled

lengths = st.integers(1, 300)
batches = st.integers(1, 70)
worlds = st.integers(1, 9)
micros = st.none() | st.integers(1, 9)


@given(lengths, st.integers(0, 99), st.integers(0, 5))
def test_an_order_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(p, length, seed, epoch) for p in range(length)) == list(range(length))


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert [shuffled(p, 1437, 0, 0) for p in range(6)] == [964, 252, 644, 1263, 189, 923]
    assert [shuffled(p, 10**10, 7, 3) for p in range(3)] == [7101414774, 3913163464, 9304448954]


def test_orders_of_seeds_and_passes_differ_and_no_place_is_preferred() -> None:
    orders = {tuple(shuffled(p, 50, seed, epoch) for p in range(50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    drawn = Counter(shuffled(7, 50, seed, 0) for seed in range(5000))  # 100 each, give or take 10
    assert len(drawn) == 50
    assert 60 < min(drawn.values()) <= max(drawn.values()) < 140
    small = {tuple(shuffled(p, 4, seed, 0) for p in range(4)) for seed in range(400)}
    assert len(small) == 24, "every order of four comes up"


def test_a_position_outside_the_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="it must be 0 to 9"):
        shuffled(10, 10, 0, 0)


@given(lengths, batches, st.integers(0, 9), micros, st.lists(st.tuples(batches, worlds, st.booleans()), max_size=12))
def test_each_sample_of_a_pass_is_used_once_through_faults_and_changes_of_size(
    length: int, global_batch: int, seed: int, micro: int | None, events: list[tuple[int, int, bool]]
) -> None:
    """Any step may be of another world and of another batch size, and may be lost before its checkpoint."""
    used: Counter[int] = Counter()
    consumed = 0
    while consumed < length:
        size, world, lost = events.pop() if events else (global_batch, 2, False)
        plan = Plan(length, size, seed)
        batch = plan.batch(consumed)
        shares = [plan.share(batch, rank, world, micro) for rank in range(world)]
        if not lost:
            used.update(i for share in shares for m in share if m.used for i in m.indices)
            consumed = batch.after
    assert used == Counter(range(length))
    assert consumed == length, "no batch reaches into the next pass"


@given(lengths, batches, worlds, micros, st.integers(0, 2000))
def test_the_shares_of_any_world_are_the_same_global_batch_in_the_same_order(
    length: int, global_batch: int, world: int, micro: int | None, consumed: int
) -> None:
    plan = Plan(length, global_batch, seed=3)
    batch = plan.batch(consumed)
    shares = [plan.share(batch, rank, world, micro) for rank in range(world)]
    assert tuple(i for share in shares for m in share if m.used for i in m.indices) == plan.indices(batch)
    assert len({len(share) for share in shares}) == 1, "collectives in forward and backward meet"
    loads = [sum(len(m.indices) for m in share if m.used) for share in shares]
    assert max(loads) - min(loads) <= 1
    for share in shares:
        assert [m.last for m in share] == [False] * (len(share) - 1) + [True]
        assert all(m.indices for m in share)
        assert micro is None or all(len(m.indices) <= micro for m in share)


@given(lengths, batches, worlds, micros, st.integers(0, 2000))
def test_weights_make_the_mean_over_the_global_batch(
    length: int, global_batch: int, world: int, micro: int | None, consumed: int
) -> None:
    """What DDP does with gradients, in whole numbers: summed over micro-batches, averaged over ranks."""
    plan = Plan(length, global_batch, seed=3)
    batch = plan.batch(consumed)
    by_mean = by_sum = Fraction(0)
    for rank in range(world):
        for m in plan.share(batch, rank, world, micro):
            total = sum((i + 1) ** 2 for i in m.indices)
            by_mean += Fraction(m.weight) * Fraction(total, len(m.indices)) / world
            by_sum += Fraction(m.of_sum) * total / world
    mean = Fraction(sum((i + 1) ** 2 for i in plan.indices(batch)), batch.size)
    assert float(by_mean) == pytest.approx(float(mean), rel=1e-12)
    assert float(by_sum) == pytest.approx(float(mean), rel=1e-12)


@given(lengths, batches, st.integers(0, 500))
def test_steps_and_samples_tell_the_same_place(length: int, global_batch: int, steps: int) -> None:
    plan = Plan(length, global_batch)
    consumed = 0
    for _ in range(steps % 60):
        consumed = plan.batch(consumed).after
    assert plan.consumed_at(steps % 60) == consumed
    assert plan.batch(plan.consumed_at(steps)).epoch == steps // plan.steps_per_pass


def test_a_ragged_last_batch_is_shared_and_weighted_like_any_other() -> None:
    plan = Plan(length=10, global_batch=4, shuffle=False)
    sizes = [plan.batch(consumed).size for consumed in (0, 4, 8, 10)]
    assert sizes == [4, 4, 2, 4]
    last = plan.batch(8)
    assert [[m.indices for m in plan.share(last, rank, 3)] for rank in range(3)] == [[(8,)], [(8,)], [(9,)]]
    assert [plan.share(last, rank, 3)[0].used for rank in range(3)] == [False, True, True]
    assert [plan.share(last, rank, 3)[0].weight for rank in range(3)] == [0.0, 1.5, 1.5]


def test_the_batch_stays_and_accumulation_follows_the_world() -> None:
    plan = Plan(length=1000, global_batch=96)
    counts = {world: len(plan.share(plan.batch(0), 0, world, micro_batch=16)) for world in (1, 2, 3, 6, 7)}
    assert counts == {1: 6, 2: 3, 3: 2, 6: 1, 7: 1}


def test_scripts_may_scale_batch_and_learning_rate_instead() -> None:
    sizes = [scale_with_world(96, 4, world).global_batch for world in (1, 2, 3, 4, 8)]
    assert sizes == [24, 48, 72, 96, 192]
    assert scale_with_world(96, 4, 8).lr_factor == 2.0
    assert scale_with_world(96, 4, 1, "sqrt").lr_factor == 0.5
    assert scale_with_world(3, 8, 1).global_batch == 1
    ratios = [scale_with_world(100, 3, world).lr_factor for world in range(1, 9)]
    assert all(a < b for a, b in pairwise(ratios))
    assert scale_with_world(100, 3, 1).lr_factor == 0.33, "of the batch that it really is"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Plan(0, 4), "length is 0, it must be 1 or more"),
        (lambda: Plan(4, 0), "global_batch is 0"),
        (lambda: Plan(4, 4).batch(-1), "consumed is -1"),
        (lambda: Plan(4, 4).share(Plan(4, 4).batch(0), 2, 2), "rank is 2, it must be 0 to 1"),
        (lambda: Plan(4, 4).share(Plan(4, 4).batch(0), 0, 2, 0), "micro_batch is 0"),
    ],
)
def test_what_cannot_be_is_refused(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=words):
        call()

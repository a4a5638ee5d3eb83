"""Exact batches through a real DataLoader, and the gradients of real DDP arithmetic."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from nodeagent.train.batches import Plan
from nodeagent.train.sampler import ExactData

LENGTH = 50


def test_the_sampler_says_how_many_lists_are_left() -> None:
    for consumed in (0, 7, 41, 49, 50):
        for micro in (None, 1, 3):
            for world in (1, 3, 8):
                data = ExactData(LENGTH, 9, rank=0, world=world, micro_batch=micro, consumed=consumed)
                assert len(data.sampler) == len(list(data.sampler))


def test_the_position_is_what_was_used_and_a_pass_ends_with_the_data() -> None:
    data = ExactData(LENGTH, 20, rank=1, world=2, micro_batch=5)
    places = []
    for step in data.steps(data.sampler):
        before = data.consumed
        for micro, indices in step:
            assert list(micro.indices) == indices
            places.append((before, data.consumed, micro.last))
    assert [p for p in places if p[2]] == [(0, 20, True), (20, 40, True), (40, 50, True)]
    assert all(before == now for before, now, last in places if not last), "a step that was begun does not count"
    assert data.epoch == 1


def test_a_state_goes_on_at_another_size_and_batch() -> None:
    data = ExactData(LENGTH, 20, rank=1, world=2, seed=3)
    for step in islice(data.steps(data.sampler), 2):
        list(step)
    assert data.state_dict() == {"consumed": 40, "step": 2, "length": LENGTH, "seed": 3, "shuffle": True}
    used = {i for start in (0, 20) for i in data.plan.indices(data.plan.batch(start))}
    left: set[int] = set()
    for rank in range(3):
        other = ExactData(LENGTH, 5, rank=rank, world=3, seed=3)
        other.load_state_dict(data.state_dict())
        for step in other.steps(other.sampler):
            left |= {i for micro, indices in step for i in indices if micro.used}
        assert (other.consumed, other.step) == (LENGTH, 4)
    assert (used & left, used | left) == (set(), set(range(LENGTH)))


def test_a_state_of_other_data_is_refused() -> None:
    saved = ExactData(LENGTH, 20, rank=0, world=1).state_dict()
    for changed, name in (
        (ExactData(LENGTH + 1, 20, rank=0, world=1), "length=50"),
        (ExactData(LENGTH, 20, rank=0, world=1, seed=1), "seed=0"),
        (ExactData(LENGTH, 20, rank=0, world=1, shuffle=False), "shuffle=True"),
    ):
        with pytest.raises(ValueError, match=f"one with {name}.*used twice"):
            changed.load_state_dict(saved)


def test_steps_are_counted_over_passes() -> None:
    data = ExactData(LENGTH, 20, rank=0, world=1, consumed=40)
    counted = [data.step]
    while data.epoch < 2:
        for step in data.steps(data.sampler):
            list(step)
            counted.append(data.step)
    assert counted == [2, 3, 4, 5, 6]


def test_a_loader_that_was_not_made_with_the_sampler_is_found_out() -> None:
    data = ExactData(LENGTH, 20, rank=0, world=1, micro_batch=5)
    with pytest.raises(RuntimeError, match=r"batch_sampler=data\.sampler"):
        for step in data.steps([[0], [1]]):
            list(step)


@pytest.mark.torch
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_fetched_ahead_is_fetched_again(workers: int) -> None:
    torch_data: Any = pytest.importorskip("torch.utils.data")
    used: Counter[int] = Counter()
    consumed = 0
    for world in (2, 3, 1):
        after = consumed
        for rank in range(world):
            data = ExactData(LENGTH, 9, rank=rank, world=world, micro_batch=2, seed=1, consumed=consumed)
            options = {"prefetch_factor": 4} if workers else {}
            loader = torch_data.DataLoader(range(LENGTH), batch_sampler=data.sampler, num_workers=workers, **options)
            for step in islice(data.steps(loader), 2):
                for micro, items in step:
                    assert items.tolist() == list(micro.indices)
                    used.update(items.tolist() if micro.used else [])
            after = data.consumed
        consumed = after
    assert consumed == LENGTH
    assert used == Counter(range(LENGTH))


@pytest.mark.torch
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_accumulated_and_averaged_gradients_are_those_of_the_whole_batch(world: int) -> None:
    torch: Any = pytest.importorskip("torch")
    torch.manual_seed(0)
    x, y = torch.randn(LENGTH, 4, dtype=torch.float64), torch.randn(LENGTH, dtype=torch.float64)
    weights = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for consumed in (0, 45):  # the last batch has 5 samples: fewer than the biggest world
        averaged = torch.zeros(4, dtype=torch.float64)
        for rank in range(world):
            data = ExactData(LENGTH, 15, rank=rank, world=world, micro_batch=2, consumed=consumed)
            weights.grad = None
            for micro, indices in next(data.steps(data.sampler)):
                (((x[indices] @ weights - y[indices]) ** 2).mean() * micro.weight).backward()
            averaged += weights.grad / world
        plan = Plan(LENGTH, 15)
        whole = list(plan.indices(plan.batch(consumed)))
        weights.grad = None
        ((x[whole] @ weights - y[whole]) ** 2).mean().backward()
        assert torch.allclose(averaged, weights.grad, rtol=1e-12, atol=0)

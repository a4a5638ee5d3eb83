"""Exact batches through a DataLoader: a batch sampler, and the steps that go with what the loader hands out.

Standard library only: a DataLoader takes anything iterable. The position counts what was *used*: what the loader's
workers have fetched ahead is fetched again after a restart. Must hold no state but ``consumed`` and ``step``.

    data = ExactData(len(dataset), global_batch=1024, micro_batch=64, rank=rank, world=world, seed=0)
    loader = DataLoader(dataset, batch_sampler=data.sampler, num_workers=4)
    state = {"model": model, "optimizer": optimizer, "data": data}
    resume(state, checkpoints)
    for epoch in range(data.epoch, epochs):
        for batch in data.steps(loader):
            for micro, (x, y) in batch:
                with contextlib.nullcontext() if micro.last else ddp.no_sync():
                    (cross_entropy(ddp(x), y) * micro.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            snapshot(state, data.step, replicated=True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from nodeagent.train.batches import Batch, Micro, Plan

T = TypeVar("T")


class ExactData:
    """This rank's part of each global batch."""

    def __init__(
        self,
        length: int,
        global_batch: int,
        *,
        rank: int,
        world: int,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        consumed: int = 0,
    ) -> None:
        self.plan = Plan(length, global_batch, seed, shuffle)
        self.rank, self.world, self.micro_batch = rank, world, micro_batch
        self.consumed = consumed
        """Samples used since training began, over all ranks."""
        self.step = 0
        """Steps begun since training began: the number of a snapshot or checkpoint that is taken after the step."""
        self.sampler = ExactBatchSampler(self)

    def state_dict(self) -> dict[str, int]:
        """Where training is; the same on all ranks, for any number of them."""
        return {"consumed": self.consumed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there; before the loader is iterated. Raises KeyError for another one's state."""
        self.consumed, self.step = state["consumed"], state["step"]

    @property
    def epoch(self) -> int:
        """The pass that the next step belongs to."""
        return self.plan.batch(self.consumed).epoch

    def rest_of_pass(self) -> Iterator[tuple[Batch, tuple[Micro, ...]]]:
        """The batches from here to the end of the pass, with this rank's share."""
        at, epoch = self.consumed, self.epoch
        while (batch := self.plan.batch(at)).epoch == epoch:
            yield batch, self.plan.share(batch, self.rank, self.world, self.micro_batch)
            at = batch.after

    def steps(self, loader: Iterable[T]) -> Iterator[Step[T]]:
        """The steps from here to the end of the pass, with what ``loader`` makes of ``sampler``."""
        items = iter(loader)
        for batch, share in self.rest_of_pass():
            yield Step(self, batch, share, items)


class Step(Generic[T]):
    """One step: iterate over it, once, for its micro-batches and their data."""

    def __init__(self, data: ExactData, batch: Batch, share: tuple[Micro, ...], items: Iterator[T]) -> None:
        self.batch, self.share = batch, share
        self._data, self._items = data, items

    def __iter__(self) -> Iterator[tuple[Micro, T]]:
        for micro in self.share:
            item = next(self._items, None)
            if item is None:
                raise RuntimeError("the loader ended before the pass: was it made with batch_sampler=data.sampler?")
            if micro.last:
                self._data.consumed = self.batch.after
                self._data.step += 1
            yield micro, item


class ExactBatchSampler:
    """For ``DataLoader(batch_sampler=...)``: the index lists of this rank's micro-batches to the end of the pass."""

    def __init__(self, data: ExactData) -> None:
        self._data = data

    def __iter__(self) -> Iterator[list[int]]:
        for _, share in self._data.rest_of_pass():
            for micro in share:
                yield list(micro.indices)

    def __len__(self) -> int:
        data = self._data
        start, total = data.consumed % data.plan.length, 0
        full, ragged = divmod(data.plan.length - start, data.plan.global_batch)
        for count, size in ((full, data.plan.global_batch), (1 if ragged else 0, ragged)):
            biggest = -(-size // data.world)
            total += count * (1 if data.micro_batch is None else -(-biggest // data.micro_batch))
        return total

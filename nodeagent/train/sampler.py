"""Exact batches through a DataLoader: a batch sampler, and the steps that match the loader's output.

Standard library only: a DataLoader takes any iterable. The position counts samples that were *used*: samples that the
loader's workers have fetched ahead are fetched again after a restart. Must hold no state but the position.

    data = ExactData(len(dataset), global_batch=1024, micro_batch=64, rank=rank, world=world, seed=0)
    loader = DataLoader(dataset, batch_sampler=data.sampler, num_workers=4)
    data.load_state_dict(checkpoint["data"])  # before the loader is iterated
    while data.epoch < epochs:
        for step in data.steps(loader):
            for micro, (x, y) in step:
                with contextlib.nullcontext() if micro.last else ddp.no_sync():
                    (cross_entropy(ddp(x), y) * micro.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            # data.step steps are done; data.state_dict() belongs into the checkpoint
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

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
        self.step = self.plan.steps_to(consumed)
        """Steps done since training began; a step counts once its last micro-batch was handed out."""
        self.sampler = ExactBatchSampler(self)

    @property
    def epoch(self) -> int:
        """The pass that the next step belongs to."""
        return self.plan.batch(self.consumed).epoch

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks, and the data and order that it refers to. Take it between steps."""
        return {"consumed": self.consumed, "step": self.step} | self._order()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this position, with any number of ranks and any batch. Raises ValueError if it refers to other
        data or another order: samples would be used twice, and others never."""
        for name, mine in self._order().items():
            if state[name] != mine:
                raise ValueError(
                    f"the saved position is one with {name}={state[name]}, this training has {name}={mine}: samples "
                    f"would be used twice; keep {name} as it was, or start anew without the saved position"
                )
        self.consumed, self.step = state["consumed"], state["step"]

    def _order(self) -> dict[str, Any]:
        return {"length": self.plan.length, "seed": self.plan.seed, "shuffle": self.plan.shuffle}

    def rest_of_pass(self) -> Iterator[tuple[Batch, tuple[Micro, ...]]]:
        """The remaining batches of the pass, with this rank's share."""
        at, epoch = self.consumed, self.epoch
        while (batch := self.plan.batch(at)).epoch == epoch:
            yield batch, self.plan.share(batch, self.rank, self.world, self.micro_batch)
            at = batch.after

    def steps(self, loader: Iterable[T]) -> Iterator[SampledStep[T]]:
        """The remaining steps of the pass, with the data that ``loader`` makes of ``sampler``."""
        items = iter(loader)
        for batch, share in self.rest_of_pass():
            yield SampledStep(self, batch, share, items)


class SampledStep(Generic[T]):
    """One step: iterate over it, once, to get its micro-batches and their data."""

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

"""Exact data: which samples a step uses, and how they are divided among processes, computed from numbers alone.

Pure and standard library only. The whole state of a pass is one number, ``consumed``: the samples used since training
began. Only ``share`` may depend on the number of processes, and it only divides a batch that was chosen without it. So
a checkpoint holds that one number, and after any faults and changes of size each sample of a pass is used exactly once,
in the same global batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

_U64 = (1 << 64) - 1
_ROUNDS = 8
_SMALLEST = 6
"""In bits: with fewer bits, a small data set could have too few different orders."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One global batch: the samples that one step uses in all processes together."""

    epoch: int
    start: int
    """Position of its first sample in the pass."""
    size: int
    """The last batch of a pass may be smaller than the others; no batch reaches into the next pass."""
    after: int
    """``consumed`` after this batch was used."""


@dataclass(frozen=True, slots=True)
class Micro:
    """The samples that one process computes at once."""

    indices: tuple[int, ...]
    """Never empty: each process has to take part in each collective."""
    weight: float
    """Multiply the mean loss over ``indices`` by this before ``backward()``. The gradients, summed over the process's
    micro-batches and averaged over the processes (DDP, FSDP), are then the gradients of the mean over the global
    batch."""
    of_sum: float
    """The factor for the sum of the losses, in place of their mean."""
    used: bool = True
    """False: a filler of weight 0, for a process that has no sample in a small batch. It has no effect on the
    gradients."""
    last: bool = False
    """The last one of its step: gradients are exchanged after it (``no_sync()`` for the others), and then the optimizer
    steps."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A data set of ``length`` samples, used in global batches of ``global_batch``. Must be the same on all ranks."""

    length: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("length", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be 1 or more")

    @property
    def steps_per_pass(self) -> int:
        return -(-self.length // self.global_batch)

    def consumed_at(self, step: int) -> int:
        """``consumed`` after this many steps from the beginning, all of them with this plan."""
        epoch, batch = divmod(step, self.steps_per_pass)
        return epoch * self.length + batch * self.global_batch

    def steps_to(self, consumed: int) -> int:
        """The steps that it takes to use this many samples, all of them with this plan."""
        epoch, start = divmod(consumed, self.length)
        return epoch * self.steps_per_pass + -(-start // self.global_batch)

    def batch(self, consumed: int) -> Batch:
        """The next batch. ``consumed`` may be any number: earlier batches may have had another size."""
        if consumed < 0:
            raise ValueError(f"consumed is {consumed}, it must be 0 or more")
        epoch, start = divmod(consumed, self.length)
        size = min(self.global_batch, self.length - start)
        return Batch(epoch, start, size, consumed + size)

    def indices(self, batch: Batch) -> tuple[int, ...]:
        """The data set's indices of a whole batch, in order."""
        return self._sliced(batch, 0, batch.size)

    def share(self, batch: Batch, rank: int, world: int, micro_batch: int | None = None) -> tuple[Micro, ...]:
        """This rank's part of the batch, at most ``micro_batch`` samples at once (None: all).

        Parts differ by at most one sample. Every rank gets the same number of micro-batches, so that collectives in
        forward or backward (FSDP) match; therefore some may be fillers.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank is {rank}, it must be 0 to {world - 1}")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch is {micro_batch}, it must be 1 or more")
        biggest = -(-batch.size // world)
        count = 1 if micro_batch is None else -(-biggest // micro_batch)
        low, high = batch.size * rank // world, batch.size * (rank + 1) // world
        of_sum = world / batch.size
        parts = []
        for n in range(count):
            begin, end = (low + (high - low) * (n + i) // count for i in (0, 1))
            used = end > begin
            indices = self._sliced(batch, begin, end) if used else self._sliced(batch, 0, 1)
            parts.append(
                Micro(indices, of_sum * (end - begin), of_sum if used else 0.0, used=used, last=n == count - 1)
            )
        return tuple(parts)

    def _sliced(self, batch: Batch, begin: int, end: int) -> tuple[int, ...]:
        positions = range(batch.start + begin, batch.start + end)
        if not self.shuffle:
            return tuple(positions)
        return tuple(shuffled(p, self.length, self.seed, batch.epoch) for p in positions)


def shuffled(position: int, length: int, seed: int, epoch: int) -> int:
    """The index at a position of a pass: a permutation of ``range(length)`` for each seed and epoch.

    A keyed Feistel network over the next power of two, applied until the value is in range. It needs no list, so a pass
    over 10^10 samples costs no memory and can start anywhere. The result is the same on every machine and in every
    version of Python.
    """
    if not 0 <= position < length:
        raise ValueError(f"position is {position}, it must be 0 to {length - 1}")  # the walk might never end
    bits = max(_SMALLEST, (length - 1).bit_length())
    low = bits - bits // 2
    rounds = _rounds(seed, epoch, bits // 2, low)
    value = position
    while True:
        left, right = value >> low, value & ((1 << low) - 1)
        for key, drop in rounds:  # the halves and their widths change places, an even number of times
            mixed = (right + 1) * key & _U64
            left, right = right, left ^ ((mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _U64) >> drop
        value = left << low | right
        if value < length:
            return value


@lru_cache(maxsize=8)
def _rounds(seed: int, epoch: int, high: int, low: int) -> tuple[tuple[int, int], ...]:
    """A key for each round, and the shift of its 64 bits down to the width of the half that it changes."""
    digest = blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = (int.from_bytes(digest[i : i + 8], "big") | 1 for i in range(0, len(digest), 8))
    return tuple((key, 64 - (low if n % 2 else high)) for n, key in enumerate(keys))


@dataclass(frozen=True, slots=True)
class Scaled:
    """Batch and learning rate for another number of processes."""

    global_batch: int
    lr_factor: float
    """Multiply the reference's learning rate by this."""


def scale_with_world(
    global_batch: int, reference_world: int, world: int, rule: Literal["linear", "sqrt"] = "linear"
) -> Scaled:
    """For scripts that keep the samples per process constant, not the global batch: ``global_batch`` was chosen for
    ``reference_world`` processes. The losses then depend on the sizes that the job had; each sample is still used once.
    """
    batch = max(1, round(global_batch * world / reference_world))
    ratio = batch / global_batch
    return Scaled(batch, ratio if rule == "linear" else ratio**0.5)

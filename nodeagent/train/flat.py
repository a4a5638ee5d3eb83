"""Converts a training's state into one run of bytes and a small rest, and back.

The tensors' bytes follow one another, aligned; one pickle holds everything else and names the tensors. Must never be
given a pickle that another user could have written.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

ALIGN = 64

State = MutableMapping[str, Any]
"""Names to parts of the state: modules, optimizers, any object with ``state_dict`` and ``load_state_dict``; or
values."""


class TensorPlace(NamedTuple):
    """Where a tensor's bytes are stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class Flat(NamedTuple):
    """A state in parts; the tensors are still the state's own."""

    rest: bytes
    tensors: list[torch.Tensor]
    places: list[TensorPlace]
    data_bytes: int


def take_apart(state: Mapping[str, Any]) -> Flat:
    """Raises TypeError for a tensor that is not plain memory."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump({name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in state.items()})
    return Flat(out.getvalue(), pickler.tensors, pickler.places, pickler.end)


def put_together(rest: bytes, data: torch.Tensor) -> dict[str, Any]:
    """The inverse of ``take_apart``; every tensor is a copy, on the CPU."""
    found: dict[str, Any] = _Unpickler(io.BytesIO(rest), data).load()
    return found


def put_back(state: State, found: Mapping[str, Any]) -> None:
    """Load the stored parts into the state. Raises KeyError if a part is missing."""
    missing = sorted(set(state) - set(found))
    if missing:
        raise KeyError(f"the snapshot has no {', '.join(missing)}: it was taken of another state")
    for name, value in list(state.items()):
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(found[name])
        elif isinstance(value, torch.Tensor):
            state[name] = found[name].to(value.device)
        else:
            state[name] = found[name]


def cut(data: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    """The tensor at this place of the bytes (uint8), sharing their memory."""
    size = _bytes(place)
    return data[place.begin : place.begin + size].view(place.dtype).view(place.shape)


def total(data: torch.Tensor) -> int:
    """The sum of the bytes (a multiple of 8) as 64-bit words: one changed bit changes the sum. As fast as memory."""
    return int(data.view(torch.int64).sum()) % (1 << 64)


def copy_into(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy the tensors from any device; the copies are complete when this returns."""
    for target, source in zip(views, tensors, strict=True):
        target.copy_(source)


def _bytes(place: TensorPlace) -> int:
    return math.prod(place.shape) * int(place.dtype.itemsize)


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.places: list[TensorPlace] = []
        self.end = 0

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout != torch.strided or obj.is_quantized:
            raise TypeError(f"a snapshot keeps plain tensors, not a {type(obj).__name__}: give it the local part of it")
        tensor = obj.detach()
        place = TensorPlace(tensor.dtype, tuple(tensor.shape), self.end)
        self.tensors.append(tensor)
        self.places.append(place)
        self.end += -(-_bytes(place) // ALIGN) * ALIGN
        return tuple(place)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, data: torch.Tensor) -> None:
        super().__init__(file)
        self._data = data

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return cut(self._data, TensorPlace(*pid)).clone()

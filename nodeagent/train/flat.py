"""Converts a training's state into one run of bytes and a small rest, and back.

The tensors' bytes follow one another, aligned; one pickle holds everything else and names the tensors. Of a DTensor the
local part is kept, and its layout: it becomes a DTensor again on a mesh of the state that it is put back into. Must
never be given a pickle that another user could have written.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

ALIGN = 64

TrainingState = MutableMapping[str, Any]
"""Names to parts of the state: modules, optimizers, any object with ``state_dict`` and ``load_state_dict``; or
values."""


class TensorPlace(NamedTuple):
    """Where a tensor's bytes are stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class TensorLayout(NamedTuple):
    """How a DTensor lies on the ranks."""

    mesh: tuple[Any, ...]
    """See ``_named``."""
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    """Of the whole tensor, as ``stride`` is."""
    stride: tuple[int, ...]


class UnfitStateError(TypeError):
    """No snapshot of such a state can be kept, at no step: the script has to give another one."""


class Flat(NamedTuple):
    """A state in parts; the tensors are still the state's own."""

    rest: bytes
    tensors: list[torch.Tensor]
    places: list[TensorPlace]
    data_bytes: int
    sharded: bool
    """It has DTensors: each rank has its own part."""


def take_apart(state: Mapping[str, Any]) -> Flat:
    """Raises UnfitStateError for a tensor that is not plain memory."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump({name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in state.items()})
    return Flat(out.getvalue(), pickler.tensors, pickler.places, pickler.end, bool(pickler.meshes))


def put_together(rest: bytes, data: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``take_apart``; every tensor is a copy, on the CPU. ``state``: what it is to be put back into.
    Raises ValueError if that has no device mesh like the one of a stored DTensor."""
    found: dict[str, Any] = _Unpickler(io.BytesIO(rest), data, state).load()
    return found


def put_back(state: TrainingState, found: Mapping[str, Any]) -> None:
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
        self.meshes: dict[tuple[Any, ...], Any] = {}
        """Those of the DTensors, by ``_named``."""
        self.end = 0

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if not _is_dtensor(obj):
            return tuple(self._place(obj))
        whole: Any = obj.detach()
        layout = TensorLayout(_named(whole.device_mesh), whole.placements, tuple(whole.shape), tuple(whole.stride()))
        self.meshes[layout.mesh] = whole.device_mesh
        return (*self._place(whole.to_local()), *layout)

    def _place(self, obj: torch.Tensor) -> TensorPlace:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout != torch.strided or obj.is_quantized:
            raise UnfitStateError(f"a snapshot keeps plain tensors and DTensors, not a {type(obj).__name__}")
        tensor = obj.detach()
        place = TensorPlace(tensor.dtype, tuple(tensor.shape), self.end)
        self.tensors.append(tensor)
        self.places.append(place)
        self.end += -(-_bytes(place) // ALIGN) * ALIGN
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, data: torch.Tensor, state: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._data, self._state = data, state
        self._meshes: dict[tuple[Any, ...], Any] | None = None

    def persistent_load(self, pid: Any) -> torch.Tensor:
        place, layout = TensorPlace(*pid[: len(TensorPlace._fields)]), pid[len(TensorPlace._fields) :]
        tensor = cut(self._data, place)
        return self._whole(tensor, TensorLayout(*layout)) if layout else tensor.clone()

    def _whole(self, local: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        if self._meshes is None:
            self._meshes = _meshes_of(self._state)
        if layout.mesh not in self._meshes:
            raise ValueError(f"the snapshot has tensors on {layout.mesh}, and the state has no such device mesh")
        mesh = self._meshes[layout.mesh]
        # made without memory first: from_local would move all of it to the mesh's device at once
        empty = DTensor.from_local(
            local.to("meta"), mesh, layout.placements, run_check=False,
            shape=torch.Size(layout.shape), stride=layout.stride,
        )  # fmt: skip
        whole: Any = torch.empty_like(empty, device=local.device)
        whole.to_local().copy_(local)
        made: torch.Tensor = whole
        return made


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """Without an import, which takes seconds: where there is a DTensor, its module is loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _named(mesh: Any) -> tuple[Any, ...]:
    """A device mesh as plain values: one of a later process that has the same is the same."""
    ranks = mesh.mesh
    return mesh.device_type, tuple(ranks.shape), tuple(ranks.flatten().tolist()), tuple(mesh.mesh_dim_names or ())


def _meshes_of(state: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
    """By ``_named``. An optimizer that has made no step yet has them in its parameters alone."""
    pickler = _Pickler(io.BytesIO())
    for value in state.values():
        pickler.dump(value.state_dict() if hasattr(value, "state_dict") else value)
        pickler.dump(getattr(value, "param_groups", None))
    return pickler.meshes

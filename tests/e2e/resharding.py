"""Runs the example ``fsdp2`` as it is, and writes down a digest of all weights and moments at each save and load, from
whole tensors: the same in every layout if it holds the same numbers.

``resharding.py FILE EXAMPLE ARGUMENTS``: one JSON line each into FILE, by rank 0.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor


def digest(tree: Mapping[str, Any]) -> str:
    """Of every tensor in it, whole, by name. All ranks must call it."""
    found = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                add(f"{name}.{key}", value[key])
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(name.encode() + whole.detach().cpu().contiguous().numpy().tobytes())

    add("", tree)
    return found.hexdigest()


def main() -> None:
    """Put the notes around what the example calls, and run it."""
    notes, example = Path(sys.argv[1]), sys.argv[2]
    read = ""

    def note(what: str, checkpoint: str, tree: Mapping[str, Any]) -> None:
        row = {"what": what, "checkpoint": checkpoint, "world": dist.get_world_size(), "digest": digest(tree)}
        if dist.get_rank() == 0:
            with notes.open("a") as file:
                file.write(json.dumps(row) + "\n")

    save, load, put = dcp.save, dcp.load, state_dict.set_state_dict

    def saved(tree: Mapping[str, Any], *, checkpoint_id: Path) -> None:
        note("saved", checkpoint_id.name, tree)
        save(dict(tree), checkpoint_id=checkpoint_id)

    def loaded(tree: dict[str, Any], *, checkpoint_id: Path) -> None:
        nonlocal read
        read = checkpoint_id.name
        load(tree, checkpoint_id=checkpoint_id)

    def taken(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **trees: Any) -> None:
        put(model, optimizer, **trees)
        weights, moments = state_dict.get_state_dict(model, optimizer)
        note("loaded", read, {"model": weights, "optimizer": moments})

    dcp.save, dcp.load, state_dict.set_state_dict = saved, loaded, taken
    sys.argv = sys.argv[2:]
    runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    main()

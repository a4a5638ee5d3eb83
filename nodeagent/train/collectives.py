"""Exchanges data between all ranks of a generation, over the script's own process group.

Every function is a collective: each rank must call it. With one rank no function needs a group.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
PIECE = 64 << 20
"""Bytes sent in one message."""


def gather(mine: T, world: int) -> list[T]:
    """The values of all ranks, by rank. Raises RuntimeError before the group exists."""
    if world == 1:
        return [mine]
    if not dist.is_initialized():
        raise RuntimeError("the ranks must agree first: call torch.distributed.init_process_group() before this")
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    return found


def hand_out(giver: int, given: tuple[bytes, torch.Tensor] | None, wanted: bool) -> tuple[bytes, torch.Tensor] | None:
    """Sends the giver's value (None on all others) to the ranks that want it; the other ranks take part and get
    None."""
    shared: list[Any] = [(given[0], len(given[1]))] if given is not None else [None]
    dist.broadcast_object_list(shared, src=giver)
    rest, size = shared[0]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    data = torch.empty(size if wanted else 0, dtype=torch.uint8)
    for begin in range(0, size, PIECE):
        end = min(begin + PIECE, size)
        if given is not None:
            piece = given[1][begin:end].to(device)
        else:
            piece = torch.empty(end - begin, dtype=torch.uint8, device=device)
        dist.broadcast(piece, src=giver)
        if wanted:
            data[begin:end] = piece.cpu()
    return (rest, data) if wanted else None

"""Loads snapshots that were written from memory when a job's nodes were given up (``writeout.py``).

Each file is one rank's snapshot, exactly as it was in memory, its own checksum included. Must never return a snapshot
in which a byte changed, before or after writing.
"""

from __future__ import annotations

import mmap
import os
import zlib
from pathlib import Path

import torch

from nodeagent.train import collectives
from nodeagent.train.flat import State, put_back, put_together, total
from nodeagent.train.folder import damage, part_name, read_manifest
from nodeagent.train.memory import HEADER, Header, header_of

Parts = tuple[bytes, torch.Tensor]
"""The rest of a state and its tensors' bytes, for ``flat.put_together``."""


def read(path: Path, rank: int, world: int) -> Parts:
    """The parts from which this rank of a gang of ``world`` ranks continues. Raises ValueError with the reason if it
    cannot."""
    named = read_manifest(path)
    own = part_name(rank)
    name = own if own in named else min(named, default="")
    problem = damage(path, {name: named[name]}) if name else f"{path} has no part at all"
    if problem:
        raise ValueError(problem)
    with (path / name).open("rb") as file:
        header = header_of(file.fileno())
        if header is None:
            raise ValueError(f"{path / name} is no snapshot that this nodeagent can read")
        if not header.replicated and (header.rank, header.world) != (rank, world):
            raise ValueError(f"{path} has a part of its own for each of {header.world} ranks, and there are {world}")
        # private and copied on write: torch accepts only writable memory
        content = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, access=mmap.ACCESS_COPY)
    return _checked(path / name, content, header)


def _checked(path: Path, content: mmap.mmap, header: Header) -> Parts:
    end = HEADER + header.data_bytes
    rest, body = content[end : end + header.rest_bytes], torch.frombuffer(content, dtype=torch.uint8)[HEADER:end]
    if zlib.crc32(rest) != header.rest_crc or total(body) != header.data_sum:
        raise ValueError(f"{path} was damaged in memory before it was written")
    return rest, body


def load(state: State, path: Path, rank: int, world: int) -> str:
    """Load it into the state, in place. Every rank calls it. Returns the first problem of any rank, or ""."""
    parts, problem = None, ""
    try:
        parts = read(path, rank, world)
    except (OSError, ValueError) as error:
        problem = str(error)
    problem = next(filter(None, collectives.gather(problem, world)), "")
    if parts is not None and not problem:
        put_back(state, put_together(*parts))
    return problem

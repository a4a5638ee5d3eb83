"""Snapshots in shared memory: the form of each one, and the choice of the one from which a new generation continues.

A snapshot is a header, the tensors' bytes and the rest of the state. A header counts only once it is sealed, and
sealing is the last write: the unfinished work of a killed process is never taken for a snapshot.

The choice is the newest snapshot that every rank can get. Newest means the highest generation first, then the highest
step: the newer generation's snapshots are the history that training continued; a later step of an older generation
belongs to an abandoned branch. Standard library only. Must never interpret what is stored.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

HEADER = 4096
"""Bytes before the data: one page."""
_MAGIC = b"NAsnap01"
_FIELDS = struct.Struct("<QQII?QQQI")
_CRC = struct.Struct("<I")


class Header(NamedTuple):
    """The description of a sealed snapshot."""

    generation: int
    step: int
    rank: int
    world: int
    replicated: bool
    """Every rank has the same state, so any rank's copy serves all."""
    data_bytes: int
    rest_bytes: int
    data_sum: int
    rest_crc: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(*self)
        return fields + _CRC.pack(zlib.crc32(fields))


def parse(page: bytes) -> Header | None:
    """The header of a sealed and whole snapshot; None for anything else."""
    if page[: len(_MAGIC)] != _MAGIC:
        return None
    fields = page[len(_MAGIC) : len(_MAGIC) + _FIELDS.size]
    crc = page[len(_MAGIC) + _FIELDS.size :][: _CRC.size]
    if len(crc) < _CRC.size or _CRC.unpack(crc)[0] != zlib.crc32(fields):
        return None
    return Header(*_FIELDS.unpack(fields))


def size_of(data_bytes: int, rest_bytes: int) -> int:
    return HEADER + data_bytes + rest_bytes


class SharedBuffer:
    """One buffer, mapped with all its pages present, so that the first write is as fast as later ones."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    @classmethod
    def of_size(cls, size: int) -> SharedBuffer:
        """A new buffer; it lives as long as some process has its descriptor."""
        fd = os.memfd_create("nodeagent-snapshot", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)  # too little memory is an error here, not a SIGBUS at a later write
            return cls(fd)
        except OSError:
            os.close(fd)
            raise

    def unseal(self) -> None:
        """Marks the buffer as empty."""
        self.map[: len(_MAGIC)] = bytes(len(_MAGIC))

    def put_rest(self, header: Header, rest: bytes) -> None:
        begin = HEADER + header.data_bytes
        self.map[begin : begin + len(rest)] = rest

    def rest(self, header: Header) -> bytes | None:
        """The rest of the state; None if it is not what was sealed."""
        begin = HEADER + header.data_bytes
        found = self.map[begin : begin + header.rest_bytes]
        return found if len(found) == header.rest_bytes and zlib.crc32(found) == header.rest_crc else None

    def seal(self, header: Header) -> None:
        """Marks the written bytes as a snapshot."""
        packed = header.pack()
        self.map[len(_MAGIC) : len(_MAGIC) + len(packed)] = packed
        self.map[: len(_MAGIC)] = _MAGIC

    def close(self) -> None:
        """Close the descriptor; the pages are unmapped when the last tensor in them is gone."""
        os.close(self.fd)


def header_of(fd: int) -> Header | None:
    """The header in a buffer that is not mapped. None: nothing is sealed, or the buffer is shorter than the header
    says."""
    header = parse(os.pread(fd, HEADER, 0))
    if header is None or os.fstat(fd).st_size < size_of(header.data_bytes, header.rest_bytes):
        return None
    return header


class SnapshotOffer(NamedTuple):
    """One sealed snapshot in the memory of some rank's node."""

    slot: int
    """Local rank whose buffers hold it."""
    half: int
    """Which of the two buffers."""
    generation: int
    step: int
    rank: int
    """The rank whose state it is."""
    world: int
    replicated: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The snapshot that all ranks load."""

    generation: int
    step: int
    local: Mapping[int, SnapshotOffer]
    """Rank to the snapshot on its own node that it loads. A rank that is missing here gets it from ``giver``."""
    giver: int
    """The lowest rank that has it."""


def choose(offers: Sequence[Sequence[SnapshotOffer]], since: tuple[int, int] = (0, 0)) -> Choice | None:
    """``offers[r]`` are the snapshots on the node of rank r of the new generation. Snapshots older than ``since``
    (generation, step) do not count. The result is the same on every rank."""
    for generation, step in sorted({(o.generation, o.step) for found in offers for o in found}, reverse=True):
        if (generation, step) < since:
            return None
        here = [[o for o in found if (o.generation, o.step) == (generation, step)] for found in offers]
        own = {rank: mine for rank, found in enumerate(here) if (mine := _own_offer(found, rank, len(offers)))}
        if len(own) == len(offers):
            return Choice(generation, step, own, 0)
        if any(o.replicated for found in here for o in found):
            local = own | {r: _copy(found) for r, found in enumerate(here) if r not in own and _copies(found)}
            return Choice(generation, step, local, min(local))
    return None


def _own_offer(found: Sequence[SnapshotOffer], rank: int, world: int) -> SnapshotOffer | None:
    """The state that this rank itself kept in a gang of the same size."""
    return next((o for o in sorted(found) if o.rank == rank and o.world == world), None)


def _copies(found: Sequence[SnapshotOffer]) -> list[SnapshotOffer]:
    return sorted(o for o in found if o.replicated)


def _copy(found: Sequence[SnapshotOffer]) -> SnapshotOffer:
    return _copies(found)[0]

"""The form of one snapshot in shared memory: a header, the tensors' bytes, the rest of the state.

Standard library only. A header counts only once it is sealed, and sealing is the last write: what a killed process left
half-done is never taken for a snapshot. Must never interpret what is stored.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import NamedTuple

HEADER = 4096
"""Bytes before the data: one page."""
_MAGIC = b"NAsnap01"
_FIELDS = struct.Struct("<QQII?QQQI")
_CRC = struct.Struct("<I")


class Header(NamedTuple):
    """What a sealed snapshot says of itself."""

    generation: int
    step: int
    rank: int
    world: int
    replicated: bool
    """Every rank's state is the same, so any rank's copy serves all."""
    data_bytes: int
    rest_bytes: int
    data_sum: int
    rest_crc: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(*self)
        return fields + _CRC.pack(zlib.crc32(fields))


def parse(page: bytes) -> Header | None:
    """The header of a sealed and whole one; None for anything else."""
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
    """One buffer, mapped with all its pages there: a first write costs no more than a later one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    @classmethod
    def of_size(cls, size: int) -> SharedBuffer:
        """A new one, owned by whoever holds its descriptor."""
        fd = os.memfd_create("nodeagent-snapshot", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)  # too little memory is an error here, not a SIGBUS at some write
            return cls(fd)
        except OSError:
            os.close(fd)
            raise

    def unseal(self) -> None:
        """It holds nothing from now on."""
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
        """What was written is a snapshot."""
        packed = header.pack()
        self.map[len(_MAGIC) : len(_MAGIC) + len(packed)] = packed
        self.map[: len(_MAGIC)] = _MAGIC

    def close(self) -> None:
        """Let go of the descriptor; the pages are unmapped when the last tensor in them is gone."""
        os.close(self.fd)


def header_of(fd: int) -> Header | None:
    """Of a buffer that is not mapped. None: nothing sealed, or it is shorter than it says."""
    header = parse(os.pread(fd, HEADER, 0))
    if header is None or os.fstat(fd).st_size < size_of(header.data_bytes, header.rest_bytes):
        return None
    return header

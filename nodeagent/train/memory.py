"""The form of one snapshot in shared memory: a header, the tensors' bytes, the rest of the state.

Standard library only. A header counts only once it is sealed, and sealing is the last write: the unfinished work of a
killed process is never taken for a snapshot. Must never interpret what is stored.
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

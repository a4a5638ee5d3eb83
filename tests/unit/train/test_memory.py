"""The form of a snapshot in memory: what is not sealed or not whole is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from nodeagent.train.memory import HEADER, Header, SharedBuffer, header_of, parse, size_of

SOME = Header(7, 100, 3, 8, True, 64, 5, 1234567890123456789, 0)


@pytest.fixture
def memory() -> Iterator[SharedBuffer]:
    made = SharedBuffer.of_size(size_of(64, 5) + 100)
    yield made
    made.close()


def sealed(memory: SharedBuffer, rest: bytes = b"hello", **changes: Any) -> Header:
    import zlib

    header = SOME._replace(rest_crc=zlib.crc32(rest), rest_bytes=len(rest), **changes)
    memory.put_rest(header, rest)
    memory.seal(header)
    return header


def test_it_comes_back_as_it_was_sealed(memory: SharedBuffer) -> None:
    header = sealed(memory)
    again = SharedBuffer(os.dup(memory.fd))  # another process
    assert header_of(again.fd) == header
    assert again.rest(header) == b"hello"
    again.close()


def test_what_is_being_written_is_none(memory: SharedBuffer) -> None:
    assert header_of(memory.fd) is None
    sealed(memory)
    memory.unseal()
    assert header_of(memory.fd) is None


@pytest.mark.parametrize("at", range(len(SOME.pack()) + 8))
def test_a_changed_byte_of_the_header_is_noticed(memory: SharedBuffer, at: int) -> None:
    sealed(memory)
    page = bytearray(memory.map[:HEADER])
    page[at] ^= 4
    assert parse(bytes(page)) is None


def test_a_changed_byte_of_the_rest_is_noticed(memory: SharedBuffer) -> None:
    header = sealed(memory)
    memory.map[HEADER + header.data_bytes] ^= 1
    assert memory.rest(header) is None


def test_one_that_was_cut_off_is_none(memory: SharedBuffer) -> None:
    sealed(memory)
    os.ftruncate(memory.fd, HEADER + 66)
    assert header_of(memory.fd) is None
    assert parse(b"") is None

"""The tokens file of an agent that is asked by many at once, and one whose disk hangs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from nodeagent.api import remote
from nodeagent.api.errors import ApiError
from nodeagent.api.remote import TokenBook
from nodeagent.spec.sections import TokenEntry
from tests.descriptors import few_files
from tests.integration.remote_support import TOKENS, write_tokens

MANY = 4


async def name(book: TokenBook, token: str = "reads-secret") -> str | None:
    found = await book.find(hashlib.sha256(token.encode()).hexdigest())
    return None if found is None else found[0]


async def test_a_token_is_known_while_another_request_reads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = remote.read_tokens

    def slow(path: Path) -> Mapping[str, tuple[str, TokenEntry]]:
        time.sleep(0.05)  # a disk that takes its time
        return whole(path)

    monkeypatch.setattr(remote, "read_tokens", slow)
    book = TokenBook(write_tokens(tmp_path / "tokens.yaml", TOKENS), pytest.fail)
    assert await asyncio.gather(*(name(book) for _ in range(MANY))) == ["reads"] * MANY


async def test_a_disk_that_hangs_lets_nobody_in_and_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tokens(tmp_path / "tokens.yaml", TOKENS)
    complaints: list[str] = []
    book = TokenBook(file, complaints.append)
    assert await name(book) == "reads"
    file.unlink()
    os.mkfifo(file)
    monkeypatch.setattr(remote, "open_plain", partial(Path.open, mode="rb"))  # waits for who writes
    with monkeypatch.context() as hasty:
        hasty.setattr(remote, "LOOK_LIMIT", 0.1)
        for found in await asyncio.gather(*(name(book) for _ in range(100)), return_exceptions=True):
            assert isinstance(found, ApiError) and f"{file}, by which tokens are known here" in found.message
    async with asyncio.timeout(10):
        await asyncio.to_thread(int)  # the loop's own threads are free
    file.open("w").close()
    file.unlink()
    write_tokens(file, TOKENS)
    while await name(book) is None:  # the look that hung has found nothing
        assert complaints
    assert await name(book) == "reads"


async def test_a_file_that_could_not_be_read_for_want_of_a_descriptor_is_read_again(tmp_path: Path) -> None:
    """It counted as read: no token was let in until somebody changed the file."""
    complaints: list[str] = []
    book = TokenBook(write_tokens(tmp_path / "tokens.yaml", TOKENS), complaints.append)
    with few_files(0):
        assert await name(book) is None
    assert len(complaints) == 1 and "cannot be read: Too many open files" in complaints[0]
    assert await name(book) == "reads"
    (tmp_path / "tokens.yaml").chmod(0o644)
    assert [await name(book), await name(book), len(complaints)] == [None, None, 2], "one that is wrong is read once"

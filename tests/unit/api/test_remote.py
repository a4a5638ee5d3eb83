"""The tokens file of an agent that is asked by many at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nodeagent.api import remote
from nodeagent.api.remote import TokenBook
from nodeagent.spec.sections import TokenEntry
from tests.integration.remote_support import TOKENS, write_tokens

MANY = 4


def test_a_token_is_known_while_another_request_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, start = remote.read_tokens, threading.Barrier(MANY)

    def slow(path: Path) -> Mapping[str, tuple[str, TokenEntry]]:
        time.sleep(0.05)  # a disk that takes its time
        return whole(path)

    monkeypatch.setattr(remote, "read_tokens", slow)
    book = TokenBook(write_tokens(tmp_path / "tokens.yaml", TOKENS), pytest.fail)

    def find(_: int) -> str | None:
        start.wait(10)
        found = book.find("reads-secret")
        return None if found is None else found[0]

    with ThreadPoolExecutor(MANY) as threads:
        assert [*threads.map(find, range(MANY))] == ["reads"] * MANY

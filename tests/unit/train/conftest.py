"""Shared buffers that a test has made are closed after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.train.helpers import memories


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while memories:
        memories.pop().close()

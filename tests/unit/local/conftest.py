"""A place of its own for each test's clusters, and an agent that needs no agent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.local.helpers import local_home


@pytest.fixture
def home() -> Iterator[Path]:
    """A short folder for local clusters."""
    with local_home() as path:
        yield path


@pytest.fixture
def agent() -> list[str]:
    """The stand-in's command."""
    return [sys.executable, str(Path(__file__).with_name("standin.py"))]

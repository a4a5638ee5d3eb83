"""The simulation logs nothing unless a test fails, and then only what pytest captured. Its tests only compute: what
stands still is found in virtual time, and how long one takes by the clock says how busy the machine is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import structlog

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))

LIMIT = 400
"""Seconds by the clock: eight times what the longest one needs of a core. More is an endless loop."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT))

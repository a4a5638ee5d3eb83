"""How long what failed waits before it starts again. Standard library only: the shim imports it too."""

from __future__ import annotations

FIRST = 0.5
"""Seconds of the first wait that is longer than the least."""


def backoff(count: int, low: float, high: float) -> float:
    """Seconds that the ``count``-th restart waits: the first two the least; then the wait doubles up to the most."""
    if count <= 2:
        return min(low, high)
    return min(high, max(low, FIRST) * 2.0 ** min(count - 3, 32))

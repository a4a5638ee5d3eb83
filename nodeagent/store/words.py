"""Sentences that both implementations of the store say. Must never decide anything."""

from __future__ import annotations

from nodeagent.model.timing import Timing


def timing_differs(stored: Timing, ours: Timing) -> str:
    """Which timing values differ from the store's, and what to do."""
    theirs, mine = stored.model_dump(), ours.model_dump()
    parts = [f"{key} is {theirs[key]} there and {mine[key]} here" for key in theirs if theirs[key] != mine[key]]
    return (
        f"the cluster's timing differs from this agent's: {'; '.join(parts)}. Every node needs the same values: "
        "set timing in this agent's config to the cluster's"
    )

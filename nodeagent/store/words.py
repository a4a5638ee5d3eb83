"""Sentences that both implementations of the store say. Must never decide anything."""

from __future__ import annotations

from collections.abc import Iterable

from nodeagent.model.timing import Timing

NAMED = 5
"""Most nodes that a sentence names."""


def waits_for(nodes: Iterable[str], count: int, seconds: float) -> str:
    """Why a store that has lost writes, or may have, decides nothing yet. ``nodes``: the first few by name, or more, of
    these ``count``."""
    named = ", ".join(sorted(nodes)[:NAMED])
    more = f" and {count - NAMED} more" if count > NAMED else ""
    return (
        f"the store may lack what was written last, and waits for nodes that may know it: {named}{more}; "
        f"nothing is decided until enough of them are back, or for another {seconds:.1f} s"
    )


def timing_differs(stored: Timing, ours: Timing) -> str:
    """Which timing values differ from the store's, and what to do."""
    theirs, mine = stored.model_dump(), ours.model_dump()
    parts = [f"{key} is {theirs[key]} there and {mine[key]} here" for key in theirs if theirs[key] != mine[key]]
    return (
        f"the cluster's timing differs from this agent's: {'; '.join(parts)}. Every node needs the same values: "
        "set timing in this agent's config to the cluster's"
    )

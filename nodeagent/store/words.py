"""Sentences that both implementations of the store say. Must never decide anything."""

from __future__ import annotations

from collections.abc import Iterable

from nodeagent.model.timing import Timing

NAMED = 5
"""Most nodes that a sentence names."""


def waits_for(nodes: Iterable[str], seconds: float) -> str:
    """Why a store that has lost writes decides nothing yet."""
    known = sorted(nodes)
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return (
        f"the store has lost what was written last, and waits for nodes that may know it: {', '.join(known[:NAMED])}"
        f"{more}; nothing is decided until they are back, or for another {seconds:.1f} s"
    )


def timing_differs(stored: Timing, ours: Timing) -> str:
    """Which timing values differ from the store's, and what to do."""
    theirs, mine = stored.model_dump(), ours.model_dump()
    parts = [f"{key} is {theirs[key]} there and {mine[key]} here" for key in theirs if theirs[key] != mine[key]]
    return (
        f"the cluster's timing differs from this agent's: {'; '.join(parts)}. Every node needs the same values: "
        "set timing in this agent's config to the cluster's"
    )

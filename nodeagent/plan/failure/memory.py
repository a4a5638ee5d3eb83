"""Whose fault it was that the kernel killed a worker for want of memory: it takes the largest, whoever filled it.

Where a limit of the pod itself was reached, it was the pod. Else the memory is shared with other pods and with whatever
else runs there: then it was the pod only if it held more than its share. Nothing here knows who else it was.
"""

from __future__ import annotations

from collections.abc import Collection

from nodeagent.model.node import NodeFacts
from nodeagent.model.world import Starved

MOST = 0.75
"""Of the memory: the largest share, of a pod that has the whole node. The rest is the kernel's, and the system's."""


def memory_share(facts: NodeFacts, devices: Collection[str]) -> float:
    """The part of the node's memory that goes with these devices: their part of its GPUs, or of its CPU slots."""
    gpus = {gpu.uuid for gpu in facts.gpus}.intersection(devices)
    of_gpus = len(gpus) / len(facts.gpus) if gpus else 0.0
    slots = len(devices) - len(gpus)
    return min(MOST, max(of_gpus, slots / facts.cpu_slots if facts.cpu_slots else 0.0))


def within_share(starved: Starved | None, share: float) -> str:
    """The amounts, in words, if a worker was killed though its pod held no more than its share; else empty."""
    if starved is None or starved.held > share * starved.total:
        return ""
    held, mine, total = (f"{size / 1e9:.1f}" for size in (starved.held, share * starved.total, starved.total))
    return f"memory was full, and its pod held {held} GB of {total} GB, within its share of {mine} GB"

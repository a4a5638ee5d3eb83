"""Two kinds of blocks, measured in pairs: by how much the one is longer, and how sure that is. Pure but for ``main``.

python -m benchmarks.paired FILE        what snapshot_cost.py wrote
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

DRAWS = 4000


class Share(NamedTuple):
    """All of the one as a share of all of the other, and the interval that holds it with 95 %."""

    mean: float
    low: float
    high: float


def share(some: Sequence[float], blocks: Sequence[float]) -> Share:
    """The interval is drawn from the pairs (bootstrap)."""
    pairs = list(zip(some, blocks, strict=True))
    lots = random.Random(0)

    def of(drawn: Sequence[tuple[float, float]]) -> float:
        return sum(a for a, _ in drawn) / sum(b for _, b in drawn)

    means = sorted(of(lots.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return Share(of(pairs), means[round(DRAWS * 0.025)], means[round(DRAWS * 0.975) - 1])


def rows(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What, by how much it is more, and the interval."""
    kinds = (
        ("time of the steps", "seconds", "seconds", 1.0),
        ("CPU time of all ranks", "cpu", "cpu", 1.0),
        ("the calls alone, time", "call", "seconds", 0.0),
        ("the calls alone, CPU time", "call_cpu", "cpu", 0.0),
    )
    found = []
    for text, part, whole, less in kinds:
        mean, low, high = share(results["with"][part], results["without"][whole])
        found.append((text, f"**{mean - less:+.2%}**", f"{low - less:+.2%} to {high - less:+.2%}"))
    return found


def section(results: dict[str, Any]) -> str:
    """Of ``docs/benchmarks.md``."""
    pairs, every = len(results["with"]["seconds"]), results["every"]
    step = statistics.median(results["without"]["cpu"]) / results["ranks"] / every
    call = statistics.median(results["with"]["call_cpu"]) / results["ranks"]
    lines = [f"| {' | '.join(row)} |" for row in (("", "more", "95 %"), ("---",) * 3, *rows(results))]
    how = (
        f"A state of {results['state_mb']:g} MB, a snapshot each {every} steps, {results['ranks']} ranks with "
        "DistributedDataParallel.\n"
        f"A step takes {step * 1e3:.0f} ms of CPU, a snapshot {call * 1e3:.1f} ms. Blocks of {every} steps with a "
        "snapshot and without, by turns in one\n"
        f"process, in pairs whose order is drawn by lot: {pairs} pairs, {2 * pairs * every} steps. The intervals are "
        "drawn from the pairs\n"
        f"(bootstrap). Taken apart from the rest with `benchmarks/snapshot_cost.py`, {results['load']}.\n"
    )
    return "\n".join(["## What snapshots cost\n", *lines, "", how])


def main() -> None:
    print(section(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()

"""The arithmetic of the lease study: how late renewals were, and what each lease would have made of it. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from typing import Any

from nodeagent.model.timing import Timing

Results = dict[str, Any]

STEP = 0.01
"""Seconds: how finely lateness is counted."""
LONGEST = 20
"""Gaps that are kept one by one."""
LEASES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
QUANTILES = (0.5, 0.99, 0.999, 0.9999)


class Gaps:
    """Seconds between two renewals of a node, as the store served them."""

    def __init__(self, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        self._bins: dict[int, int] = {}
        """Lateness in steps, rounded up, to how often."""
        self._longest: list[float] = []

    def add(self, gap: float) -> None:
        late = max(0, -int(-(gap - self._heartbeat) // STEP))
        self._bins[late] = self._bins.get(late, 0) + 1
        self._longest = sorted([*self._longest, round(gap, 3)])[-LONGEST:]

    def as_json(self) -> dict[str, Any]:
        bins = sorted(self._bins.items())
        return {"count": sum(n for _, n in bins), "late_cs": [list(one) for one in bins], "longest": self._longest}


def fence(lease: float, timing: Timing) -> float:
    """The latest fence that goes with this lease: protocol's inequality, at this heartbeat's credit."""
    return (lease - timing.credit - timing.kill) / 1.02


def over(gaps: Results, heartbeat: float, bound: float) -> int:
    """How many gaps were longer than this, to a step."""
    late = [steps for steps, _ in gaps["late_cs"]]
    first = bisect_right(late, (bound - heartbeat) / STEP)
    return sum(n for _, n in gaps["late_cs"][first:])


def quantile(gaps: Results, share: float) -> float:
    """Seconds of lateness that this share of all renewals did not exceed."""
    seen = 0
    for steps, n in gaps["late_cs"]:
        seen += n
        if seen >= share * gaps["count"]:
            return float(steps * STEP)
    return 0.0


def tables(results: Results) -> str:
    """What was measured, and the curve for the default heartbeat."""
    shares = " / ".join(f"{100 * share:g} %" for share in QUANTILES)
    rows = [
        f"| heartbeat | lease | fence | node hours | renewals | late: {shares} (s) | longest gap (s) "
        "| nodes lost | gangs re-formed |",
        "| --- " * 9 + "|",
    ]
    for one in results["clockworks"]:
        timing, gaps = one["timing"], one["gaps"]
        late = " / ".join(f"{quantile(gaps, q):.2f}" for q in QUANTILES)
        rows.append(
            f"| {timing['heartbeat']:g} s | {timing['lease']:g} s | {timing['fence']:g} s | {one['node_hours']:.1f} "
            f"| {gaps['count']} | {late} | {max(gaps['longest'], default=0):.2f} | {one['lost']} | {one['reformed']} |"
        )
    default = results["clockworks"][0]
    heartbeat, hours = default["timing"]["heartbeat"], default["node_hours"]
    rows += ["", f"What other leases would have made of the gaps of the first row ({hours:.1f} node hours):", ""]
    rows += ["| lease | its fence | gaps beyond the fence, per node hour | beyond the lease, per node hour |"]
    rows += ["| --- | --- | --- | --- |"]
    for lease in LEASES:
        bound = fence(lease, Timing())
        if bound > heartbeat:
            past = " | ".join(rate(over(default["gaps"], heartbeat, limit), hours) for limit in (bound, lease))
            rows.append(f"| {lease:g} s | {bound:.2f} s | {past} |")
    return "\n".join(rows) + "\n" + _restarts(results["killed"])


def _restarts(killed: Results) -> str:
    gaps = killed["restarts"]
    if not gaps:
        return ""
    p95, what = gaps[int(0.95 * (len(gaps) - 1))], killed.get("killed", "agents, which renewed then,")
    return (
        f"\nBeside them a cluster of the default clockwork had one of its {what} killed (kill -9), "
        f"and started again, now and then for {killed['minutes']:.0f} minutes: the gap around its death was "
        f"{statistics.median(gaps):.2f} s (median of {len(gaps)}; p95 {p95:.2f}, longest {gaps[-1]:.2f}); nodes lost: "
        f"{killed['lost']}, gangs re-formed: {killed['reformed']}.\n"
    )


def rate(count: int, hours: float) -> str:
    """Per hour; where none was seen, what 95 % certainty allows (the rule of three)."""
    return f"{count / hours:.2f}" if count else f"none seen (below {3 / hours:.2f})"

"""What processes cost while nothing happens: memory as PSS, so that shared pages are shared out, and CPU time.

Owns the reading of /proc; who belongs to which kind is told by the caller.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one kind of process: per process, the average of all of the kind."""

    processes: int
    pss_mb: float
    cpu_percent: float
    """Of one core."""

    def as_json(self) -> dict[str, float]:
        return {key: round(value, 3) for key, value in asdict(self).items()}


def measure(kinds: Mapping[Kind, Sequence[int]], seconds: float) -> dict[Kind, Cost]:
    """Watch the processes for so long. Those that end meanwhile are left out; a kind without any is left out."""
    began = time.monotonic()
    before = {pid: used for pids in kinds.values() for pid in pids if (used := _cpu_seconds(pid)) is not None}
    time.sleep(seconds)
    after = {pid: used for pid in before if (used := _cpu_seconds(pid)) is not None}
    elapsed = time.monotonic() - began
    costs: dict[Kind, Cost] = {}
    for kind, pids in kinds.items():
        there = [(after[pid] - before[pid], pss) for pid in pids if pid in after and (pss := _pss(pid)) is not None]
        if there:
            used = sum(seconds for seconds, _ in there)
            costs[kind] = Cost(
                processes=len(there),
                pss_mb=sum(pss for _, pss in there) / len(there) / 1024,
                cpu_percent=100 * used / elapsed / len(there),
            )
    return costs


def _cpu_seconds(pid: int) -> float | None:
    """Of its living threads, as the scheduler counts it: to the nanosecond, where ``stat`` has hundredths, half of what
    a probe uses in a window."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except OSError:
        return None


def _pss(pid: int) -> int | None:
    """In KiB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))

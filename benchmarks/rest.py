"""What processes cost while nothing happens: memory as PSS, so that shared pages are shared out, and CPU time.

Owns the reading of /proc; who belongs to which kind is told by the caller.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one kind of process: per process, the average of all of the kind."""

    processes: int
    pss_mb: float
    cpu_percent: float
    """Of one core."""

    def as_json(self) -> dict[str, float]:
        return {key: round(value, 3) for key, value in asdict(self).items()}


def measure(kinds: Mapping[str, Sequence[int]], seconds: float) -> dict[str, Cost]:
    """Watch the processes for so long. Those that end meanwhile are left out; a kind without any is left out."""
    began = time.monotonic()
    before = {pid: ticks for pids in kinds.values() for pid in pids if (ticks := _cpu_ticks(pid)) is not None}
    time.sleep(seconds)
    after = {pid: ticks for pid in before if (ticks := _cpu_ticks(pid)) is not None}
    elapsed = time.monotonic() - began
    costs: dict[str, Cost] = {}
    for kind, pids in kinds.items():
        there = [(after[pid] - before[pid], pss) for pid in pids if pid in after and (pss := _pss(pid)) is not None]
        if there:
            used = sum(ticks for ticks, _ in there) / TICKS
            costs[kind] = Cost(
                processes=len(there),
                pss_mb=sum(pss for _, pss in there) / len(there) / 1024,
                cpu_percent=100 * used / elapsed / len(there),
            )
    return costs


def _cpu_ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


def _pss(pid: int) -> int | None:
    """In KiB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))

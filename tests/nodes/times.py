"""What a run has measured, for docs/benchmarks.md: a row for each scenario that has passed.

Owns the rows of this process; ``--times FILE`` (``make nodes`` gives it) has them written at a run's end.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import describe


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    seconds: float | None
    training: str
    """What the fault did to it."""


ROWS: list[Row] = []


def record_time(what: str, training: str, seconds: float | None = None) -> None:
    """Say it here and in the file. To be called once all of it was asserted."""
    ROWS.append(Row(what, None if seconds is None else round(seconds, 2), training))
    print(f"\n{what}: {'' if seconds is None else f'{seconds:.2f} s, '}{training}")


def since(start: float) -> float:
    return time.monotonic() - start


def write(file: Path, *, tests: int, minutes: float, load: tuple[float, float]) -> None:
    """``load``: the machine's load average at the beginning and at the end."""
    facts = describe() | {"load": f"{load[0]:.1f} at the beginning, {load[1]:.1f} at the end"}
    machine = facts | {"machine": facts["machine"].partition(", everything")[0]}
    rows = [asdict(row) for row in ROWS]
    file.write_text(json.dumps({"machine": machine, "tests": tests, "minutes": minutes, "rows": rows}, indent=1) + "\n")


def load() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]

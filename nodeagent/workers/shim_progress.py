"""What a worker tells of its progress: the page it writes to (``train/progress.py``), and the pace learned from it.

Standard library only. The worker may write anything there, or nothing: it is read, never mapped, and never trusted.
"""

from __future__ import annotations

import math
import os
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"naprog1\0"
PAGE = struct.Struct("<8sqdd32s")
"""As train/progress.py, which runs in the job's Python, has it."""
TRAIN = "train"

LEAST_GAPS = 20
"""Steps that must have been seen before a pace is told."""
RECENT = 128
FLOOR = 60.0
"""No limit is learned below this many seconds."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker told last."""

    step: int | None
    at: float
    """CLOCK_BOOTTIME."""
    phase: str
    bound: float | None


class Page:
    """One worker's page. Raises OSError if it cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.write(self._fd, PAGE.pack(MAGIC, -1, 0.0, 0.0, b""))

    def read(self, now: float) -> Told | None:
        """None: nothing has been told yet, or what is there is no page. A time in the future is now."""
        if self._fd < 0:
            return None
        data = os.pread(self._fd, PAGE.size, 0)
        if len(data) != PAGE.size:
            return None
        magic, step, at, bound, phase = PAGE.unpack(data)
        if magic != MAGIC or not math.isfinite(at) or at <= 0:
            return None
        name = phase.split(b"\0", 1)[0].decode("utf-8", "replace") or TRAIN
        return Told(step if step >= 0 else None, min(at, now), name, bound if 0 < bound < math.inf else None)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink(missing_ok=True)


class Pace:
    """How long this worker's steps take: what ``hang: auto`` goes by."""

    def __init__(self) -> None:
        self._last: Told | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._longest = 0.0
        self._steps = 0

    def see(self, told: Told) -> None:
        """Each look at the page. Only what passes between two steps of training counts, and not the first one, in
        which things are compiled and filled."""
        last, self._last = self._last, told
        if last is None or last.at == told.at or {last.phase, told.phase} != {TRAIN}:
            return
        if last.step is None or told.step is None or told.step <= last.step:
            return
        first = self._steps == 0
        self._steps += told.step - last.step
        gap = (told.at - last.at) / (told.step - last.step)
        if not first:
            self._recent.append(gap)
            self._longest = max(self._longest, gap)

    def limit(self) -> float | None:
        """Ten times the longest recent step, twice the longest ever, never below the floor; None: not learned yet."""
        if self._steps < LEAST_GAPS or not self._recent:
            return None
        return max(FLOOR, 10 * max(self._recent), 2 * self._longest)

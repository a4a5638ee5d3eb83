"""One worker's signs of life, look after look: the progress that it reports in its page (``train/progress.py``) and the
pace learned from it, output, CPU time, the kernel's state of it.

Pure but for ``look``, which reads /proc, and the page. Standard library only. The worker may write anything into its
page, or nothing: it is read, never mapped, and never trusted. Reads nothing that makes the kernel wait for the process
(its memory, its open files): that could block the shim's loop for as long as the process is blocked.
"""

from __future__ import annotations

import math
import os
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeagent.osutil.linux import family, proc_stat

MAGIC = b"naprog1\0"
PAGE = struct.Struct("<8sqdd32s")
"""As train/progress.py, which runs in the job's Python, has it."""
TRAIN = "train"

LEAST_GAPS = 20
"""Steps that must have been seen before a pace is reported."""
RECENT = 128
FLOOR = 60.0
"""No limit is learned below this many seconds."""


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """What a worker reported last."""

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
        self.clear()

    def clear(self) -> None:
        """Nothing has been reported. Raises OSError."""
        if self._fd >= 0:
            os.pwrite(self._fd, PAGE.pack(MAGIC, -1, 0.0, 0.0, b""), 0)

    def read(self, now: float) -> WorkerProgress | None:
        """None: nothing has been reported yet, or what is there is no page. A time in the future is now."""
        if self._fd < 0:
            return None
        data = os.pread(self._fd, PAGE.size, 0)
        if len(data) != PAGE.size:
            return None
        magic, step, at, bound, phase = PAGE.unpack(data)
        if magic != MAGIC or not math.isfinite(at) or at <= 0:
            return None
        name = phase.split(b"\0", 1)[0].decode("utf-8", "replace") or TRAIN
        return WorkerProgress(step if step >= 0 else None, min(at, now), name, bound if 0 < bound < math.inf else None)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink(missing_ok=True)


class StepPace:
    """How long this worker's steps take: what ``hang: auto`` goes by."""

    def __init__(self) -> None:
        self._last: WorkerProgress | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._longest = 0.0
        self._steps = 0
        self._waited = 0.0
        """Seconds that were seen to pass after the last progress: the steps of one look may be short but for one."""

    def see(self, progress: WorkerProgress, now: float) -> None:
        """Each look at the page. Only what passes between two steps of training counts, and not the first one, in
        which things are compiled and filled."""
        last, self._last = self._last, progress
        if last is not None and last.at == progress.at:
            self._waited = now - progress.at
            return
        waited, self._waited = self._waited, 0.0
        if last is None or {last.phase, progress.phase} != {TRAIN}:
            return
        if last.step is None or progress.step is None or progress.step <= last.step:
            return
        first = self._steps == 0
        self._steps += progress.step - last.step
        gap = max(waited, (progress.at - last.at) / (progress.step - last.step))
        if not first:
            self._recent.append(gap)
            self._longest = max(self._longest, gap)

    def limit(self) -> float | None:
        """Ten times the longest recent step, twice the longest ever, never below the floor; None: not learned yet."""
        if self._steps < LEAST_GAPS or not self._recent:
            return None
        return max(FLOOR, 10 * max(self._recent), 2 * self._longest)


FIRST_LIMIT = 600.0
"""``auto``: seconds without progress that are allowed until a pace has been learned."""
LONG = 1800.0
"""``auto``: while some worker still computes, it may be in a phase that nobody reported: at least so long (or ten
limits)."""
QUIET = 0.02
"""Cores: who uses less is quiet. Threads of gloo and NCCL that only look around need some."""
BUSY = 0.1
LOOKS = 3
"""A state of the kernel's counts when so many looks in a row have seen it."""
MOST_PROCESSES = 64
"""Of one worker: more are not counted."""
FROZEN = {"T": "stopped", "D": "blocked", "Z": "zombie"}
"""Not ``t``: that is a tracer's doing, most likely py-spy reading stacks for us."""
_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class WorkerLook:
    """One look at a worker. ``at`` is CLOCK_BOOTTIME."""

    at: float
    progress: WorkerProgress | None
    written: int
    """Bytes of output so far."""
    ticks: int
    """CPU time of the worker and of what it started, as far as they live."""
    own: int
    """CPU time of its main thread alone."""
    letter: str
    """The state of its main thread, as in /proc/PID/stat."""


class Track:
    """``limit`` None is ``auto``."""

    def __init__(self, rank: int, limit: float | None, phases: float, at: float) -> None:
        self.rank = rank
        self._limit, self._phases = limit, phases
        self._pace = StepPace()
        self.progress: WorkerProgress | None = None
        self._written, self._written_at = 0, at
        self._looks: deque[tuple[float, int]] = deque()
        self._letter, self._letter_since, self._letter_looks = "", at, 0
        self._own = 0
        self._now = at

    @property
    def limit(self) -> float:
        return self._limit or self._pace.limit() or FIRST_LIMIT

    def see(self, look: WorkerLook) -> None:
        self._now = look.at
        if look.progress is not None:
            self.progress = look.progress
            self._pace.see(look.progress, look.at)
        if look.written != self._written:
            self._written, self._written_at = look.written, look.at
        if (look.letter, look.own) != (self._letter, self._own):
            self._letter, self._own, self._letter_since, self._letter_looks = look.letter, look.own, look.at, 0
        self._letter_looks += 1
        self._looks.append((look.at, look.ticks))
        while len(self._looks) > 1 and self._looks[1][0] <= look.at - self.limit:
            self._looks.popleft()

    @property
    def left(self) -> float:
        """Seconds from the last look until reported progress becomes overdue; below 0 if it is, or none is reported."""
        progress = self.progress
        if progress is None or progress.phase != TRAIN:
            return -1.0
        return (progress.bound or self.limit) - (self._now - progress.at)

    def facts(self, lead: float = 0.0) -> dict[str, Any]:
        """As model.pod.RankFacts, without what stacks tell; as they would be with limits shorter by ``lead``."""
        progress, limit = self.progress, self.limit - lead
        since = progress.at if progress is not None else self._written_at
        return {
            "rank": self.rank,
            "state": self._state(),
            "step": None if progress is None else progress.step,
            "phase": "" if progress is None or progress.phase == TRAIN else progress.phase,
            "age": round(max(0.0, self._now - since), 1),
            "overdue": self._overdue(lead),
            "silent": self._now - self._written_at >= limit,
            "quiet": self._quiet(limit),
            "frozen": self._frozen and self._now - self._letter_since >= limit,
        }

    @property
    def _frozen(self) -> bool:
        return self._letter in FROZEN and self._letter_looks >= LOOKS

    def _state(self) -> str:
        if self._frozen:
            return FROZEN[self._letter]
        return "busy" if _cores(list(self._looks)) >= BUSY else "idle"

    def _quiet(self, limit: float) -> bool:
        before = sum(at <= self._now - limit for at, _ in self._looks)
        return before > 0 and _cores(list(self._looks)[before - 1 :]) < QUIET

    def _overdue(self, lead: float) -> str | None:
        if self.progress is None:
            return None
        age = self._now - self.progress.at + lead
        if self.progress.phase != TRAIN:
            return "long" if age >= (self.progress.bound or self._phases) else "no"
        limit = self.progress.bound or self.limit
        if age < limit:
            return "no"
        return "long" if self._limit or self.progress.bound or age >= max(LONG, 10 * limit) else "yes"


def _cores(looks: list[tuple[float, int]]) -> float:
    """Mean use between the first and the last of these looks."""
    if len(looks) < 2:
        return 0.0
    (start, before), (end, after) = looks[0], looks[-1]
    return max(0, after - before) / _HZ / (end - start) if end > start else 0.0


def look(pid: int, at: float, progress: WorkerProgress | None, written: int) -> WorkerLook | None:
    """None: the process has just ended. Raises OSError if there is no descriptor or memory to look."""
    whole, main = proc_stat(f"/proc/{pid}/stat"), proc_stat(f"/proc/{pid}/task/{pid}/stat")
    if not whole or not main:
        return None
    children = family((pid,), MOST_PROCESSES)[1:]
    ticks = _ticks(whole) + sum(_ticks(fields) for child in children if (fields := proc_stat(f"/proc/{child}/stat")))
    return WorkerLook(at, progress, written, ticks, int(main[11]) + int(main[12]), main[0].decode())


def _ticks(fields: list[bytes]) -> int:
    """Its own CPU time and that of its children that were reaped."""
    return sum(map(int, fields[11:15]))

"""What jobs use: devices and for how long, and how much of that was lost to faults. By the day (UTC), kept for
``DAYS_KEPT``.

A job's record has its own use (``JobRecord.used``), and what it holds since when (``Held``). For jobs that were removed
from the view, the store keeps sums by day, owner and queue (``UsageDay``). Must never hold a calculation: the store
counts, and ``plan/fairshare/usage.py`` derives figures.
"""

from __future__ import annotations

from nodeagent.model.base import Record

DAYS_KEPT = 400
"""Days for which use is kept; the same value as in ``store/scripts/_usage.lua``."""
ROWS_KEPT = 1024
"""The most rows of a day: one for each owner and queue of the first 256, and one for all others of each queue."""
OTHERS = -2
"""The owner of the sum over the last owners of a day on which very many users had jobs; no user has this uid."""


class UsedTime(Record):
    """Sums over some time. Milliseconds are of the served clock; times of devices are added up over the devices."""

    gpu_ms: int = 0
    """GPU time booked: from the proposal of a generation to the acknowledgement that nothing runs there any more, or to
    the end of the lease of a node that was lost."""
    slot_ms: int = 0
    """CPU slot time booked, counted in the same way."""
    lost_gpu_ms: int = 0
    """GPU time lost to faults, a part of ``gpu_ms``: the work after the last checkpoint that had to be repeated, and
    the time from the fault until the workers ran again."""
    lost_slot_ms: int = 0
    overhead_gpu_ms: int = 0
    """GPU time without steps that no fault was the cause of, another part of ``gpu_ms``: from a proposal to the
    workers' first step, or their start (of a job's first generation, to the time it was put together, if they report
    no steps), and from a planned end until nothing runs."""
    overhead_slot_ms: int = 0
    waited_ms: int = 0
    """Time in the queue, or holding; not multiplied by devices."""
    restarts: int = 0
    """Generations that became active after the first."""


class Held(Record):
    """The devices that a job has booked. Times are served ms; 0 means never."""

    at: int
    """The time up to which use is counted in ``JobRecord.used``; the devices are held at least since then."""
    gpus: int = 0
    slots: int = 0
    saved: int = 0
    """When a checkpoint was last committed."""
    stands: int = 0
    """When a fault stopped the job's progress; 0 if it runs."""
    started: int = 0
    """When its workers ran, or made their first step, after the last generation of which that was reported."""
    idle: int = 0
    """Since when the job has had no active generation; 0 if it has one."""


class UsageRow(UsedTime):
    """The sums of one owner in one queue on one day."""

    jobs: int = 0
    """Jobs submitted on that day."""


class UsageDay(Record):
    """The use on one day of jobs that were removed from the view."""

    day: int
    """Days since 1970-01-01."""
    rows: dict[str, UsageRow] = {}
    """Owner (uid) and queue, separated by a space, to the sums."""
    rev: int

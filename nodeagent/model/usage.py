"""What jobs use: devices for how long, and how much of that was lost to faults. By the day (UTC), for as long as
``DAYS_KEPT``.

A job's record has its own use (``JobRecord.used``), and what it holds since when (``Held``); of jobs that are in the
view no more the store keeps sums by day, owner and queue (``UsageDay``). Must never hold how any of it is worked out:
counting is the store's, what follows from it ``plan/usage.py``'s.
"""

from __future__ import annotations

from nodeagent.model.base import Record

DAYS_KEPT = 400
"""Days for which use is kept; as in ``store/scripts/_usage.lua``."""
OTHERS = -2
"""The owner under whom those are summed up who came last on a day on which very many had jobs; nobody's uid."""


class UsedTime(Record):
    """Sums over some time. Milliseconds are of the served clock; those of devices are added up over the devices."""

    gpu_ms: int = 0
    """For which GPUs were booked: from the proposal of a generation to the acknowledgement that nothing runs there any
    more, or to the end of the lease of a node that was lost."""
    slot_ms: int = 0
    """Likewise CPU slots."""
    lost_gpu_ms: int = 0
    """Of that, lost to faults: what came after the last checkpoint and had to be done again, and what went by from the
    fault until the workers ran again."""
    lost_slot_ms: int = 0
    waited_ms: int = 0
    """In the queue, or holding: not of devices."""
    restarts: int = 0
    """Generations that became active after the first."""


class Held(Record):
    """What a job has booked. Times are served ms, 0 where there is none."""

    at: int
    """Since when, at least: all before is in ``JobRecord.used``."""
    gpus: int = 0
    slots: int = 0
    saved: int = 0
    """When a checkpoint was committed last."""
    stands: int = 0
    """Since when it stands still because of a fault."""
    started: int = 0
    """When its workers ran again after the last fault."""


class UsageRow(UsedTime):
    """The sums of one owner in one queue on one day."""

    jobs: int = 0
    """Submitted on that day."""


class UsageDay(Record):
    """Of the jobs that are in the view no more, what they used on one day."""

    day: int
    """Days since 1970-01-01."""
    rows: dict[str, UsageRow] = {}
    """Owner (uid) and queue, with a space between, to the sums."""
    rev: int

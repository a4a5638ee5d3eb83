"""Who used what: the sums that the store keeps, the records of jobs that are in the view, and what runs since they were
written. Exact to the millisecond at the view's time. Decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import fsum, log
from typing import Literal

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import queue_of
from nodeagent.model.usage import DAYS_KEPT, UsedTime
from nodeagent.plan.cluster import Cluster

DAY_MS = 86_400_000
HALF_LIFE = 7 * 86400.0
"""Seconds after which what was used counts half."""
SLOT = 1 / 16
"""What a CPU slot counts for, where a GPU is 1."""
STEP_MS = 3_600_000
"""What runs is counted up to the last whole hour of served time: so agents that have the same view, read at slightly
different times, come to the same sums."""

By = Literal["user", "queue", "job"]


@dataclass(frozen=True, slots=True)
class UsageLine:
    """What somebody used on one day."""

    day: int
    """Since 1970-01-01, UTC."""
    owner: int
    queue: str
    use: UsedTime
    jobs: int = 0
    """Submitted then."""
    job: JobRecord | None = None
    """Whose it is; None: of jobs that are in the view no more."""


@dataclass(frozen=True, slots=True)
class Total:
    """Several lines."""

    use: UsedTime
    jobs: int

    @property
    def lost(self) -> float | None:
        """The part of the devices' time that was lost to faults: of GPUs, or of slots where no GPU was used. None where
        nothing was used."""
        return lost_part(self.use)

    @property
    def goodput(self) -> float | None:
        """The part in which steps were made that were kept: without what was lost, and without overhead."""
        return goodput(self.use)


def lost_part(use: UsedTime) -> float | None:
    """As ``Total.lost``. What was lost in the first minutes of a day may have been used on the day before."""
    return _part(use, use.lost_gpu_ms, use.lost_slot_ms)


def goodput(use: UsedTime) -> float | None:
    """As ``Total.goodput``."""
    other = _part(use, use.lost_gpu_ms + use.overhead_gpu_ms, use.lost_slot_ms + use.overhead_slot_ms)
    return None if other is None else 1.0 - other


def _part(use: UsedTime, gpu_ms: int, slot_ms: int) -> float | None:
    used, part = (use.gpu_ms, gpu_ms) if use.gpu_ms > 0 else (use.slot_ms, slot_ms)
    return None if used <= 0 else min(1.0, max(0.0, part / used))


def add(uses: Iterable[UsedTime]) -> UsedTime:
    """Their sum."""
    sums = dict.fromkeys(UsedTime.model_fields, 0)
    for use in uses:
        for name in sums:
            sums[name] += getattr(use, name)
    return UsedTime(**sums)


def since_written(job: JobRecord, served: int, wall_ms: int) -> dict[int, UsedTime]:
    """By day, what a job has used since its record was written last: what its devices did, or its waiting. ``served``:
    the served time of now (ms); ``wall_ms``: Unix time of the same moment."""
    found: dict[int, UsedTime] = {}
    held = job.held
    if held is not None and (held.gpus or held.slots):
        lost = held.stands > 0
        idle = held.idle > 0 and not lost
        for day, ms in _days(served - held.at, wall_ms):
            found[day] = UsedTime(
                gpu_ms=ms * held.gpus, slot_ms=ms * held.slots,
                lost_gpu_ms=lost * ms * held.gpus, lost_slot_ms=lost * ms * held.slots,
                overhead_gpu_ms=idle * ms * held.gpus, overhead_slot_ms=idle * ms * held.slots,
            )  # fmt: skip
    if job.phase in ("queued", "holding"):
        for day, ms in _days(served - job.since, wall_ms):
            found[day] = add((found.get(day, UsedTime()), UsedTime(waited_ms=ms)))
    return found


def _days(ms: int, until: int) -> Iterator[tuple[int, int]]:
    """The last so many milliseconds until then, parted at midnight (UTC), the newest day first. Of more days than are
    kept the rest counts as the oldest one's, as in the store."""
    for number in range(DAYS_KEPT):
        if ms <= 0:
            return
        part = min(ms, (until - 1) % DAY_MS + 1) if number < DAYS_KEPT - 1 else ms
        yield (until - 1) // DAY_MS, part
        ms, until = ms - part, until - part


def of_job(job: JobRecord, served: int, wall_ms: int) -> list[UsageLine]:
    """What one job used, by day."""
    days = {int(day): use for day, use in job.used.items()}
    for day, use in since_written(job, served, wall_ms).items():
        days[day] = add((days.get(day, UsedTime()), use))
    submitted = int(job.submitted * 1000 // DAY_MS)
    days.setdefault(submitted, UsedTime())
    queue = queue_of(job.spec.queue)
    return [UsageLine(day, job.owner, queue, use, int(day == submitted), job) for day, use in sorted(days.items())]


def all_lines(cluster: Cluster, wall_ms: int) -> Iterator[UsageLine]:
    """All that is known, of jobs in the view and of others."""
    yield from past_lines(cluster)
    for job in cluster.jobs.values():
        yield from of_job(job, cluster.served, wall_ms)


def past_lines(cluster: Cluster) -> Iterator[UsageLine]:
    """Of jobs that are in the view no more."""
    for day in cluster.usage.values():
        for key, row in day.rows.items():
            yield UsageLine(day.day, *_whose(key), row, row.jobs)


def _whose(key: str) -> tuple[int, str]:
    """Owner and queue of a day's row."""
    owner, _, queue = key.partition(" ")
    return int(owner), queue


def total(lines: Iterable[UsageLine]) -> Total:
    """All of them together."""
    seen = list(lines)
    return Total(add(line.use for line in seen), sum(line.jobs for line in seen))


def by_key(lines: Iterable[UsageLine], by: By) -> dict[str, list[UsageLine]]:
    """Lines by the owner's uid, the queue, or the job's uid; those of no job in particular are in no job's."""
    found: dict[str, list[UsageLine]] = defaultdict(list)
    for line in lines:
        if by == "job":
            if line.job is not None:
                found[line.job.uid].append(line)
        else:
            found[str(line.owner) if by == "user" else line.queue].append(line)
    return found


DeviceSeconds = dict[tuple[int, str], list[float]]
"""Owner and queue to device-seconds."""


@dataclass(frozen=True, slots=True)
class Decayed:
    """Device-seconds in which what was used counts the less the longer ago it was."""

    by_queue: Mapping[str, float] = field(default_factory=dict)
    by_user: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Of a queue's jobs, by their owner."""


def decayed(cluster: Cluster, half_life: float = HALF_LIFE) -> Decayed:
    """What queues and their users have used. In it what was used counts the less the longer ago it was:

        sum of seconds x devices x 0.5 ^ (age / half_life)

    which is what Slurm's multifactor priority makes of usage with ``PriorityDecayHalfLife``
    (https://slurm.schedmd.com/priority_multifactor.html). A CPU slot counts for ``SLOT`` of a GPU. What was used on one
    day counts as if in its middle. From the view alone, so that agents with the same view get the same: the time is
    what the view's jobs say it is, in whole hours, and what runs counts up to the last whole hour of served time."""
    served = cluster.served // STEP_MS * STEP_MS
    what = f"decayed {half_life} {served}"
    return cluster.once(what, lambda _before: _decayed(cluster, served, half_life), cluster.usage)


def _decayed(cluster: Cluster, served: int, half_life: float) -> Decayed:
    used = [job for job in cluster.jobs.values() if job.used or job.held is not None]
    now, notes = _now(cluster, used, served), cluster.notes
    what = f"decayed past {half_life} {now}"
    past = notes.once(what, (cluster.usage,), lambda _before: _decayed_past(cluster, now, half_life))
    parts = DeviceSeconds({key: [seconds] for key, seconds in past.items()})
    weights = _Weights(now, half_life)
    for job in used:
        here = parts.setdefault((job.owner, queue_of(job.spec.queue)), [])
        here += (weights[int(day)] * _devices(use.gpu_ms, use.slot_ms) for day, use in job.used.items())
        if job.held is not None:
            seconds = max(0, served - job.held.at) / 1000  # of a constant number of devices: the integral of the decay
            here.append(
                _devices(job.held.gpus, job.held.slots) * half_life / log(2) * (1 - 0.5 ** (seconds / half_life))
            )
    queues, users = defaultdict[str, list[float]](list), dict[tuple[str, int], float]()
    for (owner, queue), here in parts.items():
        users[queue, owner] = fsum(here)  # exact, hence the same in whatever order
        queues[queue].append(users[queue, owner])
    return Decayed({queue: fsum(of) for queue, of in queues.items()}, users)


def _decayed_past(cluster: Cluster, now: int, half_life: float) -> dict[tuple[int, str], float]:
    weights, rows = _Weights(now, half_life), defaultdict[str, list[float]](list)
    for day in cluster.usage.values():
        weight = weights[day.day]
        for key, row in day.rows.items():
            rows[key].append(weight * _devices(row.gpu_ms, row.slot_ms))
    return {_whose(key): fsum(parts) for key, parts in rows.items()}


def _devices(gpus: float, slots: float) -> float:
    return gpus + SLOT * slots


class _Weights(dict[int, float]):
    """What a device-millisecond of a day counts for now, in seconds."""

    def __init__(self, now: int, half_life: float) -> None:
        self._now, self._half_life = now, half_life

    def __missing__(self, day: int) -> float:
        begin = day * DAY_MS
        age = max(0, self._now - (begin + min(self._now, begin + DAY_MS)) // 2) / 1000
        weight: float = 0.5 ** (age / self._half_life) / 1000
        self[day] = weight
        return weight


def _now(cluster: Cluster, used: Iterable[JobRecord], served: int) -> int:
    """Unix time (ms), in whole hours, of a served time, as far as the view says: by when jobs started, which their
    records have in both. Served time may have stood still in between, never the other; so the latest is the best. Not
    before the newest day that is known."""
    walls = (
        int(job.started * 1000) + served - job.first_active
        for job in used
        if job.started is not None and job.first_active is not None
    )
    days = {day.day for day in cluster.usage.values()} | {int(day) for job in used for day in job.used}
    return max(max(walls, default=0) // STEP_MS * STEP_MS, max(days, default=0) * DAY_MS)

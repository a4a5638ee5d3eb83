"""What the pods of this node use, read from /proc: CPU time and resident memory of their processes, and the machine's
load. Costs two small files a process, so it is bounded, and read only as often as pods' states are told.

Must never scan all of /proc (a machine with many cores has thousands of kernel threads), nor read what makes the kernel
walk a process's memory. So psutil reads the machine but not the processes: it finds children by a scan, and gives the
time of a start by the wall clock, which steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from nodeagent.model.usage import MachineUsage, PodUsage
from nodeagent.osutil.linux import family, proc_stat
from nodeagent.pods.base import PodStatus

MOST_PROCESSES = 256
"""Processes of all pods together that are read in one measurement; those beyond it are not counted."""
SLACK = 2
"""Ticks by which the kernel's rounding may let a process seem to have started earlier."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Meter:
    """Remembers the CPU time of each process since the measurement before."""

    def __init__(self) -> None:
        self._ticks: dict[int, tuple[int, int]] = {}
        """Process to (start time, CPU ticks)."""
        self._at = 0.0

    def measure(self, statuses: Mapping[str, PodStatus], now: float) -> dict[str, PodUsage]:
        """By job uid: of every pod that has a process. ``now`` is CLOCK_BOOTTIME."""
        roots = {uid: roots_of(status) for uid, status in statuses.items()}
        before, since = self._ticks, self._at
        self._ticks, self._at = {}, now
        if not any(roots.values()):
            return {}
        machine = machine_usage()
        found = {}
        for uid, pids in roots.items():
            if not pids:
                continue
            cpu = pages = count = 0
            for pid in family(pids, MOST_PROCESSES - len(self._ticks)):
                fields = proc_stat(f"/proc/{pid}/stat")
                if not fields:
                    continue
                ticks, start = int(fields[11]) + int(fields[12]), int(fields[19])
                self._ticks[pid] = (start, ticks)
                cpu += spent(start, ticks, before.get(pid), since)
                pages += int(fields[21])
                count += 1
            cores = round(cpu / _TICKS / (now - since), 2) if 0 < since < now else None
            found[uid] = PodUsage(cpu=cores, memory=pages * _PAGE, processes=count, machine=machine)
        return found


def spent(start: int, ticks: int, before: tuple[int, int] | None, since: float) -> int:
    """CPU ticks of a process since the measurement at ``since``: of one that was not seen then, all if it started
    after it, else (it is another pod's, or it was beyond the bound) none."""
    if before is not None and before[0] == start:
        return max(0, ticks - before[1])
    return ticks if start >= since * _TICKS - SLACK else 0


def roots_of(status: PodStatus) -> list[int]:
    """The processes of a pod that its shim tells of."""
    workers = [w.pid for w in status.workers if w.state != "exited"]
    return [pid for pid in (status.shim_pid, status.standby_pid, *workers) if pid]


def machine_usage() -> MachineUsage:
    """This machine now."""
    memory = psutil.virtual_memory()
    return MachineUsage(
        load=round(os.getloadavg()[0], 2),
        cpus=os.cpu_count() or 1,
        memory_used=max(0, memory.total - memory.available),
        memory_total=memory.total,
    )

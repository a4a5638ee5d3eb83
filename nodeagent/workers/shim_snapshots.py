"""Snapshots that outlive their workers: the shim keeps the memory, and gives it to the next generation.

``worker.snapshot.put`` brings a memory of a worker's own local rank (two each, 0 and 1, by turns), ``worker.snapshot
.get`` hands out a local rank's. Freed when the shim ends, as it does when the job ends on this node. Standard library
only; must never read or map what it keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from nodeagent.workers.shim_link import Call, WorkerLink

BUFFERS = 2
"""Memories of each local rank: one whole, one being written."""
SHARE = 0.5
"""Of the memory that this machine could give now, one more buffer may take this much at most."""


class Snapshots:
    """What is kept, by local rank and index. ``changed`` is called when ``bytes`` is another."""

    def __init__(self, link: WorkerLink, changed: Callable[[], None], available: Callable[[], int]) -> None:
        self._kept: dict[tuple[int, int], int] = {}
        self._changed, self._available = changed, available
        self.bytes = 0
        link.add("snapshot.put", self._put)
        link.add("snapshot.get", self._get)

    def _put(self, call: Call) -> None:
        index = int(call.message["index"])
        size = int(call.message["bytes"])
        if not 0 <= index < BUFFERS:
            raise ValueError(f"index {index}")
        place = (call.local_rank, index)
        old = self._kept.get(place)
        freed = os.fstat(old).st_size if old is not None else 0
        most = int((self._available() + freed) * SHARE)
        if size > most:
            call.refuse(f"a snapshot of {size >> 20} MiB is more than this node has memory for ({most >> 20} MiB)")
            return
        if not call.fds:  # only asked whether it may
            call.answer()
            return
        if os.fstat(call.fds[0]).st_size > size:
            raise ValueError("the memory is larger than was said")
        self._kept[place] = call.fds.pop(0)
        if old is not None:
            os.close(old)
        self.bytes = sum(os.fstat(fd).st_size for fd in self._kept.values())
        call.answer()
        self._changed()

    def memories(self) -> list[tuple[int, int, int]]:
        """Local rank, index and descriptor of each that is kept; the descriptors stay the shim's."""
        return [(slot, index, fd) for (slot, index), fd in sorted(self._kept.items())]

    def _get(self, call: Call) -> None:
        if "slot" not in call.message:
            call.answer(slots=sorted({slot for slot, _ in self._kept}))
            return
        found = {index: fd for (slot, index), fd in sorted(self._kept.items()) if slot == call.message["slot"]}
        call.answer(fds=tuple(found.values()), indexes=list(found))


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that this machine could give without swapping."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise OSError(0, f"{meminfo} does not say how much memory is available")

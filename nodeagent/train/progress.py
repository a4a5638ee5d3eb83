"""Progress that the worker reports: its step, and its phase. From it nodeagent detects that a gang hangs.

The worker writes into a shared page of 64 bytes (NODEAGENT_PROGRESS), which the shim reads now and then. So a call
costs a microsecond and no system call, and cannot block. Only the first step is also sent to the shim, within a bound:
from it nodeagent knows how long a recovery took. Standard library only. Must never raise for an error outside of the
script.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

MAGIC = b"naprog1\0"
PAGE = struct.Struct("<8sqdd32s")
"""Magic, step, time (CLOCK_BOOTTIME), the phase's own bound (0: the job's), phase."""
NO_STEP = -1
TRAIN = "train"
_NEWS, _PHASE = struct.Struct("<qd"), struct.Struct("<d32s")

_page: mmap.mmap | None = None
_opened = False
_stepped = False
_step, _phase, _bound = NO_STEP, "", -1.0


def progress(step: int | None = None, phase: str = TRAIN, bound: float | None = None) -> None:
    """Report that this worker has reached ``step`` (None: no further, but it lives), and is in ``phase``.

    Call it once a step, on every rank. A phase other than ``train`` (``evaluate``, ``checkpoint``, any name) may take
    longer than the job's limit: up to ``bound`` seconds, or the job file's ``hang.phases``. It ends with the next call.
    """
    global _step, _phase, _bound, _stepped  # noqa: PLW0603 (one page for each process)
    if step is not None and not _stepped:
        _stepped = True
        _send_stepped()
    page = _page if _opened else _open()
    if page is None:
        return
    if phase != _phase or (bound or 0.0) != _bound:
        _phase, _bound = phase, bound or 0.0
        _PHASE.pack_into(page, 24, _bound, phase.encode()[:31])
    if step is not None:
        _step = int(step)
    _NEWS.pack_into(page, 8, _step, time.clock_gettime(time.CLOCK_BOOTTIME))


def _send_stepped() -> None:
    from nodeagent.train.link import Link

    if (link := Link.of_environment()) is not None:
        link.send("stepped")
        link.close()


def _open() -> mmap.mmap | None:
    global _page, _opened  # noqa: PLW0603
    _opened = True
    path = os.environ.get("NODEAGENT_PROGRESS")
    if path is None:  # the job detects no hangs, or nodeagent did not start this process
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            page = mmap.mmap(fd, PAGE.size)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
    _page = page if page[: len(MAGIC)] == MAGIC else None
    return _page

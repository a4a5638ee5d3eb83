"""Ends the waits that a stranger's descriptor costs the thread that reads a unix socket, on kernels that cannot refuse
descriptors (``linux.refuse_descriptors``).

The kernel closes a descriptor that nobody takes in the thread that read the message, on its way back from the call. A
TCP socket that lingers waits there for as long as its sender chose, for an hour if he likes; but no longer than until
the thread has a signal. So a thread of its own looks at what the watched thread waits for, and sends it one where that
is such a socket: the call then returns as if nothing had been. Must never touch a descriptor or the loop.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

QUIET, BUSY = 0.25, 0.001
"""Seconds between two looks: as long as nothing was found, and for ``AFTER`` seconds after something was."""
AFTER = 10.0
SIGNAL = signal.SIGURG
"""Which nobody else uses here, and which does nothing."""
PLACE = 64
"""Bytes of a kernel function's name that are read."""


def end_lingering(noticed: Callable[[], object]) -> None:
    """Watch the thread that calls this, the process' first, until the process ends. ``noticed``: is called at the first
    wait that was ended, in another thread. Raises OSError where the kernel does not show what a thread waits for."""
    file = os.open(Path(f"/proc/self/task/{threading.get_native_id()}/wchan"), os.O_RDONLY | os.O_CLOEXEC)
    signal.signal(SIGNAL, lambda _number, _frame: None)
    watched = threading.get_ident()
    threading.Thread(target=_watch, args=(file, watched, noticed), name="lingering", daemon=True).start()


def _watch(file: int, watched: int, noticed: Callable[[], object]) -> None:
    until = 0.0
    while True:
        time.sleep(BUSY if time.monotonic() < until else QUIET)
        if _lingers(os.pread(file, PLACE, 0)):
            signal.pthread_kill(watched, SIGNAL)
            if not until:
                noticed()
            until = time.monotonic() + AFTER


def _lingers(place: bytes) -> bool:
    """Whether a thread that waits in this function of the kernel waits for a socket that it closes (its own name, or
    that of the function by which it waits)."""
    return place in (b"wait_woken", b"sk_stream_wait_close")

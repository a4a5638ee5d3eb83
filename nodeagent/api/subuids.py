"""Counts the subordinate uids of one user together: each would have the limits of a user of its own.

Must never look up a name: what is counted is counted before anybody is looked up.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

from nodeagent.api.auth import Key
from nodeagent.osutil.subuids import FILE, ranges

FRESH = 30.0
"""Seconds after which it is looked whether root has changed the file."""


class SubordinateUids:
    """Of this machine. ``clock`` counts seconds, and never goes back."""

    def __init__(self, file: Path = FILE, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._looked = float("-inf")
        self._version: tuple[int, int, int] | None = None
        self._ranges: list[tuple[int, int, str]] = []
        """First and last uid, and their key; by the first."""

    def key(self, uid: int) -> Key:
        """Under which what this uid asks for is counted: its own, or one for all subordinate uids of a user."""
        now = self._clock()
        if now - self._looked >= FRESH:
            self._looked = now
            self._look()
        at = bisect_right(self._ranges, uid, key=lambda one: one[0]) - 1
        return self._ranges[at][2] if at >= 0 and uid <= self._ranges[at][1] else uid

    def _look(self) -> None:
        try:
            found = self._file.stat()
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            if version == self._version:
                return
            found_ranges = ranges(self._file)
        except OSError:  # no file: nobody has any
            self._version, self._ranges = None, []
            return
        self._version = version
        keys = ((first, last, f"subordinate uids of {user[:64]}") for first, last, user in found_ranges)
        self._ranges = sorted(keys, key=lambda one: one[0])


SUBORDINATES = SubordinateUids()
"""Those of the machine that this process runs on."""

"""Whose the subordinate uids are: `/etc/subuid` lets a user have processes, and files, under thousands of uids
(`newuidmap`). Ranges that only the user database has (`subid: sss`) are not known here.

``SubordinateUids`` counts those of one user together: each would have the limits of a user of its own. It must never
look up a name: what is counted is counted before anybody is looked up.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FILE = Path("/etc/subuid")
BYTES_MAX = 1 << 18
"""Bytes of it that are read: some ten thousand users. What comes after them is not known."""
FRESH = 30.0
"""Seconds after which it is looked whether root has changed the file."""


def ranges(file: Path) -> list[tuple[int, int, str]]:
    """First and last uid, and the user, by name or number. Raises OSError."""
    with file.open("rb", buffering=0) as opened:
        text = os.read(opened.fileno(), BYTES_MAX).decode(errors="replace")
    return [found for line in text.splitlines() if (found := _range(line)) is not None]


def ranges_of(owner: int) -> list[tuple[int, int, str]]:
    """Those of this user; none where the file cannot be read. Blocks on the user database."""
    import pwd

    users = {str(owner)}
    with suppress(KeyError):
        users.add(pwd.getpwuid(owner).pw_name)
    try:
        return [found for found in ranges(FILE) if found[2] in users]
    except OSError:
        return []


def _range(line: str) -> tuple[int, int, str] | None:
    """Of ``ann:100000:65536``; nothing of what is no such line."""
    user, _, numbers = line.strip().partition(":")
    first, _, count = numbers.partition(":")
    if not user or not all(text.isascii() and text.isdecimal() and len(text) <= 10 for text in (first, count)):
        return None
    return int(first), int(first) + int(count) - 1, user


class SubordinateUids:
    """Of this machine. ``clock`` counts seconds, and never goes back."""

    def __init__(self, file: Path, clock: Callable[[], float]) -> None:
        self._file, self._clock = file, clock
        self._looked = float("-inf")
        self._version: tuple[int, int, int] | None = None
        self._ranges: list[tuple[int, int, str]] = []
        """First and last uid, and their key; by the first."""

    def key(self, uid: int) -> int | str:
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


SUBORDINATES = SubordinateUids(FILE, time.monotonic)
"""Those of the machine that this process runs on."""

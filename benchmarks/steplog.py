"""Reading the step log that ``train.py`` writes: which gangs there were, when each first stepped, how long none did.

All times are CLOCK_MONOTONIC of this one machine, so that a fault's time and a step's can be subtracted. Must never
know who launched the gang.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

POLL = 0.05
"""Seconds between two looks at the log; no measured time depends on it."""
CHECK = 10.0
"""Seconds between two checks whether waiting still makes sense: rare, since a check costs the machine work."""


class NotReachedError(Exception):
    """What was waited for did not happen in time."""


@dataclass(slots=True)
class Gang:
    """One formed gang, as far as its log lines are here."""

    number: int
    world: int
    pids: dict[int, int] = field(default_factory=dict)
    """By rank."""
    began: dict[int, float] = field(default_factory=dict)
    """When each rank had done its first step."""
    steps: list[float] = field(default_factory=list)
    """When rank 0 had done each of its steps."""
    lowest: int = 0
    """The number of the earliest step that any of its ranks has done."""
    highest: int = 0

    @property
    def whole(self) -> bool:
        """Every rank has stepped."""
        return len(self.began) == self.world

    @property
    def first_step(self) -> float:
        """When the last of its ranks had done its first step."""
        return max(self.began.values())


class StepLog:
    """The log of one training, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._gangs: dict[int, Gang] = {}

    def gangs(self) -> list[Gang]:
        """All gangs so far, in the order of their forming."""
        self._read()
        return [self._gangs[number] for number in sorted(self._gangs)]

    def newest(self) -> Gang:
        """Raises NotReachedError when nothing has stepped yet."""
        if not (gangs := self.gangs()):
            raise NotReachedError(f"nobody has stepped yet ({self.path})")
        return gangs[-1]

    def wait(
        self,
        world: int,
        timeout: float,
        *,
        after: int = -1,
        check: Callable[[], None] | None = None,
        poll: float = POLL,
    ) -> Gang:
        """The first whole gang of this world size with a number above ``after``. ``check`` may raise to end the
        wait. Raises NotReachedError."""
        checked = time.monotonic()
        until = checked + timeout
        while True:
            for gang in self.gangs():
                if gang.number > after and gang.world == world and gang.whole:
                    return gang
            if check is not None and time.monotonic() > checked + CHECK:
                check()
                checked = time.monotonic()
            if time.monotonic() > until:
                seen = ", ".join(f"{g.world} ranks, {len(g.began)} stepped" for g in self.gangs() if g.number > after)
                raise NotReachedError(f"no gang of {world} stepped within {timeout:g} s (seen: {seen or 'none'})")
            time.sleep(poll)

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        lines = new[: new.rfind(b"\n") + 1]
        self._at += len(lines)
        for line in lines.splitlines():
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        gang = self._gangs.setdefault(line["gang"], Gang(line["gang"], line["world"]))
        rank = line["rank"]
        gang.pids[rank] = line["pid"]
        gang.began.setdefault(rank, line["mono"])
        gang.lowest = min(gang.lowest or line["step"], line["step"])
        gang.highest = max(gang.highest, line["step"])
        if rank == 0:
            gang.steps.append(line["mono"])


def standstill(gangs: Sequence[Gang], old: Gang, new: Gang) -> float:
    """Seconds by which the longest pause from ``old``'s last steps to ``new``'s first ones, gangs in between included,
    is longer than a normal step."""
    normal = statistics.median(b - a for a, b in pairwise(old.steps))
    steps = sorted(at for gang in gangs if old.number < gang.number <= new.number for at in gang.steps)
    return max(b - a for a, b in pairwise([old.steps[-1], *steps])) - normal


def steps_lost(gangs: Sequence[Gang], old: Gang, new: Gang) -> int:
    """Steps done by ``old``, or a gang after it, that ``new`` has to do again."""
    return max(gang.highest for gang in gangs if old.number <= gang.number < new.number) - (new.lowest - 1)


def longest_pause(gang: Gang, start: float, end: float) -> float:
    """Seconds by which rank 0's longest pause around these moments is longer than a normal step."""
    normal = statistics.median(b - a for a, b in pairwise(gang.steps))
    inside = [(a, b) for a, b in pairwise(gang.steps) if b >= start and a <= end]
    return max((b - a for a, b in inside), default=end - start) - normal


def steps_per_second(gang: Gang, start: float, end: float) -> float:
    """Steps per second of rank 0 between two moments, from the first to the last step in between."""
    inside = [t for t in gang.steps if start <= t <= end]
    if len(inside) < 2:
        raise NotReachedError(f"only {len(inside)} steps in {end - start:.1f} s")
    return (len(inside) - 1) / (inside[-1] - inside[0])

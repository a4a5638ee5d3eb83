"""The verify run after a repair: has it run, and takes what it says to the judge. A run that could not run is tried
again a few times, and never taken for one that passed. Must never decide when hardware is free for one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from nodeagent.agent.clock import Clock
from nodeagent.agent.hands import FAILED, Hands
from nodeagent.model.health import Action, Verdict

MOST_TRIES = 3
"""How often a verify run that could not run is tried."""
PAUSE = 60.0
"""Seconds until the second try; doubled for each further one."""


class Ward(Protocol):
    """What is wrong with this node (``health/monitor.py``)."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]: ...

    @property
    def waiting(self) -> frozenset[str]: ...

    @property
    def processes(self) -> Mapping[str, Sequence[int]] | None: ...

    @property
    def strangers(self) -> frozenset[int]: ...

    def repaired(self, devices: Collection[str], action: Action) -> None: ...

    def passed(self, devices: Collection[str]) -> None: ...

    def escalate(self, keys: Collection[tuple[str, str]], why: str) -> None: ...

    async def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tries:
    """Verify runs that could not run."""

    count: int
    again: float
    """Unix time of the next one."""
    why: str

    @property
    def over(self) -> bool:
        return self.count >= MOST_TRIES

    @property
    def told(self) -> str:
        return f"its verify run is broken{', and is not tried again' if self.over else ''}: {self.why}"


class Verifier:
    """One node's verify runs, one at a time."""

    def __init__(self, ward: Ward, hands: Hands, clock: Clock, counted: Callable[[str, str], None]) -> None:
        self._ward, self._hands, self._clock, self._counted = ward, hands, clock, counted
        self._tries: dict[str, Tries] = {}
        """By the first device of each run."""
        self._log = structlog.get_logger("repair")

    def forget(self) -> None:
        """Of those that wait for nothing any more."""
        waiting = {v.device for v in self._ward.verdicts if v.stage == "repaired"}
        self._tries = {device: tries for device, tries in self._tries.items() if device in waiting}

    async def verify(self, devices: Collection[str], whole: bool, note: Callable[[str, str], None]) -> Tries | None:
        """Have them (``whole``: the node) verified; what is to be said if that could not be done, or not yet again."""
        key, now = min(devices), self._clock.wall()
        before = self._tries.get(key)
        if before is not None and (before.over or now < before.again):
            return before
        ended = await self._hands.verify([] if whole else sorted(devices))
        what = "the node" if whole else ", ".join(sorted(devices))
        if ended.code not in (0, FAILED, None):
            count = before.count + 1 if before is not None else 1
            tries = Tries(count, self._clock.wall() + PAUSE * 2 ** (count - 1), ended.text)
            self._tries[key] = tries
            self._counted("verify", "interrupted")
            self._log.error("verify run could not run", devices=what, why=ended.text)
            return tries
        self._tries.pop(key, None)
        passed = ended.code == 0
        if passed:
            self._ward.passed(devices)
        else:
            failed = {(v.rule, v.device) for v in self._ward.verdicts if v.device in devices and v.stage == "repaired"}
            self._ward.escalate(failed, f"verify run: {ended.text}")
        note("VerifyPassed" if passed else "VerifyFailed", f"{what}: {ended.text}")
        self._counted("verify", "done" if passed else "failed")
        return None

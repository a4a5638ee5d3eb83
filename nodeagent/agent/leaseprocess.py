"""The agent's side of the lease process (``nodeagent/lease``): what it is to do, what it says, and that it is there.

Must never renew, grant, or decide who may run.
"""

from __future__ import annotations

from typing import Protocol

from nodeagent.lease.core import State
from nodeagent.lease.signs import Pulse


class LeaseProcess(Protocol):
    """Renews this node's lease and grants its pods their time. Nothing here waits, and nothing raises."""

    def tend(self, life: str, start: int, era: str) -> None:
        """This life is to be looked after from now on. To be called again whenever it may have changed, and with each
        beat: where the store is may have changed too."""

    def wake(self) -> None:
        """There is a new grant file, or the store answers again."""

    def alive(self) -> None:
        """The agent is there."""

    def lend(self, uid: str, until: float) -> None:
        """The keepers of this job's generation let its pod run on until then (CLOCK_BOOTTIME)."""

    def end(self) -> None:
        """The lease was given back: nothing is granted any more, and the process ends."""

    def pulse(self) -> Pulse | None:
        """What it last granted, and when; None if it has not turned yet."""

    def said(self) -> tuple[State, str]:
        """What it is at, and why."""

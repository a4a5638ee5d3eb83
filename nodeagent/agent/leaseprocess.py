"""The agent's side of the lease process (``nodeagent/lease``): what it is to do, and that it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Pulse:
    """How the lease process does; times are of CLOCK_BOOTTIME."""

    turned: float
    """When it last went round."""
    renewed: float
    """When its last good renewal was sent."""
    until: float
    """Until when the node's pods may run."""


class LeaseProcess(Protocol):
    """Every call returns at once, and none fails: what it did shows in ``pulse``."""

    def tend(self, life: str, start: int, era: str) -> None:
        """Renew the lease of this life, while the store is in this era."""

    def wake(self) -> None:
        """A new pod waits for its time, or the store answers again."""

    def alive(self) -> None:
        """The agent is there, and does its work."""

    def lend(self, uid: str, until: float) -> None:
        """Let one job's workers run on until then, though the lease could not be renewed."""

    def end(self) -> None:
        """The lease was given back, or is to lapse: nothing may run here any more."""

    def pulse(self) -> Pulse | None:
        """None while it has not said anything."""

"""What a lease process does, for tests that have none: it renews, and hears what its agent says.

The product's client has no method for a renewal: agents do not renew.
"""

from __future__ import annotations

from nodeagent.lease.core import State
from nodeagent.lease.signs import Pulse
from nodeagent.store.calls import Calls


async def renew_lease(calls: Calls, node: str, life: str, era: str, length: int, *, asks: bool = False) -> str:
    """Renew for ``length`` ms. Who waits for the node, if its agent is silent (``asks``); empty if nobody does. Raises
    what steps raise."""
    about: dict[str, object] = {"node": node, "life": life, "era": era, "length": length, "asks": asks}
    _served, waits = await calls.step("renew_lease", about)
    return str(waits)


async def era_of(calls: Calls) -> str:
    """The era that the store is in."""
    async with calls.link() as link:
        return str(await link.ask("HGET", calls.prefix + "meta", "era") or "")


class Words:
    """The agent's words, kept; nobody acts on them. See ``agent.leaseprocess.LeaseProcess``."""

    def __init__(self) -> None:
        self.tended: list[tuple[str, int, str]] = []
        self.lent: list[tuple[str, float]] = []
        self.alive_said = 0
        self.ended = False

    def tend(self, life: str, start: int, era: str) -> None:
        self.tended.append((life, start, era))

    def wake(self) -> None:
        """There is nobody to be woken."""

    def alive(self) -> None:
        self.alive_said += 1

    def lend(self, uid: str, until: float) -> None:
        self.lent.append((uid, until))

    def end(self) -> None:
        self.ended = True

    def pulse(self) -> Pulse | None:
        return None

    def said(self) -> tuple[State, str]:
        return "idle", ""

"""What a lease process does, for tests that have none: it renews, and hears what its agent says.

The product's client has no method for a renewal: agents do not renew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nodeagent.lease.core import NOBODY_WAITS, LeaseState
from nodeagent.lease.lending import LoanRow, Promises
from nodeagent.lease.statefiles import NOT_BRIDGED, Bridged, Pulse, unannounced
from nodeagent.lease.withdrawals import jobs_and_numbers
from nodeagent.store.calls import Calls


class Renewed(NamedTuple):
    """A good renewal's reply."""

    waits: Mapping[str, int]
    """The jobs (uids) that wait for the node, if its agent is silent, with the generation that it holds."""
    unannounced: int
    """The newest revision that woke nobody."""


async def renew_lease(
    calls: Calls,
    node: str,
    life: str,
    era: str,
    length: int,
    *,
    asks: bool = False,
    late: bool = False,
    standing: Mapping[str, int] | None = None,
) -> Renewed:
    """Renew for ``length`` ms. ``asks``: its agent is silent; ``late``: since answers come late. Raises what steps
    raise."""
    about: dict[str, object] = {"node": node, "life": life, "era": era, "length": length, "asks": asks, "late": late}
    if standing is not None:
        about["standing"] = standing
    clocks, waits = await calls.step("renew_lease", about)
    return Renewed(jobs_and_numbers(str(waits)), unannounced(str(clocks)))


async def era_of(calls: Calls) -> str:
    """The era that the store is in."""
    async with calls.link() as link:
        return str(await link.ask("HGET", calls.prefix + "meta", "era") or "")


async def nobody(*_: object) -> None:
    """No peer has its lease in another store."""


class Words:
    """The agent's words, kept; nobody acts on them. See ``agent.leaseprocess.LeaseProcess``."""

    def __init__(self) -> None:
        self.tended: list[tuple[str, int, str]] = []
        self.known: list[Mapping[str, LoanRow]] = []
        self.leaving = self.deaf = False
        self.promised: Promises | None = Promises("", float("-inf"), True, {})
        self.shown = NOT_BRIDGED
        self.reached_at = ""
        self.renewed_at = self.renewed_in = ""
        """Where the lease runs, and in which era."""
        self.cut_off: list[bool] = []
        """As said with each word that the agent is there."""
        self.beats: Pulse | None = None
        self.newest = 0
        self.ended = False

    def tend(self, life: str, start: int, era: str, cluster_uid: str) -> None:
        self.tended.append((life, start, era))

    def wake(self) -> None:
        """There is nobody to be woken."""

    def alive(self, cut_off: bool, standing: Mapping[str, int] = NOBODY_WAITS) -> None:
        self.cut_off.append(cut_off)

    def know(self, life: str, leaving: bool, jobs: Mapping[str, LoanRow]) -> bool:
        if not self.deaf:
            self.known.append(jobs)
            self.leaving = leaving
        return not self.deaf

    def promises(self) -> Promises | None:
        return self.promised

    def bridged(self) -> Bridged:
        return self.shown

    def address(self) -> str:
        return self.reached_at

    def end(self) -> None:
        self.ended = True

    def pulse(self) -> Pulse | None:
        return self.beats

    def unannounced(self) -> int:
        return self.newest

    def elsewhere(self, era: str | None) -> str:
        return self.renewed_at if era != self.renewed_in else ""

    def status(self) -> tuple[LeaseState, str]:
        return "idle", ""

"""Jobs that this node lets go of while its agent is silent or cut off, since they wait for it: what is taken back,
until when, and what stays barred. A part of ``core``; pure.

The agent of another member has found a fault, and the job's next generation cannot begin before this node runs nothing
of the one before. Or the others wait for what this node's agent cannot start or report, of a generation of which
nothing runs here. So the time of that job's pod is taken back, and of no other; when nothing of it can run any more the
store is told. Its generations up to that one are barred here for the rest of the node's life, whatever an agent with an
old view orders, and this node lends them nothing. A newer one starts as any other does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MOST = 256
"""Jobs of which withdrawals are kept. A node has fewer pods; of those that are over the oldest go."""
LONGEST_NUMBER = 15
"""Digits of a generation's number, of which a grant record holds each exactly."""


class Withdrawal(NamedTuple):
    """Of one job."""

    number: int
    """Of the newest generation of which nothing may run here any more."""
    at: float
    """When its pod's time was taken back (CLOCK_BOOTTIME)."""
    over: bool = False
    """The store knows that nothing of it runs here. The pod has time again, for newer generations."""


class Withdrawals(NamedTuple):
    """Of one life. Written down before they have any effect, so that no restart takes them back."""

    life: str
    jobs: Mapping[str, Withdrawal]
    """By uid."""

    def barred(self, uid: str, number: int) -> bool:
        """Nothing of this generation may run here, or be lent time."""
        withdrawal = self.jobs.get(uid)
        return withdrawal is not None and number <= withdrawal.number

    def begun(self, uid: str, number: int, now: float) -> Withdrawals:
        """The job waits for this node, which holds a generation of this number."""
        old = self.jobs.get(uid)
        if old is None or old.number < number:
            new = Withdrawal(number, now)
        elif old.over:  # a store that lost writes does not know it any more
            new = old._replace(over=False)
        else:
            return self
        others = {u: w for u, w in self.jobs.items() if u != uid}
        if len(others) >= MOST:
            over = sorted((w.at, u) for u, w in others.items() if w.over)
            if not over:
                return self  # the next renewal asks again
            del others[over[0][1]]
        return self._replace(jobs=others | {uid: new})

    def ended(self, uid: str, number: int) -> Withdrawals:
        """The store knows that this node has let go."""
        old = self.jobs.get(uid)
        if old is None or old.number != number:
            return self
        return self._replace(jobs={**self.jobs, uid: old._replace(over=True)})

    @property
    def pending(self) -> dict[str, Withdrawal]:
        """Those that are not over, by uid."""
        return {uid: one for uid, one in self.jobs.items() if not one.over}


NOTHING_WITHDRAWN = Withdrawals("", {})


def jobs_and_numbers(text: str) -> dict[str, int]:
    """Of a reply ("uid number uid number"): jobs, each with the number of a generation. What is no such pair is left
    out."""
    words = text.split()
    found = {}
    for uid, number in zip(words[::2], words[1::2], strict=False):
        if number.isdecimal() and number.isascii() and len(number) <= LONGEST_NUMBER and int(number):
            found[uid] = int(number)
    return found

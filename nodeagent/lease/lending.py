"""What a failsafe member answers when a member of a gang asks it for time, and by what it knows that. Pure.

The rules that make it safe: a failsafe member lends only to the newest generation that its agent knows to be active,
under the very failsafe members that the agent knows; having lent, it does not let go of that job for ``promise``
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LentGeneration = tuple[int, str]
"""Number and id, as in ``model.world.Token``."""


class Ask(NamedTuple):
    """A member's question to one failsafe member: may the workers of this generation run on?"""

    uid: str
    token: LentGeneration
    failsafe_members: Mapping[str, str]
    """As the member knows them: node to life."""
    node: str
    life: str
    to: str = ""
    """The failsafe member that is asked, and its life: what is reached at its address may be another node."""
    to_life: str = ""


class LoanAnswer(NamedTuple):
    """A failsafe member's answer. ``yes`` is a promise."""

    yes: bool
    why: str = ""
    node: str = ""
    """Whose answer it is: a failsafe member that is reached at another's address must not answer for two."""
    life: str = ""

    def of(self, node: str, life: str) -> bool:
        """It is this node's, in this life."""
        return (self.node, self.life) == (node, life)


class FailsafeAddress(NamedTuple):
    """Where a failsafe member is asked."""

    address: str
    """``host:port`` with a numeric host: to look up a name may take longer than the fence."""
    life: str


class LoanRow(NamedTuple):
    """The active generation of a job that this node is a member of, or keeps."""

    token: LentGeneration
    failsafe_members: Mapping[str, str]
    """Node to life."""
    members: Mapping[str, str]
    """Node to life; of a job that this node keeps."""
    refuses: str = ""
    """Why this node lends it nothing, though it keeps it; empty if it does."""
    pod: str = ""
    """The key of the pod here whose workers are this generation's; empty if there is none."""
    places: Mapping[str, FailsafeAddress] = {}
    """Of the failsafe members that can be asked; of a job that runs here."""


class Table(NamedTuple):
    """What an agent knows of the jobs of its node, in one life of that."""

    boot: str
    node: str
    life: str
    leaving: bool
    """The node goes soon: it lends nothing any more."""
    jobs: Mapping[str, LoanRow]
    """By uid."""


class Promises(NamedTuple):
    """What a node has promised those that it keeps."""

    boot: str
    began: float
    """Since when (CLOCK_BOOTTIME) they are written down. What was promised before is not known."""
    whole: bool
    """Since before the node had any life in this boot: what was promised in one of those is known."""
    until: Mapping[str, float]
    """Job (uid) to the time until which this node must not let go of it."""

    def end(self, uid: str, length: float, ours: bool) -> float:
        """Until when this node must not let go of the job; a promise binds for ``length`` seconds. ``ours``: it was
        made a failsafe member in the life that it has now."""
        return max(0.0 if ours and self.whole else self.began + length, self.until.get(uid, 0.0))

    def last(self, length: float) -> float:
        """When all of them are over."""
        return max([self.began + length, *self.until.values()])


def answer(table: Table, ask: Ask, renewed: float, unserved: float) -> LoanAnswer:
    """What the table's node says. ``renewed``: seconds since its last good renewal at the store was sent. If they
    are no more than ``unserved``, this node still reaches the store, and lends nothing: it would only hold the gang
    up."""

    def no(why: str) -> LoanAnswer:
        return LoanAnswer(False, why, table.node, table.life)

    node, number, row = table.node, ask.token[0], table.jobs.get(ask.uid)
    if (ask.to, ask.to_life) != (node, table.life):
        return no(f"{node} was asked in the place of {ask.to}")
    if table.leaving:
        return no(f"{node} is leaving")
    if row is None or row.token != ask.token:
        return no(f"{node} does not know generation {number} as active")
    if row.failsafe_members != ask.failsafe_members or node not in row.failsafe_members:
        return no(f"{node} knows other failsafe members of generation {number}")
    if row.members.get(ask.node) != ask.life:
        return no(f"{node} does not know {ask.node} as a member of generation {number}")
    if row.refuses:
        return no(f"{node} {row.refuses}")
    if renewed <= unserved:
        return no(f"the store answers {node}")
    return LoanAnswer(True, "", node, table.life)

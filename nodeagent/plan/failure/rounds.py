"""A role that is started again as a whole, on whichever nodes its places are, while the rest of the gang goes on.

Each such start is a round of the role, within a generation. A member's report is a promise (``PodReport.rounds``): of
an earlier round nothing runs there, and nothing will. So the newest round that anybody has promised is the one that is
asked of all, and it starts on each node when every member with places of the role has promised that very round. Two
failures at once ask for the same round; a failure after the start asks for the next. Nobody chooses, so there is
nothing to be agreed on; and where the gang is formed anew, the reports with their rounds are gone with their
generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nodeagent.model.backoff import backoff
from nodeagent.model.job import JobRecord
from nodeagent.model.timing import millis
from nodeagent.model.world import Generation, Member


@dataclass(frozen=True, slots=True)
class Round:
    """What a node is to do for one of its roles."""

    role: str
    number: int
    starts: bool
    """Its workers are to be started; else they are to be stopped."""


def next_round(generation: Generation, member: Member, reached: Mapping[str, int], down: Iterable[str]) -> Round | None:
    """What is next for a role of this member of the active generation; None: nothing. ``reached`` and ``down``: as its
    shim has them (``PodStatus``)."""
    waiting = frozenset(down)
    for role in dict.fromkeys(place.role for place in member.places):
        own, asked = reached.get(role, 0), asked_round(generation, role)
        if own < asked:
            return Round(role, asked, starts=False)
        if role in waiting and own == agreed_round(generation, role):
            return Round(role, own, starts=True)
    return None


def asked_round(generation: Generation, role: str) -> int:
    """The newest round that some member has promised."""
    return max((report.rounds.get(role, 0) for report in generation.reports.values()), default=0)


def agreed_round(generation: Generation, role: str) -> int:
    """The newest round that all members with places of the role have promised."""
    reports = [generation.reports.get(member.node) for member in members_with(generation, role)]
    return min((0 if report is None else report.rounds.get(role, 0) for report in reports), default=0)


def members_with(generation: Generation, role: str) -> list[Member]:
    """Members that hold places of the role, by group rank."""
    return [member for member in generation.ordered() if any(place.role == role for place in member.places)]


def unable(generation: Generation) -> tuple[str, str] | None:
    """A role that cannot be started again as a whole, and the node where all that the pod had to do is done: it holds
    no worker any more that could start with the others. None: there is none."""
    for role in sorted({role for report in generation.reports.values() for role in report.rounds}):
        for member in members_with(generation, role):
            report = generation.reports.get(member.node)
            if (
                report is not None
                and report.state == "succeeded"
                and report.rounds.get(role, 0) < asked_round(generation, role)
            ):
                return role, member.node
    return None


def round_wait(job: JobRecord, generation: Generation, role: str, served: int) -> float:
    """Seconds until the role's workers start once it is down everywhere: the back-off of its restarts in this
    generation that are no older than the budget's window (``served``: ms)."""
    limits = job.spec.restarts
    since = served - millis(limits.window)
    rounds = {
        one.round
        for member in members_with(generation, role)
        if (report := generation.reports.get(member.node)) is not None
        for one in report.alone
        if one.round and one.at >= since and one.rank in member.ranks_of(role)
    }
    return backoff(max(1, len(rounds)), limits.backoff_min, limits.backoff_max)

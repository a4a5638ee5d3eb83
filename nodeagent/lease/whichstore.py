"""By which store a node has its lease: what its lease process answers an agent that is about to join one. Pure.
Standard library only."""

from __future__ import annotations

from typing import NamedTuple

from nodeagent.lease.core import Core
from nodeagent.lease.resp import place


class LeaseAsk(NamedTuple):
    """By which store does the node that is asked have its lease?"""


class LeaseAnswer(NamedTuple):
    """By this one."""

    node: str = ""
    """Empty: it has none."""
    cluster_uid: str = ""
    era: str = ""
    store: str = ""
    """Where it is, for people: as the node reaches it."""
    age: float | None = None
    """Seconds since the last good renewal was sent; None: this lease process has sent none."""
    away: bool = False
    """That was the last good one: the next one was refused, or was not answered."""


def lease_answer(core: Core, now: float) -> LeaseAnswer:
    """What this node says."""
    order = core.order
    if order is None:
        return LeaseAnswer()
    age = max(0.0, now - core.renewed) if core.renewed else None
    return LeaseAnswer(order.node, order.cluster_uid, order.era, place(order.server), age, bool(core.away))

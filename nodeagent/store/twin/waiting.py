"""Who is waited for while a store recovers that has lost writes, or may have: those that may know better.

The twin of ``scripts/_waiting.lua``; must never judge whose view wins: that is ``restore``'s.
"""

from __future__ import annotations

from nodeagent.store.messages import Offer
from nodeagent.store.twin.state import State


def expect(s: State, o: Offer, *, anew: bool) -> None:
    """The newest view so far says who was live. ``anew``: the loss has only now been found; all are to be heard."""
    s.heard = frozenset() if anew else s.heard - {o.by}
    s.excused = 0
    if o.regroup:
        s.awaited = frozenset({*o.awaited, o.by}) - s.heard
        s.recover = s.least + o.regroup
    else:
        s.awaited = frozenset()
        s.recover = max(s.least, min(s.recover, s.served + s.credit_ms + s.lease_ms))
    s.amnesty = max(s.amnesty, s.recover)


def hear(s: State, node: str) -> None:
    """This node has said what it knows of the writes that the store may have lost."""
    if not s.recovering:
        return
    if not s.parent:
        s.heard |= {node}
    if node not in s.awaited:
        return
    s.awaited -= {node}
    if len(s.awaited) <= s.excused:
        s.awaited = frozenset()
        s.recover = max(s.least, s.served)
        if not s.parent:
            s.amnesty = max(s.recover, s.served + s.credit_ms + s.lease_ms)

"""Which replies of the store somebody acts on, so that replicas must have what they tell first (ADR 13).

Looks at a script's raw reply; never at the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ActedOn = Callable[[list[Any]], bool]
"""Whether somebody acts on a step for this reply: on the step itself, or on a job's record in the reply. With
``replicas`` it counts as lost until that many replicas have the step, and what it read. Goodbyes and removals need no
wait of their own: whatever is built on them waits, and writes keep their order."""


def never(_reply: list[Any]) -> bool:
    """A goodbye, a removal, what is only read."""
    return False


def always(_reply: list[Any]) -> bool:
    """A step that others build on, or whose reply is a job's record."""
    return True


def beat_brings_jobs(reply: list[Any]) -> bool:
    """An agent may start or stop workers because of what a beat tells; that its lease was renewed, a new primary makes
    good with an amnesty."""
    _uid, _served, _lapsed, _next_lapse, _rev, _more, _event, records, *_ = reply
    return any(key.startswith("job:") for key, *_ in records)

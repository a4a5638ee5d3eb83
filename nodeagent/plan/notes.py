"""What was worked out from one view of the cluster, kept for as long as that view stays the same.

With thousands of nodes, sorting and judging all of them anew for each job in each round of each agent would be most of
what an agent does. Decides nothing, and no result may depend on whether it was kept: only pure functions of the view's
nodes, jobs and lapsed leases belong here, never what depends on its time.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import TypeVar, cast

T = TypeVar("T")

ROOM = 50_000
"""Entries kept, all results together: of many jobs that wait, each has a result as long as the list of nodes."""
SMALL = 10
"""A result counts as so many entries at least."""


class Notes:
    """Results by what they are, the oldest dropped first."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[object, ...], object, int]] = {}
        self._size = 0

    def once(self, what: str, of: tuple[object, ...], work: Callable[[T | None], T], size: int = 1) -> T:
        """``work(before)``, done once for this ``what`` of these very objects (they are compared by identity).
        ``before`` is the result of other ones, if there is one: most of it may still be right. ``size``: how many
        entries the result has."""
        kept = self._kept.get(what)
        if kept is not None and all(map(is_, kept[0], of)):
            return cast("T", kept[1])
        before = None
        if kept is not None:
            before = cast("T", kept[1])
            del self._kept[what]
            self._size -= kept[2]
        made = work(before)  # it may keep others meanwhile
        size = max(SMALL, size)
        while self._kept and self._size + size > ROOM:
            self._size -= self._kept.pop(next(iter(self._kept)))[2]
        self._kept[what] = (of, made, size)
        self._size += size
        return made

"""What was worked out from one view of the cluster, kept for as long as that view stays the same.

With thousands of nodes, sorting and judging all of them anew for each job in each round of each agent would be most of
what an agent does. Decides nothing, and no result may depend on whether it was kept: only pure functions of the view's
nodes, jobs and lapsed leases belong here, never what depends on its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")

MOST = 24
"""Results kept: of the many jobs that may wait, each has some as long as the list of nodes."""


class Notes:
    """Results by what they are, the oldest dropped first."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[object, ...], object]] = {}

    def once(self, what: str, of: tuple[object, ...], work: Callable[[T | None], T]) -> T:
        """``work(before)``, done once for this ``what`` of these very objects (they are compared by identity).
        ``before`` is the result of other ones, if there is one: most of it may still be right."""
        kept = self._kept.get(what)
        if kept is None or any(one is not other for one, other in zip(kept[0], of, strict=True)):
            before = cast("T", self._kept.pop(what)[1]) if kept is not None else None
            if len(self._kept) >= MOST:
                del self._kept[next(iter(self._kept))]
            kept = (of, work(before))
            self._kept[what] = kept
        return cast("T", kept[1])

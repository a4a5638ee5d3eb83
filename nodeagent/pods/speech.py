"""How much the shims of one user may say together: beside each pod's own bounds, since a user may have as many pods on
a node as it has slots, and the agent's loop is one.

Must never hold up one user's pods for what another's say, nor lose the newest status of any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nodeagent.osutil.clock import Allowance
from nodeagent.pods.base import PodStatus

LINES_AT_ONCE, LINES_PER_SECOND = 16384.0, 1600.0
"""Lines of all shims of a user that are read as they come, and in the long run, a KiB counted as another line. Sixty
pods whose agent pings them twice a second say a quarter of it."""
CHANGES_AT_ONCE, CHANGES_PER_SECOND = 1024.0, 20.0
"""The same of changes of their statuses that the agent acts on: sixty pods whose gangs form again are far below. Those
beyond them it sees together."""
TOGETHER_EVERY = 0.2
"""Seconds between two looks of the agent at changes that it sees together."""


class OwnersSpeech:
    """Of all pods of one user on this node."""

    def __init__(self) -> None:
        self.lines = Allowance(LINES_AT_ONCE, LINES_PER_SECOND)
        self.changes = Allowance(CHANGES_AT_ONCE, CHANGES_PER_SECOND)
        self._later: dict[object, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def later(self, pod: object, show: Callable[[], None]) -> None:
        """Have this pod's newest status shown soon, with those of others."""
        self._later[pod] = show
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TOGETHER_EVERY, self._show)

    def forget(self, pod: object) -> None:
        """Its status has been shown, or nobody asks for it any more."""
        self._later.pop(pod, None)
        if not self._later and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _show(self) -> None:
        self._timer = None
        later, self._later = self._later, {}
        for show in later.values():
            show()


class SpeechByOwner:
    """Of all users who have had a pod here, by uid."""

    def __init__(self) -> None:
        self._of: dict[int, OwnersSpeech] = {}

    def of(self, owner: int) -> OwnersSpeech:
        return self._of.setdefault(owner, OwnersSpeech())


def is_progress(now: PodStatus, before: PodStatus) -> bool:
    """Only how far its workers are, and what they hold in memory, may have changed: nothing that anybody waits for. A
    shim says that at each ping, without end."""
    return _without_progress(now) == _without_progress(before)


def _without_progress(status: PodStatus) -> tuple[object, ...]:
    workers = [(w.rank, w.local_rank, w.pid, w.state, w.exit) for w in status.workers]
    return workers, status.model_copy(update={"workers": (), "snapshot_bytes": 0, "preforked": {}})

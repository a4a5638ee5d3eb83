"""How much the shims of one user may say together: beside each pod's own bounds, since a user may have as many pods on
a node as it has slots, and the agent's loop is one.

Must never hold up one user's pods for what another's say, but for one line that takes long; nor lose the newest status
of any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nodeagent.osutil.clock import Allowance
from nodeagent.pods.base import PodStatus

LINES_AT_ONCE, LINES_PER_SECOND = 16384.0, 1600.0
"""Lines of all shims of a user that are read as they come, and in the long run, a KiB counted as another line. Sixty
pods whose agent pings them twice a second say a quarter of it."""
PART = 4096
"""Bytes of a line whose handling counts as another line of its user's: it takes the loop as long as a short line, some
0.1 ms."""
LONG = 1 << 14
"""Bytes of a line that is handled in a turn of the loop of its own: a status of some 150 workers."""
CHANGES_AT_ONCE, CHANGES_PER_SECOND = 1024.0, 20.0
"""The same of changes of their statuses that the agent acts on: sixty pods whose gangs form again are far below. Those
beyond them it sees together."""
TOGETHER_EVERY = 0.2
"""Seconds between two looks of the agent at changes that it sees together."""


class LongLines:
    """One is handled in a turn of the loop, of each user in turn; those of a user whose lines are spent wait."""

    def __init__(self) -> None:
        self._waiting: dict[OwnersSpeech, dict[object, Callable[[], None]]] = {}
        """Users in turn, and of each the pods."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, owner: OwnersSpeech, pod: object, handle: Callable[[], None]) -> None:
        self._waiting.setdefault(owner, {})[pod] = handle
        now = asyncio.get_running_loop().time()
        if self._timer is not None and self._timer.when() > now:  # others wait until they may
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._again(0.0)

    def forget(self, owner: OwnersSpeech, pod: object) -> None:
        pods = self._waiting.get(owner, {})
        pods.pop(pod, None)
        if not pods:
            self._waiting.pop(owner, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _again(self, wait: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(wait, self._next)

    def _next(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        waits = {owner: owner.lines.spend(0, now) for owner in self._waiting}
        owner = min(waits, key=waits.__getitem__)  # of several the first
        if waits[owner]:
            self._again(waits[owner])
            return
        pods = self._waiting.pop(owner)
        handle = pods.pop(next(iter(pods)))
        if pods:
            self._waiting[owner] = pods
        if self._waiting:
            self._again(0.0)
        handle()


class OwnersSpeech:
    """Of all pods of one user on this node."""

    def __init__(self, long_lines: LongLines) -> None:
        self.lines = Allowance(LINES_AT_ONCE, LINES_PER_SECOND)
        self._long_lines = long_lines
        self.changes = Allowance(CHANGES_AT_ONCE, CHANGES_PER_SECOND)
        self._later: dict[object, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def in_turn(self, pod: object, handle: Callable[[], None]) -> None:
        """Have this pod's next line handled, which is ``LONG``."""
        self._long_lines.add(self, pod, handle)

    def no_turn(self, pod: object) -> None:
        """That line is not to be handled any more."""
        self._long_lines.forget(self, pod)

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
        self._long_lines = LongLines()

    def of(self, owner: int) -> OwnersSpeech:
        return self._of.setdefault(owner, OwnersSpeech(self._long_lines))


def is_progress(now: PodStatus, before: PodStatus) -> bool:
    """Only how far its workers are, and what they hold in memory, may have changed: nothing that anybody waits for. A
    shim says that at each ping, without end."""
    return _without_progress(now) == _without_progress(before)


def _without_progress(status: PodStatus) -> tuple[object, ...]:
    workers = [(w.rank, w.local_rank, w.pid, w.state, w.exit) for w in status.workers]
    return workers, status.model_copy(update={"workers": (), "snapshot_bytes": 0, "preforked": {}})

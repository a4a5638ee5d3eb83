"""Kills what dead shims left behind, found by their pods' marks: a user's pods share one look at a node's processes.

A look takes 0.1 ms a process, and may not come back: a process that hangs in the kernel can hold what its environment
is read under, and a user can see to that. So it is made in a daemon thread, one at a time for each user: nobody's pods
wait for another's process. Must never make the loop wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from nodeagent.osutil.linux import MarkedProcesses
from nodeagent.osutil.threads import in_daemon

Killed = Mapping[MarkedProcesses, list[int]]
KillMarked = Callable[[Set[MarkedProcesses]], Killed]
_Request = tuple[MarkedProcesses, asyncio.Future[list[int]]]


class Sweeper:
    """Of one node. ``look`` is ``kill_marked``'s like and may block."""

    def __init__(self, look: KillMarked) -> None:
        self._look = look
        self._asked: dict[int, list[_Request]] = {}
        """For the next look, by the pods' user."""
        self._looking: set[int] = set()
        """Users whose look is under way."""

    def kill(self, mark: str, owner: int) -> asyncio.Future[list[int]]:
        """SIGKILL a pod's processes: those that were alive, or the OSError of the look. It begins at once, or, for all
        of this user that ask meanwhile, when the one that is under way has ended."""
        answer = asyncio.get_running_loop().create_future()
        self._asked.setdefault(owner, []).append(((mark, owner), answer))
        if owner not in self._looking:
            self._begin(owner)
        return answer

    def _begin(self, owner: int) -> None:
        asked = [one for one in self._asked.pop(owner, []) if not one[1].done()]
        if not asked:
            return
        try:
            look = in_daemon(partial(self._look, {pod for pod, _ in asked}), "sweep")
        except OSError as error:
            for _, answer in asked:
                answer.set_exception(error)
            return
        self._looking.add(owner)
        look.add_done_callback(partial(self._end, owner, asked))

    def _end(self, owner: int, asked: Sequence[_Request], look: asyncio.Future[Killed]) -> None:
        self._looking.discard(owner)
        for pod, answer in asked:
            if answer.done():  # its pod was let go
                continue
            if (error := look.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(look.result()[pod])
        self._begin(owner)
